"""A request with segments, as far as `loads` and `fills` need to know one.

The engine's requests are of this kind, and the simulator's: what is reused is decided by the same
code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Protocol

from penstock.types import BlockKey, Tier, Verdict

if TYPE_CHECKING:
    from penstock.engine.table import Places


class AnySegment(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def keys(self) -> Sequence[BlockKey]: ...
    @property
    def reused(self) -> range: ...
    @property
    def saved_share(self) -> float:
        """Of the tokens of its blocks: those that are not computed."""
        ...


class AnyTable(Sized, Protocol):
    @property
    def places(self) -> Places: ...


class Segmented(Protocol):
    """See `penstock.engine.request.Request`."""

    priority: int
    num_computed: int
    num_present: int
    num_preemptions: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_reused_tokens: int
    num_mended_tokens: int
    num_lossy_tokens: int
    has_filled: bool
    num_new_blocks: dict[BlockKey, int]
    mended: Places | None
    seen: list[range]
    fills: set[BlockKey]
    found: Counter[Tier]
    found_elsewhere: Counter[Tier]
    lost: Counter[Verdict]

    @property
    def tenant(self) -> str: ...
    @property
    def tokens(self) -> Sized: ...
    @property
    def table(self) -> AnyTable: ...
    @property
    def segments(self) -> Sequence[AnySegment]: ...
    @property
    def is_blended(self) -> bool: ...
    @property
    def is_waiting(self) -> bool: ...
