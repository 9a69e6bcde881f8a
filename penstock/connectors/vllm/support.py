"""Checks that Penstock supports this vLLM, and refuses what it cannot restore correctly."""

from __future__ import annotations

import logging
import re
from typing import Any

from penstock.connectors.vllm.settings import POLICY
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 26), (0, 32)
GROUPS_FROM = (0, 30)  # before it, a failed load of several groups cannot be reported

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
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise refusal("prefill_context_parallel_size above 1, because its KV layout is not tested")
    if getattr(parallel, "nnodes", 1) > 1:
        raise refusal("workers on several machines, because they cannot share DRAM")
    if getattr(cache, "calculate_kv_scales", False):
        raise refusal("calculate_kv_scales, because scales computed at run time are not saved")
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != POLICY:
        log.warning(
            "kv_load_failure_policy is %r: if a block cannot be loaded, its request fails. "
            'Set it to "%s", as `penstock vllm-config` does.',
            transfer.kv_load_failure_policy,
            POLICY,
        )


def check_groups_version(version: str, *, fails_whole: bool) -> None:
    """Refuse what fails as a whole where vLLM cannot be told that it did."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not fails_whole or (found and (int(found[1]), int(found[2])) >= GROUPS_FROM):
        return
    raise refusal(
        f"this model with vLLM {version}, which cannot be told that a load failed as a whole. It "
        f"needs vLLM {GROUPS_FROM[0]}.{GROUPS_FROM[1]} or later"
    )


def refusal(what: str) -> ConfigError:
    return ConfigError(f"Penstock does not support {what}. {_WHAT_TO_DO}")
