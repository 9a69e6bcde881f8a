"""KV events of `penstock serve`, decoded by vLLM's own classes."""

from __future__ import annotations

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from penstock.keys import KeyChain, Namespace
from penstock.kv_events.held import HeldBlocks, NamedSequence, short_hash
from penstock.kv_events.salts import with_salt
from penstock.kv_events.wire import CLEARED, events_of, pack
from penstock.types import BlockKey, Tier


def test_vllm_decodes_our_events() -> None:
    salted = with_salt("", "pepper")
    tokens = list(range(8))
    keys = KeyChain(Namespace("m", "w", "d", "l", 4, tenant=salted), tokens).keys
    held = HeldBlocks()
    held.name(NamedSequence(keys, tokens, 4, salted), range(2))
    for tier in Tier:
        held.stored(tier, keys)
    held.removed(Tier.DISK, keys[1:])
    events = [CLEARED, *events_of(held.take(100) or [])]
    batch = msgspec.msgpack.decode(pack(events), type=KVEventBatch)
    assert batch.data_parallel_rank == 0
    cleared, *stored, removed = batch.events
    assert isinstance(cleared, AllBlocksCleared)
    hashes = [short_hash(key) for key in keys]
    places = [("GPU", None), ("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")]
    for event, (medium, locality) in zip(stored, places, strict=True):
        assert isinstance(event, BlockStored)
        assert event.block_hashes == hashes
        assert event.parent_block_hash is None
        assert (event.token_ids, event.block_size) == (tokens, 4)
        assert (event.lora_id, event.lora_name) == (None, None)
        assert event.medium == medium
        assert event.extra_keys == [("pepper",), None]
        assert getattr(event, "locality", locality) == locality  # vLLM 0.26 does not know it
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium) == (hashes[1:], "STORAGE")
    assert getattr(removed, "locality", "LOCAL") == "LOCAL"


def test_hashes_are_shortened_as_in_vllm() -> None:
    digest = sha256(b"a block")
    assert maybe_convert_block_hash(BlockHash(digest)) == short_hash(BlockKey(digest))
