"""DISK: preallocated slabs of fixed slots, direct I/O, a record that vouches for every block.

The byte format stands in `penstock.stores.slab`. The store never takes more than its cap, files
and records together; it is written by one process at a time, and any number may read.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Lock

import xxhash

from penstock.errors import (
    ConfigError,
    Corrupt,
    Foreign,
    Full,
    Missing,
    ReadOnly,
    StoreError,
)
from penstock.stores import slab
from penstock.stores.base import Answers, Block, Digests, Found, Incident, Verify, WholeBlocks
from penstock.stores.directory import (
    is_at,
    lock_directory,
    make_directory,
    refuse_foreign,
    refuse_strangers_index,
    remove_store_files,
)
from penstock.stores.slab import RECORD_BYTES, Geometry, SlabRecord
from penstock.types import BlockKey, BlockSpec, Slot, round_up
from penstock.units import format_bytes

log = logging.getLogger(__name__)

SCAN_RECORDS = 4096
_GROW_BYTES = 1 << 30  # a slab takes disk space in steps of this
_GROW_STEPS = 32  # or of this part of the cap, if that is less
_MAX_RUN = 512  # blocks in one system call; the kernel takes 1024 buffers

# A run's answers: an error, or what the store knows of the block that was moved.
_RunAnswers = Sequence[StoreError | SlabRecord | None]
_MoveRun = Callable[[Sequence[Block]], _RunAnswers]


class DiskStore(WholeBlocks):
    """One directory. Safe to use from many threads, as long as no two write the same slot.

    Without a cap an existing store keeps the size it has. Readers take it as it is. `make_room` is
    told how large the store is about to become, before it does; `incidents` takes what is found
    damaged while the store is opened and its index read.
    """

    def __init__(
        self,
        directory: Path,
        spec: BlockSpec,
        cap_bytes: int | None,
        *,
        read_only: bool = False,
        direct: bool = True,
        slab_bytes: int = slab.SLAB_BYTES,
        make_room: Callable[[int], None] = lambda num_bytes: None,
        incidents: deque[Incident] | None = None,
    ) -> None:
        self.directory = directory
        self.read_only = read_only
        self.direct = direct
        # Whoever asks may still believe in what lay here before.
        self.is_replacement = False
        self.incidents: deque[Incident] = deque() if incidents is None else incidents
        self._spec = spec
        self._make_room = make_room
        self._grow_bytes = _GROW_BYTES
        if cap_bytes is not None:  # so that namespaces under one cap need not give up more at once
            self._grow_bytes = max(spec.stride_bytes, min(_GROW_BYTES, cap_bytes // _GROW_STEPS))
        self._slabs: dict[int, tuple[int, int]] = {}  # slab -> descriptor, bytes it has
        self._slab_lock = Lock()
        self._lock_descriptor: int | None = None
        make_directory(directory, read_only)
        if not read_only:
            self._lock_descriptor = lock_directory(directory)
        try:
            self._geometry = self._open_geometry(slab_bytes)
            self._generations = count(self._geometry.epoch << 40)
            self._index = self._open_index(cap_bytes)
        except OSError as error:
            self.unlock()
            raise Full(f"{directory} cannot be opened: {error}.") from None
        except BaseException:
            self.unlock()
            raise

    @property
    def block_bytes(self) -> int:
        return self._geometry.block_bytes

    def digest(self, memory: memoryview) -> bytes:
        return xxhash.xxh3_128_digest(memory[: self._geometry.block_bytes])

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        if self.read_only:
            return [ReadOnly(f"{self.directory} was opened for reading only")] * len(blocks)
        digest_of: dict[Slot, bytes] = {}

        def write_run(run: Sequence[Block]) -> _RunAnswers:
            return self._write_run(run, late_digest)

        def late_digest(block: Block) -> bytes:
            if not digest_of:
                slots = (block.slot for block in blocks)
                digest_of.update(zip(slots, digests(), strict=True))
            return digest_of[block.slot]

        answers = self._in_runs(blocks, write_run)
        return [answer if isinstance(answer, StoreError) else None for answer in answers]

    def read(self, blocks: Sequence[Block]) -> Verify:
        answers = self._in_runs(blocks, self._read_run)

        def verify() -> Answers:
            return [
                self._verify(block, answer) if isinstance(answer, SlabRecord) else answer
                for block, answer in zip(blocks, answers, strict=True)
            ]

        return verify

    def drop(self, key: BlockKey, slot: Slot) -> None:
        if self.read_only:
            return
        try:
            record = self._read_records(slot, 1)[0]
            if record is None or record.key == key:
                self._write_records(slot, [slab.empty_record(next(self._generations))])
        except OSError as error:
            log.warning("slot %d of %s could not be cleared: %s", slot, self.directory, error)

    def scan(self) -> Iterator[list[Found]]:
        """Every slot once, oldest block first within a batch. What cannot be read holds nothing."""
        per_slab = self._geometry.slots_per_slab
        for first in range(0, self.num_slots, per_slab):
            beyond = min(first + per_slab, self.num_slots)
            try:
                reach, problem = first + self._num_slots_in_file(first // per_slab), ""
            except OSError as error:  # too many open files, say: that is no reason to clear them
                reach, problem = first, f"cannot be opened ({error})"
            for start in range(first, beyond, SCAN_RECORDS):
                batch = self._scan_batch(start, min(start + SCAN_RECORDS, beyond))
                batch.sort()
                cut = [slot for _, slot, key in batch if slot >= reach and key is not None]
                if cut:
                    name = slab.slab_path(self.directory, first // per_slab).name
                    what = f"blocks were in {name}, which {problem or 'is gone or cut off'}"
                    self._found_damaged(cut, what, clear=not problem)
                yield [(Slot(slot), key if slot < reach else None) for _, slot, key in batch]

    def _scan_batch(self, start: int, end: int) -> list[tuple[int, int, BlockKey | None]]:
        """Generation, slot and key: sorted, the oldest block comes first."""
        try:
            data = self._read_index(Slot(start), end - start)
        except OSError as error:
            self._found_damaged(range(start, end), f"records cannot be read ({error})", clear=False)
            data = bytes((end - start) * RECORD_BYTES)
        found = slab.find_keys(data, self._spec.namespace, self._geometry.block_bytes)
        if damaged := slab.find_damage(data, found):
            slots = [start + index for index in damaged]
            self._found_damaged(slots, "records of the index are damaged")
        return [(generation, slot, key) for slot, (generation, key) in enumerate(found, start)]

    def _found_damaged(self, slots: Collection[int], what: str, *, clear: bool = True) -> None:
        """Tell of it, once: cleared records are not found again with the next start.

        Nobody else writes these slots: none is given out before the scan has named it.
        """
        self.incidents.append(Incident(f"{self.directory}: {len(slots)} {what}", len(slots)))
        if clear and not self.read_only:
            with suppress(OSError):
                for slot in slots:
                    record = slab.empty_record(next(self._generations))
                    self._write_records(Slot(slot), [record])

    def find_lost(self, slots: Iterable[Slot] = ()) -> str | None:
        """Which file is no longer where it was made: deleted, or another lies there by now.

        Asked of the lock, of the index, and of the slabs of these slots.
        """
        opened = [("index", self._index)]
        if self._lock_descriptor is not None:
            opened.append(("LOCK", self._lock_descriptor))
        for number in {self._geometry.place(slot)[0] for slot in slots}:
            if (found := self._slabs.get(number)) is not None:
                opened.append((slab.slab_path(self.directory, number).name, found[0]))
        for name, descriptor in opened:
            if not is_at(self.directory / name, descriptor):
                return name
        return None

    def is_index_at(self, path: Path) -> bool:
        """Whether this is the file that the store has as its index."""
        return is_at(path, self._index)

    def records(self) -> Iterator[tuple[Slot, SlabRecord]]:
        """Every slot that claims to hold a block."""
        for start in range(0, self.num_slots, SCAN_RECORDS):
            num = min(SCAN_RECORDS, self.num_slots - start)
            for slot, record in enumerate(self._read_records(Slot(start), num), start):
                if record is not None and record.held:
                    yield Slot(slot), record

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
                    os.utime(self.directory / "MANIFEST")  # when it was last used
        self.unlock()

    # Runs: neighbouring slots of one slab, moved by one system call.

    def _in_runs(self, blocks: Sequence[Block], move: _MoveRun) -> _RunAnswers:
        answers: list[StoreError | SlabRecord | None] = [None] * len(blocks)
        order = sorted(range(len(blocks)), key=lambda index: blocks[index].slot)
        start = 0
        while start < len(order):
            end = start + 1
            while end < len(order) and self._follows(blocks[order[end - 1]], blocks[order[end]]):
                if end - start == _MAX_RUN:
                    break
                end += 1
            run = order[start:end]
            for index, answer in zip(run, self._try(move, [blocks[i] for i in run]), strict=True):
                answers[index] = answer
            start = end
        return answers

    def _follows(self, block: Block, following: Block) -> bool:
        same_slab = following.slot % self._geometry.slots_per_slab != 0
        return same_slab and following.slot == block.slot + 1

    def _try(self, move: _MoveRun, run: Sequence[Block]) -> _RunAnswers:
        """One block's fault must not cost its neighbours: a run that fails is moved singly."""
        try:
            return move(run)
        except OSError as error:
            if len(run) > 1:
                return [self._try(move, [block])[0] for block in run]
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            kind = Full if full else StoreError
            return [kind(f"{self.directory}: {error}")]

    def _write_run(self, run: Sequence[Block], digest: Callable[[Block], bytes]) -> _RunAnswers:
        first = run[0].slot
        number, offset = self._geometry.place(first)
        num_bytes = len(run) * self._geometry.stride_bytes
        descriptor = self._open_slab(number, grow_to=offset + num_bytes)
        empty = slab.empty_record(next(self._generations))
        self._write_records(first, [empty] * len(run))
        written = os.pwritev(descriptor, self._memory(run), offset)
        if written != num_bytes:
            raise OSError(errno.ENOSPC, f"only {written} of {num_bytes} bytes were written")
        self._write_records(first, [self._pack(block, digest(block)) for block in run])
        return [None] * len(run)

    def _read_run(self, run: Sequence[Block]) -> _RunAnswers:
        """Each answer is an error, or the record that the bytes read must agree with."""
        first = run[0].slot
        number, offset = self._geometry.place(first)
        num_bytes = len(run) * self._geometry.stride_bytes
        records = self._read_records(first, len(run))
        answers = [self._judge(block, record) for block, record in zip(run, records, strict=True)]
        if all(isinstance(answer, StoreError) for answer in answers):
            return answers
        try:
            descriptor = self._open_slab(number)
        except FileNotFoundError:
            return [Missing(f"slab {number} of {self.directory} is gone")] * len(run)
        num_read = os.preadv(descriptor, self._memory(run), offset)
        if num_read != num_bytes:
            if len(run) > 1:
                raise OSError(errno.EIO, "short read")  # each block is tried by itself
            if self.read_only and self._read_records(first, 1) != records:
                return [Missing(f"slot {first} of {self.directory} was given up meanwhile")]
            return [Corrupt(f"slot {first} of {self.directory} is cut off")]
        return answers

    def _memory(self, run: Sequence[Block]) -> list[memoryview]:
        """As much of each slot as is kept here: in DRAM there may be room behind."""
        return [block.memory[: self._geometry.stride_bytes] for block in run]

    def _judge(self, block: Block, record: SlabRecord | None) -> StoreError | SlabRecord:
        """The record, if it vouches for the block that is asked for."""
        if record is None:
            if (self.read_only or self.is_replacement) and self._is_blank(block.slot):
                return Missing(f"slot {block.slot} of {self.directory} is empty")
            return Corrupt(f"the record of slot {block.slot} in {self.directory} is damaged")
        if not record.held or record.key != block.key:
            return Missing(f"slot {block.slot} of {self.directory} holds another block")
        if not self._vouches(record):
            return Corrupt(f"slot {block.slot} of {self.directory} is of another layout")
        return record

    def _verify(self, block: Block, record: SlabRecord) -> StoreError | None:
        if self.digest(block.memory) == record.checksum:
            return None
        try:
            rewritten = self._read_records(block.slot, 1)[0] != record
        except OSError as error:
            return StoreError(f"{self.directory}: {error}")
        if rewritten:
            return Missing(f"slot {block.slot} of {self.directory} was rewritten meanwhile")
        return Corrupt(f"slot {block.slot} of {self.directory} fails its checksum")

    def _pack(self, block: Block, digest: bytes) -> bytes:
        generation, length = next(self._generations), self._geometry.block_bytes
        return slab.pack_record(
            SlabRecord(True, generation, block.key, self._spec.namespace, length, digest)
        )

    def _vouches(self, record: SlabRecord) -> bool:
        return (
            record.held
            and record.namespace == self._spec.namespace
            and record.length == self._geometry.block_bytes
        )

    # Files.

    def _open_geometry(self, slab_bytes: int) -> Geometry:
        wanted = Geometry.of(self._spec, slab_bytes)
        found = slab.read_manifest(self.directory)
        if found is not None:
            refuse_foreign(self.directory, found, wanted)
        if self.read_only:
            if found is None:
                raise Foreign(f"{self.directory} holds no store to read; check the path.")
            return found
        if found is None:
            refuse_strangers_index(self.directory)
            # Without a manifest nothing vouches for them.
            if (num_bytes := remove_store_files(self.directory)) > 0:
                what = f"{self.directory}: its MANIFEST is gone, and with it what lay beside it"
                num_blocks = max(1, num_bytes // wanted.stride_bytes)
                self.incidents.append(Incident(what, num_blocks))
            found = replace(wanted, epoch=0)
        geometry = replace(found, epoch=found.epoch + 1, description=wanted.description)
        try:
            for leftover in self.directory.glob(".MANIFEST-*"):
                leftover.unlink()  # of a writer that was killed
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
        self.num_slots = self._geometry.num_slots(cap_bytes)
        if self.num_slots < 1:
            need = self._geometry.min_cap_bytes
            raise ConfigError(
                f"disk.size is {format_bytes(cap_bytes)}, too little for one block; "
                f"give it at least {format_bytes(need)}."
            )
        self._trim()
        slabs = self._slab_sizes()
        self._make_room(self._geometry.footprint_bytes(self.num_slots, slabs.values()))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._find_cut(os.fstat(descriptor).st_size // RECORD_BYTES, slabs)
        try:
            os.ftruncate(descriptor, self.num_slots * RECORD_BYTES)
            os.posix_fallocate(descriptor, 0, self.num_slots * RECORD_BYTES)
        except OSError as error:
            os.close(descriptor)
            raise Full(f"the index of {self.directory} cannot be made: {error}.") from None
        return descriptor

    def _find_cut(self, num_records: int, slabs: Mapping[int, int]) -> None:
        """An index grows before its slabs and shrinks after them: a shorter one has been cut."""
        last = max(slabs, default=0)
        in_last = slabs.get(last, 0) // self._geometry.stride_bytes
        num_missing = last * self._geometry.slots_per_slab + in_last - num_records
        if num_missing > 0:
            what = f"{self.directory}: {num_missing} records of the index are gone"
            self.incidents.append(Incident(what, num_missing))

    def _slab_sizes(self) -> dict[int, int]:
        return {number: path.stat().st_size for number, path in slab.slab_paths(self.directory)}

    def _trim(self) -> None:
        """Give back what lies beyond the cap, which may have shrunk since the last start."""
        for number, path in slab.slab_paths(self.directory):
            most = self._max_slab_bytes(number)
            if most <= 0:
                path.unlink()
            elif path.stat().st_size > most:
                os.truncate(path, most)

    def _max_slab_bytes(self, number: int) -> int:
        per_slab = self._geometry.slots_per_slab
        return min(per_slab, self.num_slots - number * per_slab) * self._geometry.stride_bytes

    def _num_slots_in_file(self, number: int) -> int:
        """Slots of a slab that its file is long enough for; a lost or cut file has fewer."""
        try:
            self._open_slab(number)
        except FileNotFoundError:
            return 0
        return self._slabs[number][1] // self._geometry.stride_bytes

    def _open_slab(self, number: int, grow_to: int = 0) -> int:
        opened = self._slabs.get(number)
        if opened is not None and opened[1] >= grow_to:
            return opened[0]
        with self._slab_lock:
            opened = self._slabs.get(number)
            if opened is None:
                descriptor = self._open_slab_file(number, create=grow_to > 0)
                self._refuse_anothers(descriptor)
                opened = self._slabs[number] = descriptor, os.fstat(descriptor).st_size
            descriptor, size = opened
            if size < grow_to:
                step = round_up(grow_to, self._grow_bytes)
                size = min(step, self._max_slab_bytes(number))
                slabs = {**self._slab_sizes(), number: size}
                self._make_room(self._geometry.footprint_bytes(self.num_slots, slabs.values()))
                os.posix_fallocate(descriptor, 0, size)
                self._slabs[number] = descriptor, size
            return descriptor

    def _refuse_anothers(self, descriptor: int) -> None:
        """Since we were asked to write, the folder may have become another process's."""
        held = self._lock_descriptor
        if not self.read_only and (held is None or not is_at(self.directory / "LOCK", held)):
            os.close(descriptor)
            raise OSError(errno.ESTALE, "the folder was deleted or replaced meanwhile")

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
                    "%s does not take direct I/O; reads and writes go through the page cache",
                    self.directory,
                )
        return os.open(path, flags, 0o600)

    def _read_index(self, slot: Slot, num: int) -> bytes:
        data = os.pread(self._index, num * RECORD_BYTES, slot * RECORD_BYTES)
        return data.ljust(num * RECORD_BYTES, b"\0")  # a truncated index holds nothing there

    def _is_blank(self, slot: Slot) -> bool:
        return not any(self._read_index(slot, 1))

    def _read_records(self, slot: Slot, num: int) -> list[SlabRecord | None]:
        data = self._read_index(slot, num)
        return [
            slab.unpack_record(data[start : start + RECORD_BYTES])
            for start in range(0, len(data), RECORD_BYTES)
        ]

    def _write_records(self, slot: Slot, records: Sequence[bytes]) -> None:
        data = b"".join(records)
        if os.pwrite(self._index, data, slot * RECORD_BYTES) != len(data):
            raise OSError(errno.ENOSPC, "the index took only part of a record")

    def unlock(self) -> None:
        """Let another open the store for writing. Only for who writes to it no more."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None
