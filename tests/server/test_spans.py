"""From a request's story to its spans, and where they are sent: what needs no server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind

from penstock.errors import ConfigError
from penstock.events import RequestStory, Stage
from penstock.server.collector import Collector, find_collector
from penstock.server.spans import emit
from penstock.types import NO_ORIGIN, Origin, Tier, Verdict

PAGE = Path(__file__).parent.parent.parent / "docs" / "tracing.md"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OFFSET_NS = 1_700_000_000 * 10**9
ARRIVAL = 12.5


def told(
    *stages: tuple[str, float], first: float | None, seconds: float, **fields: Any
) -> RequestStory:
    given: dict[str, Any] = {
        "request_id": "7-0",
        "origin": NO_ORIGIN,
        "tenant": "user:secret-name",
        "arrival": ARRIVAL,
        "stages": tuple(Stage(*stage) for stage in stages),
        "first_token_seconds": first,
        "seconds": seconds,
        "reason": "stop",
        "num_prompt": 100,
        "num_output": 9,
        "num_cached": 64,
        "num_recomputed": 0,
        "num_preemptions": 0,
        "matched": (),
        "found": (),
        "lost": (),
        "load_seconds": None,
        "compute_seconds": None,
        "block_tokens": 16,
        "block_bytes": 1000,
    }
    return RequestStory(**{**given, **fields})


PLAIN = (("waiting", 0.0), ("loading", 0.25), ("running", 0.5))


def spans_of(story: RequestStory) -> list[ReadableSpan]:
    """By their start; the request comes first."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=DEFAULT_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    num_made = emit(provider.get_tracer("test"), story, model="m", offset_ns=OFFSET_NS)
    spans = exporter.get_finished_spans()
    assert num_made == len(spans)
    return sorted(spans, key=lambda span: (span.start_time or 0, span.kind is SpanKind.INTERNAL))


def seconds_of(span: ReadableSpan) -> tuple[float, float]:
    """Since the request came."""
    came = OFFSET_NS + round(ARRIVAL * 1e9)
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - came) / 1e9, (span.end_time - came) / 1e9


def drawn(story: RequestStory) -> list[tuple[str, float, float]]:
    """Its stages, after what holds of all has been checked."""
    request, *stages = spans_of(story)
    assert (request.name, request.kind) == ("penstock.request", SpanKind.SERVER)
    assert seconds_of(request) == (0, story.seconds)
    reached = request.start_time
    for stage in stages:
        assert stage.parent == request.context
        assert stage.kind is SpanKind.INTERNAL
        assert stage.start_time == reached
        reached = stage.end_time
    assert reached == request.end_time
    return [(stage.name.removeprefix("penstock."), *seconds_of(stage)) for stage in stages]


def test_a_life_in_its_stages() -> None:
    assert drawn(told(*PLAIN, first=0.75, seconds=2.0)) == [
        ("wait", 0, 0.25),
        ("load", 0.25, 0.5),
        ("prefill", 0.5, 0.75),
        ("decode", 0.75, 2.0),
    ]


def test_preempted_twice_before_and_after_the_first_token() -> None:
    stages = (
        *PLAIN,
        *(("waiting", 0.75), ("running", 1.0)),
        *(("waiting", 2.0), ("loading", 2.5), ("running", 3.0)),
    )
    story = told(*stages, first=1.5, seconds=4.0, num_preemptions=2)
    assert drawn(story) == [
        ("wait", 0, 0.25),
        ("load", 0.25, 0.5),
        ("prefill", 0.5, 0.75),
        ("wait", 0.75, 1.0),
        ("prefill", 1.0, 1.5),
        ("decode", 1.5, 2.0),
        ("wait", 2.0, 2.5),
        ("load", 2.5, 3.0),
        ("decode", 3.0, 4.0),
    ]
    request, *spans = spans_of(story)
    assert [dict(span.attributes or {}) for span in spans] == [
        {"penstock.preemptions": number} for number in (0, 0, 0, 1, 1, 1, 2, 2, 2)
    ]
    came = OFFSET_NS + round(ARRIVAL * 1e9)
    assert [
        (e.name, (e.timestamp - came) / 1e9, dict(e.attributes or {})) for e in request.events
    ] == [
        ("penstock.preempted", 0.75, {"penstock.preemptions": 1}),
        ("penstock.preempted", 2.0, {"penstock.preemptions": 2}),
    ]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((), [("wait", 0, 1.0)]),  # given up before the engine looked at it
        ((("waiting", 0.0),), [("wait", 0, 1.0)]),
        (PLAIN[:2], [("wait", 0, 0.25), ("load", 0.25, 1.0)]),
        (PLAIN, [("wait", 0, 0.25), ("load", 0.25, 0.5), ("prefill", 0.5, 1.0)]),
        ((*PLAIN, ("waiting", 0.5)), [("wait", 0, 0.25), ("load", 0.25, 0.5), ("wait", 0.5, 1.0)]),
        ((("waiting", 0.0), ("running", 3.0)), [("wait", 0, 1.0)]),  # entered as it was given up
    ],
)
def test_ended_before_the_first_token(stages: Any, expected: Any) -> None:
    story = told(*stages, first=None, seconds=1.0, reason="abort", num_output=0)
    assert drawn(story) == expected
    request, *_ = spans_of(story)
    assert request.attributes is not None
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "penstock.first_token_seconds" not in request.attributes


