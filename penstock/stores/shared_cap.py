"""One cap for all namespaces of a disk folder: those in use take space from the others.

The least recently used namespace shrinks first, from the end of its slabs, and only as far as
needed. Records are cleared before their blocks are deleted, so no record names a deleted block even
if the process is killed. Only the process that holds the folder's lock may do this.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock

from penstock.errors import Full
from penstock.stores import slab
from penstock.stores.directory import is_at, lock_directory, remove_store_files
from penstock.stores.folder import FOLDER_BYTES, Shelf, disk_bytes, look_at, store_paths
from penstock.stores.slab import RECORD_BYTES
from penstock.types import PAGE_BYTES
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_CLEAR_BYTES = 1 << 20


class SharedCap:
    def __init__(self, directory: Path, cap_bytes: int, num_parts: int = 1) -> None:
        """Up to `num_parts` stores may be in use at once, each up to an equal part of the cap."""
        self._directory = directory
        self._cap_bytes = max(0, cap_bytes - FOLDER_BYTES - (num_parts - 1) * PAGE_BYTES)
        self._num_parts = num_parts
        self._lock = Lock()
        others = [look_at(path) for path in store_paths(directory)]
        # The least recently used is last: it shrinks first.
        self._others = sorted(others, key=lambda shelf: shelf.last_used, reverse=True)
        self._sizes = {shelf.path: shelf.disk_bytes for shelf in self._others}
        self._in_use: set[Path] = set()

    @property
    def own_cap_bytes(self) -> int:
        """The size to which a store in use may grow if all that are not in use are deleted."""
        return self._cap_bytes // self._num_parts

    @property
    def has_part(self) -> bool:
        """Whether one more store may be in use."""
        return len(self._in_use) < self._num_parts

    def use(self, path: Path) -> None:
        """From now on, `path` is in use: it does not shrink for others. Raises Full."""
        with self._lock:
            if path in self._in_use or not self.has_part:
                raise Full(
                    f"{self._directory} is divided among {self._num_parts} models, which are in use"
                    ": expected a part that is free; stop one of them, or divide it among more"
                )
            self._in_use.add(path)
            self._others = [shelf for shelf in self._others if shelf.path != path]

    def leave(self, path: Path) -> None:
        """`path` is not in use any more, and may shrink for others."""
        with self._lock:
            if path not in self._in_use:
                return
            self._in_use.remove(path)
            self._sizes.pop(path, None)
            if path in store_paths(self._directory):
                shelf = look_at(path)
                self._sizes[path] = shelf.disk_bytes
                self._others.insert(0, shelf)

    def make_room(self, path: Path, num_bytes: int) -> None:
        """Make `path`, which is in use, fit at `num_bytes`. Raises OSError if others cannot shrink.

        Must be called before it grows, so that all stores together stay below the cap.
        """
        with self._lock:
            self._sizes[path] = num_bytes
            while (excess := sum(self._sizes.values()) - self._cap_bytes) > 0:
                if not self._others:
                    return
                shelf = self._others[-1]
                before = self._sizes[shelf.path]
                is_gone = _give_up(shelf, excess)
                self._sizes[shelf.path] = 0 if is_gone else disk_bytes(shelf.path)
                if is_gone:
                    self._others.pop()
                freed = format_bytes(before - self._sizes[shelf.path])
                log.info("deleted %s of KV for %s to make room", freed, shelf.title)


class DividedFolder:
    """A folder that several stores of one process use at once. They share its lock and its cap."""

    def __init__(self, directory: Path, cap_bytes: int, num_parts: int) -> None:
        self._directory = directory
        self._cap_bytes = cap_bytes
        self._num_parts = num_parts
        self._lock = Lock()
        self._descriptor: int | None = None
        self._cap: SharedCap | None = None

    @property
    def has_part(self) -> bool:
        """Whether one more store may be opened."""
        cap = self._cap
        return cap is None or cap.has_part

    @property
    def is_open(self) -> bool:
        """Whether this process holds the folder's lock."""
        return self._descriptor is not None

    def open(self) -> tuple[int, SharedCap]:
        """A descriptor that holds the folder's lock, which the caller closes; and the cap.

        If the folder was deleted or replaced, this locks the one that is there now.
        """
        with self._lock:
            held = self._descriptor
            if held is None or self._cap is None or not is_at(self._directory / "LOCK", held):
                self._unlock()
                self._descriptor = held = lock_directory(self._directory)
                self._cap = SharedCap(self._directory, self._cap_bytes, self._num_parts)
            return os.dup(held), self._cap

    def close(self) -> None:
        """Other processes may use the folder once all of its stores are closed, too."""
        with self._lock:
            self._unlock()

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._cap = None


def _give_up(shelf: Shelf, num_bytes: int) -> bool:
    """Shrink a store by `num_bytes` or more. Returns True if nothing is left of it."""
    geometry, slabs = shelf.geometry, slab.slab_paths(shelf.path)
    if geometry is not None:
        freed = 0
        while slabs and freed < num_bytes:
            number, path = slabs[-1]
            status = path.stat()
            left = max(0, status.st_size - (num_bytes - freed)) // geometry.stride_bytes
            _clear_records(shelf.path, number * geometry.slots_per_slab + left)
            if left:
                os.truncate(path, left * geometry.stride_bytes)
                return False
            path.unlink()
            slabs.pop()
            freed += status.st_blocks * 512
        if slabs:
            return False
    remove_store(shelf.path)
    return True


def _clear_records(path: Path, first_slot: int) -> None:
    """Zero all records from `first_slot` on.

    The index keeps its length, because a shorter one counts as damage, and its modification time,
    because making room is not a use.
    """
    try:
        descriptor = os.open(path / "index", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        status = os.fstat(descriptor)
        for start in range(first_slot * RECORD_BYTES, status.st_size, _CLEAR_BYTES):
            num_bytes = min(_CLEAR_BYTES, status.st_size - start)
            zeros = bytes(num_bytes)
            if os.pread(descriptor, num_bytes, start) != zeros:
                os.pwrite(descriptor, zeros, start)
        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
    finally:
        os.close(descriptor)


def remove_store(path: Path) -> int:
    """Delete one namespace's store, but no files of others. Returns the number of bytes freed."""
    num_bytes = remove_store_files(path)
    (path / "LOCK").unlink(missing_ok=True)
    with suppress(OSError):  # it contains files that are not ours
        path.rmdir()
    return num_bytes
