"""The latest requests and their timelines, for the dashboard. No text, token or name is kept.

A tenant is shown by a mark that is the same for all its requests and does not reveal its name.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from penstock.events import Event, RequestStory
from penstock.server.stages import WAIT, pieces_of

if TYPE_CHECKING:  # needs numpy, which `penstock dashboard` does without
    from penstock.engine.census import Sighting

MAX_STORIES = 200
_MARK_BYTES = 3


class Stories:
    """An observer. The engine's thread adds, the server's thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: deque[tuple[int, float, RequestStory]] = deque(maxlen=MAX_STORIES)
        self._num_told = 0
        self._salt = secrets.token_bytes(32)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestStory):
            with self._lock:
                self._num_told += 1
                self._told.append((self._num_told, time.time(), event))

    def since(self, number: int, limit: int = MAX_STORIES) -> list[dict[str, Any]]:
        """The latest `limit` stories after `number`, oldest first."""
        with self._lock:
            new = [told for told in self._told if told[0] > number]
        return [self._plain(*told) for told in new[-limit:]]

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """The sequences of a request, by the client's id or the engine's."""
        with self._lock:
            told = list(self._told)
        return [
            self._plain(*each)
            for each in told
            if request_id in (each[2].origin.request_id, each[2].request_id)
        ]

    def sightings(self, census: Sequence[Sighting]) -> list[dict[str, Any]]:
        return [
            {
                "id": seen.request_id,
                "request_id": seen.client_id,
                "tenant": self._mark(seen.tenant),
                "phase": seen.phase,
                "prompt_tokens": seen.num_prompt,
                "output_tokens": seen.num_output,
                "cached_tokens": seen.num_cached,
                "resident_blocks": seen.num_resident,
                "cold_blocks": seen.num_cold,
                "preemptions": seen.num_preemptions,
                "seconds": round(seen.seconds, 3),
            }
            for seen in census
        ]

    def _plain(self, number: int, ended: float, told: RequestStory) -> dict[str, Any]:
        return {
            "number": number,
            "id": told.request_id,
            "request_id": told.origin.request_id,
            "tenant": self._mark(told.tenant),
            "ended": round(ended, 3),
            "reason": told.reason,
            "seconds": _round(told.seconds),
            "first_token_seconds": _round(told.first_token_seconds),
            "prompt_tokens": told.num_prompt,
            "output_tokens": told.num_output,
            "cached_tokens": told.num_cached,
            "reused_tokens": told.num_reused,
            "mended_tokens": told.num_mended,
            "lossy_tokens": told.num_lossy,
            "recomputed_tokens": told.num_recomputed,
            "preemptions": told.num_preemptions,
            "block_tokens": told.block_tokens,
            "block_bytes": told.block_bytes,
            "matched_blocks": {tier.label: num for tier, num in told.matched},
            "found_blocks": {tier.label: num for tier, num in told.found},
            "lost_blocks": {verdict.label: num for verdict, num in told.lost},
            "load_estimate_seconds": _round(told.load_seconds),
            "compute_estimate_seconds": _round(told.compute_seconds),
            "stages": stages_of(told),
        }

    def _mark(self, tenant: str) -> str:
        if not tenant:
            return ""
        return blake3(tenant.encode(), key=self._salt).digest(length=_MARK_BYTES).hex()


def stages_of(told: RequestStory) -> list[dict[str, Any]]:
    """The stages in order, without gaps."""
    return [
        {
            "stage": "preempted" if name == WAIT and num_preemptions else name,
            "start": _round(start_ns / 1e9),
            "seconds": _round((end_ns - start_ns) / 1e9),
        }
        for name, start_ns, end_ns, num_preemptions in pieces_of(told)[0]
    ]


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
