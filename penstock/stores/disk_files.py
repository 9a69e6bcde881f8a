"""The open files of one disk store: its lock, manifest, index and slabs.

Opens, grows, shrinks and watches them, and reads and writes the index. `slab` has their format.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

from penstock.errors import Foreign, Full
from penstock.stores import slab
from penstock.stores.base import Incident
from penstock.stores.directory import (
    is_at,
    lock_directory,
    make_directory,
    refuse_foreign,
    refuse_strangers_index,
    remove_store_files,
)
from penstock.stores.slab import RECORD_BYTES, Geometry, SlabRecord
from penstock.types import BlockSpec, Slot, round_up

log = logging.getLogger("penstock.stores.disk")

_GROW_BYTES = 1 << 30  # slabs grow in steps of this size
_GROW_STEPS = 32  # or of this fraction of the cap, if that is smaller


class DiskFiles:
    """Safe to use from many threads, as long as no two write the same slot.

    `make_room` is called with the store's new size before the store grows. `incidents` receives
    the damage found while the files are opened.
    """

    def __init__(
        self,
        directory: Path,
        spec: BlockSpec,
        cap_bytes: int | None,
        *,
        read_only: bool,
        direct: bool,
        slab_bytes: int,
        make_room: Callable[[int], None],
        incidents: deque[Incident],
    ) -> None:
        self.directory = directory
        self.read_only = read_only
        self.direct = direct
        self._make_room = make_room
        self._incidents = incidents
        self._grow_bytes = _GROW_BYTES
        if cap_bytes is not None:  # small steps, so that other namespaces give up little at a time
            self._grow_bytes = max(spec.stride_bytes, min(_GROW_BYTES, cap_bytes // _GROW_STEPS))
        self._slabs: dict[int, tuple[int, int]] = {}  # slab number -> descriptor, size in bytes
        self._slab_lock = Lock()
        self._lock_descriptor: int | None = None
        make_directory(directory, read_only)
        if not read_only:
            self._lock_descriptor = lock_directory(directory)
        try:
            self.geometry = self._open_geometry(Geometry.of(spec, slab_bytes))
            self._index = self._open_index(cap_bytes)
        except OSError as error:
            self.unlock()
            raise Full(f"{directory} cannot be opened: {error}.") from None
        except BaseException:
            self.unlock()
            raise

    def close(self) -> None:
        with self._slab_lock:
            for descriptor, _ in self._slabs.values():
                os.close(descriptor)
            self._slabs.clear()
            if self._index >= 0:
                os.close(self._index)
                self._index = -1
            if not self.read_only:
                with suppress(OSError):
                    os.utime(self.directory / "MANIFEST")  # records when the store was last used
        self.unlock()

    def unlock(self) -> None:
        """Let another process open the store for writing. Nothing may be written after this."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def find_lost(self, slots: Iterable[Slot] = ()) -> str | None:
        """The name of an open file that was deleted or replaced, or None.

        Checks the lock, the index, and the slabs that hold `slots`.
        """
        opened = [("index", self._index)]
        if self._lock_descriptor is not None:
            opened.append(("LOCK", self._lock_descriptor))
        for number in {self.geometry.place(slot)[0] for slot in slots}:
            if (found := self._slabs.get(number)) is not None:
                opened.append((slab.slab_path(self.directory, number).name, found[0]))
        for name, descriptor in opened:
            if not is_at(self.directory / name, descriptor):
                return name
        return None

    def is_index_at(self, path: Path) -> bool:
        """Whether `path` is the file that this store has open as its index."""
        return is_at(path, self._index)

    # The index.

    def read_index(self, slot: Slot, num: int) -> bytes:
        data = os.pread(self._index, num * RECORD_BYTES, slot * RECORD_BYTES)
        return data.ljust(num * RECORD_BYTES, b"\0")  # beyond a truncated index all slots are empty

    def read_records(self, slot: Slot, num: int) -> list[SlabRecord | None]:
        data = self.read_index(slot, num)
        return [
            slab.unpack_record(data[start : start + RECORD_BYTES])
            for start in range(0, len(data), RECORD_BYTES)
        ]

    def write_records(self, slot: Slot, records: Sequence[bytes]) -> None:
        data = b"".join(records)
        if os.pwrite(self._index, data, slot * RECORD_BYTES) != len(data):
            raise OSError(errno.ENOSPC, "only part of a record was written to the index")

    # Slabs.

    def open_slab(self, number: int, grow_to: int = 0) -> int:
        """The slab's descriptor. With `grow_to` it is created if needed and at least that long."""
        opened = self._slabs.get(number)
        if opened is not None and opened[1] >= grow_to:
            return opened[0]
        with self._slab_lock:
            opened = self._slabs.get(number)
            if opened is None:
                descriptor = self._open_slab_file(number, create=grow_to > 0)
                self._refuse_replaced(descriptor)
                opened = self._slabs[number] = descriptor, os.fstat(descriptor).st_size
            descriptor, size = opened
            if size < grow_to:
                step = round_up(grow_to, self._grow_bytes)
                size = min(step, self._max_slab_bytes(number))
                slabs = {**self._slab_sizes(), number: size}
                self._make_room(self.geometry.footprint_bytes(self.num_slots, slabs.values()))
                os.posix_fallocate(descriptor, 0, size)
                self._slabs[number] = descriptor, size
            return descriptor

    def num_slots_in_file(self, number: int) -> int:
        """Slots that fit in the slab's file: fewer than a full slab if it is missing or cut off."""
        try:
            self.open_slab(number)
        except FileNotFoundError:
            return 0
        return self._slabs[number][1] // self.geometry.stride_bytes

    def _refuse_replaced(self, descriptor: int) -> None:
        """Refuse a slab of a folder that another process may have created in the meantime."""
        held = self._lock_descriptor
        if not self.read_only and (held is None or not is_at(self.directory / "LOCK", held)):
            os.close(descriptor)
            raise OSError(errno.ESTALE, "the folder was deleted or replaced while it was in use")

    def _open_slab_file(self, number: int, create: bool) -> int:
        path = slab.slab_path(self.directory, number)
        flags = os.O_CLOEXEC | (os.O_RDONLY if self.read_only else os.O_RDWR)
        if create:
            flags |= os.O_CREAT
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                log.warning(
                    "%s does not support direct I/O; reads and writes go through the page cache",
                    self.directory,
                )
        return os.open(path, flags, 0o600)

    def _slab_sizes(self) -> dict[int, int]:
        return {number: path.stat().st_size for number, path in slab.slab_paths(self.directory)}

    def _max_slab_bytes(self, number: int) -> int:
        per_slab = self.geometry.slots_per_slab
        return min(per_slab, self.num_slots - number * per_slab) * self.geometry.stride_bytes

    # Opening.

    def _open_geometry(self, wanted: Geometry) -> Geometry:
        found = slab.read_manifest(self.directory)
        if found is not None:
            refuse_foreign(self.directory, found, wanted)
        if self.read_only:
            if found is None:
                raise Foreign(f"{self.directory} holds no store to read; check the path.")
            return found
        if found is None:
            refuse_strangers_index(self.directory)
            # Without a manifest the files that remain cannot be trusted.
            if (num_bytes := remove_store_files(self.directory)) > 0:
                what = f"{self.directory}: MANIFEST is missing, so the files beside it were deleted"
                num_blocks = max(1, num_bytes // wanted.stride_bytes)
                self._incidents.append(Incident(what, num_blocks))
            found = replace(wanted, epoch=0)
        geometry = replace(found, epoch=found.epoch + 1, description=wanted.description)
        try:
            for leftover in self.directory.glob(".MANIFEST-*"):
                leftover.unlink()  # a writer was killed before it could rename this file
            slab.write_manifest(self.directory, geometry)
        except OSError as error:
            raise Full(f"the manifest of {self.directory} cannot be written: {error}.") from None
        return geometry

    def _open_index(self, cap_bytes: int | None) -> int:
        path = self.directory / "index"
        if self.read_only or cap_bytes is None:
            try:
                flags = os.O_RDONLY if self.read_only else os.O_RDWR
                descriptor = os.open(path, flags | os.O_CLOEXEC)
            except OSError as error:
                raise Foreign(f"{path} cannot be read: {error.strerror}.") from None
            self.num_slots = os.fstat(descriptor).st_size // RECORD_BYTES
            if self.num_slots < 1:
                os.close(descriptor)
                raise Foreign(f"{path} is empty; there is nothing to read.")
            return descriptor
        self.num_slots = self.geometry.num_slots(cap_bytes)
        if self.num_slots < 1:
            raise slab.too_small(cap_bytes, self.geometry.min_cap_bytes)
        self._trim()
        slabs = self._slab_sizes()
        self._make_room(self.geometry.footprint_bytes(self.num_slots, slabs.values()))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._find_cut(os.fstat(descriptor).st_size // RECORD_BYTES, slabs)
        try:
            os.ftruncate(descriptor, self.num_slots * RECORD_BYTES)
            os.posix_fallocate(descriptor, 0, self.num_slots * RECORD_BYTES)
        except OSError as error:
            os.close(descriptor)
            raise Full(f"the index of {self.directory} cannot be created: {error}.") from None
        return descriptor

    def _find_cut(self, num_records: int, slabs: Mapping[int, int]) -> None:
        """Report an index that was cut off: it grows before its slabs and shrinks after them."""
        last = max(slabs, default=0)
        in_last = slabs.get(last, 0) // self.geometry.stride_bytes
        num_missing = last * self.geometry.slots_per_slab + in_last - num_records
        if num_missing > 0:
            what = f"{self.directory}: {num_missing} records of the index are missing"
            self._incidents.append(Incident(what, num_missing))

    def _trim(self) -> None:
        """Free what is beyond the cap, which may have been lowered since the last start."""
        for number, path in slab.slab_paths(self.directory):
            most = self._max_slab_bytes(number)
            if most <= 0:
                path.unlink()
            elif path.stat().st_size > most:
                os.truncate(path, most)
