"""A disk store's directory: locking it, recognizing our files, and refusing other stores."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from penstock.errors import ConfigError, Foreign, Locked
from penstock.stores import slab
from penstock.stores.slab import Geometry
from penstock.units import printable

_LOCK_WORD = "process"
_LOCK_SECONDS = 10.0


def lock_directory(directory: Path) -> int:
    """Become the directory's only writer. The kernel frees the lock when the process ends."""
    try:
        descriptor = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"disk.path {directory} cannot be written ({error.strerror}); choose a path that "
            "this user may write, or open it with disk.read_only = true."
        ) from None
    try:
        _lock(descriptor)
    except OSError:
        holder = read_lock(descriptor)
        os.close(descriptor)
        raise locked_by(holder, directory) from None
    with suppress(OSError):  # the text is only for people; the lock works without it
        os.ftruncate(descriptor, 0)
        text = f"{_LOCK_WORD} {os.getpid()} on {socket.gethostname()}\n"
        os.pwrite(descriptor, text.encode(), 0)
    return descriptor


def locked_by(writer: str, directory: Path) -> Locked:
    return Locked(
        f"{directory} is being written by {writer}; stop it, choose another disk.path, "
        "or open this one with disk.read_only = true."
    )


def _lock(descriptor: int) -> None:
    """Take the lock, retrying while `find_writer` in other processes holds it for a moment."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises if there is a writer
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(0.001)


def read_lock(descriptor: int) -> str:
    """The process that holds a lock, as its file describes it."""
    words = printable(os.pread(descriptor, 200, 0).decode(errors="replace").strip())
    return words or "another process"


def has_our_lock(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / "LOCK", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.read(descriptor, 200).startswith(f"{_LOCK_WORD} ".encode())
    except OSError:  # a directory, for example
        return False
    finally:
        os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the file that is open as `descriptor` is still the one at `path`.

    True if the disk cannot tell: reads and writes will report the fault.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def remove_store_files(directory: Path) -> int:
    """Delete a store's files and nothing else. Returns the number of bytes freed."""
    num_bytes = 0
    paths = [path for _, path in slab.slab_paths(directory)]
    paths += [directory / "index", *directory.glob(".MANIFEST-*"), directory / "MANIFEST"]
    for path in paths:
        if path.is_file():
            num_bytes += path.stat().st_blocks * 512
            path.unlink()
    return num_bytes


def refuse_strangers_index(directory: Path) -> None:
    """Raise Foreign if there is a file named `index` that is not ours: it must not be deleted."""
    try:
        with (directory / "index").open("rb") as file:
            head = file.read(len(slab.MAGIC))
    except FileNotFoundError:
        return
    if head not in (slab.MAGIC, bytes(len(head))):
        raise Foreign(
            f"{directory} contains a file named index that is not Penstock's; set disk.path to an "
            "empty directory."
        )


def make_directory(directory: Path, read_only: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"disk.path {directory} is a file; expected a directory.")
    if read_only:
        if not directory.is_dir():
            raise ConfigError(f"disk.path {directory} does not exist; there is nothing to read.")
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"disk.path {directory} cannot be created ({error.strerror}); choose another path."
        ) from None


def refuse_foreign(directory: Path, found: Geometry, wanted: Geometry) -> None:
    names = ("namespace", "block_bytes", "block_tokens", "stride_bytes")
    for name in names:
        have, want = getattr(found, name), getattr(wanted, name)
        if have != want:
            about = printable(", ".join(found.description.values()))
            raise Foreign(
                f"{directory} was created for another model or layout ({name} is {have}, expected "
                f"{want}{f'; it is for {about}' if about else ''}); use another disk.path, or "
                f"clear it with `{slab.clear_command(directory)}`."
            )
