"""A real server's spans at a real collector; and collectors that fail."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from server.collecting import Collecting, Sent
from server.running import TIMEOUT_SECONDS, Client, Spawned, wait_until
from server.test_spans import PLAIN, RICH, told

from penstock import __version__
from penstock.errors import ConfigError
from penstock.events import Refused
from penstock.server.tracing import Tracer

MODEL = "smollm2-135m"
KEY, TENANT = "s3cret-key", "secret-tenant"
STORY = "The sturgeon swims through quartz-clear water above the old turbine. " * 30
OTHER = "A merchant of Lisbon counts copper coins beneath seven green lanterns. " * 45
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, INTERNAL = 2, 1  # as OTLP counts kinds
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # milliseconds
END_SECONDS = 30.0  # far above the few that it may take, far below a hang


@pytest.fixture(scope="module")
def collector() -> Iterator[Collecting]:
    made = Collecting()
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(
    cache: Path, collector: Collecting, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Spawned]:
    """Its device holds one long prompt at a time; DRAM holds all."""
    spawned = Spawned(
        cache,
        *("--otlp-traces-endpoint", collector.url, "--kv-offloading-size", 0.25),
        *("--device-kv-gib", 0.04, "--block-tokens", 16, "--dtype", "float32"),
        PENSTOCK_API_KEY=KEY,
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
        OTEL_EXPERIMENTAL_RESOURCE_DETECTORS="process",
        OTEL_EXPORTER_OTLP_HEADERS="x-tenant=of-the-collector",
        **QUICK,
    )
    spawned.wait_ready()
    yield spawned
    assert spawned.end(signal.SIGTERM) == 0, spawned.stderr
    assert f"sending traces to {collector.url}/v1/traces" in spawned.stderr
    assert "WARNING" not in spawned.stderr
    # Of all that was ever sent.
    assert collector.bodies
    for secret in (KEY, TENANT, "sturgeon", "quartz", "merchant", "Lisbon", "penstock serve"):
        assert not any(secret.encode() in body for body in collector.bodies), secret


@pytest.fixture(scope="module")
def ai(served: Spawned) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_SECONDS
    ) as client:
        yield client


def arrived(collector: Collecting, request_id: str, num: int = 1) -> list[Sent]:
    """A request's own spans, once they and all below them are there: a parent is sent last."""
    wait_until(lambda: len(collector.requests(request_id)) >= num, "its spans arrive")
    found = collector.requests(request_id)
    assert len(found) == num
    return found


def names_below(collector: Collecting, request: Sent) -> list[str]:
    """Of its stages, after it has been checked that they fill its time."""
    stages = collector.below(request)
    reached = request.start_ns
    for stage in stages:
        assert stage.trace_id == request.trace_id
        assert stage.kind == INTERNAL
        assert stage.start_ns == reached
        assert stage.end_ns > stage.start_ns
        reached = stage.end_ns
    assert reached == request.end_ns
    return [stage.name.removeprefix("penstock.") for stage in stages]


def parent(flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"}


def test_a_request_with_a_caller(ai: openai.OpenAI, collector: Collecting) -> None:
    before = time.time_ns()
    answer = ai.completions.create(
        prompt=STORY,
        extra_headers={
            **parent(),
            "tracestate": "vendor=7",
            "X-Request-Id": "with-a-caller",
            "X-Penstock-Tenant": TENANT,
        },
        **GREEDY,
    )
    after = time.time_ns()
    (request,) = arrived(collector, "with-a-caller")
    assert (request.name, request.kind) == ("penstock.request", SERVER)
    assert (request.trace_id, request.parent_id) == (TRACE, CALLER)
    assert request.trace_state == "vendor=7"
    slack = 10**9  # the wall clock may be set right meanwhile
    assert before - slack < request.start_ns < request.end_ns < after + slack
    assert names_below(collector, request) == ["wait", "prefill", "decode"]
    usage, told = answer.usage, request.attributes
    assert usage is not None
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.response.finish_reasons"] == [answer.choices[0].finish_reason]
    assert told["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == usage.completion_tokens
    assert told["penstock.cached_tokens"] == told["penstock.loaded_bytes"] == 0
    assert 0 < told["penstock.first_token_seconds"] < (request.end_ns - request.start_ns) / 1e9
    assert request.resource["service.name"] == "penstock"
    assert request.resource["service.version"] == __version__
    assert request.resource["deployment.environment.name"] == "test"
    assert "process.pid" in request.resource  # the detector was asked
    assert not any(name.startswith("process.command") for name in request.resource)
    assert collector.paths[0] == "/v1/traces"
    assert collector.headers[0]["x-tenant"] == "of-the-collector"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("none", None),
        ("nonsense", "nonsense"),
        ("zeros", f"00-{'0' * 32}-{CALLER}-01"),
        ("upper", f"00-{TRACE.upper()}-{CALLER}-01"),
        ("version", f"ff-{TRACE}-{CALLER}-01"),
    ],
)
def test_without_a_caller_to_be_understood_a_trace_begins(
    ai: openai.OpenAI, collector: Collecting, name: str, header: str | None
) -> None:
    headers = {"X-Request-Id": f"alone-{name}"}
    if header is not None:
        headers["traceparent"] = header
    ai.chat.completions.create(
        messages=[{"role": "user", "content": "What is a sturgeon?"}],
        extra_headers=headers,
        **GREEDY,
    )
    (request,) = arrived(collector, f"alone-{name}")
    assert request.parent_id == ""
    assert request.trace_id not in ("", TRACE)
    assert names_below(collector, request)[-1] == "decode"


