"""A server that is not this process: its metrics in our words, and what they tell of itself."""

from __future__ import annotations

from urllib.parse import SplitResult

from penstock.watch import dialects
from penstock.watch.samples import PREFIX, Samples
from penstock.watch.scrape import read_metrics, shown_url


class Elsewhere:
    def __init__(self, metrics: SplitResult) -> None:
        self.metrics = metrics
        self.host = "penstock"
        self.models: list[str] = []

    @property
    def metrics_url(self) -> str:
        """Without what might be a secret."""
        return shown_url(self.metrics)

    @property
    def url(self) -> str:
        return self.metrics_url.removesuffix("/metrics")

    def read(self) -> Samples:
        """Raises NoMetrics; then what was known of it before stands."""
        seen = read_metrics(self.metrics, (PREFIX, dialects.PREFIX))
        self.host = "vllm" if dialects.is_vllm(seen) else "penstock"
        self.models = dialects.model_names(seen)
        return dialects.in_our_words(seen)
