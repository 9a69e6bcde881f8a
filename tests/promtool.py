"""promtool, and the metrics that rules, panels and pages may speak of."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import yaml

from penstock.metrics import Metrics
from penstock.metrics.node import NodeMetrics

EXECUTABLE = shutil.which("promtool")
WHY_NOT = None if EXECUTABLE else "promtool is not installed: apt-get install prometheus"

_ENDS = {
    "counter": ("_total",),
    "gauge": ("",),
    "unknown": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
# vLLM's own, as they are scraped; all are in 0.26 and since. Nothing here can ask vLLM.
VLLM = {
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
}


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    assert EXECUTABLE is not None, WHY_NOT
    command = [EXECUTABLE, *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True)


def check_expressions(expressions: Iterable[str], folder: Path) -> None:
    """promtool reads rules, so each expression becomes one."""
    rules = [{"record": f"e{n}", "expr": expr} for n, expr in enumerate(expressions)]
    file = folder / "expressions.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def scraped_names() -> set[str]:
    """Ours, as they are scraped."""
    registries = (Metrics().registry, NodeMetrics().registry)
    return {
        metric.name + end
        for registry in registries
        for metric in registry.collect()
        for end in _ENDS[metric.type]
    }


def named_in(text: str) -> set[str]:
    """Metrics that an expression names, ours and vLLM's; not what rules record."""
    return set(re.findall(r"(?<![\w:])(?:penstock_|vllm:)\w+", text))
