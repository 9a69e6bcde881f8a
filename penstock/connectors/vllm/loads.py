"""Starts the loads of requests and handles their outcomes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.connectors.vllm.auditing import RequestAudits
from penstock.connectors.vllm.dispatch import Dispatch
from penstock.connectors.vllm.tracked import (
    NULL_BLOCK,
    Loading,
    Offer,
    Tables,
    Tracked,
    TrackedRequests,
)
from penstock.tiers import Tiers
from penstock.types import BlockKey, Done, Match, Slot, Tier, Verdict

log = logging.getLogger(__name__)

_BARRED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RequestLoads:
    offloader: Tiers
    requests: TrackedRequests
    dispatch: Dispatch
    clock: Clock
    block_bytes: int
    audits: RequestAudits
    fails_whole: bool

    def start(self, tracked: Tracked, offer: Offer, num_tokens: int, tables: Tables) -> None:
        """Load the first `num_tokens` of an offer into the request's blocks."""
        align = self.requests.groups.align_tokens
        end = offer.start + -(-num_tokens // align) * align
        pieces = self.requests.pieces(end, offer.start)
        keys: list[BlockKey] = []
        slots: list[Slot] = []
        parents: dict[int, BlockKey | None] = {}
        for place, group, blocks in pieces:
            if group.is_full:
                parents[len(keys)] = tracked.parent_key(group, blocks.start)
            else:  # a checkpoint's blocks are evicted together, not from their end
                parents.update(dict.fromkeys(range(len(keys), len(keys) + len(blocks))))
            keys += tracked.keys_of(group, blocks)
            slots += map(Slot, tables[place][blocks.start : blocks.stop])
            if group.is_full:  # the tiers have these blocks already
                tracked.num_saved[place] = max(tracked.num_saved[place], blocks.stop)
        if len(slots) < len(keys) or (NULL_BLOCK in slots and not self.requests.groups.is_plain):
            self._refuse(tracked, slots)
            return
        tracked.num_checked = end
        self.dispatch.fence(slots)
        counts = _count_by_tier(offer.match, len(slots))
        tracked.tokens_from = _tokens_by_tier(counts, end - offer.start)
        started = self.clock.now()
        ticket = self.offloader.load(
            keys,
            slots,
            patience_seconds=offer.choice.patience_seconds,
            tenant=tracked.tenant,
            parents=parents,
        )
        tracked.loading = Loading(
            tracked.request.request_id,
            ticket,
            offer.start,
            end,
            tuple(slots),
            len(slots),
            max(counts),
            len(slots) * self.block_bytes,
            started,
        )
        self.dispatch.expect(tracked.loading)

    def ended(self, done: Done) -> None:
        """A load has ended: report its bad blocks, which vLLM then computes."""
        bad = [index for index, verdict in enumerate(done.verdicts) if verdict is not Verdict.OK]
        loading = self.dispatch.ended(done.ticket, bad)
        tracked = self.requests.get(loading.request_id)
        if tracked is None:
            return
        if tracked.loading is loading:
            tracked.loading = None
        if not bad:
            self.audits.loaded(tracked, loading, done)
            return
        tracked.barred_until = self.clock.now() + _BARRED_SECONDS
        if not self.fails_whole:
            block_tokens = self.requests.groups.align_tokens
            num_sound = loading.start // block_tokens + bad[0]
            tracked.num_saved[0] = min(tracked.num_saved[0], num_sound)
            arrived = Counter(tier for tier in done.sources[: bad[0]] if tier is not None)
            tracked.tokens_from = {tier: n * block_tokens for tier, n in arrived.items()}
        else:  # its request starts again, with other blocks
            tracked.forget_blocks()
            tracked.tokens_from = {}

    def _refuse(self, tracked: Tracked, slots: Sequence[Slot]) -> None:
        """vLLM has no block where one is needed, so this hit cannot be right: let it compute."""
        log.warning(
            "vLLM allocated other blocks for a load than Penstock expects. The request is computed "
            "instead. Please report this."
        )
        tracked.forget_blocks()
        tracked.barred_until = self.clock.now() + _BARRED_SECONDS
        self.dispatch.refuse(tracked.request.request_id, slots)


def _tokens_by_tier(counts: Mapping[Tier, int], num_tokens: int) -> dict[Tier, int]:
    """The tokens of a hit by the tier of its blocks, in proportion to their number."""
    num_blocks = sum(counts.values())
    shares = {tier: num_tokens * count // num_blocks for tier, count in counts.items()}
    slowest = max(counts)
    shares[slowest] += num_tokens - sum(shares.values())
    return shares


def _count_by_tier(match: Match, num_blocks: int) -> dict[Tier, int]:
    """How many of the first `num_blocks` of a match come from each tier."""
    counts: dict[Tier, int] = {}
    for run in match.runs:
        taken = min(run.num_blocks, num_blocks)
        if taken:
            counts[run.tier] = counts.get(run.tier, 0) + taken
        num_blocks -= taken
    return counts
