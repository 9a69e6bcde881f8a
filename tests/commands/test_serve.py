"""`penstock serve` from its command line: what it refuses, and how it ends."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server.running import Spawned, make_tiny, wait_until

from penstock.engine.weights import embedded_gguf


@pytest.fixture
def serve(
    run: Callable[..., object], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> Callable[..., str]:
    """Runs it in this process with what it must refuse; returns the sentence."""
    monkeypatch.setattr("penstock.commands.serve.set_logging", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def refuse(*argv: object) -> str:
        ran = run("serve", *argv, *(() if "--port" in argv else ("--port", 0)))
        assert (ran.code, ran.stdout) == (2, "")  # type: ignore[attr-defined]
        *progress, sentence = ran.stderr.splitlines()  # type: ignore[attr-defined]
        assert all(line.startswith("penstock: ") for line in (*progress, sentence))
        said = "\n".join((*progress, sentence.removeprefix("penstock: ")))
        assert "Traceback" not in said
        return said

    return refuse


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(
    serve: Callable[..., str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = serve("--port", port)
    assert said.startswith(f"cannot listen on port {port} of 127.0.0.1: another process")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-offloading-size", "-1"], "--kv-offloading-size"),
        (["--kv-offloading-size", "nan"], "size"),
        (["--kv-offloading-size", "1e9"], "at most the machine's memory"),
        (["--disk-size", "-1"], "--disk-size"),
        (["--device-kv-gib", "-1"], "--device-kv-gib"),
        (["--max-waiting", "0"], "--max-waiting"),
        (["--max-body-bytes", "-5"], "--max-body-bytes"),
        (["--grace-seconds", "-1"], "--grace-seconds"),
        (["--port", "70000"], "--port"),
        (["--set", "host.sze=1GiB"], "did you mean host.size?"),
        (["--set", "nonsense"], "--set 'nonsense' is not a setting"),
        (["--config", "/nowhere.toml"], "there is no file /nowhere.toml"),
        (["--kv-offloading-size", "0", "--disk-path", "kv"], "passes through DRAM"),
        (["--disk-path", "/dev/null/kv"], "--disk-path /dev/null/kv is below the file /dev/null"),
        (["--disk-path", "/proc/x"], "--disk-path /proc/x cannot be created"),
        (["--disk-size", "4"], "--disk-size is given without --disk-path"),
        (["--remote", "http://foo"], "--remote is 'http://foo': expected one that begins with"),
        (["--set", "host.size=1"], "host.size is 1 B, less than one block"),
        (["--host", "no.such.host.invalid"], "has no address"),
        (["--api-key", ""], "API key is empty"),
        (["--allowed-host", "http://x/"], "--allowed-host is 'http://x/'"),
        (["--tenant-from", "cookie"], "--tenant-from"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["--chat-template", "/nowhere.jinja"], "--chat-template '/nowhere.jinja' cannot be read"),
        (["--api-key", "a\nb"], "an HTTP header cannot contain"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--otlp-traces-endpoint", "localhost:4318"], "endpoint is 'localhost:4318': expected"),
        (["--segment-separator", ""], "--segment-separator is ''"),
        (["--kv-mending", "glue"], "--kv-mending is 'glue': expected one of link"),
        (["--log-level", "loud"], "--log-level"),
        (["--prot", "1"], "--prot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_cannot_be(
    serve: Callable[..., str], arguments: list[str], words: str
) -> None:
    said = serve("smollm2-135m", *arguments)
    assert words in said
    assert "listening" not in said


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/model", "there is no model at '/no/such/model'"),
        ("/no/such/model.gguf", "cannot be read"),
    ],
)
def test_a_model_that_is_not_there(serve: Callable[..., str], model: str, words: str) -> None:
    said = serve(model)
    assert words in said.splitlines()[-1]
    assert "listening on http://127.0.0.1:" in said


def test_a_model_that_is_cut_off(serve: Callable[..., str], tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with embedded_gguf().open("rb") as whole:
        cut.write_bytes(whole.read(1 << 20))
    assert f"{cut} cannot be unpacked" in serve(cut).splitlines()[-1]


def test_whoever_listens_to_all_without_a_key_is_warned(serve: Callable[..., str]) -> None:
    assert "anyone who can reach http://0.0.0.0:" in serve("/no/model", "--host", "0.0.0.0")
    assert "anyone" not in serve("/no/model", "--host", "0.0.0.0", "--api-key", "s3cret")
    assert "anyone" not in serve("/no/model", "--host", "localhost")


def test_parts_that_are_not_installed_are_named(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = serve()
    assert said.startswith("fastapi, uvicorn and pydantic are not installed, which this command")
    assert "pip install '.[server]'" in said


@pytest.mark.parametrize("by_option", [True, False], ids=["option", "environment"])
def test_spans_without_their_extra(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch, by_option: bool
) -> None:
    url, name = "http://127.0.0.1:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    monkeypatch.delitem(sys.modules, "penstock.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    if not by_option:
        monkeypatch.setenv(name, url)
    said = serve(*(("--otlp-traces-endpoint", url) if by_option else ()))
    assert said.startswith("--otlp-traces-endpoint is set" if by_option else f"{name} is set")
    assert "opentelemetry.exporter.otlp.proto.http.trace_exporter, which is not installed" in said
    assert "pip install '.[otel]'" in said


def test_a_url_for_spans_that_is_wrong_in_the_environment(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://localhost:4317")
    said = serve()
    assert said.startswith("OTEL_EXPORTER_OTLP_ENDPOINT is 'grpc://localhost:4317': expected")


def test_the_key_in_the_environment_is_no_setting(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "s3cret")
    said = serve("/no/model", "--host", "0.0.0.0")
    assert "anyone" not in said
    assert "s3cret" not in said


# The whole process.


@pytest.fixture
def spawn(cache: Path) -> Iterator[Callable[..., Spawned]]:
    made: list[Spawned] = []

    def make(*arguments: object) -> Spawned:
        made.append(Spawned(cache, *arguments))
        return made[-1]

    yield make
    for spawned in made:
        spawned.end(signal.SIGKILL)


def test_stopped_while_it_loads(spawn: Callable[..., Spawned], cache: Path) -> None:
    spawned = spawn(make_tiny(cache))
    wait_until(lambda: "starting the engine" in spawned.stderr, "it begins")
    assert spawned.end(signal.SIGTERM) == 0
    assert "Traceback" not in spawned.stderr


def test_asked_twice_it_stops_at_once(spawn: Callable[..., Spawned], cache: Path) -> None:
    spawned = spawn(
        *(make_tiny(cache), "--grace-seconds", 300, "--kv-offloading-size", 0),
        *("--device-kv-gib", 0.1, "--log-level", "debug"),
    )
    spawned.wait_ready()
    body = {"prompt": "my secret", "max_tokens": 500, "n": 64, "stream": True}
    with (
        spawned.client() as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        spawned.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping: waiting for running requests" in spawned.stderr, "it hears")
        assert spawned.end(signal.SIGINT) == 130
    assert "stopped at once" in spawned.stderr
    assert "first token after" in spawned.stderr  # the engine's story, with --log-level debug
    assert "secret" not in spawned.stderr
