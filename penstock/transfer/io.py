"""Movers for memory and stores: what a transfer thread runs. All of them release the GIL.

A mover runs one `Transfer` and returns one verdict per block. The mover for a GPU is in `cuda`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from penstock.codecs.base import BlockCodec
from penstock.errors import Corrupt, Missing, StoreError
from penstock.stores.base import Answers, Arena, Block, Store
from penstock.transfer.pool import DaemonPool
from penstock.transfer.repacking import Repacker
from penstock.transfer.seals import Seals
from penstock.types import Direction, Slot, Transfer, Verdict


class MoveResult(NamedTuple):
    verdicts: list[Verdict]
    error: str = ""
    seconds: float | None = None  # time on the link, if the mover has measured it


class Mover(Protocol):
    # If set, `move` never blocks and needs no threads: it may have this many transfers of each
    # direction at once.
    max_ahead: int | None = None

    def queued(self, transfer: Transfer) -> None:
        """Called on the owner's thread: the transfer starts after what was computed up to now."""
        return

    def move(self, transfer: Transfer) -> MoveResult | Future[MoveResult]:
        """Move the blocks. Returns a Future if the work continues on another thread."""

    def remap(self, replace_memory: Callable[[], None]) -> None:
        """Let HOST get other memory at the same addresses. No copy is running."""
        replace_memory()

    def close(self) -> None:
        return


class CopyMover(Mover):
    """Copies between HOST and a device pool that the processor can address, by memcpy."""

    def __init__(
        self, device: Arena, host: Arena, seals: Seals, codec: BlockCodec | None = None
    ) -> None:
        """`codec` says how HOST holds blocks; None if it holds the device's bytes."""
        num_bytes = device.block_bytes if codec is None else codec.packed_bytes
        if num_bytes != host.block_bytes:
            raise ValueError(
                f"device blocks need {num_bytes} bytes in HOST, but HOST blocks have "
                f"{host.block_bytes}; expected the same size"
            )
        self._device = device
        self._host = host
        self._seals = seals
        self._codec = codec if codec is not None and codec.version else None

    def move(self, transfer: Transfer) -> MoveResult:
        keys, sources, targets = transfer.keys, transfer.source_slots, transfer.target_slots
        if transfer.direction is Direction.LOAD:
            if self._codec is None:
                self._copy(self._host, sources, self._device, targets)
            else:
                for source, target in zip(sources, targets, strict=True):
                    self._codec.unpack(self._host.view(source), self._device.view(target))
            # After the copy: a slot that was overwritten during it has lost its seal.
            return MoveResult(self._seals.verdicts(keys, sources))
        self._seals.open(targets)
        if self._codec is None:
            self._copy(self._device, sources, self._host, targets)
            self._seals.seal(keys, targets)
            return MoveResult([Verdict.OK] * len(keys))
        verdicts = []
        for key, source, target in zip(keys, sources, targets, strict=True):
            fits = self._codec.pack(self._device.view(source), self._host.view(target))
            if fits:
                self._seals.seal([key], [target])
            verdicts.append(Verdict.OK if fits else Verdict.UNFIT)
        return MoveResult(verdicts)

    def _copy(
        self, source: Arena, sources: Sequence[Slot], target: Arena, targets: Sequence[Slot]
    ) -> None:
        same_stride = source.stride_bytes == target.stride_bytes
        for start, end in _runs(sources, targets) if same_stride else _singles(len(sources)):
            num_bytes = (end - start - 1) * source.stride_bytes + source.block_bytes
            ctypes.memmove(
                target.address + targets[start] * target.stride_bytes,
                source.address + sources[start] * source.stride_bytes,
                num_bytes,
            )


