"""What the dashboard is made of: the page's files, the numbers, the stories; who may see them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from server.running import Client, Local, wait_until

from penstock.config import Config, HostConfig
from penstock.events import RequestStory, Stage
from penstock.server import watching
from penstock.server.app import AppSettings
from penstock.server.stories import MAX_STORIES, Stories, stages_of
from penstock.types import Origin, Tier, Verdict

PAGE = Path(__file__).parents[2] / "penstock" / "server" / "page"
SECRET = "the secret of the third reservoir"


def events(client: Client, wanted: int, **options: Any) -> list[tuple[str, Any]]:
    """The first so many events of a live stream."""
    found: list[tuple[str, Any]] = []
    with client.stream("GET", "/v1/penstock/live", **options) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
                if len(found) == wanted:
                    break
    return found


def ask(client: Client, text: str = "One two three", **fields: Any) -> Any:
    headers = fields.pop("headers", {})
    answer = client.post(
        "/v1/completions", json={"prompt": text, "max_tokens": 4, **fields}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return answer


class TestPage:
    def test_it_is_served_with_its_guards(self, client: Client) -> None:
        answer = client.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert client.head("/").status_code == 200

    def test_all_it_names_is_there(self, client: Client) -> None:
        named = set(re.findall(r'(?:src|href)="(dashboard/[^"]+)"', client.get("/").text))
        assert named
        imported = {
            f"dashboard/{name}"
            for file in PAGE.glob("*.js")
            for name in re.findall(r'from "\./([^"]+)"', file.read_text())
        }
        for path in named | imported:
            answer = client.get(f"/{path}")
            assert answer.status_code == 200, path
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.content

    @pytest.mark.parametrize("name", ["nothing.js", "index.html", "..%2fapp.py", "%2e%2e", ""])
    def test_what_is_not_part_of_it(self, client: Client, name: str) -> None:
        assert client.get(f"/dashboard/{name}").status_code in (404, 405)

    def test_nothing_comes_from_elsewhere(self) -> None:
        for file in PAGE.iterdir():
            text = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|//cdn|url\(", text.replace("url(#", "")), file.name

    def test_text_never_becomes_markup(self) -> None:
        ways = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
        )
        for file in PAGE.glob("*.js"):
            assert not re.search(ways, file.read_text()), file.name

    def test_other_answers_are_no_pages(self, client: Client) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/v1/penstock/state", "/nothing"):
            headers = client.get(path).headers
            assert headers["x-content-type-options"] == "nosniff", path
            assert headers["content-security-policy"].startswith("default-src 'none'"), path


class TestNumbers:
    def test_a_look(self, client: Client) -> None:
        ask(client)
        state: dict[str, Any] = {}

        def is_seen() -> bool:  # a look is up to a second old
            state.update(client.get("/v1/penstock/state").json())
            return bool(state["view"]["tiers"])

        wait_until(is_seen, "the device is seen")
        assert state["phase"] == "serving"
        assert state["models"] == ["tiny"]
        assert {"sessions", "stories", "chat"} == set(state["has"])
        assert state["settings"]["engine"]["block_tokens"] == 16
        names = [tier["name"] for tier in state["view"]["tiers"]]
        assert names == ["device"]

    def test_they_come_as_they_change(self, client: Client) -> None:
        ask(client, headers={"X-Request-Id": "one-of-mine"})
        found = events(client, 4)
        kinds = [name for name, _ in found]
        assert kinds[:2] == ["hello", "state"]
        assert "stories" in kinds
        told = next(data for name, data in found if name == "stories")
        assert "one-of-mine" in [story["request_id"] for story in told]
        points = found[0][1]["points"]
        assert all(one["at"] < other["at"] for one, other in pairwise(points))

    def test_a_story_by_its_name(self, client: Client) -> None:
        answer = ask(client, headers={"X-Request-Id": "find-me"})
        assert answer.headers["x-request-id"] == "find-me"
        (story,) = client.get("/v1/penstock/requests/find-me").json()["sequences"]
        usage = answer.json()["usage"]
        assert story["prompt_tokens"] == usage["prompt_tokens"]
        assert story["output_tokens"] == usage["completion_tokens"]
        seconds = sum(stage["seconds"] for stage in story["stages"])
        assert seconds == pytest.approx(story["seconds"], abs=1e-4)

    def test_each_sequence_of_a_request(self, client: Client) -> None:
        ask(client, n=3, headers={"X-Request-Id": "three"})
        wait_until(
            lambda: len(client.get("/v1/penstock/requests/three").json()["sequences"]) == 3,
            "its sequences are told",
        )

    def test_nobody_knows_of_it(self, client: Client) -> None:
        answer = client.get("/v1/penstock/requests/<script>")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "request_not_found"
        assert answer.headers["content-type"] == "application/json"

    def test_names_and_texts_stay_out(self, client: Client) -> None:
        ask(client, SECRET, cache_salt="alice@example.org")
        ask(client, SECRET, cache_salt="alice@example.org")
        ask(client, SECRET, cache_salt="bob@example.org")
        found = events(client, 3)
        everything = json.dumps(found) + client.get("/v1/penstock/state").text
        for hidden in (SECRET, "reservoir", "alice", "bob", "example.org"):
            assert hidden not in everything
        told = next(data for name, data in found if name == "stories")
        marks = [story["tenant"] for story in told[-3:]]
        assert marks[0] == marks[1] != marks[2]
        assert all(marks)

    def test_who_is_in_the_engine(self, local: Callable[..., Local]) -> None:
        server = local().slow_down()
        with server.client() as client:
            body = {"prompt": "One two", "max_tokens": 200, "ignore_eos": True, "cache_salt": "me"}
            headers = {"X-Request-Id": "long"}
            waiting = threading.Thread(
                target=lambda: client.post("/v1/completions", json=body, headers=headers)
            )
            waiting.start()
            seen: list[dict[str, Any]] = []

            def is_seen() -> bool:
                seen[:] = client.get("/v1/penstock/state").json()["sessions"]
                return bool(seen) and seen[0]["phase"] == "running"

            wait_until(is_seen, "the sequence is seen")
            assert seen[0]["request_id"] == "long"
            assert seen[0]["resident_blocks"] > 0
            assert seen[0]["tenant"] not in ("", "me")
            waiting.join()
            wait_until(
                lambda: client.get("/v1/penstock/state").json()["sessions"] == [], "it is gone"
            )

    def test_tiers_and_flows(self, local: Callable[..., Local]) -> None:
        server = local(Config(HostConfig(size_bytes=8 << 20)), kv_offloading_size=None)
        with server.client() as client:
            for number in range(12):
                ask(client, f"{number} " + "water and stone " * 60)
            wait_until(
                lambda: bool(client.get("/v1/penstock/state").json()["view"]["flows"]),
                "saves are seen",
            )
            view = client.get("/v1/penstock/state").json()["view"]
        assert [tier["name"] for tier in view["tiers"]] == ["device", "host"]
        flow = view["flows"][0]
        assert (flow["source"], flow["target"], flow["direction"]) == ("device", "host", "save")
        host = view["tiers"][1]
        assert 0 < host["used_bytes"] <= host["capacity_bytes"]


class TestWhoMaySee:
    @pytest.fixture
    def locked(self, local: Callable[..., Local]) -> Iterator[Client]:
        server = local(settings=AppSettings(api_key="open sesame"))
        with server.client() as client:
            yield client

    @pytest.mark.parametrize("path", ["state", "live", "requests/1-0"])
    def test_numbers_want_the_key(self, locked: Client, path: str) -> None:
        assert locked.get("/").status_code == 200
        assert locked.get(f"/v1/penstock/{path}").status_code == 401
        wrong = {"Authorization": "Bearer open barley"}
        assert locked.get(f"/v1/penstock/{path}", headers=wrong).status_code == 401

    def test_with_the_key(self, locked: Client) -> None:
        right = {"Authorization": "Bearer open sesame"}
        state = locked.get("/v1/penstock/state", headers=right)
        assert state.status_code == 200
        assert "sesame" not in state.text
        assert events(locked, 2, headers=right)[0][0] == "hello"

    def test_passwords_are_not_shown(self, local: Callable[..., Local], tmp_path: Path) -> None:
        from penstock.config import RemoteConfig

        remote = RemoteConfig(url="redis://user:hunter2@127.0.0.1:1/0")
        server = local(Config(HostConfig(8 << 20), remote=remote), kv_offloading_size=None)
        with server.client() as client:
            text = client.get("/v1/penstock/state").text
        assert "127.0.0.1:1" in text
        assert "hunter2" not in text


class TestStreams:
    def test_before_the_model_is_there(self, tiny: Path) -> None:
        server = Local(tiny)
        server.may_load.clear()
        server.start(wait=False)
        try:
            with server.client() as client:
                assert client.get("/").status_code == 200
                state = client.get("/v1/penstock/state").json()
                assert (state["phase"], state["models"]) == ("loading", [])
        finally:
            server.may_load.set()
            server.stop()

    def test_they_end_with_the_server(self, local: Callable[..., Local]) -> None:
        server = local()
        ended = threading.Event()
        began = threading.Event()

        def look() -> None:
            with server.client() as client, client.stream("GET", "/v1/penstock/live") as response:
                for _ in response.iter_lines():
                    began.set()
            ended.set()

        thread = threading.Thread(target=look)
        thread.start()
        assert began.wait(60)
        server.stop()
        assert ended.wait(60), "the stream outlives the server"
        thread.join()

    def test_not_more_than_so_many(
        self, local: Callable[..., Local], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watching, "MAX_VIEWERS", 2)
        server = local()
        with server.client() as client:
            with ExitStack() as stack:
                for _ in range(2):
                    stream = stack.enter_context(client.stream("GET", "/v1/penstock/live"))
                    lines = stream.iter_lines()
                    stack.callback(lines.close)  # kept: a generator that is lost ends its stream
                    next(lines)
                refused = client.get("/v1/penstock/live")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_viewers"

            def has_place() -> bool:
                with client.stream("GET", "/v1/penstock/live") as response:
                    return response.status_code == 200

            wait_until(has_place, "a place is free again")
            client.check_serves()

    def test_a_look_that_fails_hurts_nobody(self, local: Callable[..., Local]) -> None:
        server = local()

        def broken() -> Any:
            raise RuntimeError("broken")

        server.metrics.registry.collect = broken  # type: ignore[method-assign]
        with server.client() as client:
            wait_until(
                lambda: client.get("/v1/penstock/state").json()["phase"] == "unknown", "it is told"
            )
            client.check_serves()


def told(*stages: Stage, first: float | None = 1.0, seconds: float = 2.0) -> RequestStory:
    return RequestStory(
        "1-0",
        Origin("mine"),
        "tenant",
        0.0,
        stages,
        first,
        seconds,
        "stop",
        100,
        10,
        64,
        0,
        0,
        ((Tier.HOST, 4),),
        ((Tier.HOST, 2),),
        ((Verdict.CORRUPT, 2),),
        0.01,
        0.2,
        16,
        1024,
    )


class TestStories:
    def test_an_answer_from_lossy_kv_says_so(self) -> None:
        stories = Stories()
        stories(told())
        stories(replace(told(), request_id="2-0", num_lossy=48))
        assert [story["lossy_tokens"] for story in stories.since(0)] == [0, 48]

    @pytest.mark.parametrize(
        ("stages", "first", "expected"),
        [
            ([("waiting", 0.0), ("running", 0.2)], 1.0, ["wait", "prefill", "decode"]),
            (
                [("waiting", 0.0), ("loading", 0.1), ("running", 0.5)],
                1.0,
                ["wait", "load", "prefill", "decode"],
            ),
            ([("waiting", 0.0)], None, ["wait"]),
            ([("waiting", 0.0), ("loading", 0.1)], None, ["wait", "load"]),
            ([("waiting", 0.0), ("running", 0.1)], None, ["wait", "prefill"]),
            ([], None, ["wait"]),
            (
                [
                    ("waiting", 0.0),
                    ("running", 0.1),
                    ("waiting", 1.2),
                    ("loading", 1.4),
                    ("running", 1.5),
                ],
                1.0,
                ["wait", "prefill", "decode", "preempted", "load", "decode"],
            ),
            (
                [("waiting", 0.0), ("running", 0.1), ("waiting", 0.3), ("running", 0.6)],
                1.0,
                ["wait", "prefill", "preempted", "prefill", "decode"],
            ),
        ],
    )
    def test_stages_follow_without_a_gap(
        self, stages: list[tuple[str, float]], first: float | None, expected: list[str]
    ) -> None:
        found = stages_of(told(*(Stage(*stage) for stage in stages), first=first))
        assert [stage["stage"] for stage in found] == expected
        for one, other in pairwise(found):
            assert one["start"] + one["seconds"] == pytest.approx(other["start"])
        if found:
            assert found[-1]["start"] + found[-1]["seconds"] == pytest.approx(2.0)

    def test_the_latest_are_kept(self) -> None:
        stories = Stories()
        for _ in range(MAX_STORIES + 7):
            stories(told(Stage("waiting", 0.0)))
        kept = stories.since(0)
        assert len(kept) == MAX_STORIES
        assert [story["number"] for story in kept] == list(range(8, MAX_STORIES + 8))
        assert [story["number"] for story in stories.since(MAX_STORIES + 5)] == [
            MAX_STORIES + 6,
            MAX_STORIES + 7,
        ]
        assert len(stories.since(0, 5)) == 5

    def test_what_is_told(self) -> None:
        stories = Stories()
        stories(told(Stage("waiting", 0.0), Stage("running", 0.1)))
        (story,) = stories.find("mine")
        assert story["matched_blocks"] == {"host": 4}
        assert story["found_blocks"] == {"host": 2}
        assert story["lost_blocks"] == {"corrupt": 2}
        assert story["tenant"] not in ("", "tenant")
        assert stories.find("other") == []
        assert json.loads(json.dumps(story)) == story
