"""Converts block news to vLLM's KV events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from penstock.connectors.vllm.kv_events import TierEvent
from penstock.groups.kinds import Group, Kind
from penstock.types import Tier

_STORAGE = getattr(kv_events, "MEDIUM_STORAGE", None) or getattr(kv_events, "MEDIUM_FS", "FS")
_STORED_FIELDS = set(kv_events.BlockStored.__struct_fields__)  # they differ between versions
_REMOVED_FIELDS = set(kv_events.BlockRemoved.__struct_fields__)
_KINDS = {
    Kind.FULL: "full_attention",
    Kind.WINDOW: "sliding_window",
    Kind.CHUNK: "chunked_local_attention",
    Kind.STATE: "mamba",
}


def published(news: Iterable[TierEvent], *, is_latent: bool = False) -> list[Any]:
    return [_event(event, is_latent=is_latent) for event in news]


def extra_keys(request: Any, start: int, end: int) -> Any:
    """What besides tokens is part of the hash of a block: adapter, media, salt."""
    names = ("lora_request", "mm_features", "cache_salt", "prompt_embeds")
    if not any(getattr(request, name, None) for name in names):
        return None
    return kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)[0]


def _event(event: TierEvent, *, is_latent: bool) -> Any:
    medium = kv_events.MEDIUM_CPU if event.tier is Tier.HOST else _STORAGE
    block_hash = maybe_convert_block_hash(event.hash)
    # DISK and REMOTE have the same medium. A block that DISK has evicted may still be in REMOTE.
    where: dict[str, Any] = {"locality": "REMOTE" if event.tier is Tier.REMOTE else "LOCAL"}
    if event.group is not None:
        where["group_idx"] = event.group.index
    if not event.is_stored:
        known = {name: value for name, value in where.items() if name in _REMOVED_FIELDS}
        return kv_events.BlockRemoved(block_hashes=[block_hash], medium=medium, **known)
    assert event.group is not None
    more = {
        **where,
        "extra_keys": _as_published(event.extra_keys),
        "kv_cache_spec_kind": _kind(event.group, is_latent=is_latent),
        "kv_cache_spec_sliding_window": event.group.span
        if event.group.kind is Kind.WINDOW
        else None,
    }
    return kv_events.BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
        token_ids=list(event.tokens),
        block_size=event.group.block_tokens,
        lora_id=None if event.lora is None else event.lora.lora_int_id,
        medium=medium,
        lora_name=None if event.lora is None else event.lora.lora_name,
        **{name: value for name, value in more.items() if name in _STORED_FIELDS},
    )


def _kind(group: Group, *, is_latent: bool) -> str:
    if is_latent:
        return "mla_attention" if group.is_full else "sliding_window_mla"
    return _KINDS[group.kind]


def _as_published(keys: Any) -> Any:
    if keys is None:
        return None
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return [keys] if convert is None else convert([keys])
