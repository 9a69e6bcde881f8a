"""A request's story in the debug log: what was found, loaded, computed, and how long it took."""

from __future__ import annotations

import logging

from penstock.engine.request import Request
from penstock.events import Decided, Event, Finished, FirstToken, Preempted
from penstock.types import Done, Tier
from penstock.units import format_bytes

log = logging.getLogger("penstock.engine")


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1000:.0f} ms"


class Story:
    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens

    def scheduled(self, event: Event) -> None:
        if isinstance(event, Decided):
            log.debug(
                "%d blocks match below the device, %d are loaded: about %s, computing them %s",
                event.num_matched,
                event.num_loaded,
                _ms(event.load_seconds),
                _ms(event.compute_seconds),
            )
        elif isinstance(event, Preempted):
            log.debug("a sequence of %d tokens was preempted", event.num_tokens)

    def loaded(self, request: Request, done: Done) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        num_bytes = done.num_leading_ok * self._block_bytes
        sources = [tier for tier in Tier if tier in done.sources[: done.num_leading_ok]]
        log.debug(
            "request %s: loaded %d of %d blocks (%s) from %s in %s, %.2f GB/s",
            request.id,
            done.num_leading_ok,
            len(done.keys),
            format_bytes(num_bytes),
            " and ".join(f"{tier.name} ({done.sources.count(tier)})" for tier in sources) or "none",
            _ms(done.seconds),
            num_bytes / max(done.seconds, 1e-9) / 1e9,
        )

    def first_token(self, request: Request, first: FirstToken) -> None:
        log.debug(
            "request %s: first token after %s; of %d prompt tokens %d were on the device, %d were "
            "loaded; computing all of them takes about %s",
            request.id,
            _ms(first.seconds),
            first.num_prompt,
            first.num_on_device,
            first.num_loaded,
            _ms(first.recompute_seconds),
        )

    def finished(self, request: Request, finished: Finished) -> None:
        log.debug(
            "request %s: %s after %s with %d tokens; preempted %d times, %d tokens computed again",
            request.id,
            finished.reason,
            _ms(finished.seconds),
            finished.num_output,
            finished.num_preemptions,
            finished.num_recomputed,
        )
