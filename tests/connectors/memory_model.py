"""KV that follows from its tokens, in memory of a shape that vLLM's workers have.

Each token's bytes depend on all tokens before it, on the layer and on the worker, so that whatever
is copied wrong, cut short or put in another's place shows.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Sequence

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


class Silent(AssertionError):
    """Wrong KV that nobody was told of."""


def _kv(digest: Digest, rank: int) -> list[bytes]:
    """What the token with this past has in each layer of a worker."""
    return [
        blake3(digest + bytes([rank, layer])).digest(length=num_bytes)
        for layer, num_bytes in enumerate(TOKEN_BYTES)
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

    def __init__(self, num_blocks: int, rank: int) -> None:
        self._rank = rank
        sizes = [BLOCK_TOKENS * num_bytes + GAP_BYTES for num_bytes in TOKEN_BYTES]
        self._memory = bytearray(SCRIBBLE * (num_blocks * sum(sizes)))
        self._held = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        starts = [num_blocks * sum(sizes[:layer]) for layer in range(len(sizes))]
        self._layers = list(zip(starts, sizes, TOKEN_BYTES, strict=True))
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
            self._layers, _kv(digest, self._rank), strict=True
        ):
            at = start + block * size + position * num_bytes
            self._memory[at : at + num_bytes] = data

    def holds(self, block: int, digests: Sequence[Digest]) -> bool:
        """Whether a block begins with the KV of these tokens."""
        for position, digest in enumerate(digests):
            for (start, size, num_bytes), data in zip(
                self._layers, _kv(digest, self._rank), strict=True
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


def block_bytes_of(digests: Sequence[Digest], rank: int) -> bytes:
    """A worker's part of a full block, as DRAM keeps it."""
    tokens = [_kv(digest, rank) for digest in digests]
    return b"".join(kv[layer] for layer in range(len(TOKEN_BYTES)) for kv in tokens)


def audit_layout(num_workers: int) -> BlockLayout:
    """What an audit compares: the bytes of each layer of each worker."""
    sizes = [BLOCK_TOKENS * num_bytes for num_bytes in TOKEN_BYTES]
    return BlockLayout(
        tuple(
            Stretch(f"{layer} of {rank}", rank * PART_BYTES + sum(sizes[:layer]), "bytes", (size,))
            for rank in range(num_workers)
            for layer, size in enumerate(sizes)
        )
    )


class Truth:
    """What every key stands for."""

    def __init__(self) -> None:
        self._digests: dict[BlockKey, tuple[Digest, ...]] = {}
        self.wrong: list[str] = []

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
            if slot is None or host.view(slot)[: host.block_bytes] == wanted:
                continue
            # It may have been given up in the meantime, and filled with another or anew.
            found = bytes(host.view(slot)[: host.block_bytes])
            if _slot_of(key, host) == slot and found != wanted:
                wrong = [at for at, byte in enumerate(found) if byte != wanted[at]]
                kind = "overwritten" if found[wrong[0]] == SCRIBBLE[0] else "other"
                self.wrong.append(
                    f"wrong bytes are kept in slot {slot}: {len(wrong)} of {len(found)} {kind} "
                    f"bytes, the first at {wrong[0]}"
                )

    def _part(self, key: BlockKey, rank: int) -> bytes:
        return block_bytes_of(self._digests[key], rank)


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