def test_a_caller_that_does_not_sample(ai: openai.OpenAI, collector: Collecting) -> None:
    for name, flags in (("unsampled", "00"), ("sampled", "01")):
        headers = {**parent(flags), "X-Request-Id": name}
        ai.completions.create(prompt="Hello", extra_headers=headers, **GREEDY)
    arrived(collector, "sampled")  # which came after it
    assert collector.requests("unsampled") == []


def test_what_was_found_and_what_was_loaded(ai: openai.OpenAI, collector: Collecting) -> None:
    def ask(prompt: str, name: str) -> Sent:
        ai.completions.create(prompt=prompt, extra_headers={"X-Request-Id": name}, **GREEDY)
        (request,) = arrived(collector, name)
        return request

    first, second = ask(STORY, "first"), ask(STORY, "second")
    assert first.attributes["penstock.cached_tokens"] == 0  # another tenant had the same
    found = second.attributes
    num_blocks = found["gen_ai.usage.input_tokens"] // 16
    assert found["penstock.blocks.matched.device"] == num_blocks
    assert found["penstock.cached_tokens"] == num_blocks * 16
    assert found["gen_ai.usage.cache_read.input_tokens"] == num_blocks * 16
    assert found["penstock.loaded_bytes"] == 0
    assert "load" not in names_below(collector, second)

    ask(OTHER, "other")  # takes the whole device
    third = ask(STORY, "third")
    loaded = third.attributes
    assert names_below(collector, third) == ["wait", "load", "prefill", "decode"]
    num_loaded = loaded["penstock.blocks.loaded.host"]
    assert 0 < num_loaded <= loaded["penstock.blocks.matched.host"]
    assert loaded["penstock.cached_tokens"] >= num_loaded * 16
    assert loaded["penstock.loaded_bytes"] % num_loaded == 0
    assert not any(name.startswith("penstock.blocks.lost") for name in loaded)


def test_a_client_that_leaves(ai: openai.OpenAI, collector: Collecting) -> None:
    stream = ai.completions.create(
        prompt="Once upon a time",
        stream=True,
        extra_headers={"X-Request-Id": "leaves"},
        extra_body={"ignore_eos": True},
        **{**GREEDY, "max_tokens": 500},
    )
    next(stream)
    stream.close()
    (request,) = arrived(collector, "leaves")
    assert request.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < request.attributes["gen_ai.usage.output_tokens"] < 500
    assert names_below(collector, request)[-1] == "decode"


def test_two_answers_have_two_spans(ai: openai.OpenAI, collector: Collecting) -> None:
    ai.completions.create(
        prompt="Hello", n=2, extra_headers={**parent(), "X-Request-Id": "two"}, **GREEDY
    )
    one, two = arrived(collector, "two", 2)
    assert one.span_id != two.span_id
    assert one.attributes["penstock.sequence_id"] != two.attributes["penstock.sequence_id"]
    for request in (one, two):
        assert (request.trace_id, request.parent_id) == (TRACE, CALLER)
        assert names_below(collector, request)[-1] == "decode"


# Switched on and off.


@pytest.fixture
def odd() -> Iterator[Callable[[str], Collecting]]:
    made: list[Collecting] = []

    def make(mode: str = "ok") -> Collecting:
        made.append(Collecting(mode))
        return made[-1]

    yield make
    for each in made:
        each.close()


SMALL = ("--kv-offloading-size", 0, "--device-kv-gib", 0.02)


def serve_some(client: Client, num: int = 3) -> None:
    for _ in range(num):
        body = {"prompt": "The sturgeon", "max_tokens": 4}
        assert client.post("/v1/completions", json=body, headers=parent()).status_code == 200


def test_switched_on_by_the_environment_and_flushed_at_the_end(
    spawn: Callable[..., Spawned], tiny: Path, odd: Callable[..., Collecting]
) -> None:
    collector = odd()
    server = spawn(
        *(tiny, *SMALL),
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_SERVICE_NAME="mine",
        OTEL_BSP_SCHEDULE_DELAY="600000",  # so that only the end sends them
        OTEL_EXPORTER_OTLP_COMPRESSION="none",
    )
    server.wait_ready()
    with server.client() as client:
        serve_some(client)
    assert collector.bodies == []
    assert server.end() == 0
    requests = [span for span in collector.spans() if span.name == "penstock.request"]
    assert len(requests) == 3
    assert {span.resource["service.name"] for span in requests} == {"mine"}
    assert "did not reach" not in server.stderr


