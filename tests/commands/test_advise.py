"""`penstock advise` against real HTTP servers on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from penstock.events import LookedUp, Moved, Removed, TierUsage
from penstock.metrics import Metrics
from penstock.types import BlockKey, Direction, Tier

Run = Callable[..., Any]


class Stand:
    """A server that answers every GET with what it is told, and notes the paths."""

    def __init__(self) -> None:
        self.status = 200
        self.answers: list[bytes] = []  # the last one stays
        self.paths: list[str] = []
        stand = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand.paths.append(self.path)
                body = stand.answers.pop(0) if len(stand.answers) > 1 else stand.answers[0]
                self.send_response(stand.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.url = f"http://{self.address}"


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def small_dram(times: int = 1) -> bytes:
    metrics = Metrics()
    for _ in range(100 * times):
        metrics(LookedUp(10, ((Tier.HOST, 1),)))
    metrics(Moved(Tier.DEVICE, Tier.HOST, Direction.SAVE, 1000, 1000 << 21, 1.0))
    metrics(Removed(Tier.HOST, (BlockKey(bytes(32)),) * 512 * times, evicted=True))
    metrics(TierUsage(Tier.HOST, 1024, 1024, 0, 0, 0))
    return metrics.expose()


def test_what_to_change_with_the_numbers(run: Run, stand: Stand) -> None:
    stand.answers = [small_dram()]
    ran = run("advise", stand.url)
    assert (ran.code, ran.stderr) == (0, "")
    said = " ".join(ran.stdout.split())
    assert "consider" in said
    assert "10% of blocks" in said
    found = run("advise", stand.url, "--json").json
    assert found["hit_rate"] == pytest.approx(0.1)
    (hits,) = [advice for advice in found["advice"] if advice["topic"] == "hits"]
    assert hits["numbers"]["more_bytes"] == 1 << 30
    assert "by up to 1.0 GiB more than its 2.0 GiB" in hits["change"]


@pytest.mark.parametrize("ending", ["", "/", "/metrics", "/metrics/", "/v1"])
def test_urls_as_people_write_them(run: Run, stand: Stand, ending: str) -> None:
    stand.answers = [small_dram()]
    assert run("advise", f"{stand.address}{ending}", "--json").code == 0
    assert run("advise", f"{stand.url}{ending}", "--json").code == 0
    assert set(stand.paths) == {"/metrics"}


def test_inside_vllm(run: Run, stand: Stand) -> None:
    labels = 'engine="0",model_name="m"'
    stand.answers = [
        (
            f"vllm:num_requests_running{{{labels}}} 3\n"
            f"penstock_lookups_total{{{labels}}} 100\n"
            f"penstock_lookup_blocks_total{{{labels}}} 1000\n"
            f'penstock_hit_blocks_total{{{labels},tier="host"}} 900\n'
            f'penstock_corrupt_blocks_total{{{labels},tier="disk"}} 2\n'
        ).encode()
    ]
    found = run("advise", stand.url, "--json").json
    assert [advice["topic"] for advice in found["advice"]] == ["corruption", "hits"]
    assert found["advice"][1]["urgency"] == "well"


def test_watching_for_a_while(run: Run, stand: Stand) -> None:
    stand.answers = [small_dram(), small_dram(times=3)]
    found = run("advise", stand.url, "--seconds", 0.01, "--json").json
    assert found["watched_seconds"] == 0.01
    (hits,) = [advice for advice in found["advice"] if advice["topic"] == "hits"]
    assert hits["numbers"]["evicted_blocks"] == 1024


def test_nothing_to_change(run: Run, stand: Stand) -> None:
    stand.answers = [
        b"penstock_lookups_total 50\npenstock_lookup_blocks_total 10\n"
        b'penstock_hit_blocks_total{tier="host"} 9\n'
    ]
    assert "Nothing to change." in run("advise", stand.url).stdout


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<!doctype html>", "has no metrics: line 1"),
        (b"", "has no metrics: there is no metric"),
        (b"go_threads 7\n", "has no metrics of Penstock: expected a `penstock serve`"),
        (b"vllm:num_requests_running 0\n", "this is vLLM without Penstock"),
        (b"\xff\xfe\x00", "has no metrics"),
    ],
)
def test_servers_that_are_not_ours(run: Run, stand: Stand, answer: bytes, words: str) -> None:
    stand.answers = [answer]
    assert words in run("advise", stand.url).refusal


def test_a_server_that_refuses(run: Run, stand: Stand) -> None:
    stand.status, stand.answers = 404, [b"no"]
    assert f"{stand.url}/metrics answers with 404" in run("advise", stand.url).refusal


def test_nobody_there(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refusal = run("advise", f"http://user:secret@127.0.0.1:{port}").refusal
    assert "does not answer (Connection refused)" in refusal
    assert "secret" not in refusal
    assert "does not answer" in run("advise", "http://no.such.host.invalid").refusal


def test_a_server_that_hangs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.watch.scrape._TIMEOUT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refusal = run("advise", f"http://127.0.0.1:{silent.getsockname()[1]}").refusal
    assert "did not answer within" in refusal


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://a:99999999", "", "http://a b"])
def test_urls_that_are_none(run: Run, url: str) -> None:
    assert "the URL is" in run("advise", url).refusal


def test_help_has_an_example(run: Run) -> None:
    stdout = run("advise", "--help").stdout
    assert "Example: penstock advise" in stdout
    assert "--json" in stdout
