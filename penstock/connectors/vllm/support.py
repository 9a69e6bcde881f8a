"""What Penstock can restore whole in vLLM, and a sentence for everything else."""

from __future__ import annotations

import logging
import re
from typing import Any

from penstock.connectors.vllm.settings import POLICY
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 26), (0, 32)

_WHAT_TO_DO = "Start vLLM without Penstock, or with another model or setting."


def check_version(version: str, *, insist: bool = False) -> None:
    """Refuse a vLLM that was never tested, unless the user insists."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if not insist:
        raise ConfigError(
            f"this is vLLM {version}, and Penstock was tested with {span}; install one of those, "
            'or insist with "allow_untested_vllm": true in kv_connector_extra_config.'
        )
    log.warning("vLLM %s was never tested with Penstock (%s was)", version, span)


def check_config(vllm_config: Any) -> None:
    """Refuse what cannot be restored whole; warn where failures would reach users."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if parallel.pipeline_parallel_size > 1:
        raise _refusal("pipeline parallelism: workers of different stages keep different layers")
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise _refusal(f"{name} above 1: a block's tokens are spread over workers")
    if getattr(parallel, "nnodes", 1) > 1:
        raise _refusal("workers on several machines: they cannot share one machine's DRAM")
    if getattr(cache, "calculate_kv_scales", False):
        raise _refusal("calculate_kv_scales: scales made at run time are not kept with the KV")
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "method", "") != "ngram":
        raise _refusal("speculative decoding with a draft model, whose KV is not restored")
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != POLICY:
        log.warning(
            "kv_load_failure_policy is %r: a block that cannot be loaded fails its request. "
            'Set it to "%s", as `penstock vllm-config` does.',
            transfer.kv_load_failure_policy,
            POLICY,
        )


def check_groups(kv_cache_config: Any) -> Any:
    """The spec of the one KV cache group, of plain attention over all tokens."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise _refusal(
            f"{len(groups)} groups of KV caches ({kinds}): a prefix is only whole with all of them"
        )
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        # Its newer runner zeroes and copies blocks before it calls `handle_preemptions`, that is
        # before the fence that lets saves end. With one group of plain attention it does neither.
        raise _refusal("KV caches that vLLM zeroes before Penstock can hold it back")
    spec = groups[0].kv_cache_spec
    # Not its subclasses: those of MLA, sinks and the like mean something else by a block.
    if type(spec).__name__ != "FullAttentionSpec":
        raise _refusal(f"KV caches of the kind {type(spec).__name__}")
    return spec


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"Penstock does not support {what}. {_WHAT_TO_DO}")
