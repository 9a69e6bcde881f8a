"""Whether the tiers that are asked for can be opened, before anybody waits for a model.

Every way in which `build` refuses settings later is found here first:

    host.size           more than the machine has, less than one block
    host.numa_node      no such node, or the kernel does not bind memory to it
    host.verify         where other processes write the DRAM
    disk.path           a file, not to be made, not to be written, nothing there to read; another
                        process writes it, another format or somebody else's files lie there
    disk.size           more than the disk has, less than one block
    remote.url          a scheme or options nobody knows, a client library that is not installed
    remote.encrypt      no secret, or no cipher installed; a secret that is too short

The other settings are judged by their values alone, when they are read (`config`). What only the
model tells, the size of a block, is asked by `check_block` once its shape is known.
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

_SMALLEST = BlockSpec(bytes(32), block_bytes=1, block_tokens=1)  # a page, as it is kept


def check_tiers(config: Config) -> None:
    """Raise ConfigError, Locked or Foreign if a tier could not be opened. Leaves nothing behind.

    Errors name what the user typed: an option, or a variable of the environment.
    """
    check_anywhere(config)
    check_here(config)


def check_anywhere(config: Config) -> None:
    """What would be refused on every machine."""
    with as_typed(config):
        check_block(config, _SMALLEST)
        if config.remote.url is not None:
            check_scheme(config.remote.url)


def check_here(config: Config) -> None:
    """What this machine refuses: memory, disk, libraries, the secret in the environment."""
    with as_typed(config):
        check_machine(config)
        if config.host.numa_node is not None:
            check_numa_node(config.host.numa_node)
        if config.disk.path is not None and os.path.isdir(config.disk.path):
            _check_folder(config.disk, Path(config.disk.path))
        if config.remote.url is not None:
            _check_remote(config.remote, config.remote.url)


def check_block(config: Config, spec: BlockSpec) -> None:
    """Raise ConfigError if DRAM or disk would not hold a single block of `spec`."""
    stride = spec.stride_bytes + headroom_bytes(config.remote.url)
    with as_typed(config):
        if config.host.size_bytes < stride:
            raise ConfigError(
                f"host.size is {format_bytes(config.host.size_bytes)}, less than one block of "
                f"{format_bytes(stride)}; give it room for at least one."
            )
        if config.disk.path is None or config.disk.read_only:
            return
        geometry = slab.Geometry.of(spec)
        if geometry.num_slots(config.disk.size_bytes - folder.FOLDER_BYTES) < 1:
            need = geometry.min_cap_bytes + folder.FOLDER_BYTES
            raise slab.too_small(config.disk.size_bytes, need)


def check_delegated(config: Config) -> None:
    """What is refused only where other processes write the DRAM, as vLLM's workers do."""
    if config.host.verify:
        with as_typed(config):
            raise ConfigError(
                "host.verify is set: checksums of DRAM are not kept where other processes write "
                "it; leave it out. What lies on disk is always verified."
            )


def warnings(config: Config) -> list[str]:
    """What is allowed and should be known, a sentence each."""
    url = config.remote.url
    if url is None or url.lower().startswith("memory:") or remote_secret():
        return []
    return [
        "the remote store is used without a secret: whoever can write to it can make KV that is "
        f"believed. Set {ENV_REMOTE_SECRET} to the same secret on all instances, such as "
        "`openssl rand -hex 32` prints."
    ]


def remote_secret() -> bytes:
    return os.environ.get(ENV_REMOTE_SECRET, "").strip().encode()


def _check_remote(remote: RemoteConfig, url: str) -> None:
    # Neither connects: a store that is away at the start is used once it is there.
    Envelope(_SMALLEST, secret=remote_secret(), encrypt=remote.encrypt)
    open_client(url, remote.timeout_seconds).close()


def _check_folder(disk: DiskConfig, directory: Path) -> None:
    shelves = folder.look_into(directory)
    if disk.read_only:
        if not shelves:
            raise Foreign(f"{directory} holds no store to read; check disk.path.")
        if not any(shelf.geometry for shelf in shelves):
            slab.read_manifest(shelves[0].path)  # says what is wrong with it
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
            "expected a folder with room, whose files this user may read and write; mend that, "
            "or choose another path"
        ) from None


def check_access(paths: list[Path]) -> None:
    """Raise PermissionError for a file that is there and may not be read and written."""
    for path in paths:
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def try_writing(directory: Path) -> None:
    """Write a page to a file without a name, which is gone when it is closed. Raises OSError."""
    try:
        file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # no such files on this filesystem
            return
        raise
    try:
        os.pwrite(file, bytes(PAGE_BYTES), 0)
        os.fsync(file)  # some filesystems notice only now that they are full
    finally:
        os.close(file)
