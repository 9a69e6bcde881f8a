"""Metrics of the embedded engine's requests."""

from __future__ import annotations

from penstock.events import (
    Event,
    Finished,
    FirstToken,
    KvEventsDropped,
    Preempted,
    Refused,
    Sequences,
    StepFailed,
    TurnEnded,
)
from penstock.metrics.families import Families

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LONG_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)


class RequestFamilies:
    """An observer of the embedded engine's requests."""

    def __init__(self, make: Families) -> None:
        self._finished = make.counter(
            "penstock_requests", "Sequences that ended, by reason.", ("reason",)
        )
        self._refused = make.counter(
            "penstock_refused_requests", "Sequences refused, by reason.", ("reason",)
        )
        self._sequences = make.gauge(
            "penstock_sequences", "Sequences in the engine, by phase.", ("phase",)
        )
        self._faults = make.counter(
            "penstock_engine_faults", "Steps that failed, after which the engine recovered."
        )
        self._preemptions = make.counter("penstock_preemptions", "Preemptions of sequences.")
        self._turns = make.counter(
            "penstock_turns", "Times a sequence paused to let a waiting one run."
        )
        self._prompt_tokens = make.counter(
            "penstock_prompt_tokens", "Prompt tokens, by where their KV came from.", ("source",)
        )
        self._segment_tokens = make.counter(
            "penstock_segment_tokens",
            "Prompt tokens of segments that were reused anywhere, by what was done.",
            ("kind",),
        )
        self._output_tokens = make.counter("penstock_output_tokens", "Tokens generated.")
        self._recomputed = make.counter(
            "penstock_recomputed_tokens", "Tokens computed again after preemption."
        )
        self._lossy = make.counter(
            "penstock_lossy_requests", "Requests answered from KV of a tier with a lossy codec."
        )
        self._kv_events_dropped = make.counter(
            "penstock_kv_events_dropped", "KV events that did not fit their queue."
        )
        self._first_token = make.histogram(
            "penstock_first_token_seconds",
            "From a request's arrival to its first token, by whether KV was reused.",
            ("prompt",),
            buckets=_LONG_SECONDS,
        )
        self._token = make.histogram(
            "penstock_token_seconds", "Mean time between a request's tokens.", buckets=_STEP_SECONDS
        )
        self._request = make.histogram(
            "penstock_request_seconds",
            "From a request's arrival to its end.",
            buckets=_LONG_SECONDS,
        )

        for reason in ("too_long", "no_room", "busy"):
            self._refused.labels(reason)  # created now: else increase() misses the first event
        for kind in ("reused", "mended"):
            self._segment_tokens.labels(kind)

    def __call__(self, event: Event) -> None:
        match event:
            case Sequences(num_waiting, num_loading, num_running):
                self._sequences.labels("waiting").set(num_waiting)
                self._sequences.labels("loading").set(num_loading)
                self._sequences.labels("running").set(num_running)
            case StepFailed():
                self._faults.inc()
            case KvEventsDropped(num_events):
                self._kv_events_dropped.inc(num_events)
            case Preempted():
                self._preemptions.inc()
            case TurnEnded():
                self._turns.inc()
            case Refused(reason):
                self._refused.labels(reason).inc()
            case FirstToken(seconds, num_prompt, num_on_device, num_loaded):
                num_found = num_on_device + num_loaded + event.num_reused
                self._prompt_tokens.labels("device").inc(num_on_device)
                self._prompt_tokens.labels("loaded").inc(num_loaded)
                self._prompt_tokens.labels("computed").inc(max(0, num_prompt - num_found))
                if event.num_reused:
                    self._prompt_tokens.labels("reused").inc(event.num_reused)
                self._segment_tokens.labels("reused").inc(event.num_reused)
                self._segment_tokens.labels("mended").inc(event.num_mended)
                kind = "loaded" if num_loaded else "resident" if num_on_device else "computed"
                self._first_token.labels(kind).observe(seconds)
            case Finished(reason, _, num_output, num_recomputed, _, seconds, _):
                self._finished.labels(reason).inc()
                self._output_tokens.inc(num_output)
                self._recomputed.inc(num_recomputed)
                self._request.observe(seconds)
                if event.num_lossy:
                    self._lossy.inc()
                if event.token_seconds is not None:
                    self._token.observe(event.token_seconds)
