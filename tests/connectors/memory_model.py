"""KV that follows from its tokens, in memory of a shape that vLLM's workers have.

Each token's bytes depend on all tokens before it, on the layer and on the worker, so that whatever
is copied wrong, cut short or put in another's place shows.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from penstock.audits.layout import BlockLayout, Stretch
from penstock.keys import Namespace
from penstock.stores.host import HostArena
from penstock.transfer.io import Mover, MoveResult
from penstock.transfer.paged import PagedMemory, PagedMover, PageStretch, Part
from penstock.transfer.seals import Seals
from penstock.types import KEY_BYTES, BlockKey, Direction, Slot, Transfer

BLOCK_TOKENS = 4
TOKEN_BYTES = (24, 40, 8)  # of one token in each layer
GAP_BYTES = 16  # between the blocks of a layer
PART_BYTES = BLOCK_TOKENS * sum(TOKEN_BYTES)
VOCABULARY = 50
NAMESPACE = Namespace("model", "weights", "dtype", "layout", BLOCK_TOKENS)
SCRIBBLE = b"\xee"

Digest = bytes


@dataclass(frozen=True)
class Shape:
    """The bytes of KV: how many, and whether they are bfloat16 as a model computes them.

    Of `num_unfit` tokens in 256 the exponents are far apart: their blocks do not fit the codec.
    """

    token_bytes: tuple[int, ...]  # of one token in each layer
    page_bytes: tuple[int, ...]  # of a block in each layer, if there are several groups
    is_bf16: bool = False
    num_unfit: int = 0

    @property
    def part_bytes(self) -> int:
        return BLOCK_TOKENS * sum(self.token_bytes)

    def made(self, data: bytes) -> bytes:
        """KV from random bytes."""
        if not self.is_bf16 or data[0] < self.num_unfit:
            return data
        bits = np.frombuffer(data, "<u2")
        exponents = 120 + (bits >> 7 & 7)
        return ((bits & 0x807F) | exponents << 7).astype("<u2").tobytes()


BYTES = Shape(TOKEN_BYTES, (96, 48))
PACKABLE = Shape((512, 512), (2048, 2048), is_bf16=True)


class Silent(AssertionError):
    """Wrong KV that nobody was told of."""


def _kv(digest: Digest, rank: int, shape: Shape) -> list[bytes]:
    """What the token with this past has in each layer of a worker."""
    return [
        shape.made(blake3(digest + bytes([rank, layer])).digest(length=num_bytes))
        for layer, num_bytes in enumerate(shape.token_bytes)
    ]


class Past:
    """A digest for each token, of all tokens up to it and of what else makes KV differ."""

    def __init__(self, seed: str) -> None:
        self._seed = blake3(seed.encode()).digest()
        self.digests: list[Digest] = []

    def of(self, tokens: Sequence[int]) -> list[Digest]:
        """Tokens only ever grow, but for drafts, which come last."""
        for token in tokens[len(self.digests) :]:
            self.digests.append(self.after(self.digests, token))
        return self.digests

    def after(self, digests: Sequence[Digest], token: int) -> Digest:
        last = digests[-1] if digests else self._seed
        return blake3(last + token.to_bytes(4, "little")).digest()


class Device:
    """One worker's memory."""

    def __init__(self, num_blocks: int, rank: int, shape: Shape = BYTES) -> None:
        self._rank = rank
        self._shape = shape
        sizes = [BLOCK_TOKENS * num_bytes + GAP_BYTES for num_bytes in shape.token_bytes]
        self._memory = bytearray(SCRIBBLE * (num_blocks * sum(sizes)))
        self._held = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        starts = [num_blocks * sum(sizes[:layer]) for layer in range(len(sizes))]
        self._layers = list(zip(starts, sizes, shape.token_bytes, strict=True))
        address = ctypes.addressof(self._held)
        self.paged = PagedMemory(
            tuple(
                PageStretch(address + start, size, BLOCK_TOKENS * num_bytes)
                for start, size, num_bytes in self._layers
            ),
            num_blocks,
        )

    def write(self, block: int, position: int, digest: Digest) -> None:
        for (start, size, num_bytes), data in zip(
            self._layers, _kv(digest, self._rank, self._shape), strict=True
        ):
            at = start + block * size + position * num_bytes
            self._memory[at : at + num_bytes] = data

    def holds(self, block: int, digests: Sequence[Digest]) -> bool:
        """Whether a block begins with the KV of these tokens."""
        for position, digest in enumerate(digests):
            for (start, size, num_bytes), data in zip(
                self._layers, _kv(digest, self._rank, self._shape), strict=True
            ):
                at = start + block * size + position * num_bytes
                if self._memory[at : at + num_bytes] != data:
                    return False
        return True

    def scribble(self, block: int) -> None:
        for start, size, num_bytes in self._layers:
            at = start + block * size
            length = BLOCK_TOKENS * num_bytes
            self._memory[at : at + length] = SCRIBBLE * length