def test_ended_in_no_time() -> None:
    assert drawn(told(first=None, seconds=0.0, reason="abort")) == []


def test_ended_with_its_first_token() -> None:
    story = told(("waiting", 0.0), ("running", 0.5), first=1.0, seconds=1.0)
    assert drawn(story) == [("wait", 0, 0.5), ("prefill", 0.5, 1.0)]


# The caller's trace.


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("01", True), ("03", True), ("00", False), ("02", False)]
)
def test_the_caller_decides_what_is_sampled(flags: str, is_sampled: bool) -> None:
    origin = Origin("mine", "chat", f"00-{TRACE}-{CALLER}-{flags}", "vendor=7,other=x")
    spans = spans_of(told(*PLAIN, first=0.75, seconds=2.0, origin=origin))
    assert bool(spans) is is_sampled
    for span in spans:
        assert f"{span.get_span_context().trace_id:032x}" == TRACE
        assert span.get_span_context().trace_state.to_header() == "vendor=7,other=x"
    if spans:
        parent = spans[0].parent
        assert parent is not None
        assert (f"{parent.span_id:016x}", parent.is_remote) == (CALLER, True)


def test_without_a_caller_a_trace_begins() -> None:
    first, second = (spans_of(told(*PLAIN, first=0.75, seconds=2.0)) for _ in range(2))
    assert first[0].parent is None
    assert len({span.get_span_context().trace_id for span in first}) == 1
    assert first[0].get_span_context().trace_id != second[0].get_span_context().trace_id


# What they carry.

RICH = told(
    *PLAIN,
    first=0.75,
    seconds=2.0,
    origin=Origin("mine", "chat", f"00-{TRACE}-{CALLER}-01", ""),
    num_recomputed=3,
    matched=tuple((tier, 10 + tier) for tier in Tier),
    found=tuple((tier, 1 + tier) for tier in Tier),
    lost=tuple((verdict, 20 + verdict) for verdict in Verdict if verdict is not Verdict.OK),
    load_seconds=0.125,
    compute_seconds=0.5,
)


def test_what_a_request_carries() -> None:
    attributes = dict(spans_of(RICH)[0].attributes or {})
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "penstock.request_id": "mine",
        "penstock.sequence_id": "7-0",
        "penstock.cached_tokens": 64,
        "penstock.reused_tokens": 0,
        "penstock.mended_tokens": 0,
        "penstock.recomputed_tokens": 3,
        "penstock.lossy_tokens": 0,
        "penstock.preemptions": 0,
        "penstock.block_tokens": 16,
        "penstock.loaded_bytes": (2 + 3 + 4) * 1000,
        "penstock.first_token_seconds": 0.75,
        "penstock.estimate.load_seconds": 0.125,
        "penstock.estimate.compute_seconds": 0.5,
        **{f"penstock.blocks.matched.{tier.label}": 10 + tier for tier in Tier},
        **{
            f"penstock.blocks.loaded.{name}": num
            for name, num in zip(BELOW, (2, 3, 4), strict=True)
        },
        **{f"penstock.blocks.lost.{v.label}": 20 + v for v in Verdict if v is not Verdict.OK},
    }


BELOW = ("host", "disk", "remote")


def test_what_others_have_named_is_named_as_they_do() -> None:
    known = {getattr(gen_ai_attributes, name) for name in dir(gen_ai_attributes) if name.isupper()}
    names = {
        name for name in spans_of(RICH)[0].attributes or {} if not name.startswith("penstock.")
    }
    assert names
    assert names <= known


