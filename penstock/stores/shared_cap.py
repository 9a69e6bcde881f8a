"""One cap for all namespaces of a disk folder: the one in use takes space from the others.

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

from penstock.stores import slab
from penstock.stores.directory import remove_store_files
from penstock.stores.folder import FOLDER_BYTES, Shelf, disk_bytes, look_at, store_paths
from penstock.stores.slab import RECORD_BYTES
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_CLEAR_BYTES = 1 << 20


class SharedCap:
    def __init__(self, directory: Path, own: Path, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._lock = Lock()
        others = [look_at(path) for path in store_paths(directory) if path != own]
        # The least recently used is last: it shrinks first.
        self._others = sorted(others, key=lambda shelf: shelf.last_used, reverse=True)
        self._sizes = {shelf.path: shelf.disk_bytes for shelf in self._others}

    @property
    def own_cap_bytes(self) -> int:
        """The size to which the store in use may grow if all others are deleted."""
        return max(0, self._cap_bytes - FOLDER_BYTES)

    def make_room(self, own_bytes: int) -> None:
        """Make the store in use fit at `own_bytes`. Raises OSError if the others cannot shrink.

        Must be called before it grows, so that all stores together stay below the cap.
        """
        with self._lock:
            while (excess := sum(self._sizes.values()) + own_bytes - self.own_cap_bytes) > 0:
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
