"""The interface of a codec, and blocks that consist of several parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.codecs.names import RAW


class Codec(Protocol):
    """Packs one worker's part of a block. Thread-safe; releases the GIL for large parts."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Everything that decides the meaning of packed bytes, for the namespace of a store."""

    @property
    def raw_bytes(self) -> int: ...

    @property
    def packed_bytes(self) -> int: ...

    def pack(self, raw: memoryview, packed: memoryview) -> bool:
        """Fill `packed`. False if the part does not fit; then `packed` must not be used."""

    def unpack(self, packed: memoryview, raw: memoryview) -> None:
        """Fill `raw`. Packed bytes that no `pack` made give wrong values, but never an error."""


@dataclass(frozen=True, slots=True)
class RawCodec:
    raw_bytes: int
    name: str = RAW
    version: str = ""

    @property
    def packed_bytes(self) -> int:
        return self.raw_bytes

    def pack(self, raw: memoryview, packed: memoryview) -> bool:
        packed[: self.raw_bytes] = raw[: self.raw_bytes]
        return True

    def unpack(self, packed: memoryview, raw: memoryview) -> None:
        raw[: self.raw_bytes] = packed[: self.raw_bytes]


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """The codec of whole blocks: their parts one after another, all packed in the same way."""

    parts: tuple[Codec, ...]

    @classmethod
    def raw(cls, block_bytes: int) -> BlockCodec:
        return cls((RawCodec(block_bytes),))

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def version(self) -> str:
        return " | ".join(part.version for part in self.parts if part.version)

    @property
    def raw_bytes(self) -> int:
        return sum(part.raw_bytes for part in self.parts)

    @property
    def packed_bytes(self) -> int:
        return sum(part.packed_bytes for part in self.parts)

    def pack(self, raw: memoryview, packed: memoryview) -> bool:
        return all(
            part.pack(raw[start:], packed[packed_start:])
            for part, start, packed_start in self._places()
        )

    def unpack(self, packed: memoryview, raw: memoryview) -> None:
        for part, start, packed_start in self._places():
            part.unpack(packed[packed_start:], raw[start:])

    def values(self, packed: memoryview) -> memoryview:
        """The values of a packed block: a copy, unless the codec keeps them as they are."""
        if not self.version:
            return packed
        raw = memoryview(bytearray(self.raw_bytes))
        self.unpack(packed, raw)
        return raw

    def _places(self) -> Sequence[tuple[Codec, int, int]]:
        places, start, packed_start = [], 0, 0
        for part in self.parts:
            places.append((part, start, packed_start))
            start += part.raw_bytes
            packed_start += part.packed_bytes
        return places
