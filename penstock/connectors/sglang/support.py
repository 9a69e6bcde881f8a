"""Checks that Penstock supports this SGLang, and refuses pools whose pages it cannot copy."""

from __future__ import annotations

import logging
import re
from typing import Any

from penstock.errors import ConfigError

log = logging.getLogger(__name__)

TESTED = "0.5.23"

_WHAT_TO_DO = "Start SGLang without Penstock, or use another model or setting."


def check_version(version: str, *, insist: bool = False) -> None:
    """Raise ConfigError if this version of SGLang was not tested, unless the user insists."""
    if re.match(rf"{re.escape(TESTED)}(\D|$)", version):
        return
    if not insist:
        raise ConfigError(
            f"this is SGLang {version}, but Penstock was tested with {TESTED}. Install that, or "
            'set "allow_untested_sglang": true.'
        )
    log.warning("SGLang %s was not tested with Penstock, only %s", version, TESTED)


def page_bytes(name: str, pool: Any) -> int:
    """The size of one page of this pool. Raises ConfigError if it has no flat pages."""
    try:
        page = pool.get_data_page(0, flat=True)
        # Written back as it is: nothing is stored there yet.
        pool.set_from_flat_data_page(0, page)
    except (NotImplementedError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise _refusal(name, pool, str(error) or type(error).__name__) from None
    if page.device.type != "cpu" or not page.numel():
        raise _refusal(name, pool, f"a page has {page.numel()} values on {page.device}")
    return int(page.numel() * page.element_size())


def describe_pool(pool: Any) -> str:
    """Everything that says what the bytes of a page mean."""
    page = pool.get_data_page(0, flat=True)
    facts = [f"{type(pool).__module__}.{type(pool).__qualname__}", f"values {page.dtype}"]
    for name in (
        *("layout", "dtype", "page_size", "layer_num", "target_layer_num", "head_num", "head_dim"),
        *("v_head_dim", "start_layer", "end_layer", "size_per_token", "kv_lora_rank"),
        *("qk_rope_head_dim", "kv_cache_dim", "storage_format_tag", "dcp_size", "dcp_rank"),
        *("indexer_head_dim", "index_head_dim", "indexer_quant_block_size"),
    ):
        value = getattr(pool, name, None)
        if value is not None:
            facts.append(f"{name} {value}")
    return "; ".join(facts)


def _refusal(name: str, pool: Any, why: str) -> ConfigError:
    return ConfigError(
        f"Penstock cannot copy the pages of SGLang's pool {name} ({type(pool).__name__}): {why}. "
        f"{_WHAT_TO_DO}"
    )
