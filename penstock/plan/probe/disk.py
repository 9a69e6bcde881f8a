"""Measures a disk with direct writes and reads of whole blocks, as the disk tier does."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from penstock.errors import ConfigError, StoreError
from penstock.plan.probe import links
from penstock.plan.probe.links import BLOCK_BYTES, Link, Tick
from penstock.types import Slot
from penstock.units import counted, format_bytes

DISK_THREADS = 4  # the disk tier's default
_NUM_SOURCE_BLOCKS = 16  # different blocks in memory, written in turn


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """Uses an unnamed file in `directory`, which disappears even after kill -9."""

    directory: Path
    size_bytes: int
    seconds: float
    num_threads: int = DISK_THREADS

    def __post_init__(self) -> None:
        links.check_size(self.size_bytes)
        _check_folder(self.directory)
        usage = os.statvfs(self.directory)
        free = usage.f_bavail * usage.f_frsize
        if usage.f_blocks and free < self.size_bytes:  # 0: the filesystem does not report it
            raise ConfigError(
                f"{self.directory} has {format_bytes(free)} free: expected at least --size, "
                f"{format_bytes(self.size_bytes)}; lower --size or choose another --dir"
            )

    def measure(self, tick: Tick) -> Iterator[Link]:
        try:
            with tempfile.TemporaryFile(buffering=0, dir=self.directory) as file:
                scratch = _Scratch(file.fileno(), self.size_bytes // BLOCK_BYTES)
                yield from self._measure(scratch, tick)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS):
                raise ConfigError(
                    f"a file of {format_bytes(self.size_bytes)} cannot be written to "
                    f"{self.directory} ({reason}): lower --size or choose another --dir"
                ) from None
            raise StoreError(f"{self.directory} failed during the measurement: {reason}") from None

    def _measure(self, scratch: _Scratch, tick: Tick) -> Iterator[Link]:
        num_threads = min(self.num_threads, scratch.num_blocks)
        arena = links.new_arena(max(_NUM_SOURCE_BLOCKS, num_threads) * BLOCK_BYTES)
        links.fill(arena)
        notes = (
            [] if scratch.direct else ["measured through the page cache: direct I/O was refused"]
        )
        if _is_in_memory(self.directory):
            notes.append(f"{self.directory} is in memory, not on a disk")
        note = "; ".join(notes)

        def write(_thread: int, block: int) -> None:
            scratch.write(arena.view(Slot(block % arena.num_slots)), block)

        def write_through(thread: int, block: int) -> None:
            write(thread, block)
            scratch.flush()

        block_seconds = links.single_seconds(write_through, scratch.num_blocks)
        name = f"disk write, {counted(num_threads, 'thread')}"
        part = links.tick_part(tick, name, 0, 2)
        # Only once: a second pass would write to extents that are already allocated.
        num_written, seconds = links.move_blocks(
            write, iter(range(scratch.num_blocks)), num_threads, self.seconds, part, scratch.flush
        )
        rate = num_written * BLOCK_BYTES / seconds
        written = Link(name, num_threads, rate, block_seconds, note=note)

        def read(thread: int, block: int) -> None:
            scratch.read(arena.view(Slot(thread)), block)

        scratch.forget()
        block_seconds = links.single_seconds(read, num_written)
        scratch.forget()
        order = list(range(num_written))
        # Random order, as in a store that has run for a while.
        random.Random(0).shuffle(order)
        name = f"disk read, {counted(num_threads, 'thread')}"
        part = links.tick_part(tick, name, 1, 2)
        # With the page cache, a second pass would measure the cache instead of the disk.
        blocks = cycle(order) if scratch.direct else iter(order)
        num_read, seconds = links.move_blocks(read, blocks, num_threads, self.seconds, part)
        rate = num_read * BLOCK_BYTES / seconds
        yield Link(name, num_threads, rate, block_seconds, loads=True, note=note)
        yield written


class _Scratch:
    """The unnamed, preallocated file to write and read; avoids the page cache if possible."""

    def __init__(self, descriptor: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._descriptor = descriptor
        os.posix_fallocate(descriptor, 0, num_blocks * BLOCK_BYTES)
        self.direct = self._try_direct()

    def write(self, memory: memoryview, block: int) -> None:
        if os.pwrite(self._descriptor, memory, block * BLOCK_BYTES) != len(memory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(self, memory: memoryview, block: int) -> None:
        if os.preadv(self._descriptor, [memory], block * BLOCK_BYTES) != len(memory):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush(self) -> None:
        """Wait until the page cache is written to disk; not needed after direct writes."""
        if not self.direct:
            os.fdatasync(self._descriptor)

    def forget(self) -> None:
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _try_direct(self) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            # Some filesystems accept the flag but refuse the first write.
            self.write(links.new_arena(BLOCK_BYTES).view(Slot(0)), 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return False
        return True


def _check_folder(directory: Path) -> None:
    if not directory.is_dir():
        problem = "is not a folder" if directory.exists() else "does not exist"
        raise ConfigError(
            f"--dir {directory} {problem}: expected a folder on the disk to measure; "
            "correct the path"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--dir {directory} is not writable: expected a folder that this user can write to; "
            "choose another"
        )


def _is_in_memory(directory: Path) -> bool:
    """If /tmp is a tmpfs, the default folder measures memory instead of a disk."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for mount in mounts:
        fields, _, kind = mount.partition(" - ")
        if fields.split()[2] == number:
            return kind.split()[0] in ("tmpfs", "ramfs")
    return False
