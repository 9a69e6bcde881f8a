"""Converts block news to vLLM's KV events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from penstock.connectors.vllm.kv_events import TierEvent
from penstock.types import Tier

_STORAGE = getattr(kv_events, "MEDIUM_STORAGE", None) or getattr(kv_events, "MEDIUM_FS", "FS")


def published(news: Iterable[TierEvent], block_tokens: int) -> list[Any]:
    return [_event(event, block_tokens) for event in news]


def _event(event: TierEvent, block_tokens: int) -> Any:
    medium = kv_events.MEDIUM_CPU if event.tier is Tier.HOST else _STORAGE
    block_hash = maybe_convert_block_hash(event.hash)
    if not event.is_stored:
        return kv_events.BlockRemoved(block_hashes=[block_hash], medium=medium)
    return kv_events.BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
        token_ids=list(event.tokens),
        block_size=block_tokens,
        lora_id=None if event.lora is None else event.lora.lora_int_id,
        medium=medium,
        lora_name=None if event.lora is None else event.lora.lora_name,
    )
