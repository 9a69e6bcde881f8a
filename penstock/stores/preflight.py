"""Checks that the configured tiers can be opened, before a model is loaded.

Finds every reason for which `build` would later refuse the settings:

    host.size           more than the machine has, or less than one block
    host.numa_node      no such node, or the kernel does not bind memory to it
    host.verify         set although other processes write to DRAM
    disk.path           a file, cannot be created or written, has nothing to read, is being written
                        by another process, or contains another format or files that are not ours
    disk.size           more than the disk has, or less than one block
    remote.url          unknown scheme or options, or a client library that is not installed
    remote.encrypt      no secret, a secret that is too short, or no cipher installed

All other settings are checked when they are read (`config`). The size of a block depends on the
model: `check_block` checks it once the model's shape is known.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from penstock.config import ENV_REMOTE_SECRET, Config, DiskConfig, RemoteConfig, as_typed
from penstock.errors import ConfigError, Foreign
from penstock.machine import check_machine
from penstock.stores import folder, slab
from penstock.stores.directory import locked_by, refuse_strangers_index
from penstock.stores.envelope import Envelope
from penstock.stores.host import check_numa_node
from penstock.stores.remotes import check_scheme, headroom_bytes, open_client
from penstock.types import PAGE_BYTES, BlockSpec
from penstock.units import format_bytes

_SMALLEST = BlockSpec(bytes(32), block_bytes=1, block_tokens=1)  # stored as one page


def check_tiers(config: Config) -> None:
    """Raise ConfigError, Locked or Foreign if a tier could not be opened. Creates no files.

    Errors name the option or environment variable that the user has set.
    """
    check_anywhere(config)
    check_here(config)


def check_anywhere(config: Config) -> None:
    """Check what every machine would refuse."""
    if config.node.url is not None:
        return  # the tiers are the node's
    with as_typed(config):
        check_block(config, _SMALLEST)
        if config.remote.url is not None:
            check_scheme(config.remote.url)


def check_here(config: Config) -> None:
    """Check this machine: memory, disk, libraries, and the secret in the environment."""
    if config.node.url is not None:
        return
    with as_typed(config):
        check_machine(config)
        if config.host.numa_node is not None:
            check_numa_node(config.host.numa_node)
        if config.disk.path is not None and os.path.isdir(config.disk.path):
            _check_folder(config.disk, Path(config.disk.path))
        if config.remote.url is not None:
            _check_remote(config.remote, config.remote.url)


def check_block(config: Config, spec: BlockSpec, disk_spec: BlockSpec | None = None) -> None:
    """Raise ConfigError if DRAM or disk is too small for one block.

    `disk_spec` is that of the disk's blocks if they have another size than DRAM's.
    """
    if config.node.url is not None:
        return
    stride = spec.stride_bytes + headroom_bytes(config.remote.url)
    with as_typed(config):
        if config.host.size_bytes < stride:
            raise ConfigError(
                f"host.size is {format_bytes(config.host.size_bytes)}, less than one block of "
                f"{format_bytes(stride)}; set it to at least that."
            )
        if config.disk.path is None or config.disk.read_only:
            return
        geometry = slab.Geometry.of(disk_spec or spec)
        if geometry.num_slots(config.disk.size_bytes - folder.FOLDER_BYTES) < 1:
            need = geometry.min_cap_bytes + folder.FOLDER_BYTES
            raise slab.too_small(config.disk.size_bytes, need)


def check_delegated(config: Config) -> None:
    """Check what is refused if other processes, such as vLLM's workers, write to DRAM."""
    if config.host.verify:
        with as_typed(config):
            raise ConfigError(
                "host.verify is set, but checksums of DRAM are not available if other processes "
                "write to it; remove the setting. Blocks on disk are always verified."
            )


def warnings(config: Config) -> list[str]:
    """Warnings about settings that are allowed but risky, one sentence each."""
    url = config.remote.url
    if url is None or url.lower().startswith("memory:") or remote_secret():
        return []
    return [
        "the remote store is used without a secret: anyone who can write to it can forge KV. "
        f"Set {ENV_REMOTE_SECRET} to the same secret on all instances; "
        "`openssl rand -hex 32` makes one."
    ]


def remote_secret() -> bytes:
    return os.environ.get(ENV_REMOTE_SECRET, "").strip().encode()


def _check_remote(remote: RemoteConfig, url: str) -> None:
    # Neither connects: a store that is down at the start is used once it is up.
    Envelope(_SMALLEST, secret=remote_secret(), encrypt=remote.encrypt)
    open_client(url, remote.timeout_seconds).close()


def _check_folder(disk: DiskConfig, directory: Path) -> None:
    shelves = folder.look_into(directory)
    if disk.read_only:
        if not shelves:
            raise Foreign(f"{directory} holds no store to read; check disk.path.")
        if not any(shelf.geometry for shelf in shelves):
            slab.read_manifest(shelves[0].path)  # raises the error
        return
    if (writer := folder.find_writer(directory)) is not None:
        raise locked_by(writer, directory)
    if shelves is None:
        refuse_strangers_index(directory)
    try:
        for path in (directory, *(shelf.path for shelf in shelves or ())):
            check_access([path / "LOCK", path / "index", path / "MANIFEST"])
        try_writing(directory)
    except OSError as error:
        raise ConfigError(
            f"disk.path {error.filename or directory} cannot be written ({error.strerror}): "
            "expected a folder with free space, whose files this user may read and write; fix "
            "that, or choose another path"
        ) from None


def check_access(paths: list[Path]) -> None:
    """Raise PermissionError if a file exists and this user may not read and write it."""
    for path in paths:
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def try_writing(directory: Path) -> None:
    """Write a page to an unnamed file, which is deleted when it is closed. Raises OSError."""
    try:
        file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # not supported by this filesystem
            return
        raise
    try:
        os.pwrite(file, bytes(PAGE_BYTES), 0)
        os.fsync(file)  # some filesystems report only now that they are full
    finally:
        os.close(file)
