"""The namespace of KV that vLLM's own offloading passes down.

vLLM's block hashes name tokens, salts, media and adapters, but not the model, its weights or the
layout. The connector's namespace has these. Where a hash does not determine the KV either, KV gets
a namespace that nothing else has: then it is of use until vLLM ends.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.connectors.vllm.groups import describe_groups
from penstock.connectors.vllm.identity import model_namespace
from penstock.connectors.vllm.orders import Shard
from penstock.keys import Namespace

log = logging.getLogger(__name__)


class _Known(NamedTuple):
    vllm_config: Any
    kv_cache_config: Any


_known: dict[str, _Known] = {}  # by vLLM's engine id, in the scheduler's process


def remember(vllm_config: Any, kv_cache_config: Any) -> None:
    """What a tier of this engine will ask for. vLLM itself tells it too little."""
    engine_id = str(vllm_config.kv_transfer_config.engine_id)
    _known[engine_id] = _Known(vllm_config, kv_cache_config)


def tier_namespace(config: Any, version: str, block_bytes: int) -> Namespace:
    """The namespace of chunks that a manager with vLLM's `OffloadingConfig` passes down."""
    known = _known.get(str(config.engine_id))
    tokens = config.cache.tokens_per_hash
    if known is None:
        why = "vLLM's connector is not PenstockTieringConnector, which would say what it runs"
        return _this_run(config, version, tokens, why)
    why = _why_unnamed(known.vllm_config)
    base = model_namespace(
        known.vllm_config,
        version,
        [Shard(0, block_bytes, 0, _layout(config), os.getpid())],
        block_tokens=tokens,
        groups=describe_groups(known.kv_cache_config, known.vllm_config),
    )
    base = replace(base, shard_size=config.parallel.world_size)
    if why:
        return _this_run(config, version, tokens, why)
    return base


def _layout(config: Any) -> str:
    """What the bytes of a chunk mean, as far as the scheduler knows."""
    parallel = config.parallel
    facts = {
        "chunk": config.cache.blocks_per_chunk,
        "worker": config.worker_kv_bytes_per_block,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "layout": config.kv_cache_layout,
        "dtype": config.model.dtype,
        "ranks": [
            *(parallel.world_size, parallel.tp_size, parallel.pp_size),
            *(parallel.pcp_size, parallel.dcp_size),
        ],
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in config.groups
        ],
        "device": _device(),
    }
    return "vllm's chunks " + json.dumps(facts, sort_keys=True)


def _device() -> str:
    """The kind of device: attention backends choose their layout by it."""
    from vllm.platforms import current_platform

    try:
        return f"{current_platform.device_type} {current_platform.get_device_name()}"
    except Exception:  # some platforms have no name
        return str(current_platform.device_type)


def _why_unnamed(vllm_config: Any) -> str:
    """Why vLLM's block hashes do not determine the KV; empty if they do."""
    model = vllm_config.model_config
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256"))
    if not algorithm.startswith("sha256"):
        return f"its block hashes are {algorithm}, which collide: use sha256"
    if vllm_config.lora_config is not None:
        return "its block hashes name adapters, whose weights may change under the same name"
    if getattr(model, "is_multimodal_model", False):
        return "its block hashes name media by ids that clients may choose"
    return ""


def _this_run(config: Any, version: str, tokens: int, why: str) -> Namespace:
    log.warning("%s. KV is therefore not reused after a restart or by other instances.", why)
    return Namespace(
        model=str(config.model.name),
        weights=f"run {secrets.token_hex(16)}",
        dtype=str(config.model.dtype),
        layout=f"vllm {version}: {_layout(config)}",
        block_tokens=tokens,
    )