def documented(title: str) -> set[str]:
    (part,) = re.findall(rf"^### {title}\n(.*?)(?=^##)", PAGE.read_text(), re.M | re.S)
    return set(re.findall(r"^\| `([\w.<>]+)` \|", part, re.M))


def general(names: Mapping[str, Any] | None) -> set[str]:
    kinds = {
        **{tier.label: "<tier>" for tier in Tier},
        **{verdict.label: "<verdict>" for verdict in Verdict},
    }
    found = set()
    for name in names or {}:
        begin, _, last = name.rpartition(".")
        is_count = begin.startswith("penstock.blocks")
        found.add(f"{begin}.{kinds[last]}" if is_count else name)
    return found


def test_the_page_has_every_span_and_attribute() -> None:
    twice = (*PLAIN, ("waiting", 1.0), ("running", 1.5))
    rich, preempted = spans_of(RICH), spans_of(told(*twice, first=0.75, seconds=2.0))
    request, *stages = rich
    assert documented("Spans") == {span.name for span in rich}
    assert documented("Attributes of a request") == general(request.attributes)
    assert documented("Attributes of a stage") == {
        name for stage in stages for name in stage.attributes or {}
    }
    assert documented("Events") == {event.name for event in preempted[0].events}


# Where they go.

BASE, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
URL = "http://localhost:4318"


@pytest.mark.parametrize(
    ("option", "environment", "url"),
    [
        (URL, {}, f"{URL}/v1/traces"),
        (f"{URL}/", {}, f"{URL}/v1/traces"),
        (f"{URL}/v1/traces", {}, f"{URL}/v1/traces"),
        ("https://[::1]:1/otlp/", {}, "https://[::1]:1/otlp/v1/traces"),
        (URL, {BASE: "http://other", TRACES: "http://third"}, f"{URL}/v1/traces"),
        (URL, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, f"{URL}/v1/traces"),
        (URL, {"OTEL_TRACES_EXPORTER": "none"}, f"{URL}/v1/traces"),
        (None, {BASE: URL}, f"{URL}/v1/traces"),
        (None, {BASE: f"{URL}/", TRACES: ""}, f"{URL}/v1/traces"),
        (None, {BASE: URL, TRACES: f"{URL}/as/it/is"}, f"{URL}/as/it/is"),
        (None, {BASE: URL, "OTEL_TRACES_EXPORTER": "console, otlp"}, f"{URL}/v1/traces"),
        (None, {BASE: URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, f"{URL}/v1/traces"),
        (None, {BASE: URL, "OTEL_SDK_DISABLED": "false"}, f"{URL}/v1/traces"),
    ],
)
def test_who_names_the_collector(option: str | None, environment: Any, url: str) -> None:
    found = find_collector(option, environment)
    source = "--otlp-traces-endpoint" if option else TRACES if environment.get(TRACES) else BASE
    assert found == Collector(url, source)


@pytest.mark.parametrize(
    ("option", "environment"),
    [
        (None, {}),
        (None, {BASE: " "}),
        (None, {BASE: URL, "OTEL_TRACES_EXPORTER": "none"}),
        (None, {BASE: URL, "OTEL_SDK_DISABLED": "true"}),
        (URL, {"OTEL_SDK_DISABLED": "True"}),
    ],
)
def test_nobody_wants_spans(option: str | None, environment: Any) -> None:
    assert find_collector(option, environment) is None


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "localhost:4318", "grpc://localhost:4317", "http://", "http://:4318"),
        *("http://h:0", "http://h:99999", "http://h:x", "http://[::1", "http://a b", "ftp://h"),
        *("http://h/\na", "http://hö"),
    ],
)
@pytest.mark.parametrize("by_option", [True, False], ids=["option", "environment"])
def test_what_is_no_collector(url: str, by_option: bool) -> None:
    name = "--otlp-traces-endpoint" if by_option else BASE
    given = (url, {}) if by_option else (None, {BASE: url})
    with pytest.raises(ConfigError, match=f"^{name} .*expected .*http://localhost:4318"):
        find_collector(*given)


def test_an_empty_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint is ''"):
        find_collector("", {BASE: URL})


@pytest.mark.parametrize("url", ["http://u:s3cret@h", "http://h/?key=s3cret", "http://h/#s3cret"])
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        find_collector(url, {})
    assert "s3cret" not in str(refused.value)


def test_another_protocol_is_not_spoken() -> None:
    with pytest.raises(ConfigError, match="PROTOCOL is 'grpc': expected http/protobuf"):
        find_collector(None, {BASE: URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
