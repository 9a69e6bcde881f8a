"""Another server: its metrics under our names, and what they say about it."""

from __future__ import annotations

from urllib.parse import SplitResult

from penstock.watch import vllm_names
from penstock.watch.samples import PREFIX, Samples
from penstock.watch.scrape import read_metrics, shown_url


class RemoteServer:
    def __init__(self, metrics: SplitResult) -> None:
        self.metrics = metrics
        self.kind = "penstock"
        self.models: list[str] = []

    @property
    def metrics_url(self) -> str:
        """The URL without its query, which may hold a secret."""
        return shown_url(self.metrics)

    @property
    def url(self) -> str:
        return self.metrics_url.removesuffix("/metrics")

    def read(self) -> Samples:
        """Raises NoMetrics; `kind` and `models` then keep their last values."""
        seen = read_metrics(self.metrics, (PREFIX, vllm_names.PREFIX))
        self.kind = "vllm" if vllm_names.is_vllm(seen) else "penstock"
        self.models = vllm_names.model_names(seen)
        return vllm_names.to_our_names(seen)
