"""Memory of a model with several KV cache groups: one pool of blocks, whose meaning differs.

A block has the same bytes in every group. Those of full, window and chunk groups hold tokens, those
of a state group the state after the last token that was computed into it. All of it follows from
all tokens before: what is of another position, group, request or worker shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

from blake3 import blake3
from connectors.memory_model import BYTES, GAP_BYTES, SCRIBBLE, Digest, Shape, Truth

from penstock.groups.kinds import Group, Kind
from penstock.transfer.paged import PagedMemory, PageStretch
from penstock.types import BlockKey

GROUP_PART_BYTES = sum(BYTES.page_bytes)
NULL = 0


@lru_cache(maxsize=1 << 16)
def _kv(digest: Digest, index: int, rank: int, layer: int, num_bytes: int, shape: Shape) -> bytes:
    return shape.made(blake3(digest + bytes([index, rank, layer])).digest(length=num_bytes))


def _cells(group: Group, digests: Sequence[Digest], first: int) -> list[tuple[int, int, Digest]]:
    """The tokens of a block from its position `first` on: (position, size of a token, digest)."""
    if group.kind is Kind.STATE:
        return [(0, 1, digests[-1])] if digests else []
    return [(first + at, group.block_tokens, digest) for at, digest in enumerate(digests)]


def block_bytes(group: Group, digests: Sequence[Digest], rank: int, shape: Shape) -> bytes:
    """A worker's part of a full block, as it is on the device."""
    cells = _cells(group, digests, 0)
    return b"".join(
        _kv(digest, group.index, rank, layer, page // parts, shape)
        for layer, page in enumerate(shape.page_bytes)
        for _, parts, digest in cells
    )


class GroupDevice:
    """One worker's memory."""

    def __init__(self, num_blocks: int, rank: int, shape: Shape = BYTES) -> None:
        self._rank = rank
        self._shape = shape
        sizes = [page + GAP_BYTES for page in shape.page_bytes]
        self._memory = bytearray(SCRIBBLE * (num_blocks * sum(sizes)))
        self._held = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        starts = [num_blocks * sum(sizes[:layer]) for layer in range(len(sizes))]
        self._layers = list(zip(starts, sizes, shape.page_bytes, strict=True))
        address = ctypes.addressof(self._held)
        self.paged = PagedMemory(
            tuple(PageStretch(address + start, size, page) for start, size, page in self._layers),
            num_blocks,
        )

    def write(self, group: Group, block: int, digests: Sequence[Digest], first: int = 0) -> None:
        """Tokens from the position `first` of a block on. A state is that of the last of them."""
        assert block != NULL, "vLLM writes to the null block"
        for at, data in self._places(group, block, digests, first):
            self._memory[at : at + len(data)] = data

    def holds(self, group: Group, block: int, digests: Sequence[Digest], first: int = 0) -> bool:
        return block != NULL and all(
            self._memory[at : at + len(data)] == data
            for at, data in self._places(group, block, digests, first)
        )

    def scribble(self, block: int) -> None:
        for start, size, page in self._layers:
            at = start + block * size
            self._memory[at : at + page] = SCRIBBLE * page

    def _places(
        self, group: Group, block: int, digests: Sequence[Digest], first: int
    ) -> list[tuple[int, bytes]]:
        return [
            (
                start + block * size + position * (page // parts),
                _kv(digest, group.index, self._rank, layer, page // parts, self._shape),
            )
            for position, parts, digest in _cells(group, digests, first)
            for layer, (start, size, page) in enumerate(self._layers)
        ]


class GroupTruth(Truth):
    """What every key of every group stands for."""

    def __init__(self, shape: Shape = BYTES) -> None:
        super().__init__(shape)
        self._group: dict[BlockKey, Group] = {}

    def learn_group(
        self, group: Group, keys: Sequence[BlockKey], digests: Sequence[Digest], start: int
    ) -> None:
        """`keys` are those of a group's blocks from the index `start` on."""
        size = group.block_tokens
        for index, key in enumerate(keys, start):
            self._group[key] = group
            self._digests[key] = tuple(digests[index * size : (index + 1) * size])

    def _part(self, key: BlockKey, rank: int) -> bytes:
        return block_bytes(self._group[key], self._digests[key], rank, self._shape)
