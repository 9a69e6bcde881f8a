"""A remote store that all nodes of a fleet write to and read from. Pure.

It evicts what was unused longest, as Redis does with `allkeys-lru`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from penstock.errors import ConfigError
from penstock.types import BlockKey


class SharedStore:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"the shared store holds {num_blocks} blocks: expected 1 or more")
        self._num_blocks = num_blocks
        self._held: OrderedDict[BlockKey, None] = OrderedDict()  # the one unused longest first
        self.num_evicted = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def put(self, keys: Iterable[BlockKey]) -> None:
        """Store blocks. One that is there already counts as used."""
        for key in keys:
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)
            self.num_evicted += 1

    def use(self, key: BlockKey) -> bool:
        """Read a block. Returns whether it is there."""
        if key not in self._held:
            return False
        self._held.move_to_end(key)
        return True
