"""Starts the loads of requests and handles their outcomes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.connectors.vllm.dispatch import Dispatch
from penstock.connectors.vllm.tracked import Loading, Offer, Tracked, TrackedRequests
from penstock.offload import Offloader
from penstock.types import Done, Match, Slot, Tier, Verdict

_BARRED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RequestLoads:
    offloader: Offloader
    requests: TrackedRequests
    dispatch: Dispatch
    clock: Clock
    block_bytes: int

    def start(self, tracked: Tracked, offer: Offer, num_tokens: int) -> None:
        """Load the first `num_tokens` of an offer into the request's blocks."""
        assert tracked.keys is not None
        block_tokens = self.requests.block_tokens
        num_blocks = -(-num_tokens // block_tokens)
        end = offer.start + num_blocks
        slots = tuple(Slot(block) for block in tracked.block_ids[offer.start : end])
        self.dispatch.fence(slots)
        counts = _count_by_tier(offer.match, num_blocks)
        tracked.tokens_from = {tier: n * block_tokens for tier, n in counts.items()}
        tracked.num_saved = max(tracked.num_saved, end)  # the tiers have these blocks already
        started = self.clock.now()
        ticket = self.offloader.load(
            tracked.keys.first(end * block_tokens)[offer.start :],
            slots,
            patience_seconds=offer.choice.patience_seconds,
            tenant=tracked.tenant,
            parents={0: tracked.parent_key(offer.start, block_tokens)},
        )
        tracked.loading = Loading(
            tracked.request.request_id,
            ticket,
            offer.start,
            slots,
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
        if bad:
            block_tokens = self.requests.block_tokens
            tracked.barred_until = self.clock.now() + _BARRED_SECONDS
            tracked.num_saved = min(tracked.num_saved, loading.start + bad[0])
            arrived = Counter(tier for tier in done.sources[: bad[0]] if tier is not None)
            tracked.tokens_from = {tier: n * block_tokens for tier, n in arrived.items()}


def _count_by_tier(match: Match, num_blocks: int) -> dict[Tier, int]:
    """How many of the first `num_blocks` of a match come from each tier."""
    counts: dict[Tier, int] = {}
    for run in match.runs:
        taken = min(run.num_blocks, num_blocks)
        if taken:
            counts[run.tier] = counts.get(run.tier, 0) + taken
        num_blocks -= taken
    return counts
