"""Which requests used KV that a lossy codec may have changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from penstock.codecs.names import is_lossy
from penstock.types import Slot, Tier

if TYPE_CHECKING:
    from penstock.engine.request import Request


class _Counted(Protocol):
    num_lossy_tokens: int


class LossyBlocks:
    """The device's blocks with KV from a lossy tier, or computed after such KV.

    A block in DRAM may have come from the disk before, also one that a sequence has computed: it
    may have been evicted and fetched again. So if any tier is lossy, every block that is loaded or
    read in DRAM counts as lossy: this may count too many, but never too few.
    """

    def __init__(
        self, block_tokens: int, codecs: Mapping[Tier, str] = MappingProxyType({})
    ) -> None:
        self._block_tokens = block_tokens
        self._is_any_lossy = any(map(is_lossy, codecs.values()))
        self._slots: set[Slot] = set()

    def loaded(self, request: _Counted, num_blocks: int, slots: Iterable[Slot | None]) -> None:
        """`num_blocks` arrived for a request, in these slots; None: they stay in HOST."""
        if self._is_any_lossy and num_blocks:
            request.num_lossy_tokens += num_blocks * self._block_tokens
            self._slots.update(slot for slot in slots if slot is not None)

    def returned(self, slot: Slot) -> None:
        """A block that was read in HOST is now in this slot."""
        if self._is_any_lossy:
            self._slots.add(slot)

    def shared(self, request: _Counted, slots: Iterable[Slot]) -> None:
        """A request uses blocks that are on the device already."""
        if self._is_any_lossy:
            num_blocks = sum(slot in self._slots for slot in slots)
            request.num_lossy_tokens += num_blocks * self._block_tokens

    def computed(self, request: Request, slots: Iterable[Slot]) -> None:
        """A request has computed these blocks, after reading all KV before them."""
        if not self._is_any_lossy:
            return
        num_cold = request.table.num_cold * self._block_tokens
        request.num_lossy_tokens = max(request.num_lossy_tokens, num_cold)
        # Slots are reused: what was lossy in them is gone.
        if request.num_lossy_tokens:
            self._slots.update(slots)
        else:
            self._slots.difference_update(slots)
