"""Checks that Penstock supports this vLLM, and refuses what it cannot restore correctly."""

from __future__ import annotations

import logging
import re
from typing import Any

from penstock.connectors.vllm.settings import POLICY
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 26), (0, 32)

_WHAT_TO_DO = "Start vLLM without Penstock, or use another model or setting."


def check_version(version: str, *, insist: bool = False) -> None:
    """Raise ConfigError if this version of vLLM was not tested, unless the user insists."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if not insist:
        raise ConfigError(
            f"this is vLLM {version}, but Penstock was tested with {span}. Install one of those, "
            'or set "allow_untested_vllm": true in kv_connector_extra_config.'
        )
    log.warning("vLLM %s was not tested with Penstock, only %s", version, span)


def check_config(vllm_config: Any) -> None:
    """Refuse unsupported settings; warn if a failed load would fail its request."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if parallel.pipeline_parallel_size > 1:
        raise _refusal("pipeline parallelism, because each stage keeps the KV of other layers")
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise _refusal(f"{name} above 1, because a block's tokens are then spread over workers")
    if getattr(parallel, "nnodes", 1) > 1:
        raise _refusal("workers on several machines, because they cannot share DRAM")
    if getattr(cache, "calculate_kv_scales", False):
        raise _refusal("calculate_kv_scales, because scales computed at run time are not saved")
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "method", "") != "ngram":
        raise _refusal("speculative decoding with a draft model, because its KV is not saved")
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != POLICY:
        log.warning(
            "kv_load_failure_policy is %r: if a block cannot be loaded, its request fails. "
            'Set it to "%s", as `penstock vllm-config` does.',
            transfer.kv_load_failure_policy,
            POLICY,
        )


def check_groups(kv_cache_config: Any) -> Any:
    """Returns the spec of the only KV cache group, which must be plain full attention."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise _refusal(
            f"{len(groups)} KV cache groups ({kinds}), because a prefix needs the KV of all groups"
        )
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        # vLLM's newer runner zeroes and copies blocks before it calls `handle_preemptions`, where
        # our fence waits for saves to end. With one group of plain attention it does neither.
        raise _refusal("KV caches that vLLM zeroes, because a save may still read them")
    spec = groups[0].kv_cache_spec
    # Subclasses (MLA, sinks and others) do not qualify: their blocks mean something else.
    if type(spec).__name__ != "FullAttentionSpec":
        raise _refusal(f"KV caches of type {type(spec).__name__}")
    return spec


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"Penstock does not support {what}. {_WHAT_TO_DO}")
