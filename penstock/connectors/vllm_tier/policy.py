"""Our policies in vLLM's first tier: `"eviction_policy": "PenstockCachePolicy"`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from penstock.config import HostConfig
from penstock.policies import POLICIES
from penstock.types import BlockKey


class PenstockCachePolicy(CachePolicy):  # type: ignore[misc]
    """The policy that `penstock serve` uses for DRAM by default."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._order = POLICIES[HostConfig().policy](self.cache_capacity)

    def get(self, key: bytes) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:
        self._chunks[key] = chunk
        self._order.insert(BlockKey(key))

    def remove(self, key: bytes) -> None:
        del self._chunks[key]
        self._order.forget(BlockKey(key))

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._order.touch_all([BlockKey(key) for key in keys if key in self._chunks])

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Nothing: a chunk's insertion counts as its first use."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """Count the chunks that the request found, from first to last."""
        ordered = order_request_keys(key_groups, req_context)
        self.touch([key for key in ordered if key in reused_keys], req_context)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        def is_idle(key: BlockKey) -> bool:
            return self._chunks[key].ref_cnt == 0 and key not in protected

        victims = self._order.pick(n, is_idle)
        if len(victims) < n:
            return None
        return [(key, self._chunks.pop(key)) for key in victims]
