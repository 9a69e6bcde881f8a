"""`penstock dashboard` as a process of its own: the page and its numbers, of a server elsewhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands.stand import Stand
from server.running import TIMEOUT_SECONDS, Client, Local, make_tiny, wait_until
from watch.prepared import exposed, usage, vllm_text, work

import penstock

Run = Callable[..., Any]
STATE, LIVE = "/v1/penstock/state", "/v1/penstock/live"


class Dashboard:
    def __init__(self, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "penstock", "dashboard", "--port", "0", "--json"]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env={**inherited, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        self.facts = json.loads(line)
        self.url = self.facts["url"]

    def client(self, **options: Any) -> Client:
        return Client(self.url, **options)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            _, stderr = self.process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            self.process.kill()
        return self.process.returncode, stderr


Start = Callable[..., Dashboard]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Dashboard] = []

    def make(*arguments: object, **environment: str) -> Dashboard:
        made.append(Dashboard("--metrics", *arguments, **environment))
        return made[-1]

    yield make
    for dashboard in made:
        if dashboard.process.returncode is None:
            dashboard.end(signal.SIGKILL)


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    made.answers["/metrics"] = exposed(usage(), work())
    yield made
    made.close()


def events(client: Client, **headers: str) -> Iterator[tuple[str, Any]]:
    with client.stream("GET", LIVE, headers=headers) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in stream.iter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)


def test_a_real_server(start: Start, cache: Path) -> None:
    server = Local(make_tiny(cache)).start()
    try:
        dashboard = start(server.url)
        assert dashboard.facts["metrics_url"] == f"{server.url}/metrics"
        assert dashboard.facts["pid"] == dashboard.process.pid
        with server.client() as asking, dashboard.client() as client:
            asking.check_serves()
            state = client.get(STATE).json()
            assert state["version"] == penstock.__version__
            assert (state["host"], state["has"], state["models"]) == ("penstock", [], [])
            assert state["metrics_url"] == f"{server.url}/metrics"
            assert state["phase"] == "serving"
            assert "sessions" not in state
            told = events(client)
            name, hello = next(told)
            assert name == "hello"
            assert hello["host"] == "penstock"
            live = next(data for name, data in told if name == "state" and data["view"]["requests"])
            assert live["phase"] == "serving"
            assert live["view"]["requests"] == {"length": 1}
        code, said = dashboard.end(signal.SIGINT)
    finally:
        server.stop()
    assert code == 0
    assert f"penstock: the dashboard of {server.url} is at {dashboard.url}" in said
    assert said.endswith("penstock: stopping\npenstock: stopped\n")


def test_the_page_and_its_guards(start: Start, stand: Stand) -> None:
    with start(stand.url).client() as client:
        page = client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "<html" in page.text
        assert client.head("/").status_code == 200
        state = client.get(STATE)
        assert state.headers["cache-control"] == "no-store"
        assert state.headers["x-request-id"].startswith("req-")
        missing = client.get("/v1/penstock/requests/req-1")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
        # It is no model's server.
        for path in ("/v1/models", "/metrics", "/nowhere"):
            answer = client.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "invalid_request_error"


def test_vllm_with_the_connector(start: Start, stand: Stand) -> None:
    stand.answers["/metrics"] = vllm_text().encode()
    with start(f"{stand.url}/metrics").client() as client:
        state = client.get(STATE).json()
    assert (state["host"], state["models"]) == ("vllm", ["smol"])
    assert [tier["name"] for tier in state["view"]["tiers"]] == ["device", "host"]


def test_a_server_that_comes_later_and_goes(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    dashboard = start(f"http://user:secret@127.0.0.1:{port}/metrics?token=hidden")
    with dashboard.client() as client:
        state = client.get(STATE)
        assert state.json()["phase"] == "unreachable"
        assert "does not answer" in state.json()["error"]
        assert "secret" not in state.text
        assert "hidden" not in state.text
        stand = Stand(port)
        stand.answers["/metrics"] = exposed(usage(), work())
        try:
            wait_until(lambda: client.get(STATE).json()["phase"] == "serving", "it is found")
            assert client.get(STATE).json()["view"]["tokens_saved"] == 8000
        finally:
            stand.close()
        wait_until(lambda: client.get(STATE).json()["phase"] == "unreachable", "it is missed")
    code, said = dashboard.end()
    assert code == 0
    assert "secret" not in said
    assert "Traceback" not in said


def test_a_server_that_hangs_keeps_nobody(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dashboard = start(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with silent.accept()[0], dashboard.client() as client:
            assert client.get("/").status_code == 200
            assert dashboard.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_while_somebody_looks(start: Start, stand: Stand, number: int) -> None:
    dashboard = start(stand.url)
    is_looking, ended = threading.Event(), threading.Event()

    def look() -> None:
        with dashboard.client() as client:
            for _ in events(client):
                is_looking.set()
        ended.set()  # the stream ended as it should, not in an error

    looking = threading.Thread(target=look)
    looking.start()
    assert is_looking.wait(TIMEOUT_SECONDS)
    code, said = dashboard.end(number)
    looking.join(TIMEOUT_SECONDS)
    assert ended.is_set()
    assert code == 0
    assert "Traceback" not in said


def test_the_numbers_want_the_key_and_the_page_does_not(start: Start, stand: Stand) -> None:
    for dashboard in (
        start(stand.url, "--api-key", "s3cret"),
        start(stand.url, PENSTOCK_API_KEY="s3cret"),
    ):
        with dashboard.client() as client:
            assert client.get("/").status_code == 200
            for path in (STATE, LIVE, "/v1/penstock/requests/x"):
                assert client.get(path).status_code == 401
            right = {"Authorization": "Bearer s3cret"}
            assert client.get(STATE, headers=right).json()["phase"] == "serving"
            assert next(events(client, **right))[0] == "hello"
        assert ("/metrics", "Bearer s3cret") not in stand.asked  # it is ours, not theirs
        assert "s3cret" not in dashboard.end()[1]


def test_a_page_whose_name_leads_here_is_refused(start: Start, stand: Stand) -> None:
    dashboard = start(stand.url, "--allowed-host", "board.example")
    with dashboard.client() as client:
        for path in ("/", STATE, LIVE, "/openapi.json"):
            answer = client.get(path, headers={"Host": "evil.example"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert client.get(STATE, headers={"Host": "board.example:8100"}).status_code == 200
    dashboard.end()


def test_whoever_listens_to_all_without_a_key_is_warned(start: Start, stand: Stand) -> None:
    warning = "anyone who can reach http://0.0.0.0:"
    assert warning in start(stand.url, "--host", "0.0.0.0").end()[1]
    assert "anyone" not in start(stand.url, "--host", "0.0.0.0", "--api-key", "k").end()[1]
    assert "anyone" not in start(stand.url).end()[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--metrics"),
        (["--metrics", "ftp://host"], "the URL is"),
        (["--metrics", ""], "the URL is"),
        (["--metrics", "http://h", "--port", "70000"], "--port"),
        (["--metrics", "http://h", "--host", "no.such.host.invalid"], "has no address"),
        (["--metrics", "http://h", "--api-key", ""], "API key is empty"),
        (["--metrics", "http://h", "--allowed-host", "a/b"], "--allowed-host is 'a/b'"),
    ],
)
def test_what_cannot_be(run: Run, argv: list[str], words: str) -> None:
    assert words in run("dashboard", *argv).refusal


def test_a_port_that_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refusal = run("dashboard", "--metrics", "http://h", "--port", port).refusal
    assert refusal.startswith(f"cannot listen on port {port} of 127.0.0.1: another process")


def test_parts_that_are_not_installed_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install '.[server]'" in run("dashboard", "--metrics", "http://h").refusal


def test_it_needs_nothing_of_the_engine() -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'numpy', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import penstock.cli, penstock.server.remote_dashboard, penstock.commands.top_screen\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