def test_switched_off(
    spawn: Callable[..., Spawned], tiny: Path, odd: Callable[..., Collecting]
) -> None:
    collector = odd()
    server = spawn(
        *(tiny, *SMALL, "--otlp-traces-endpoint", collector.url),
        OTEL_SDK_DISABLED="true",
        **QUICK,
    )
    server.wait_ready()
    with server.client() as client:
        serve_some(client)
    assert server.end() == 0
    assert collector.paths == []
    assert "OTEL_SDK_DISABLED is true: traces are not sent" in server.stderr
    assert "sending traces to" not in server.stderr


# Collectors that fail.


@pytest.mark.parametrize("mode", ["down", "hang", "500"])
def test_a_collector_that_fails_disturbs_nobody_and_is_told_once(
    spawn: Callable[..., Spawned], tiny: Path, odd: Callable[..., Collecting], mode: str
) -> None:
    collector = odd("ok" if mode == "down" else mode)
    if mode == "down":
        collector.close()
    server = spawn(
        *(tiny, *SMALL, "--otlp-traces-endpoint", collector.url),
        OTEL_EXPORTER_OTLP_TIMEOUT="60" if mode == "hang" else "1",
        **QUICK,
    )
    server.wait_ready()
    with server.client() as client:
        serve_some(client)
        if mode != "down":
            wait_until(lambda: len(collector.paths) > 0, "it is asked")
        if mode != "hang":
            wait_until(lambda: "cannot be sent" in server.stderr, "it is told")
        serve_some(client)
    began = time.monotonic()
    assert server.end() == 0
    assert time.monotonic() - began < END_SECONDS
    said = server.stderr
    assert said.count("cannot be sent") == (mode != "hang")
    assert said.count("WARNING") == (mode != "hang") + 1
    assert "requests left out of tracing: 0;" in said
    assert "spans that did not reach" in said
    assert "Traceback" not in said
    assert "sturgeon" not in said


# The observer alone.


@pytest.mark.parametrize("mode", ["500", "503", "400", "nonsense"])
def test_a_collector_that_comes_back(
    odd: Callable[..., Collecting],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    for name, value in {**QUICK, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO, "penstock.server")
    collector = odd(mode)
    tracer = Tracer(f"{collector.url}/v1/traces")
    tracer.begin("m")
    for num in range(1, 4):
        tracer(RICH)
        wait_until(lambda num=num: len(collector.paths) >= num, "it is asked")
    wait_until(lambda: "cannot be sent" in caplog.text, "it is told")
    collector.mode = "ok"
    tracer(RICH)
    wait_until(lambda: "accepts spans again" in caplog.text, "and that it works again")
    tracer.close()
    trouble, works, *end = [record.getMessage() for record in caplog.records]
    assert trouble.startswith(f"spans cannot be sent to {collector.url}/v1/traces")
    assert works == f"{collector.url}/v1/traces accepts spans again"
    num_lost = 4 * 5 - len(collector.spans())
    assert num_lost < 20
    if num_lost:  # else the same was sent once more
        assert end[0].endswith(f": {num_lost}")
    caplog.clear()


class Blocked(SpanExporter):
    """Takes a batch, and keeps it until it may go."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_go.wait(TIMEOUT_SECONDS)
        self.num_taken += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_what_it_cannot_keep_up_with_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    exporter = Blocked()
    tracer = Tracer("http://nowhere", exporter, max_queued=8)
    for _ in range(12):
        tracer(RICH)  # it has not begun: nobody takes them out
    tracer(Refused("busy"))  # none of its business
    tracer.begin("m")
    wait_until(lambda: tracer._num_made == 8 * 5, "they are made")
    exporter.may_go.set()
    tracer.close()
    assert exporter.num_taken < 40
    (slow, full, end) = [record.getMessage() for record in caplog.records]
    assert "some are left out" in slow
    assert "full" in full
    assert "requests left out of tracing: 4; spans" in end
    assert end.endswith(f": {40 - exporter.num_taken}")
    caplog.clear()
    assert logging.getLogger("opentelemetry").propagate


def test_one_that_cannot_be_told_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = Blocked()
    exporter.may_go.set()
    tracer = Tracer("http://nowhere", exporter)
    tracer.begin("m")
    tracer(told(("dreaming", 0.0), *PLAIN[1:], first=None, seconds=1.0))
    tracer(RICH)
    tracer.close()
    assert exporter.num_taken == 5
    (end,) = [record.getMessage() for record in caplog.records]
    assert "requests left out of tracing: 1; spans" in end
    assert end.endswith(": 0")
    caplog.clear()


def test_settings_that_opentelemetry_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(ConfigError, match=r"spans cannot be sent .* begin with OTEL_"):
        Tracer("http://nowhere")
    assert logging.getLogger("opentelemetry").propagate


def test_a_header_that_cannot_be_read_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization s3cret")
    Tracer("http://nowhere").close()
    (record,) = caplog.records
    assert "Header format invalid" in record.getMessage()
    assert "s3cret" not in caplog.text
    caplog.clear()
