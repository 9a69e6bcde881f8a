"""A snapshot of the sequences in the engine and where their KV is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.engine.request import Request


@dataclass(frozen=True, slots=True)
class Sighting:
    """One sequence, as seen between two steps."""

    request_id: str
    client_id: str  # the id that the caller gave it
    tenant: str = field(repr=False)
    phase: str
    num_prompt: int
    num_output: int
    num_cached: int  # tokens of the prompt that were not computed
    num_resident: int  # blocks on the device
    num_cold: int  # blocks read from HOST
    num_preemptions: int
    seconds: float  # since it arrived


def take_census(requests: Iterable[Request], now: float) -> list[Sighting]:
    return [
        Sighting(
            request.id,
            request.origin.request_id,
            request.tenant,
            request.phase.value,
            len(request.prompt_ids),
            request.num_output,
            request.num_cached_tokens,
            request.table.num_resident,
            request.table.num_cold,
            request.num_preemptions,
            max(0.0, now - request.arrival),
        )
        for request in requests
    ]
