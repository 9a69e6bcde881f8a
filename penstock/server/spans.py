"""OpenTelemetry spans of a request: one for the whole request, and below it one per stage.

Names that begin with `gen_ai` are OpenTelemetry's. docs/tracing.md explains each attribute; none
contains a prompt, an output, a tenant or a key.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.events import RequestStory
from penstock.server.stages import pieces_of, to_ns
from penstock.types import Tier

REQUEST = "penstock.request"
PREEMPTED = "penstock.preempted"  # an event of the request
PREFIX = "penstock."  # before the name of a stage

Value = str | int | float | Sequence[str]

_PROPAGATOR = TraceContextTextMapPropagator()


def emit(tracer: Tracer, told: RequestStory, *, model: str, offset_ns: int) -> int:
    """Emit the spans of a request, if it is sampled; returns how many.

    `offset_ns` is how far the wall clock is ahead of the engine's clock.
    """
    start_ns = offset_ns + to_ns(told.arrival)
    request = tracer.start_span(
        REQUEST,
        _caller(told),
        SpanKind.SERVER,
        attributes=attributes_of(told, model),
        start_time=start_ns,
    )
    if not request.get_span_context().trace_flags.sampled:
        return 0
    context = set_span_in_context(request, Context())
    pieces, preempted_ns = pieces_of(told)
    for number, at_ns in enumerate(preempted_ns, 1):
        request.add_event(PREEMPTED, {"penstock.preemptions": number}, start_ns + at_ns)
    for piece in pieces:
        span = tracer.start_span(
            PREFIX + piece.name,
            context,
            attributes={"penstock.preemptions": piece.num_preemptions},
            start_time=start_ns + piece.start_ns,
        )
        span.end(start_ns + piece.end_ns)
    request.end(start_ns + to_ns(told.seconds))
    return 1 + len(pieces)


def attributes_of(told: RequestStory, model: str) -> dict[str, Value]:
    """Unknown values are left out, and so are tiers and verdicts without blocks."""
    loaded = [(tier, num) for tier, num in told.found if tier is not Tier.DEVICE]
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": told.origin.operation or "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model,
        "gen_ai.response.finish_reasons": (told.reason,),
        "gen_ai.usage.input_tokens": told.num_prompt,
        "gen_ai.usage.output_tokens": told.num_output,
        "gen_ai.usage.cache_read.input_tokens": told.num_cached,
        "penstock.sequence_id": told.request_id,
        "penstock.cached_tokens": told.num_cached,
        "penstock.reused_tokens": told.num_reused,
        "penstock.mended_tokens": told.num_mended,
        "penstock.lossy_tokens": told.num_lossy,
        "penstock.recomputed_tokens": told.num_recomputed,
        "penstock.preemptions": told.num_preemptions,
        "penstock.block_tokens": told.block_tokens,
        "penstock.loaded_bytes": sum(num for _, num in loaded) * told.block_bytes,
    }
    if told.origin.request_id:
        attributes["penstock.request_id"] = told.origin.request_id
    for name, seconds in (
        ("penstock.first_token_seconds", told.first_token_seconds),
        ("penstock.estimate.load_seconds", told.load_seconds),
        ("penstock.estimate.compute_seconds", told.compute_seconds),
    ):
        if seconds is not None:
            attributes[name] = seconds
    for what, counts in (("matched", told.matched), ("loaded", loaded)):
        for tier, num in counts:
            attributes[f"penstock.blocks.{what}.{tier.label}"] = num
    for verdict, num in told.lost:
        attributes[f"penstock.blocks.lost.{verdict.label}"] = num
    return attributes


def _caller(told: RequestStory) -> Context:
    """The caller's trace context; empty, which starts a new trace, if its headers have none."""
    origin = told.origin
    carrier = {"traceparent": origin.traceparent, "tracestate": origin.tracestate}
    return _PROPAGATOR.extract({name: value for name, value in carrier.items() if value}, Context())
