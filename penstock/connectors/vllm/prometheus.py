"""Adds Penstock's metrics to vLLM's /metrics, with vLLM's labels before ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from penstock.connectors.vllm.stats import Plain, from_plain, summarize
from penstock.metrics.tiers import TierMetrics

log = logging.getLogger(__name__)

# If a process starts vLLM twice, a name must not be registered twice.
_made: dict[tuple[str, tuple[str, ...]], Any] = {}


class PenstockStats(KVConnectorStats):  # type: ignore[misc]
    """The events of one interval."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data if data is not None else {"events": []})

    @property
    def events(self) -> list[Plain]:
        return self.data.setdefault("events", [])  # type: ignore[no-any-return]

    def reset(self) -> None:
        self.data = {"events": []}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.events.extend(other.data.get("events", []))
        return self

    def reduce(self) -> dict[str, int | float]:
        return summarize(self.events)

    def is_empty(self) -> bool:
        return not self.events


class _Families:
    """Makes metrics with vLLM's classes, bound to one engine's labels."""

    def __init__(
        self, classes: Mapping[str, Any], names: Sequence[str], values: Sequence[object]
    ) -> None:
        self._classes = classes
        self._names = tuple(names)
        self._values = tuple(values)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Any:
        return self._make("counter", name, text, labels)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Any:
        return self._make("gauge", name, text, labels, multiprocess_mode="mostrecent")

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Any:
        return self._make("histogram", name, text, labels, buckets=buckets)

    def _make(self, kind: str, name: str, text: str, labels: Sequence[str], **options: Any) -> Any:
        all_labels = (*self._names, *labels)
        metric = _made.get((name, all_labels))
        if metric is None:
            metric = self._classes[kind](
                name=name, documentation=text, labelnames=list(all_labels), **options
            )
            _made[name, all_labels] = metric
        if not labels:
            return metric.labels(*self._values)
        return _Bound(metric, self._values)


class _Bound:
    """A metric whose first labels are set."""

    def __init__(self, metric: Any, values: tuple[object, ...]) -> None:
        self._metric = metric
        self._values = values

    def labels(self, *own: object) -> Any:
        return self._metric.labels(*self._values, *own)


class PenstockPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._has_complained = False
        classes = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        self._engines = {
            engine: TierMetrics(_Families(classes, labelnames, values))
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        events: Iterable[Plain] = transfer_stats_data.get("events", ())
        for plain in events:
            try:
                self._engines[engine_idx](from_plain(plain))
            except Exception:  # vLLM's own metrics must go on
                if not self._has_complained:
                    log.exception("A metric of Penstock could not be counted")
                self._has_complained = True
