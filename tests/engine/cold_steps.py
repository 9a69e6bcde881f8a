"""Sequences whose blocks wander between a pool and HOST, and what each step then gives."""

from __future__ import annotations

import random
from typing import Any, cast

import torch
from engine.packed_blocks import pack_into

from penstock.codecs.base import Codec, RawCodec
from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine.scheduler import Chunk
from penstock.engine.table import BlockTable
from penstock.engine.triton_runner import TritonRunner
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import Slot


class _Sequence:
    is_fill = False

    def __init__(self, tokens: list[int], slots: list[Slot]) -> None:
        self.tokens = tokens
        self.slots = slots  # where its blocks lie on the device, whatever becomes of its table
        self.table = BlockTable(slots)


class ColdSteps:
    """A runner that reads what is cold; HOST's slots are used again and again."""

    def __init__(
        self,
        runner: TritonRunner,
        pool: DevicePool,
        host: HostArena,
        lengths: list[int],
        vocabulary: int,
        seed: int,
        form: LosslessFormat | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """`form`: of HOST's blocks, if the runner expects them packed.

        `tolerance`: by how much logits may differ.
        """
        self._tolerance = tolerance
        self._runner, self._pool, self._host = runner, pool, host
        self._codec: Codec = RawCodec(pool.block_bytes) if form is None else LosslessCodec(form)
        self._rng = random.Random(seed)
        self._free = [Slot(n) for n in range(host.num_slots)]
        slots = iter(range(pool.num_slots))
        self._sequences = [
            _Sequence(
                [self._rng.randrange(vocabulary) for _ in range(length)],
                [Slot(next(slots)) for _ in range(-(-length // pool.tensor.shape[3]))],
            )
            for length in lengths
        ]
        self._running = self._sequences[1:]  # one waits, and changes with them

    def run(self, num_steps: int) -> None:
        """Every step gives the logits of one that reads the pool alone."""
        wanted = {}
        for one in self._sequences:
            self._running = [s for s in self._sequences if s is not one]
            wanted[one] = self._step()
        for step in range(num_steps):
            (waiting,) = self._waiting()
            largest = float((self._step() - wanted[waiting]).abs().max())
            assert largest <= self._tolerance, (step, largest)
            for _ in range(self._rng.choice((0, 0, 0, 1, 1, 5))):
                self._rng.choice((self._chill, self._chill, self._chill, self._warm, self._swap))()

    def _step(self) -> torch.Tensor:
        chunks = [Chunk(cast(Any, s), len(s.tokens) - 1, 1) for s in self._running]
        return self._runner.run(chunks).clone()

    def _waiting(self) -> list[_Sequence]:
        return [s for s in self._sequences if s not in self._running]

    def _chill(self) -> None:
        sequence = self._rng.choice(self._running)
        resident = sequence.table.resident(end=len(sequence.slots) - 1)  # the last is written to
        if not resident or not self._free:
            return
        index, pin = self._rng.choice(resident), self._free.pop()
        pack_into(self._codec, self._pool.tensor[sequence.slots[index]], self._host.view(pin))
        sequence.table.chill(index, pin)

    def _warm(self) -> None:
        sequence = self._rng.choice(self._running)
        cold = sequence.table.cold()
        if cold:
            index = self._rng.choice(cold)
            self._release([sequence.table.warm(index, sequence.slots[index])])

    def _swap(self) -> None:
        """One ends; another takes its place, in the order of all."""
        ended = self._rng.choice(self._running)
        self._running = [s for s in self._sequences if s is not ended]
        self._release(ended.table.take_all()[1])
        ended.table.extend(ended.slots)

    def _release(self, pins: list[Slot]) -> None:
        """The next block to go cold goes there; until then, rubbish."""
        for pin in pins:
            self._host.view(pin)[:] = b"\xff" * self._host.stride_bytes
        self._free += pins
