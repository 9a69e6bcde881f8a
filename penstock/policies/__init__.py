"""Eviction policies: which idle block to evict when room is needed. One file each, all pure."""

from __future__ import annotations

from collections.abc import Callable

from penstock.policies.arc import ARC
from penstock.policies.base import Policy
from penstock.policies.lfu import LFU
from penstock.policies.lru import LRU
from penstock.policies.prefix_lru import PrefixLRU
from penstock.policies.reuse import Reuse
from penstock.policies.s3fifo import S3FIFO

POLICIES: dict[str, Callable[[int], Policy]] = {
    "reuse": Reuse,
    "prefix-lru": PrefixLRU,
    "lru": LRU,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "lfu": LFU,
}

__all__ = ["ARC", "LFU", "LRU", "POLICIES", "S3FIFO", "Policy", "PrefixLRU", "Reuse"]
