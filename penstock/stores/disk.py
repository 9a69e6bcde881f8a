"""DISK: blocks in preallocated slabs of fixed-size slots, each verified against its record.

`slab` has the byte format. The files and records together never exceed the cap. One process at a
time may write; any number may read.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import xxhash

from penstock.errors import Corrupt, Full, Missing, ReadOnly, StoreError
from penstock.stores import slab
from penstock.stores.base import Answers, Block, Digests, Found, Incident, Verify, WholeBlocks
from penstock.stores.disk_files import DiskFiles
from penstock.stores.slab import RECORD_BYTES, SlabRecord
from penstock.types import BlockKey, BlockSpec, Slot

log = logging.getLogger(__name__)

SCAN_RECORDS = 4096
_MAX_RUN = 512  # blocks per system call; the kernel accepts 1024 buffers

# The answers for a run of blocks: an error, or the record of the block that was moved.
_RunAnswers = Sequence[StoreError | SlabRecord | None]
_MoveRun = Callable[[Sequence[Block]], _RunAnswers]


class DiskStore(WholeBlocks):
    """The store in one directory. Thread-safe, as long as no two threads write the same slot.

    If `cap_bytes` is None, or the store is read-only, it keeps its present size. `make_room` is
    called with the store's new size before the store grows. `incidents` receives the damage found
    while the store is opened and its index is read.
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
        # True if it replaces a lost store: callers may still ask for blocks of the old one.
        self.is_replacement = False
        self.incidents: deque[Incident] = deque() if incidents is None else incidents
        self.files = DiskFiles(
            directory,
            spec,
            cap_bytes,
            read_only=read_only,
            direct=direct,
            slab_bytes=slab_bytes,
            make_room=make_room,
            incidents=self.incidents,
        )
        self.num_slots = self.files.num_slots
        self._spec = spec
        self._geometry = self.files.geometry
        self._generations = count(self._geometry.epoch << 40)

    @property
    def block_bytes(self) -> int:
        return self._geometry.block_bytes

    def digest(self, memory: memoryview) -> bytes:
        return xxhash.xxh3_128_digest(memory[: self._geometry.block_bytes])

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        if self.read_only:
            return [ReadOnly(f"{self.directory} is open for reading only")] * len(blocks)
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
            record = self.files.read_records(slot, 1)[0]
            if record is None or record.key == key:
                self._clear(slot)
        except OSError as error:
            log.warning("slot %d of %s could not be cleared: %s", slot, self.directory, error)

    def scan(self) -> Iterator[list[Found]]:
        """Every slot once, oldest block first within a batch. Unreadable slots count as empty."""
        per_slab = self._geometry.slots_per_slab
        for first in range(0, self.num_slots, per_slab):
            beyond = min(first + per_slab, self.num_slots)
            try:
                reach, problem = first + self.files.num_slots_in_file(first // per_slab), ""
            except OSError as error:  # perhaps too many open files: no reason to clear the records
                reach, problem = first, f"cannot be opened ({error})"
            for start in range(first, beyond, SCAN_RECORDS):
                batch = self._scan_batch(start, min(start + SCAN_RECORDS, beyond))
                batch.sort()
                cut = [slot for _, slot, key in batch if slot >= reach and key is not None]
                if cut:
                    name = slab.slab_path(self.directory, first // per_slab).name
                    what = f"blocks were in {name}, which {problem or 'is missing or cut off'}"
                    self._found_damaged(cut, what, clear=not problem)
                yield [(Slot(slot), key if slot < reach else None) for _, slot, key in batch]

    def records(self) -> Iterator[tuple[Slot, SlabRecord]]:
        """Every slot whose record says that it holds a block."""
        for start in range(0, self.num_slots, SCAN_RECORDS):
            num = min(SCAN_RECORDS, self.num_slots - start)
            for slot, record in enumerate(self.files.read_records(Slot(start), num), start):
                if record is not None and record.held:
                    yield Slot(slot), record

    def close(self) -> None:
        self.files.close()

    def _scan_batch(self, start: int, end: int) -> list[tuple[int, int, BlockKey | None]]:
        """Generation, slot and key. Sorted, the oldest block is first."""
        try:
            data = self.files.read_index(Slot(start), end - start)
        except OSError as error:
            self._found_damaged(range(start, end), f"records cannot be read ({error})", clear=False)
            data = bytes((end - start) * RECORD_BYTES)
        found = slab.find_keys(data, self._spec.namespace, self._geometry.block_bytes)
        if damaged := slab.find_damage(data, found):
            slots = [start + index for index in damaged]
            self._found_damaged(slots, "records of the index are damaged")
        return [(generation, slot, key) for slot, (generation, key) in enumerate(found, start)]

    def _found_damaged(self, slots: Collection[int], what: str, *, clear: bool = True) -> None:
        """Report damage, and clear the records so that the next start does not report it again.

        No other thread writes these slots: a slot is given out only after the scan has named it.
        """
        self.incidents.append(Incident(f"{self.directory}: {len(slots)} {what}", len(slots)))
        if clear and not self.read_only:
            with suppress(OSError):
                for slot in slots:
                    self._clear(Slot(slot))

    def _clear(self, slot: Slot) -> None:
        self.files.write_records(slot, [slab.empty_record(next(self._generations))])

    # Runs: neighboring slots of one slab, moved by one system call.

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
        """Move a run; if that fails, move its blocks one by one, so that only bad ones fail."""
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
        descriptor = self.files.open_slab(number, grow_to=offset + num_bytes)
        empty = slab.empty_record(next(self._generations))
        self.files.write_records(first, [empty] * len(run))
        written = os.pwritev(descriptor, self._memory(run), offset)
        if written != num_bytes:
            raise OSError(errno.ENOSPC, f"only {written} of {num_bytes} bytes were written")
        self.files.write_records(first, [self._pack(block, digest(block)) for block in run])
        return [None] * len(run)

    def _read_run(self, run: Sequence[Block]) -> _RunAnswers:
        """Each answer is an error, or the record that the bytes read must match."""
        first = run[0].slot
        number, offset = self._geometry.place(first)
        num_bytes = len(run) * self._geometry.stride_bytes
        records = self.files.read_records(first, len(run))
        answers = [self._judge(block, record) for block, record in zip(run, records, strict=True)]
        if all(isinstance(answer, StoreError) for answer in answers):
            return answers
        try:
            descriptor = self.files.open_slab(number)
        except FileNotFoundError:
            return [Missing(f"slab {number} of {self.directory} does not exist")] * len(run)
        num_read = os.preadv(descriptor, self._memory(run), offset)
        if num_read != num_bytes:
            if len(run) > 1:
                raise OSError(errno.EIO, "short read")  # `_try` then reads the blocks one by one
            if self.read_only and self.files.read_records(first, 1) != records:
                return [Missing(f"slot {first} of {self.directory} was freed during the read")]
            return [Corrupt(f"slot {first} of {self.directory} is cut off")]
        return answers

    def _memory(self, run: Sequence[Block]) -> list[memoryview]:
        """The part of each slot that is stored here: slots in DRAM may have room at the end."""
        return [block.memory[: self._geometry.stride_bytes] for block in run]

    def _judge(self, block: Block, record: SlabRecord | None) -> StoreError | SlabRecord:
        """The record if it describes the requested block, else an error."""
        if record is None:
            may_be_blank = self.read_only or self.is_replacement
            if may_be_blank and not any(self.files.read_index(block.slot, 1)):
                return Missing(f"slot {block.slot} of {self.directory} is empty")
            return Corrupt(f"the record of slot {block.slot} in {self.directory} is damaged")
        if not record.held or record.key != block.key:
            return Missing(f"slot {block.slot} of {self.directory} does not hold this block")
        if (record.namespace, record.length) != (self._spec.namespace, self.block_bytes):
            return Corrupt(f"slot {block.slot} of {self.directory} has another layout")
        return record

    def _verify(self, block: Block, record: SlabRecord) -> StoreError | None:
        if self.digest(block.memory) == record.checksum:
            return None
        try:
            rewritten = self.files.read_records(block.slot, 1)[0] != record
        except OSError as error:
            return StoreError(f"{self.directory}: {error}")
        if rewritten:
            return Missing(f"slot {block.slot} of {self.directory} was rewritten during the read")
        return Corrupt(f"slot {block.slot} of {self.directory} fails its checksum")

    def _pack(self, block: Block, digest: bytes) -> bytes:
        generation, length = next(self._generations), self._geometry.block_bytes
        return slab.pack_record(
            SlabRecord(True, generation, block.key, self._spec.namespace, length, digest)
        )