class StoreMover(Mover):
    """Moves blocks between HOST and a store. Checksums run on separate threads from I/O.

    If the store packs blocks in another way than HOST, they pass through `repacker`.
    """

    def __init__(
        self,
        host: Arena,
        store: Store,
        seals: Seals,
        num_checksum_threads: int = 2,
        repacker: Repacker | None = None,
    ) -> None:
        self._host = host
        self._store = store
        self._seals = seals
        self._repacker = repacker
        self._checkers = DaemonPool(num_checksum_threads, "penstock-checksum")

    def move(self, transfer: Transfer) -> MoveResult | Future[MoveResult]:
        if transfer.direction is Direction.LOAD:
            return self._load(transfer)
        return self._save(transfer)

    def close(self) -> None:
        self._checkers.close()

    def _load(self, transfer: Transfer) -> Future[MoveResult]:
        targets = [self._host.view(slot) for slot in transfer.target_slots]
        self._seals.open(transfer.target_slots)
        if self._repacker is None:
            return self._read(transfer, targets, _verdicts)
        scratch, repack = self._repacker.take(len(targets)), self._repacker.to_host

        def arrive(answers: Answers) -> list[Verdict]:
            verdicts = _verdicts(answers)
            for index, verdict in enumerate(verdicts):
                if verdict is Verdict.OK and not repack(scratch.views[index], targets[index]):
                    verdicts[index] = Verdict.UNFIT
            return verdicts

        try:
            reading = self._read(transfer, scratch.views, arrive)
        except BaseException:
            scratch.give_back()
            raise
        reading.add_done_callback(lambda _: scratch.give_back())
        return reading

    def _read(
        self,
        transfer: Transfer,
        memory: Sequence[memoryview],
        arrive: Callable[[Answers], list[Verdict]],
    ) -> Future[MoveResult]:
        """Read into `memory` and verify. `arrive` returns which blocks are in HOST then."""
        blocks = _blocks(transfer, transfer.source_slots, memory)
        verify = self._store.read(blocks)

        def finish() -> MoveResult:
            answers = verify()
            verdicts = arrive(answers)
            sound = [index for index, verdict in enumerate(verdicts) if verdict is Verdict.OK]
            self._seals.seal(
                [transfer.keys[index] for index in sound],
                [transfer.target_slots[index] for index in sound],
            )
            for block, answer in zip(blocks, answers, strict=True):
                if isinstance(answer, Corrupt):
                    self._store.drop(block.key, block.slot)
            return MoveResult(verdicts, _moved(answers).error)

        return self._checkers.submit(finish)

    def _save(self, transfer: Transfer) -> MoveResult:
        sources = [self._host.view(slot) for slot in transfer.source_slots]
        if self._repacker is None:
            verdicts = self._seals.verdicts(transfer.keys, transfer.source_slots)
            return self._write(_blocks(transfer, transfer.target_slots, sources), verdicts)
        scratch, repack = self._repacker.take(len(sources)), self._repacker.to_store
        try:
            fits = [repack(*pair) for pair in zip(sources, scratch.views, strict=True)]
            # After the copy: a slot that was overwritten during it has lost its seal.
            verdicts = [
                Verdict.UNFIT if verdict is Verdict.OK and not fit else verdict
                for verdict, fit in zip(
                    self._seals.verdicts(transfer.keys, transfer.source_slots), fits, strict=True
                )
            ]
            return self._write(_blocks(transfer, transfer.target_slots, scratch.views), verdicts)
        finally:
            scratch.give_back()

    def _write(self, blocks: Sequence[Block], verdicts: Sequence[Verdict]) -> MoveResult:
        """Write the blocks whose verdict is OK."""
        sound = [b for b, verdict in zip(blocks, verdicts, strict=True) if verdict is Verdict.OK]
        digest = self._store.digest
        digests = self._checkers.submit(lambda: [digest(block.memory) for block in sound])
        moved = _moved(self._store.write(sound, digests.result))
        written = iter(moved.verdicts)
        return MoveResult([next(written) if v is Verdict.OK else v for v in verdicts], moved.error)


def _blocks(
    transfer: Transfer, store_slots: Sequence[Slot], memory: Sequence[memoryview]
) -> list[Block]:
    keys = transfer.keys
    tenants = transfer.tenants or ("",) * len(keys)
    parents = transfer.parents or (None,) * len(keys)
    return [Block(*each) for each in zip(keys, store_slots, memory, tenants, parents, strict=True)]


def _verdicts(answers: Answers) -> list[Verdict]:
    return [_verdict_of(answer) for answer in answers]


def _moved(answers: Answers) -> MoveResult:
    errors = [answer for answer in answers if answer is not None]
    if not errors:
        return MoveResult([Verdict.OK] * len(answers))
    # Report a fault of the tier rather than damage, and damage rather than a missing block.
    worst = max(errors, key=_verdict_of)
    return MoveResult(_verdicts(answers), str(worst))


def _verdict_of(error: StoreError | None) -> Verdict:
    if error is None:
        return Verdict.OK
    if isinstance(error, Corrupt):
        return Verdict.CORRUPT
    return Verdict.MISSING if isinstance(error, Missing) else Verdict.FAILED


def _runs(sources: Sequence[Slot], targets: Sequence[Slot]) -> Iterator[tuple[int, int]]:
    """Ranges in which the slots of both sides are consecutive: one copy instead of many."""
    start = 0
    for end in range(1, len(sources) + 1):
        length = end - start
        if (
            end == len(sources)
            or sources[end] != sources[start] + length
            or targets[end] != targets[start] + length
        ):
            yield start, end
            start = end


def _singles(length: int) -> Iterator[tuple[int, int]]:
    return ((index, index + 1) for index in range(length))
