"""Metrics of the embedded engine's requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.events import Decided, Event, Finished, FirstToken, Preempted, Refused, Sequences

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LONG_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)


class RequestMetrics:
    """What the embedded engine tells of its requests."""

    def __init__(self, r: CollectorRegistry) -> None:
        self._decisions = Counter(
            "penstock_load_decisions",
            "Matches that were loaded, loaded in part, or computed because that is faster.",
            ("choice",),
            registry=r,
        )
        self._saved_seconds = Counter(
            "penstock_saved_seconds",
            "Seconds that loading was estimated to save over computing.",
            registry=r,
        )
        self._finished = Counter(
            "penstock_requests", "Sequences that ended, by how.", ("reason",), registry=r
        )
        self._refused = Counter(
            "penstock_refused_requests", "Sequences not accepted, by why.", ("reason",), registry=r
        )
        self._sequences = Gauge(
            "penstock_sequences", "Sequences in the engine, by phase.", ("phase",), registry=r
        )
        self._preemptions = Counter(
            "penstock_preemptions", "Sequences that gave up their blocks.", registry=r
        )
        self._prompt_tokens = Counter(
            "penstock_prompt_tokens",
            "Prompt tokens, by where their KV came from.",
            ("source",),
            registry=r,
        )
        self._output_tokens = Counter("penstock_output_tokens", "Tokens generated.", registry=r)
        self._recomputed = Counter(
            "penstock_recomputed_tokens", "Tokens computed again after preemption.", registry=r
        )
        self._first_token = Histogram(
            "penstock_first_token_seconds",
            "From a request's arrival to its first token, by whether KV was reused.",
            ("prompt",),
            buckets=_LONG_SECONDS,
            registry=r,
        )
        self._token = Histogram(
            "penstock_token_seconds",
            "Mean time between a request's tokens.",
            buckets=_STEP_SECONDS,
            registry=r,
        )
        self._request = Histogram(
            "penstock_request_seconds",
            "From a request's arrival to its end.",
            buckets=_LONG_SECONDS,
            registry=r,
        )

    def count(self, event: Event) -> None:
        match event:
            case Decided(load_seconds=load_seconds, compute_seconds=compute_seconds):
                self._decisions.labels(event.choice).inc()
                if event.num_loaded and load_seconds is not None and compute_seconds is not None:
                    self._saved_seconds.inc(max(0.0, compute_seconds - load_seconds))
            case Sequences(num_waiting, num_loading, num_running):
                self._sequences.labels("waiting").set(num_waiting)
                self._sequences.labels("loading").set(num_loading)
                self._sequences.labels("running").set(num_running)
            case Preempted():
                self._preemptions.inc()
            case Refused(reason):
                self._refused.labels(reason).inc()
            case FirstToken(seconds, num_prompt, num_on_device, num_loaded):
                self._prompt_tokens.labels("device").inc(num_on_device)
                self._prompt_tokens.labels("loaded").inc(num_loaded)
                self._prompt_tokens.labels("computed").inc(num_prompt - num_on_device - num_loaded)
                kind = "loaded" if num_loaded else "resident" if num_on_device else "computed"
                self._first_token.labels(kind).observe(seconds)
            case Finished(reason, _, num_output, num_recomputed, _, seconds, _):
                self._finished.labels(reason).inc()
                self._output_tokens.inc(num_output)
                self._recomputed.inc(num_recomputed)
                self._request.observe(seconds)
                if event.token_seconds is not None:
                    self._token.observe(event.token_seconds)
