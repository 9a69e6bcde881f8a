"""Keys of blocks: a hash of the tokens so far and of everything else that changes their KV.

    root   = BLAKE3(namespace)
    key[i] = BLAKE3(key[i-1] || tokens of block i as little-endian u32)

The encoding of a namespace does not depend on Python's hash seed, dict order, pickling or the
machine's byte order, so equal inputs give equal keys everywhere.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import cast

from blake3 import blake3

from penstock.errors import ConfigError
from penstock.types import BlockKey, BlockSpec

TOKEN_BYTES = 4
_LABELS = ("model",)  # fields of a namespace that do not change the KV
_MAX_TEXT = 120  # characters of a field in a description


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens that changes their KV. Different namespaces share no blocks.

    The model's name is only a label, because one file can have many names and vice versa.
    `weights` identifies the model. If the weights cannot be read, use a unique value.
    """

    model: str
    weights: str  # fingerprint of the weights
    dtype: str
    layout: str  # order and packing of a block's bytes, including the attention backend's
    block_tokens: int
    rope: str = ""
    adapter: str = ""  # LoRA or similar: name and fingerprint
    shard_rank: int = 0
    shard_size: int = 1
    tenant: str = ""  # a salt, so that tenants cannot probe each other's cache
    settings: str = ""  # digest of other server settings that may change the KV
    loss: str = ""  # the lossy codecs of all tiers: KV computed after lossy KV differs too

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens is {self.block_tokens}: expected 1 or more")
        if not 0 <= self.shard_rank < self.shard_size:
            raise ConfigError(
                f"shard_rank is {self.shard_rank} with shard_size {self.shard_size}: "
                "expected a rank from 0 to shard_size - 1"
            )

    def digest(self) -> bytes:
        """32 bytes. Each field is hashed with its name and length, so that none can be confused."""
        hasher = blake3(b"penstock namespace 2")
        for field in fields(self):
            if field.name in _LABELS or (field.name == "loss" and not self.loss):
                continue
            for part in (field.name, str(getattr(self, field.name))):
                encoded = part.encode()
                hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        return hasher.digest()

    def root(self) -> BlockKey:
        """The parent key of a sequence's first block."""
        return BlockKey(blake3(self.digest()).digest())

    def physical(self) -> Namespace:
        """The namespace of a store: blocks of all adapters and tenants share one store."""
        return replace(self, adapter="", tenant="")

    def block_spec(self, block_bytes: int) -> BlockSpec:
        """The spec of stores for blocks of this namespace, for all adapters and tenants."""
        physical = self.physical()
        return BlockSpec(physical.digest(), block_bytes, self.block_tokens, physical.description())

    def description(self) -> tuple[tuple[str, str], ...]:
        """The fields that are not defaults, as names and values for people to read."""
        texts = ((field.name, str(getattr(self, field.name))) for field in fields(self))
        plain = {"adapter": "", "shard_rank": "0", "shard_size": "1", "tenant": ""}
        return tuple(
            (name, text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…")
            for name, text in texts
            if text and text != plain.get(name)
        )


class KeyChain:
    """The keys of one growing sequence: appending tokens hashes only the new full blocks."""

    __slots__ = ("_block_bytes", "_parent", "_pending", "keys")

    def __init__(self, namespace: Namespace, tokens: Iterable[int] = ()) -> None:
        self.keys: list[BlockKey] = []  # of all full blocks so far
        self._parent: bytes = namespace.root()
        self._block_bytes = namespace.block_tokens * TOKEN_BYTES
        self._pending = b""  # the tokens of the last, unfinished block
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append token ids (0 to 2**32 - 1). If one is invalid, nothing is appended."""
        data = self._pending + _encode(tokens)
        size = self._block_bytes
        full = len(data) - len(data) % size
        parent, hasher = self._parent, blake3
        append = cast("Callable[[bytes], None]", self.keys.append)
        for start in range(0, full, size):
            parent = hasher(parent + data[start : start + size]).digest()
            append(parent)
        self._parent = parent
        self._pending = data[full:]

    def append(self, token: int) -> None:
        """Append one token id; faster than `extend`."""
        pending = self._pending + token.to_bytes(TOKEN_BYTES, "little")
        if len(pending) == self._block_bytes:
            self._parent = blake3(self._parent + pending).digest()
            self.keys.append(BlockKey(self._parent))
            pending = b""
        self._pending = pending

    def key_before(self, index: int) -> BlockKey | None:
        """The parent of the block at `index`."""
        return self.keys[index - 1] if index else None

    def mix(self, name: bytes) -> None:
        """Make all later keys depend on `name` too, for example the hash of an image."""
        self._parent = blake3(b"penstock mix 1" + self._parent + name).digest()


def chain(namespace: Namespace, tokens: Iterable[int]) -> list[BlockKey]:
    """The keys of all full blocks of `tokens`."""
    return KeyChain(namespace, tokens).keys


def _encode(tokens: Iterable[int]) -> bytes:
    try:
        encoded = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 4294967295: {error}") from None
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()
