"""Makes metrics: in our own registry, or with the classes and labels of a client such as vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Families(Protocol):
    """Makes metrics by name, with the methods of prometheus_client's metrics."""

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Any: ...

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Any: ...

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Any: ...


class RegistryFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)
