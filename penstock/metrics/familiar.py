"""Some metrics under the names that existing dashboards for vLLM use."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from penstock.events import Event, LookedUp, Moved, TierUsage
from penstock.types import Tier


class FamiliarNames:
    """A collector. The names are exact, so that existing rules work."""

    def __init__(self) -> None:
        self._num_saves = self._num_loads = 0
        self._saved_bytes = 0
        self._num_asked = self._num_hits = 0
        self._usage = {Tier.DEVICE: 0.0, Tier.HOST: 0.0}

    def count(self, event: Event) -> None:
        match event:
            case Moved(Tier.DEVICE, Tier.HOST, _, num_blocks, num_bytes, _):
                self._num_saves += num_blocks
                self._saved_bytes += num_bytes
            case Moved(Tier.HOST, Tier.DEVICE, _, num_blocks, _, _):
                self._num_loads += num_blocks
            case LookedUp(num_asked):
                self._num_asked += num_asked
                self._num_hits += event.num_hits
            case TierUsage(tier, num_used, num_slots) if tier in self._usage:
                self._usage[tier] = num_used / max(1, num_slots)

    def collect(self) -> Iterator[Metric]:
        hit_rate = self._num_hits / self._num_asked if self._num_asked else 0.0
        for name, kind, value, text in (
            ("kv_offload_total", "counter", self._num_saves, "Blocks saved off the device."),
            ("kv_offload_bytes", "unknown", self._saved_bytes, "Bytes saved off the device."),
            ("kv_reload_total", "counter", self._num_loads, "Blocks loaded to the device."),
            ("kv_cache_hit_rate", "gauge", hit_rate, "Share of looked-up blocks found."),
            ("gpu_cache_usage_perc", "gauge", self._usage[Tier.DEVICE], "Device pool in use, 0-1."),
            ("cpu_cache_usage_perc", "gauge", self._usage[Tier.HOST], "HOST in use, 0 to 1."),
        ):
            metric = Metric(name.removesuffix("_total"), text, kind)
            metric.add_sample(name, {}, float(value))
            yield metric
