"""Residency policies: which idle block goes when room is needed. One file each, all pure."""

from __future__ import annotations

from collections.abc import Callable

from penstock.policies.base import Policy
from penstock.policies.lru import LRU
from penstock.policies.s3fifo import S3FIFO

POLICIES: dict[str, Callable[[int], Policy]] = {"lru": LRU, "s3fifo": S3FIFO}

__all__ = ["LRU", "POLICIES", "S3FIFO", "Policy"]