def block_bytes_of(digests: Sequence[Digest], rank: int, shape: Shape = BYTES) -> bytes:
    """A worker's part of a full block, as it is on the device."""
    tokens = [_kv(digest, rank, shape) for digest in digests]
    return b"".join(kv[layer] for layer in range(len(shape.token_bytes)) for kv in tokens)


def audit_layout(num_workers: int, shape: Shape = BYTES) -> BlockLayout:
    """What an audit compares: the bytes of each layer of each worker."""
    sizes = [BLOCK_TOKENS * num_bytes for num_bytes in shape.token_bytes]
    part = shape.part_bytes
    dtype, item = ("bfloat16", 2) if shape.is_bf16 else ("bytes", 1)
    return BlockLayout(
        tuple(
            Stretch(f"{layer} of {rank}", rank * part + sum(sizes[:layer]), dtype, (size // item,))
            for rank in range(num_workers)
            for layer, size in enumerate(sizes)
        )
    )


class Truth:
    """What every key stands for."""

    def __init__(self, shape: Shape = BYTES) -> None:
        self._digests: dict[BlockKey, tuple[Digest, ...]] = {}
        self._shape = shape
        self.wrong: list[str] = []
        # What DRAM has in a slot, as it is on the device.
        self.read: Callable[[HostArena, Slot], bytes] = _read_bytes

    def learn(self, keys: Sequence[BlockKey], digests: Sequence[Digest]) -> None:
        for index, key in enumerate(keys):
            self._digests[key] = tuple(digests[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])

    def check(self, keys: Sequence[BlockKey], host: HostArena, num_workers: int) -> None:
        """DRAM offers these blocks from now on."""
        for key in keys:
            if key not in self._digests:
                self.wrong.append("a block is kept under a key that stands for nothing")
                continue
            wanted = b"".join(self._part(key, rank) for rank in range(num_workers))
            slot = _slot_of(key, host)
            if slot is None or self.read(host, slot) == wanted:
                continue
            # It may have been given up in the meantime, and filled with another or anew.
            found = self.read(host, slot)
            if _slot_of(key, host) == slot and found != wanted:
                wrong = [at for at, byte in enumerate(found) if byte != wanted[at]]
                kind = "overwritten" if found[wrong[0]] == SCRIBBLE[0] else "other"
                self.wrong.append(
                    f"wrong bytes are kept in slot {slot}: {len(wrong)} of {len(found)} {kind} "
                    f"bytes, the first at {wrong[0]}"
                )

    def _part(self, key: BlockKey, rank: int) -> bytes:
        return block_bytes_of(self._digests[key], rank, self._shape)


def _read_bytes(host: HostArena, slot: Slot) -> bytes:
    return bytes(host.view(slot)[: host.block_bytes])


def _slot_of(key: BlockKey, host: HostArena) -> Slot | None:
    """The slot with this seal."""
    for slot in range(host.num_slots):
        if bytes(host.seals[slot * KEY_BYTES : (slot + 1) * KEY_BYTES]) == key:
            return Slot(slot)
    return None


class SlowMover(Mover):
    """Takes its time, and fails now and then."""

    def __init__(self, part: Part, seals: Seals, seed: int) -> None:
        self._inner = PagedMover(part, seals)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self.max_seconds = 0.0
        self.failing = 0.0  # how many in one
        self.fails_loads = False
        self.gate, self.saves_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.saves_gate.set()

    def move(self, transfer: Transfer) -> MoveResult:
        with self._lock:
            seconds = self._rng.random() * self.max_seconds
            fails = self._rng.random() < self.failing
        self.gate.wait()
        if transfer.direction is Direction.SAVE:
            self.saves_gate.wait()
        time.sleep(seconds)
        if fails or (self.fails_loads and transfer.direction is Direction.LOAD):
            raise OSError("a copy failed")
        return self._inner.move(transfer)

    def close(self) -> None:
        pass


class AdvancedClock:
    """The system's, which tests may put forward: workers take deadlines by the system's own."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._frozen: float | None = None

    def now(self) -> float:
        return (time.monotonic() if self._frozen is None else self._frozen) + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds

    def freeze(self) -> None:
        """From now on only `advance` moves it."""
        self._frozen = time.monotonic()
