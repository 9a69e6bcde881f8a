"""Snapshots of another server: what it tells, what it does not, and when it is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from commands.stand import Stand
from watch.prepared import exposed, usage, vllm_text, work

from penstock.clock import ManualClock
from penstock.watch.remote_server import RemoteServer
from penstock.watch.scrape import NoMetrics, metrics_url
from penstock.watch.server_watch import NEEDS_KEY, WRONG_KEY, ServerWatch

STATE = "/v1/penstock/state"
SESSION = {"id": "1", "phase": "running", "resident_blocks": 3, "cold_blocks": 1}


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    made.answers["/metrics"] = exposed(usage(), work())
    yield made
    made.close()


def watching(stand: Stand, key: str | None = None, clock: ManualClock | None = None) -> ServerWatch:
    return ServerWatch(metrics_url(stand.url), key, clock)


def test_what_a_server_of_ours_tells(stand: Stand) -> None:
    told = {"version": "1.2", "phase": "stopping", "models": ["m"], "num_sessions": 150}
    stand.tell(STATE, told | {"sessions": [SESSION]})
    snapshot = watching(stand, "s3cret").snapshot()
    assert (STATE, "Bearer s3cret") in stand.asked
    assert ("/metrics", None) in stand.asked  # the key goes only where it is wanted
    assert snapshot.facts.version == "1.2"
    assert snapshot.facts.phase == "stopping"
    assert snapshot.facts.models == ("m",)
    assert snapshot.facts.sessions == (SESSION,)
    assert snapshot.facts.num_sessions == 150
    data = snapshot.as_data()
    assert data["url"] == stand.url
    assert data["view"]["tokens_saved"] == 8000


@pytest.mark.parametrize(("key", "note"), [(None, NEEDS_KEY), ("wrong", WRONG_KEY)])
def test_a_server_that_wants_its_key(stand: Stand, key: str | None, note: str) -> None:
    stand.answers[STATE] = 401
    stand.tell("/health", {"status": "ok", "phase": "loading"})
    looking = watching(stand, key)
    assert [looking.snapshot().facts.note for _ in range(3)] == [note] * 3
    assert looking.snapshot().facts.phase == "loading"  # that much it tells everybody
    assert looking.snapshot().as_data()["sessions"] is None
    assert [path for path, _ in stand.asked].count(STATE) == 1  # it is not asked in vain
    stand.answers["/health"] = 503
    assert looking.snapshot().facts.phase == "failed"


def test_a_server_without_sessions(stand: Stand) -> None:
    snapshot = watching(stand).snapshot()
    assert snapshot.facts.sessions is None
    assert snapshot.facts.note == ""


def test_vllm_is_not_asked_for_them(stand: Stand) -> None:
    stand.answers["/metrics"] = vllm_text().encode()
    snapshot = watching(stand, "s3cret").snapshot()
    assert stand.asked == [("/metrics", None)]
    assert snapshot.kind == "vllm"
    assert snapshot.facts.models == ("smol",)


@pytest.mark.parametrize("answer", [b"[]", b'"x"', b"{", b'{"sessions": 7, "models": "m"}', 503])
def test_whatever_another_server_says_there(stand: Stand, answer: bytes | int) -> None:
    stand.answers[STATE] = answer
    snapshot = watching(stand).snapshot()
    assert snapshot.facts.sessions is None
    assert snapshot.facts.phase == "serving"


def test_one_that_never_answered(stand: Stand) -> None:
    stand.answers.clear()
    with pytest.raises(NoMetrics, match="answers with 404"):
        watching(stand).snapshot()


def test_one_that_goes_and_comes_back(stand: Stand) -> None:
    clock = ManualClock(100.0)
    looking = watching(stand, clock=clock)
    metrics, first = stand.answers["/metrics"], looking.snapshot()
    stand.answers["/metrics"] = 500
    clock.advance(7)
    gone = looking.snapshot()
    assert "answers with 500" in gone.error
    assert (gone.seen_at, gone.watched_since) == (100, 100)
    assert gone.view == first.view
    data = gone.as_data()
    assert (data["phase"], data["error"]) == ("unreachable", gone.error)
    assert "view" not in data
    stand.answers["/metrics"] = metrics
    stand.tell(STATE, {"sessions": []})  # it came back as a newer one
    clock.advance(1)
    back = looking.snapshot()
    assert back.error == ""
    assert (back.seen_at, back.watched_since) == (108, 100)
    assert back.facts.sessions == ()


def test_no_secret_of_the_url_is_shown(stand: Stand) -> None:
    address = stand.url.removeprefix("http://")
    server = RemoteServer(metrics_url(f"http://user:pass@{address}/metrics?token=hidden"))
    server.read()
    assert server.metrics_url == f"{stand.url}/metrics"
    assert server.url == stand.url
    stand.answers.clear()
    with pytest.raises(NoMetrics) as caught:
        server.read()
    assert "hidden" not in str(caught.value)
    assert "pass" not in str(caught.value)
