"""Checks whether this machine has the memory and disk space that the settings ask for."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path, PurePosixPath

from penstock.config import Config, DiskConfig
from penstock.errors import ConfigError
from penstock.units import format_bytes

CGROUPS = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def check_machine(config: Config, *, total_memory_bytes: int | None = None) -> None:
    """Raise ConfigError if memory or disk is too small. Leaves no files behind."""
    memory = _physical_memory_bytes() if total_memory_bytes is None else total_memory_bytes
    if memory is not None and config.host.size_bytes > memory:
        raise ConfigError(
            f"host.size is {_exact(config.host.size_bytes)}: expected at most the machine's "
            f"memory of {_exact(memory)}; lower host.size"
        )
    if config.disk.path is not None:
        _check_disk(config.disk, config.disk.path)


def _check_disk(disk: DiskConfig, path: str) -> None:
    folder = _nearest_existing(os.path.abspath(path))
    is_there = folder == os.path.abspath(path)
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except OSError as error:
        raise ConfigError(
            f"disk.path {path} cannot be used: {folder}: {error.strerror}; expected a folder, or "
            "a path where one can be created; choose another path"
        ) from None
    if not is_folder:
        which = "is a file" if is_there else f"is below the file {folder}"
        raise ConfigError(f"disk.path {path} {which}: expected a folder; choose another path")
    if disk.read_only:
        if not is_there:
            raise ConfigError(
                f"disk.path {path} does not exist: expected a folder to read from, since "
                "disk.read_only is true; correct the path"
            )
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(
                f"disk.path {path} is not readable: expected a folder that this user can read; "
                "change its permissions or choose another path"
            )
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        which = "is" if is_there else f"cannot be created: {folder} is"
        raise ConfigError(
            f"disk.path {path} {which} not writable: expected a folder that this user can write; "
            "change its permissions, choose another path or set disk.read_only"
        )
    if not is_there:
        _try_making(path, folder)
    _check_room(disk, folder, _occupied_bytes(folder) if is_there else 0)


def _try_making(path: str, above: str) -> None:
    """Try it, because some filesystems such as /proc refuse despite their permissions."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".penstock-", dir=above))
    except OSError as error:
        raise ConfigError(
            f"disk.path {path} cannot be created: creating a folder in {above} failed "
            f"({error.strerror}); choose another path"
        ) from None


def _check_room(disk: DiskConfig, folder: str, occupied_bytes: int) -> None:
    usage = os.statvfs(folder)
    total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    if total == 0:  # unknown, on some network and virtual filesystems
        return
    asked = f"disk.size is {_exact(disk.size_bytes)}: expected at most the"
    if disk.size_bytes > total:
        raise ConfigError(
            f"{asked} size of the filesystem of {folder}, {_exact(total)}; lower disk.size"
        )
    if disk.size_bytes > free + occupied_bytes:
        raise ConfigError(
            f"{asked} available {_exact(free + occupied_bytes)} ({format_bytes(free)} free and "
            f"{format_bytes(occupied_bytes)} already used by {disk.path}); lower disk.size or "
            "free some space"
        )


def _nearest_existing(path: str) -> str:
    # A dangling link counts as existing, because nothing can be created in its place.
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _occupied_bytes(folder: str) -> int:
    """Disk space of the files in `folder`, without holes and without other filesystems."""
    device, total = os.stat(folder).st_dev, 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:  # gone meanwhile
                continue
            if status.st_dev == device:
                total += status.st_blocks * 512
    return total


def _physical_memory_bytes() -> int | None:
    """The machine's memory, or the limit of this process's container if that is lower."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return min([machine, *_cgroup_limits()])


def _cgroup_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> list[int]:
    """The memory limits of this process's control group and of those above it (version 2)."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        if line.startswith("0::"):
            group = PurePosixPath(line[3:].lstrip("/"))
            for part in (group, *group.parents):
                with suppress(OSError, ValueError):  # absent at the root, or the word "max"
                    limits.append(int((root / part / "memory.max").read_text()))
    return limits


def _exact(num_bytes: int) -> str:
    # Rounded numbers alone could read "64.0 GiB is larger than 64.0 GiB".
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"
