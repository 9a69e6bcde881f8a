"""The pages of SGLang's pools as blocks: their keys, and how a page is cut.

All blocks of a store have one size, but pages of different pools have not. A page is therefore cut
into blocks of about a mebibyte, and the last one is padded. It is found only if all of them are.

SGLang names a page by a hash of its tokens and of those before it, and of the request's salt and
adapter. The key adds what the hash leaves out: the pool, what its bytes mean, and the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from penstock.types import PAGE_BYTES, BlockKey, round_up
from penstock.units import MiB

_BLOCK_BYTES = 1 * MiB


def block_bytes_for(page_bytes: int) -> int:
    """The size of blocks, if the main pool's pages have `page_bytes`."""
    num_parts = max(1, page_bytes // _BLOCK_BYTES)
    return round_up(-(-page_bytes // num_parts), PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class PageFormat:
    """One pool's pages."""

    pool: str
    layout: str  # everything that says what the bytes mean, and which rank they belong to
    page_bytes: int
    block_bytes: int

    @property
    def num_parts(self) -> int:
        return -(-self.page_bytes // self.block_bytes)

    def part(self, index: int) -> slice:
        """The bytes of the page in its block at `index`."""
        start = index * self.block_bytes
        return slice(start, min(start + self.block_bytes, self.page_bytes))

    def keys(self, hashes: Sequence[str], salt: bytes = b"") -> list[BlockKey]:
        """The keys of all blocks of these pages, page by page."""
        stem = blake3(b"penstock sglang page 1")
        for field in (self.pool, self.layout, str(self.page_bytes), str(self.block_bytes)):
            _add(stem, field.encode())
        _add(stem, salt)
        found = []
        for name in hashes:
            page = stem.copy()
            _add(page, name.encode())
            for index in range(self.num_parts):
                part = page.copy()
                part.update(index.to_bytes(8, "little"))
                found.append(BlockKey(part.digest()))
        return found

    def whole(self, blocks: Sequence[bool]) -> list[bool]:
        """Which pages are complete, from which of their blocks are there."""
        size = self.num_parts
        return [all(blocks[start : start + size]) for start in range(0, len(blocks), size)]


def _add(hasher: blake3, field: bytes) -> None:
    """With its length, so that no two lists of fields are hashed the same."""
    hasher.update(len(field).to_bytes(8, "little") + field)
