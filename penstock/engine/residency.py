"""Decides which blocks of running sequences are on the device and which are read from HOST. Pure.

A sequence reads all of its KV at every step, so a cold block costs time at every step. Some blocks
are worth more on the device than others:

    | prefix | middle ................................ | tail |
      shared   cold from its beginning on, as needed     every step appends here

The first tokens are often a template that many sessions share, so one copy serves many readers. The
tail still changes and is saved last. So blocks from the middle leave first: those of sequences over
their budget, then those of the largest sequences. Shared blocks and prefixes leave only if that is
not enough, and the last blocks never leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.config.options import EngineOptions
from penstock.engine.request import Request
from penstock.errors import ConfigError

_DEFAULTS = EngineOptions()

BlockTest = Callable[[Request, int], bool]
"""A yes-or-no question about one block of a sequence."""


@dataclass(frozen=True, slots=True)
class ResidencyConfig:
    """Where KV is while it is in use. A request may override this with its own `Residence`."""

    cold: bool = _DEFAULTS.cold_kv  # part of a running sequence's KV may be in HOST
    prefix_tokens: int = _DEFAULTS.resident_prefix_tokens
    tail_tokens: int = _DEFAULTS.resident_tail_tokens
    session_tokens: int | None = None  # on the device, of each sequence; None: no limit
    # Above this share of the device pool, blocks leave until the low watermark is reached.
    high_watermark: float = _DEFAULTS.device_high_watermark
    low_watermark: float = _DEFAULTS.device_low_watermark  # below it, cold blocks return
    # How much sequences may read from HOST in one step. None: 256 MiB on a GPU, unlimited on a CPU.
    # A sequence with more cold KV than that runs only in every second or third step.
    max_cold_bytes_per_step: int | None = None
    # After decoding for this long, a sequence makes room for one that waits and resumes later (see
    # `rotation`). None: it runs until it ends.
    turn_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "tail_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: expected 0 or more tokens.")
        for name in ("session_tokens", "max_cold_bytes_per_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: expected at least 1, or leave it out.")
        if self.turn_seconds is not None and not 0 < self.turn_seconds < math.inf:
            raise ConfigError(
                f"turn_seconds is {self.turn_seconds}: expected a number above 0; leave it out to "
                "let every sequence run until it ends."
            )
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError(
                f"the watermarks are {self.low_watermark} and {self.high_watermark}: expected "
                "shares of the device pool between 0 and 1, the low one not above the high one."
            )


@dataclass(frozen=True, slots=True)
class Zones:
    """Block indexes: the prefix ends before `prefix_end`, the tail begins at `tail_start`."""

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
        """How many cold blocks have room on the device."""
        return max(0, self._low - num_used)

    def zones(self, request: Request) -> Zones:
        wish, config = request.params.residency, self.config
        prefix = config.prefix_tokens if wish.prefix_tokens is None else wish.prefix_tokens
        tail = config.tail_tokens if wish.tail_tokens is None else wish.tail_tokens
        num_tokens = len(request.tokens)
        prefix_end = -(-min(prefix, num_tokens) // self._block_tokens)
        # The tail contains at least the block that is written to.
        tail_start = max(0, num_tokens - max(tail, 1)) // self._block_tokens
        return Zones(prefix_end, max(prefix_end, tail_start))

    def may_be_cold(self, request: Request) -> bool:
        return self.config.cold and not request.params.residency.never_cold

    def budget_blocks(self, request: Request) -> int | None:
        """How many device blocks a sequence may have; None if unlimited."""
        tokens = request.params.residency.device_tokens or self.config.session_tokens
        return None if tokens is None else max(1, tokens // self._block_tokens)

    def admits(self, num_more: int, num_cold: int, is_anyone_running: bool) -> bool:
        """Whether `num_more` cold blocks may be read per step. A sequence alone always may."""
        if self._max_cold is None or not is_anyone_running:
            return True
        return num_cold + num_more <= self._max_cold

    def victims(
        self,
        running: Sequence[Request],
        count: int,
        num_cold: int,
        is_shared: BlockTest,
        can_leave: BlockTest,
    ) -> list[tuple[Request, int]]:
        """Up to `count` resident blocks that should leave the device first.

        `num_cold` is the number of cold blocks so far. `can_leave` says whether a block can leave
        at once, because HOST has a copy. Once the limit on cold reads is reached, only a
        sequence that runs alone, or holds more than half of the device, gives up blocks.
        """
        able = [request for request in running if self.may_be_cold(request)]
        # Sequences over their budget first, then the largest.
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
                    if index < request.num_named and can_leave(request, index):
                        chosen.append((request, index))
                        to_spare[request.id] -= 1
        return chosen

    def returning(
        self, running: Iterable[Request], count: int, is_shared: BlockTest
    ) -> list[tuple[Request, int]]:
        """Up to `count` cold blocks that should return to the device first.

        Blocks that several sequences read come first, then those of the sequence with the fewest
        cold blocks, its last block first.
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

    def _middle(self, request: Request, is_shared: BlockTest) -> Iterator[int]:
        zones = self.zones(request)
        for index in request.table.resident(zones.prefix_end, zones.tail_start):
            if not is_shared(request, index):
                yield index

    def _shared_middle(self, request: Request, is_shared: BlockTest) -> Iterator[int]:
        zones = self.zones(request)
        for index in request.table.resident(zones.prefix_end, zones.tail_start):
            if is_shared(request, index):
                yield index

    def _prefix(self, request: Request, is_shared: BlockTest) -> Iterator[int]:
        del is_shared  # the prefix leaves last, shared or not
        zones = self.zones(request)
        yield from reversed(request.table.resident(0, zones.prefix_end))


class ColdReadBudget:
    """Picks the sequences that run in a step, so that reads from HOST stay within a limit.

    Sequences without cold blocks always run. The others share the limit so that small ones get all
    they need. One that needs more saves up its share and runs, for example, in every second step.
    """

    def __init__(self, max_bytes: int | None, block_bytes: int) -> None:
        self._max_blocks = None if max_bytes is None else max(1, max_bytes // block_bytes)
        self._saved: dict[str, float] = {}

    def pick(self, requests: Sequence[Request]) -> list[Request]:
        """Those of `requests` that run in this step, in the same order."""
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
        if not taking and len(cold) == len(requests):  # otherwise nothing would run in this step
            taking = {max(cold, key=lambda r: saved[r.id] / r.table.num_cold).id}
        for request_id in taking:
            saved[request_id] = 0.0
        self._saved = saved
        return [r for r in requests if not r.table.num_cold or r.id in taking]
