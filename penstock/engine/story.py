"""What the engine reports: events for observers, and each request's history in the debug log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from penstock.costs.rates import LinkRate, PrefillRate
from penstock.engine.anywhere.segments import Segment
from penstock.engine.blocks import BlockPool
from penstock.engine.request import Request
from penstock.engine.scheduler import Chunk, Scheduler
from penstock.events import (
    Decided,
    Event,
    Finished,
    FirstToken,
    Observer,
    Preempted,
    Refused,
    RequestStory,
    ResidentShare,
    Sequences,
    Served,
    ServedSegment,
    Stage,
    StepFailed,
    Stepped,
    TierUsage,
    tell,
)
from penstock.keys import KeyChain
from penstock.types import BlockKey, Done, Tier
from penstock.units import format_bytes

log = logging.getLogger("penstock.engine")


class Story:
    """Sends the engine's events to observers and writes the debug log."""

    def __init__(
        self,
        block_bytes: int,
        block_tokens: int,
        observers: Sequence[Observer] = (),
        link_bytes: int | None = None,
    ) -> None:
        """`link_bytes`: what a block has on the link to the device, if DRAM holds it packed."""
        self._block_bytes = block_bytes
        self._link_bytes = link_bytes or block_bytes
        self._block_tokens = block_tokens
        self._observers = observers
        self._latest: dict[type[Event], Event] = {}  # events that are sent only when they change

    def refused(self, reason: str) -> None:
        self._tell([Refused(reason)])

    def entered(self, scheduler: Scheduler, now: float) -> None:
        """Record the phases that requests have entered."""
        for request, phase in scheduler.take_entered():
            start = now - request.arrival if request.stages else 0.0
            request.stages.append(Stage(phase.value, start))

    def scheduled(self, scheduler: Scheduler, pool: BlockPool) -> None:
        """Report the scheduler's decisions and its state."""
        events = scheduler.take_events()
        for event in events:
            if isinstance(event, Decided):
                log.debug(
                    "matched blocks below the device: %d, of which %d are loaded; estimated "
                    "loading time %s, computing time %s",
                    event.num_matched,
                    event.num_loaded,
                    _ms(event.load_seconds),
                    _ms(event.compute_seconds),
                )
            elif isinstance(event, Preempted):
                log.debug("a sequence of %d tokens was preempted", event.num_tokens)
        if not self._observers:
            return
        if migrated := scheduler.placement.take_migrated():
            events.append(migrated)
        used = pool.num_blocks - pool.num_available
        for state in (
            TierUsage(Tier.DEVICE, used, pool.num_blocks, used, 0, 0),
            Sequences(scheduler.num_waiting, scheduler.num_loading, scheduler.num_running),
            ResidentShare(*scheduler.placement.resident_shares()),
        ):
            if self._latest.get(type(state)) != state:
                self._latest[type(state)] = state
                events.append(state)
        self._tell(events)

    def failed(self, error: str, num_failed: int, num_requeued: int, reopened: bool) -> None:
        """Report that a step failed because of a bug and that the engine has recovered."""
        self._tell([StepFailed(error, num_failed, num_requeued, reopened)])

    def stepped(
        self, chunks: Sequence[Chunk], seconds: float, link: LinkRate | None, num_brought: int
    ) -> None:
        """Report a computed step. `link` is the measured rate of loads from DRAM.

        `num_brought`: blocks that it brought from there.
        """
        if not self._observers:
            return
        num_cold = num_brought + sum(chunk.request.table.num_cold for chunk in chunks)
        num_bytes = num_cold * self._link_bytes
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        link_seconds = None if link is None else num_bytes / link.bytes_per_second
        self._tell([Stepped(len(chunks), num_tokens, seconds, num_cold, num_bytes, link_seconds)])

    def loaded(self, request: Request, done: Done) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        num_bytes = done.num_leading_ok * self._link_bytes
        arrived = done.sources[: done.num_leading_ok]
        sources = [f"{tier.name} ({arrived.count(tier)})" for tier in Tier if tier in arrived]
        log.debug(
            "request %s: loaded %d of %d blocks (%s) from %s in %s, %.2f GB/s",
            request.id,
            done.num_leading_ok,
            len(done.keys),
            format_bytes(num_bytes),
            " and ".join(sources) or "no tier",
            _ms(done.seconds),
            num_bytes / max(done.seconds, 1e-9) / 1e9,
        )

    def first_token(self, request: Request, prefill: PrefillRate | None) -> None:
        num_prompt = len(request.prompt_ids)
        # What was loaded for segments is not part of what was found as a prefix.
        num_cached = request.num_cached_tokens
        num_on_device = min(request.found[Tier.DEVICE] * self._block_tokens, num_cached)
        first = FirstToken(
            (request.first_token_time or request.arrival) - request.arrival,
            num_prompt,
            num_on_device,
            num_cached - num_on_device,
            None if prefill is None else prefill.seconds(num_prompt),
            request.num_reused_tokens,
            request.num_mended_tokens,
        )
        log.debug(
            "request %s: first token after %s; of %d prompt tokens %d were on the device and %d "
            "were loaded; computing them all would take about %s",
            request.id,
            _ms(first.seconds),
            num_prompt,
            first.num_on_device,
            first.num_loaded,
            _ms(first.recompute_seconds),
        )
        if request.segments:
            log.debug(
                "request %s: of its segments %d tokens were reused and %d mended",
                request.id,
                first.num_reused,
                first.num_mended,
            )
        self._tell([first])

    def finished(self, request: Request) -> None:
        first, end = request.first_token_time, request.finished_time or request.arrival
        finished = Finished(
            request.finish_reason or "abort",
            len(request.prompt_ids),
            len(request.output_ids),
            request.num_recomputed_tokens,
            request.num_preemptions,
            end - request.arrival,
            None if first is None else first - request.arrival,
            min(request.num_lossy_tokens, len(request.tokens)),
        )
        log.debug(
            "request %s: %s after %s; output tokens: %d, preemptions: %d, recomputed tokens: %d",
            request.id,
            finished.reason,
            _ms(finished.seconds),
            finished.num_output,
            finished.num_preemptions,
            finished.num_recomputed,
        )
        if finished.num_lossy:
            log.debug(
                "request %s: the KV of %d tokens came from a tier with a lossy codec",
                request.id,
                finished.num_lossy,
            )
        self._tell([finished])
        if self._observers:
            self._tell([self._served(request, finished), self._history(request, finished)])

    def _served(self, request: Request, finished: Finished) -> Served:
        # The KV of an answer's last token is never computed, nor the block that it would complete.
        num_computed = request.max_computed // self._block_tokens
        num_prompt = finished.num_prompt // self._block_tokens
        keys = request.chain.keys
        return Served(
            request.arrival,
            finished.num_prompt,
            finished.num_output,
            tuple(keys[:num_prompt]),
            tuple(keys[num_prompt:num_computed]),
            _counts(request.found - request.found_elsewhere),
            request.tenant,
            finished.reason,
            finished.seconds,
            finished.first_token_seconds,
            served_segments(request),
            request.num_reused_tokens,
            request.num_mended_tokens,
            partial(_plain_keys, request.segments, request.prompt_ids),
        )

    def _history(self, request: Request, finished: Finished) -> RequestStory:
        load_seconds, compute_seconds = request.estimate
        return RequestStory(
            request.id,
            request.origin,
            request.tenant,
            request.arrival,
            tuple(request.stages),
            finished.first_token_seconds,
            finished.seconds,
            finished.reason,
            finished.num_prompt,
            finished.num_output,
            request.num_cached_tokens,
            finished.num_recomputed,
            finished.num_preemptions,
            _counts(request.matched),
            _counts(request.found),
            tuple(sorted(request.lost.items())),
            load_seconds,
            compute_seconds,
            self._block_tokens,
            self._block_bytes,
            finished.num_lossy,
            request.num_reused_tokens,
            request.num_mended_tokens,
        )

    def _tell(self, events: Iterable[Event]) -> None:
        tell(self._observers, events)


def _counts(by_tier: Counter[Tier]) -> tuple[tuple[Tier, int], ...]:
    return tuple((tier, num) for tier, num in sorted(by_tier.items()) if num)


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1000:.0f} ms"


def served_segments(request: Request) -> tuple[ServedSegment, ...]:
    mending = request.params.mending
    share = mending.blend_share if mending.is_blend else 0.0
    return tuple(
        ServedSegment(each.start, each.keys, mending.num_first_tokens, share)
        for each in request.segments
    )


def _plain_keys(segments: Sequence[Segment], prompt_ids: Sequence[int]) -> Sequence[BlockKey]:
    return KeyChain(segments[0].namespace, prompt_ids).keys if segments else ()
