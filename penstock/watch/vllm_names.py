"""Translates vLLM's metrics to the names that `penstock serve` uses. Pure.

The connector's metrics have our names already. vLLM's own metrics, of its requests and its device
pool, are translated.
"""

from __future__ import annotations

from penstock.watch.samples import Key, Samples

PREFIX = "vllm:"

_NAMES = {
    "vllm:num_preemptions_total": "penstock_preemptions_total",
    "vllm:generation_tokens_total": "penstock_output_tokens_total",
    "vllm:inter_token_latency_seconds_bucket": "penstock_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_count": "penstock_token_seconds_count",
    "vllm:inter_token_latency_seconds_sum": "penstock_token_seconds_sum",
}
_LABELLED = {
    "vllm:num_requests_running": ("penstock_sequences", ("phase", "running")),
    # vLLM does not distinguish first tokens by where the prompt's KV came from.
    "vllm:time_to_first_token_seconds_bucket": (
        "penstock_first_token_seconds_bucket",
        ("prompt", "all"),
    ),
    "vllm:time_to_first_token_seconds_count": (
        "penstock_first_token_seconds_count",
        ("prompt", "all"),
    ),
}
_SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "device",
    "external_kv_transfer": "loaded",
}


_WAITING = "vllm:num_requests_waiting"
_FETCHING = "vllm:num_requests_kv_fetch_by_stage"
_IN_PROGRESS = ("stage", "in_progress")


def to_our_names(seen: Samples) -> Samples:
    """Our samples unchanged, vLLM's under our names; its other samples are dropped."""
    values: dict[Key, float] = {}
    for (name, labels), value in seen.values.items():
        if not name.startswith(PREFIX):
            values[name, labels] = value
        elif name in _NAMES:
            values[_NAMES[name], labels] = value
        elif name in _LABELLED:
            ours, label = _LABELLED[name]
            values[ours, labels | {label}] = value
        elif name == _WAITING:  # vLLM counts loading requests as waiting
            num_loading = seen.values.get((_FETCHING, labels | {_IN_PROGRESS}), 0.0)
            waiting = labels | {("phase", "waiting")}
            values["penstock_sequences", waiting] = max(0.0, value - num_loading)
        elif name == _FETCHING and _IN_PROGRESS in labels:
            loading = labels - {_IN_PROGRESS} | {("phase", "loading")}
            values["penstock_sequences", loading] = value
        elif name == "vllm:prompt_tokens_by_source_total":
            source = dict(labels).get("source", "")
            own = labels - {("source", source)}
            values[
                "penstock_prompt_tokens_total", own | {("source", _SOURCES.get(source, source))}
            ] = value
        elif name == "vllm:kv_cache_usage_perc":
            own = labels | {("tier", "device")}
            num_blocks = _num_blocks(seen, dict(labels).get("engine"))
            values["penstock_used_blocks", own] = value * num_blocks
            values["penstock_capacity_blocks", own] = num_blocks
    # vLLM does not count tokens per step: take computed prompt tokens and output tokens.
    computed = sum(
        value
        for (name, labels), value in values.items()
        if name == "penstock_output_tokens_total"
        or (name == "penstock_prompt_tokens_total" and ("source", "computed") in labels)
    )
    if is_vllm(seen):
        values["penstock_step_tokens_total", frozenset()] = computed
    return Samples(values)


def is_vllm(seen: Samples) -> bool:
    return any(name.startswith(PREFIX) for name, _ in seen.values)


def model_names(seen: Samples) -> list[str]:
    """The names of the models; empty if the metrics do not say."""
    found = (dict(labels).get("model_name", "") for _, labels in seen.values)
    return sorted({name for name in found if name})


def _num_blocks(seen: Samples, engine: str | None) -> float:
    """The number of blocks in vLLM's pool; 1 if its metrics do not say."""
    for name, labels in seen.values:
        facts = dict(labels)
        if name == "vllm:cache_config_info" and facts.get("engine", engine) == engine:
            try:
                return float(facts.get("num_gpu_blocks", ""))
            except ValueError:
                return 1.0
    return 1.0
