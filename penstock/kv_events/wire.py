"""vLLM's format of KV events: what is in a message, packed with msgpack.

A batch is `[seconds since 1970, events, data-parallel rank]`. Since vLLM 0.24 an event is a map
with its `type`, and fields with their defaults are left out. `cache_salt` is not one of vLLM's
fields: Dynamo reads it, because `extra_keys` do not say which of them is a salt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from penstock.kv_events.held import HeldBlock, TierChange
from penstock.types import Tier

CLEARED = {"type": "AllBlocksCleared"}
_RANK = 0
_MAX_EVENT_BLOCKS = 256


class Medium(NamedTuple):
    """What vLLM calls a tier."""

    name: str
    locality: str | None  # relative to this server; None: it goes without saying


MEDIA = {
    Tier.DEVICE: Medium("GPU", None),
    Tier.HOST: Medium("CPU", "LOCAL"),
    Tier.DISK: Medium("STORAGE", "LOCAL"),
    Tier.REMOTE: Medium("STORAGE", "REMOTE"),
}


def pack(events: Sequence[dict[str, Any]]) -> bytes:
    packed: bytes = msgpack.packb([time.time(), events, _RANK])
    return packed


def events_of(changes: Iterable[TierChange]) -> Iterator[dict[str, Any]]:
    """The events of some changes, in order. Consecutive blocks of a prompt share one event."""
    run: list[TierChange] = []
    for change in changes:
        if run and not (len(run) < _MAX_EVENT_BLOCKS and _continues(run[-1], change)):
            yield _event(run)
            run = []
        run.append(change)
    if run:
        yield _event(run)


def _continues(before: TierChange, change: TierChange) -> bool:
    if change[::2] != before[::2]:  # another tier, or not the same direction
        return False
    return not change.is_stored or change.block.parent == before.block.hash


def _event(run: Sequence[TierChange]) -> dict[str, Any]:
    first = run[0]
    hashes = [change.block.hash for change in run]
    medium = MEDIA[first.tier]
    where = {"medium": medium.name}
    if medium.locality is not None:
        where["locality"] = medium.locality
    if not first.is_stored:
        return {"type": "BlockRemoved", "block_hashes": hashes, **where}
    block = first.block
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": block.parent,
        "token_ids": [token for change in run for token in change.block.tokens],
        "block_size": len(block.tokens),
        "lora_id": None,
        "lora_name": None,
        **where,
    }
    if block.salt:
        event["extra_keys"] = [_extra_keys(change.block) for change in run]
        event["cache_salt"] = block.salt
    return event


def _extra_keys(block: HeldBlock) -> list[str] | None:
    """As in vLLM, a salt is part of a prompt's first block. Later ones depend on their parent."""
    return [block.salt] if block.salt and block.parent is None else None
