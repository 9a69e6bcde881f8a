"""vLLM's own offloading connector, which also tells the tier which model vLLM runs.

vLLM tells a secondary tier the model's name, but not its revision, its weights, its adapters or the
settings that change its KV. Without them, KV must not be used after a restart.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from penstock.connectors.vllm_tier.identity import remember


class PenstockTieringConnector(OffloadingConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        remember(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
