"""Which blocks of running sequences lie on the device, and which are read from HOST. Pure.

A sequence reads all of its KV at every step, so every cold block is paid for at every step; but
some are worth more on the device than others:

    | prefix | middle ................................ | tail |
      shared   cold from its beginning on, as needed     every step appends there

The first tokens are often a template that many sessions share, and what is shared is read by many
in one step. The tail changes and is saved last. So the middle goes first, of whoever has more than
its budget, then of whoever holds most; shared blocks and prefixes go only if that is not enough,
and the last blocks never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.config.options import EngineOptions
from penstock.engine.request import Request
from penstock.errors import ConfigError

_DEFAULTS = EngineOptions()

IsSo = Callable[[Request, int], bool]
"""Says something of one block of a sequence."""


@dataclass(frozen=True, slots=True)
class ResidencyConfig:
    """Where KV lies while it is in use. Requests may ask for their own `Residence`."""

    cold: bool = _DEFAULTS.cold_kv  # part of a running sequence's KV may be in HOST
    prefix_tokens: int = _DEFAULTS.resident_prefix_tokens
    tail_tokens: int = _DEFAULTS.resident_tail_tokens
    session_tokens: int | None = None  # on the device, of each; None: as many as there is room for
    high_watermark: float = (
        _DEFAULTS.device_high_watermark
    )  # of the device pool in use: blocks begin to leave ...
    low_watermark: float = (
        _DEFAULTS.device_low_watermark
    )  # ... until no more than this is; below it, cold ones come back
    # What sequences may read from HOST in one step. None: 256 MiB on a GPU; a CPU does not mind.
    # Whoever has more than that alone takes part in every second step, or third.
    max_cold_bytes_per_step: int | None = None
    # Whoever has decoded for so long makes room for one that waits for it, and comes back later
    # (see rotation). None: it stays until it has ended.
    turn_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "tail_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: expected 0 or more tokens.")
        for name in ("session_tokens", "max_cold_bytes_per_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: expected at least 1; or leave it out.")
        if self.turn_seconds is not None and not 0 < self.turn_seconds < math.inf:
            raise ConfigError(
                f"turn_seconds is {self.turn_seconds}: expected more than 0; or leave it out, and "
                "nobody takes turns."
            )
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError(
                f"the watermarks are {self.low_watermark} and {self.high_watermark}: expected "
                "shares of the device pool above 0 and up to 1, the low one not above the high one."
            )


@dataclass(frozen=True, slots=True)
class Zones:
    """Block numbers: below `prefix_end` is the prefix, from `tail_start` on the tail."""

    prefix_end: int
    tail_start: int


class ResidencyPolicy:
    def __init__(
        self, config: ResidencyConfig, block_tokens: int, block_bytes: int, num_blocks: int
    ) -> None:
        self.config = config
        self._block_tokens = block_tokens
        self._num_blocks = num_blocks
        per_step = config.max_cold_bytes_per_step
        self._max_cold = None if per_step is None else per_step // block_bytes
        self._high = max(1, int(config.high_watermark * num_blocks))
        self._low = max(1, int(config.low_watermark * num_blocks))

    def num_to_leave(self, num_used: int) -> int:
        """How many blocks should leave the device in the background."""
        return max(0, num_used - self._low) if num_used > self._high else 0

    def num_to_return(self, num_used: int) -> int:
        """For how many cold blocks there is room on the device."""
        return max(0, self._low - num_used)

    def zones(self, request: Request) -> Zones:
        wish, config = request.params.residency, self.config
        prefix = config.prefix_tokens if wish.prefix_tokens is None else wish.prefix_tokens
        tail = config.tail_tokens if wish.tail_tokens is None else wish.tail_tokens
        num_tokens = len(request.tokens)
        prefix_end = -(-min(prefix, num_tokens) // self._block_tokens)
        # The block that is written to, and what the last tokens lie in.
        tail_start = max(0, num_tokens - max(tail, 1)) // self._block_tokens
        return Zones(prefix_end, max(prefix_end, tail_start))

    def may_be_cold(self, request: Request) -> bool:
        return self.config.cold and not request.params.residency.never_cold

    def budget_blocks(self, request: Request) -> int | None:
        """How many blocks of the device a sequence may have."""
        tokens = request.params.residency.device_tokens or self.config.session_tokens
        return None if tokens is None else max(1, tokens // self._block_tokens)

    def admits(self, num_more: int, num_cold: int, is_anyone_running: bool) -> bool:
        """Whether so many more cold blocks may be read at every step. One alone always may."""
        if self._max_cold is None or not is_anyone_running:
            return True
        return num_cold + num_more <= self._max_cold

    def victims(
        self,
        running: Sequence[Request],
        count: int,
        num_cold: int,
        is_shared: IsSo,
        is_at_hand: IsSo,
    ) -> list[tuple[Request, int]]:
        """Up to `count` resident blocks that should leave the device first.

        `num_cold` are away already; `is_at_hand` says whether HOST has a block, so that it can
        leave at once. Beyond the bound on what is read from HOST only one that is alone, or has
        more than half of the device, gives up blocks.
        """
        able = [request for request in running if self.may_be_cold(request)]
        # Whoever is beyond its budget first, then whoever holds most.
        able.sort(key=lambda r: (-self._excess(r), -r.table.num_resident, r.sequence))
        share = self._num_blocks // 2 if len(running) > 1 else 0
        to_spare = {r.id: r.table.num_resident - share for r in able}
        chosen: list[tuple[Request, int]] = []

        def may_give(request: Request) -> bool:
            within = self.admits(1, num_cold + len(chosen), is_anyone_running=True)
            return within or to_spare[request.id] > 0

        for offered in (self._middle, self._shared_middle, self._prefix):
            for request in filter(may_give, able):
                for index in offered(request, is_shared):
                    if len(chosen) >= count:
                        return chosen
                    if not may_give(request):
                        break
                    if index < request.num_named and is_at_hand(request, index):
                        chosen.append((request, index))
                        to_spare[request.id] -= 1
        return chosen

    def returning(
        self, running: Iterable[Request], count: int, is_shared: IsSo
    ) -> list[tuple[Request, int]]:
        """Up to `count` cold blocks that should come back to the device first.

        What several sequences read comes first; then whoever is nearest to having all of its KV
        there, and of a sequence its end.
        """
        chosen: list[tuple[Request, int]] = []
        able = sorted(
            (r for r in running if r.table.num_cold), key=lambda r: (r.table.num_cold, r.sequence)
        )
        for wants_shared in (True, False):
            for request in able:
                budget = self.budget_blocks(request)
                room = count if budget is None else budget - request.table.num_resident
                for index in reversed(request.table.cold()):
                    if len(chosen) >= count or room <= 0:
                        break
                    if is_shared(request, index) is wants_shared:
                        chosen.append((request, index))
                        room -= 1
        return chosen

    def _excess(self, request: Request) -> int:
        budget = self.budget_blocks(request)
        return 0 if budget is None else max(0, request.table.num_resident - budget)

    def _middle(self, request: Request, is_shared: IsSo) -> Iterator[int]:
        zones = self.zones(request)
        for index in request.table.resident(zones.prefix_end, zones.tail_start):
            if not is_shared(request, index):
                yield index

    def _shared_middle(self, request: Request, is_shared: IsSo) -> Iterator[int]:
        zones = self.zones(request)
        for index in request.table.resident(zones.prefix_end, zones.tail_start):
            if is_shared(request, index):
                yield index

    def _prefix(self, request: Request, is_shared: IsSo) -> Iterator[int]:
        del is_shared  # by now it no longer matters
        zones = self.zones(request)
        yield from reversed(request.table.resident(0, zones.prefix_end))


class ColdReadBudget:
    """Who takes part in a step, so that what is read from HOST in it stays within a bound.

    Sequences without cold blocks always do. The bound is shared among the others so that small
    ones have what they need; one that needs more saves up, and takes part in every second step, or
    every tenth.
    """

    def __init__(self, max_bytes: int | None, block_bytes: int) -> None:
        self._max_blocks = None if max_bytes is None else max(1, max_bytes // block_bytes)
        self._saved: dict[str, float] = {}

    def pick(self, requests: Sequence[Request]) -> list[Request]:
        """Those of `requests` that take part, in their order."""
        cold = [request for request in requests if request.table.num_cold]
        total = sum(request.table.num_cold for request in cold)
        if self._max_blocks is None or total <= self._max_blocks:
            self._saved = {}
            return list(requests)
        saved: dict[str, float] = {}
        left = float(self._max_blocks)
        for place, request in enumerate(sorted(cold, key=lambda r: r.table.num_cold)):
            given = min(request.table.num_cold, left / (len(cold) - place))
            left -= given
            saved[request.id] = self._saved.get(request.id, 0.0) + given
        taking = {r.id for r in cold if saved[r.id] >= r.table.num_cold}
        if not taking and len(cold) == len(requests):  # nobody would be helped by waiting
            taking = {max(cold, key=lambda r: saved[r.id] / r.table.num_cold).id}
        for request_id in taking:
            saved[request_id] = 0.0
        self._saved = saved
        return [r for r in requests if not r.table.num_cold or r.id in taking]
