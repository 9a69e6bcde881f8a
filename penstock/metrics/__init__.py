"""Prometheus metrics, made from events alone: attach `Metrics` as an observer and expose it.

Our metrics are named `penstock_*`. Some are also exposed under the names that existing dashboards
for vLLM use.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from penstock.events import Event
from penstock.metrics.familiar import FamiliarNames
from penstock.metrics.families import RegistryFamilies
from penstock.metrics.requests import RequestFamilies
from penstock.metrics.residency import ResidencyMetrics
from penstock.metrics.tiers import TierMetrics


class Metrics:
    """An observer. Use one registry per process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        families = RegistryFamilies(self.registry)
        self._familiar = FamiliarNames()
        self._observers = (
            TierMetrics(families),
            RequestFamilies(families),
            ResidencyMetrics(families),
            self._familiar.count,
        )
        self.registry.register(self._familiar)

    def __call__(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)

    def expose(self) -> bytes:
        """The registry in Prometheus's text format."""
        return generate_latest(self.registry)
