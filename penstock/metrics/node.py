"""Metrics of a node: those of the tiers for each of its models, and those of its clients."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from penstock.events import (
    ClientLeft,
    ClientRefused,
    ModelId,
    ModelRemoved,
    NodeEvent,
    NodeUsage,
    OfModel,
)
from penstock.metrics.families import Families, RegistryFamilies
from penstock.metrics.tiers import TierMetrics

MODEL_LABELS = ("model_name", "namespace_id")
_MAX_NAME = 80


class NodeFamilies:
    """An observer of a node's clients and of how its DRAM is shared."""

    def __init__(self, make: Families) -> None:
        self._dram = make.gauge("penstock_node_dram_bytes", "DRAM of the node.")
        self._free = make.gauge("penstock_node_free_bytes", "DRAM of the node that no model has.")
        self._prepared = make.gauge(
            "penstock_node_prepared_bytes", "DRAM of the node that is allocated already."
        )
        self._clients = make.gauge("penstock_node_clients", "Clients attached.", MODEL_LABELS)
        self._owned = make.gauge(
            "penstock_node_model_bytes", "DRAM that a model has.", MODEL_LABELS
        )
        self._pinned = make.gauge(
            "penstock_node_pinned_blocks", "Blocks that clients read in place.", MODEL_LABELS
        )
        self._refused = make.counter(
            "penstock_node_refused_clients", "Clients refused, by reason.", ("reason",)
        )
        self._lost = make.counter(
            "penstock_node_lost_clients", "Clients that ended without saying goodbye."
        )
        self._broken = make.counter(
            "penstock_node_broken_models", "Times that the books of a model were broken."
        )
        self._shown: set[ModelId] = set()
        for reason in ("full", "attach", "request", "broken"):
            self._refused.labels(reason)  # created now: else increase() misses the first event

    def __call__(self, event: NodeEvent) -> None:
        match event:
            case NodeUsage(dram_bytes, free_bytes, prepared_bytes, models):
                self._dram.set(dram_bytes)
                self._free.set(free_bytes)
                self._prepared.set(prepared_bytes)
                for gone in self._shown - {usage.model for usage in models}:
                    for gauge in (self._clients, self._owned, self._pinned):
                        gauge.remove(*_labels(gone))
                self._shown = {usage.model for usage in models}
                for usage in models:
                    labels = _labels(usage.model)
                    self._clients.labels(*labels).set(usage.num_clients)
                    self._owned.labels(*labels).set(usage.dram_bytes)
                    self._pinned.labels(*labels).set(usage.num_pinned)
            case ClientRefused(reason):
                self._refused.labels(reason).inc()
            case ClientLeft(is_lost=True):
                self._lost.inc()
            case ModelRemoved(is_broken=True):
                self._broken.inc()


class NodeMetrics:
    """An observer of a node.

    The series of a model end when the node removes the model, so there are never more than those of
    `node.max_models`.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._clients = NodeFamilies(RegistryFamilies(self.registry))
        self._models = _PerModel()
        self.registry.register(self._models)

    def __call__(self, event: NodeEvent) -> None:
        match event:
            case OfModel(model, of_tiers):
                self._models.metrics_of(model)(of_tiers)
            case ModelRemoved(model):
                self._models.remove(model)
        self._clients(event)

    def expose(self) -> bytes:
        """The registry in Prometheus's text format."""
        return generate_latest(self.registry)


class _PerModel:
    """A collector: the metrics of each model's tiers, with the model's labels."""

    def __init__(self) -> None:
        self._models: dict[ModelId, tuple[CollectorRegistry, TierMetrics]] = {}

    def metrics_of(self, model: ModelId) -> TierMetrics:
        if model not in self._models:
            registry = CollectorRegistry()
            self._models[model] = registry, TierMetrics(RegistryFamilies(registry))
        return self._models[model][1]

    def remove(self, model: ModelId) -> None:
        self._models.pop(model, None)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        # A copy: this is called on the thread of a scrape.
        for model, (registry, _) in list(self._models.items()):
            labels = dict(zip(MODEL_LABELS, _labels(model), strict=True))
            for family in registry.collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    if sample.name.endswith("_created"):
                        continue  # each would be a family of its own, named twice
                    merged.samples.append(sample._replace(labels={**labels, **sample.labels}))
        yield from families.values()


def _labels(model: ModelId) -> tuple[str, str]:
    """Names come from clients, so they are bounded."""
    return model.name[:_MAX_NAME], model.namespace
