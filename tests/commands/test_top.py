"""`penstock top`: what it draws, and how it goes on against real servers."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands.stand import Stand
from rich.console import Console
from server.running import TIMEOUT_SECONDS, Local, make_tiny, wait_until
from watch.prepared import exposed, samples, trouble, usage, vllm_text, work

from penstock.commands.top_screen import Screen
from penstock.events import FirstToken, LookedUp
from penstock.server.app import AppSettings
from penstock.watch.history import History
from penstock.watch.samples import read_samples
from penstock.watch.server_watch import NEEDS_KEY, Facts, Snapshot
from penstock.watch.view import make_view
from penstock.watch.vllm_names import to_our_names

Run = Callable[..., Any]
STATE = "/v1/penstock/state"


def session(number: int) -> dict[str, Any]:
    return {
        "id": f"seq-{number}",
        "request_id": f"chat-{number}",
        "tenant": "ab12cd",
        "phase": "running",
        "prompt_tokens": 1000 * number,
        "output_tokens": 7 * number,
        "cached_tokens": 800 * number,
        "resident_blocks": 10 * number,
        "cold_blocks": 5 if number % 2 else 0,
        "preemptions": 1,
        "seconds": 1.5 * number,
    }


def make_look(facts: Facts | None = None, *, is_bad: bool = True, error: str = "") -> Snapshot:
    history = History()
    history.add(0.0, samples(usage(), work()))
    history.add(5.0, samples(usage(), work(6), trouble() if is_bad else []))
    if facts is None:
        facts = Facts("1.2", "serving", ("smol",), tuple(map(session, range(1, 15))), 14)
    view = make_view(history)
    return Snapshot("http://127.0.0.1:8000", "penstock", facts, view, 0.0, 100.0, 0.0, error)


def drawn(
    snapshot: Snapshot, width: int = 80, height: int | None = 24, **options: Any
) -> list[str]:
    now = options.pop("now", 100.0)
    return [line.plain for line in Screen(snapshot, now).lines(width, height, **options)]


def row(lines: list[str], name: str) -> str:
    (found,) = [line for line in lines if line.startswith(f"{name} ")]
    return found


# What is drawn.


def test_all_of_it_on_80_by_24() -> None:
    lines = drawn(make_look())
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert lines[0] == "penstock top · http://127.0.0.1:8000".ljust(62) + "watched 1 min 40 s"
    assert lines[1].startswith("smol · penstock 1.2 · serving")
    assert "68%" in row(lines, "device")
    assert "█" in row(lines, "device")
    assert "1.3 of 2.0 GiB" in row(lines, "device")
    assert "64.0 of 64.0 GiB   40%  188.7 MB/s (3)     209.7 MB/s" in row(lines, "host")
    assert "195.3 GiB of 1.0 TiB   10%       41.9 MB/s   RESTING (12)" in row(lines, "disk")
    assert "loaded 35.0 ms / 49.7 ms   computed 1.50 s / 1.99 s   42.9x as fast" in row(
        lines, "first token"
    )
    assert "25% of 160,000: 0 on device, 40,000 loaded" in row(lines, "reused")
    following = lines[lines.index(row(lines, "reused")) + 1]
    assert "in all 25% of 192,000: 0 on device, 48,000 loaded, saving 3 min 00 s" in following
    assert "40,000 loaded   hits below 50%" in row(lines, "reused")
    assert "1,000 tokens/s" in row(lines, "speed")
    assert "12 running, 2 loading, 5 waiting   1 preempted (1 lately)" in row(lines, "sequences")
    assert "78% resident, least 40%   3.3 cold reads/token" in row(lines, "KV in use")
    screen = "\n".join(lines)
    for error in (
        "corrupt: disk 3",
        "dropped: host 11",
        "lost loads: expired 7",
        "refused: busy 1",
    ):
        assert error in screen
    assert "sessions (14)" in screen
    assert "chat-13" in screen  # the largest first
    assert "130 + 5" in screen
    assert re.search(r"… and \d+ more", screen)
    assert "act       corruption: 3 blocks from disk failed verification" in screen
    assert "act       health: disk fails to save" in screen


def test_tokens_found_on_the_device_do_not_contradict_hits_below_it() -> None:
    """Nothing was found below the device, as nothing was wanted from there."""
    history = History()
    on_device = [FirstToken(0.04, 1600, 1500, 0, None)] * 30
    history.add(0.0, samples(usage()))
    history.add(1.0, samples(usage(), [LookedUp(10, ())] * 30, on_device))
    for since_start in (False, True):
        view = make_view(history, since_start=since_start)
        snapshot = Snapshot("http://x", "penstock", Facts(), view, 0.0, 100.0, 0.0)
        reused = row(drawn(snapshot), "reused")
        assert "94% of 48,000: 45,000 on device, 0 loaded   hits below 0%" in reused
        assert "saving" not in "\n".join(drawn(snapshot))


def test_without_errors_there_is_no_line_of_them() -> None:
    lines = drawn(make_look(is_bad=False))
    assert not [line for line in lines if line.startswith("errors")]
    assert "no problems" in lines


@pytest.mark.parametrize("width", [20, 40, 79, 80, 100, 129, 130, 131, 200, 400])
@pytest.mark.parametrize("height", [1, 5, 12, 24, 29, 30, 50, 100])
def test_nothing_is_wider_or_higher_than_the_terminal(width: int, height: int) -> None:
    for snapshot in (make_look(), make_look(is_bad=False, error="x" * 500), make_look(Facts())):
        lines = Screen(snapshot, 200.0).lines(width, height)
        assert len(lines) <= height
        assert all(line.cell_len <= width for line in lines)


def test_a_wide_terminal_shows_more() -> None:
    screen = "\n".join(drawn(make_look(), 150, 60))
    assert re.search(r"disk → host +load +41.9 MB/s +240.0 MiB", screen)
    assert "preempted  tenant" in screen
    assert "run `penstock store check` on its folder" in screen
    assert all(f"chat-{number} " in screen for number in range(1, 15))


def test_printed_once_nothing_is_cut_off() -> None:
    screen = "\n".join(drawn(make_look(), 80, None))
    assert "… and" not in screen
    assert all(f"chat-{number} " in screen for number in range(1, 15))


def test_a_server_that_does_not_answer() -> None:
    lines = drawn(make_look(error="http://x does not answer"), now=175.0)
    screen = " ".join(" ".join(lines).split())
    assert "no answer for 1 min 15 s, showing the last known state" in screen
    assert "http://x does not answer" in screen
    assert "smol" in screen
    assert "no answer for 10 s" in "\n".join(drawn(make_look(), now=110.0))  # it still hangs
    assert "no answer" not in "\n".join(drawn(make_look(), now=102.0))


def test_a_hint_that_sessions_need_the_key() -> None:
    assert NEEDS_KEY in drawn(make_look(Facts(note=NEEDS_KEY)))


def test_what_a_server_says_does_not_steer_the_terminal() -> None:
    evil = "\x1b[2J\x07\r\n\u202e" + "x" * 300
    facts = Facts(evil, evil, (evil,), ({"request_id": evil, "phase": evil, "seconds": evil},), 1)
    for line in drawn(make_look(facts, error=evil)):
        assert line.isprintable()
        assert len(line) <= 80


def test_a_terminal_that_knows_only_ascii() -> None:
    lines = drawn(make_look(), 150, 60, ascii_only=True)
    assert all(line.isascii() for line in lines)
    assert "####" in row(lines, "host")
    assert "#" in row(lines, "disk")
    assert "." in row(lines, "disk")
    assert [len(line) for line in lines] == [len(line) for line in drawn(make_look(), 150, 60)]


def test_vllm() -> None:
    history = History()
    for at, times in ((0.0, 1), (5.0, 6)):
        seen = read_samples(vllm_text(times), ("penstock_", "vllm:"))
        history.add(at, to_our_names(seen))
    facts = Facts(models=("smol",))
    snapshot = Snapshot("http://h:8000", "vllm", facts, make_view(history), 0.0, 100.0, 0.0)
    lines = drawn(snapshot)
    assert lines[1].startswith("smol · vLLM · serving")
    assert "100 of 400 blocks" in row(lines, "device")
    assert "200.0 MiB of 1.0 GiB   60%      33.6 MB/s" in row(lines, "host")
    assert "all 100.0 ms / 982.0 ms" in row(lines, "first token")
    assert "3 running, 4 waiting" in row(lines, "sequences")
    assert "cold" not in "\n".join(lines)
    assert "sessions" not in "\n".join(lines)


def test_before_anything_has_happened() -> None:
    history = History()
    history.add(0.0, samples())
    snapshot = Snapshot(
        "http://h", "penstock", Facts(sessions=()), make_view(history), 0.0, 0.0, 0.0
    )
    lines = drawn(snapshot, now=0.0)
    assert "no tier has reported yet" in lines
    assert "no sessions" in lines
    assert "no problems" in lines


def rendered(**environment: str) -> str:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=80, height=24, _environ=environment, markup=False
    )
    console.print(Screen(make_look(), 100.0))
    return file.getvalue()


def test_colours_only_where_they_are_wanted() -> None:
    red = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert red.search(rendered(TERM="xterm-256color"))
    assert not red.search(rendered(TERM="xterm-256color", NO_COLOR="1"))
    assert "\x1b" not in rendered(TERM="dumb")
    assert "RESTING" in rendered(TERM="dumb")


# The command, against a server that says what it is told.


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    made.answers["/metrics"] = exposed(usage(), work(), trouble())
    yield made
    made.close()


def test_once_in_json(run: Run, stand: Stand) -> None:
    told = {"version": "1.2", "phase": "serving", "models": ["m"], "num_sessions": 1}
    stand.tell(STATE, told | {"sessions": [session(1)]})
    ran = run("top", stand.url, "--once", "--json", "--interval", 0.1)
    assert (ran.code, ran.stderr) == (0, "")
    found = ran.json
    assert set(found) == {
        *("url", "host", "version", "models", "unix_seconds", "phase", "view"),
        *("sessions", "num_sessions", "note"),
    }
    assert found["url"] == stand.url
    assert (found["host"], found["version"], found["phase"]) == ("penstock", "1.2", "serving")
    assert found["sessions"] == [session(1)]
    assert found["view"]["is_since_start"] is True
    assert found["view"]["hit_rate"] == pytest.approx(0.5)
    assert found["view"]["tokens_per_second"] == 0
    assert [path for path, _ in stand.asked].count("/metrics") == 2


def test_once_has_rates(run: Run, stand: Stand) -> None:
    texts = [exposed(work(times)) for times in (1, 2)]
    stand.answers["/metrics"] = lambda: texts.pop(0)
    view = run("top", stand.url, "--once", "--json", "--interval", 0.1).json["view"]
    assert view["tokens_per_second"] > 0
    assert view["flows"][0]["bytes_per_second"] > 0


def test_without_a_terminal_it_looks_once(run: Run, stand: Stand) -> None:
    ran = run("top", stand.url, "--interval", 0.1)
    assert (ran.code, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert "hits, P50 / P99 since its start" in ran.stdout
    assert "RESTING (12)" in ran.stdout
    assert ran.stdout.endswith("\n")
    assert max(map(len, ran.stdout.splitlines())) <= 100


@pytest.mark.parametrize("ending", ["", "/", "/metrics", "/v1"])
def test_urls_as_people_write_them(run: Run, stand: Stand, ending: str) -> None:
    found = run("top", f"{stand.url}{ending}", "--once", "--json", "--interval", 0.1).json
    assert found["url"] == stand.url
    assert {path for path, _ in stand.asked} == {"/metrics", STATE, "/health"}


def test_vllm_with_the_connector(run: Run, stand: Stand) -> None:
    stand.answers["/metrics"] = vllm_text().encode()
    found = run("top", stand.url, "--once", "--json", "--interval", 0.1).json
    assert (found["host"], found["models"]) == ("vllm", ["smol"])
    assert found["sessions"] is None
    assert found["view"]["sequences"] == {"running": 3, "waiting": 4}


def test_a_key_that_is_wanted(run: Run, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.answers[STATE] = 401
    ran = run("top", stand.url, "--interval", 0.1)
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.count(NEEDS_KEY) == 1
    monkeypatch.setenv("PENSTOCK_API_KEY", "s3cret")
    assert "the given key is wrong" in run("top", stand.url, "--interval", 0.1).stdout
    assert (STATE, "Bearer s3cret") in stand.asked


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<!doctype html>", "has no metrics: line 1"),
        (b"go_threads 7\n", "has no metrics of Penstock"),
        (b"vllm:num_requests_running 0\n", "this is vLLM without Penstock"),
        (404, "answers with 404"),
    ],
)
@pytest.mark.parametrize("options", [["--once"], ["--json"], []])
def test_servers_that_are_not_ours(
    run: Run, stand: Stand, answer: bytes | int, words: str, options: list[str]
) -> None:
    stand.answers["/metrics"] = answer
    assert words in run("top", stand.url, *options).refusal


def test_one_that_goes_between_the_two_looks(run: Run, stand: Stand) -> None:
    answers: list[bytes] = [exposed(work()), b""]
    stand.answers["/metrics"] = lambda: answers.pop(0)
    assert "has no metrics" in run("top", stand.url, "--once", "--interval", 0.1).refusal


def test_nobody_there(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refusal = run("top", f"http://user:secret@127.0.0.1:{port}", "--once").refusal
    assert "does not answer (Connection refused)" in refusal
    assert "secret" not in refusal


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ftp://host"], "the URL is"),
        (["http://h", "--interval", "0"], "--interval"),
        (["http://h", "--api-key", "a\nb"], "an HTTP header cannot contain"),
    ],
)
def test_what_cannot_be(run: Run, argv: list[str], words: str) -> None:
    assert words in run("top", *argv).refusal


# As a process of its own.


def command(stand: Stand, *options: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "top", stand.url, "--interval", "0.1", *options]


def test_a_line_per_interval_also_while_the_server_is_away(stand: Stand) -> None:
    process = subprocess.Popen(
        command(stand, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = (json.loads(line) for line in process.stdout)
        assert next(lines)["view"]["tokens_per_second"] == 0
        metrics = stand.answers.pop("/metrics")
        away = next(line for line in lines if line["phase"] == "unreachable")
        assert "answers with 404" in away["error"]
        stand.answers["/metrics"] = metrics
        assert next(line for line in lines if line["phase"] != "unreachable")["view"]
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, stderr) == (0, "")


class Terminal:
    """A process behind a terminal of 80 by 24."""

    def __init__(self, argv: list[str], **environment: str) -> None:
        self.fd, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        dropped = ("NO_COLOR", "COLUMNS", "LINES")
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        # A session's leader that opens a terminal is ruled by it: so Ctrl-C comes as a signal.
        opening = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>"$0"', os.ttyname(slave)]
        self.process = subprocess.Popen(
            [*opening, *argv],
            env={**inherited, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
            start_new_session=True,
        )
        self.slave = slave
        self.shown = ""

    def wait_for(self, words: str) -> None:
        """Until it draws this, from now on."""
        self.shown = ""
        end = time.monotonic() + TIMEOUT_SECONDS
        while words not in self.shown:
            assert time.monotonic() < end, f"{words!r} was not drawn: {self.shown[-3000:]}"
            self.read()

    def read(self) -> None:
        if select.select([self.fd], [], [], 0.1)[0]:
            self.shown += os.read(self.fd, 1 << 16).decode(errors="replace")

    def end(self) -> int:
        wait_until(lambda: self.read() or self.process.poll() is not None, "it ends")
        self.read()
        return self.process.returncode


@contextmanager
def terminal(argv: list[str], **environment: str) -> Iterator[Terminal]:
    made = Terminal(argv, **environment)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        os.close(made.slave)
        os.close(made.fd)


@pytest.mark.parametrize("ending", ["q", "\x03", "SIGTERM"])
def test_live_until_it_is_ended(stand: Stand, ending: str) -> None:
    with terminal(command(stand)) as screen:
        screen.wait_for("\x1b[?1049h")  # another screen than the shell's
        screen.wait_for("RESTING (12)")
        if ending == "SIGTERM":
            screen.process.terminate()
        else:
            os.write(screen.fd, ending.encode())
        assert screen.end() == 0
        assert "\x1b[?1049l" in screen.shown
        assert "\x1b[?25h" in screen.shown
        assert "Traceback" not in screen.shown
        assert termios.tcgetattr(screen.slave) == screen.before


def test_live_it_tells_of_a_server_that_is_gone_and_finds_it_again(stand: Stand) -> None:
    port, answers = stand.port, stand.answers
    with terminal(command(stand)) as screen:
        screen.wait_for("RESTING (12)")
        stand.close()
        screen.wait_for("no answer for")
        screen.wait_for("RESTING (12)")  # as it was
        again = Stand(port)
        try:
            again.answers = answers | {"/metrics": exposed(usage(), work(2))}
            screen.wait_for("no problems")
            assert "no answer" not in screen.shown.rpartition("penstock top")[2]
            os.write(screen.fd, b"q")
            assert screen.end() == 0
        finally:
            again.close()


@pytest.mark.parametrize(
    ("environment", "is_live"), [({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False)]
)
def test_terminals_without_colours(
    stand: Stand, environment: dict[str, str], is_live: bool
) -> None:
    with terminal(command(stand), **environment) as screen:
        screen.wait_for("RESTING (12)")
        if is_live:
            os.write(screen.fd, b"q")
        else:
            assert "\x1b" not in screen.shown
        assert screen.end() == 0
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]", screen.shown)


# Against a real server.


@pytest.fixture
def serve(cache: Path) -> Iterator[Callable[..., Local]]:
    made: list[Local] = []

    def make(**options: Any) -> Local:
        made.append(Local(make_tiny(cache), **options).start())
        return made[-1]

    yield make
    for server in made:
        server.stop()


def test_a_real_server_at_work(run: Run, serve: Callable[..., Local]) -> None:
    server = serve().slow_down(0.05)
    body = {"prompt": "Once", "max_tokens": 400, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        found = run("top", server.url, "--once", "--json", "--interval", 0.5).json
        (seen,) = found["sessions"]
        text = run("top", server.url, "--interval", 0.1).stdout
    assert (found["phase"], found["models"]) == ("serving", ["tiny"])
    assert seen["phase"] == "running"
    assert seen["resident_blocks"] >= 1
    assert found["view"]["sequences"]["running"] == 1
    assert found["view"]["tokens_per_second"] > 0
    assert "1 running" in text
    assert "sessions (1)" in text


def test_a_real_server_with_a_key(run: Run, serve: Callable[..., Local]) -> None:
    server = serve(settings=AppSettings(api_key="s3cret"))
    without = run("top", server.url, "--once", "--json", "--interval", 0.1).json
    assert (without["note"], without["sessions"]) == (NEEDS_KEY, None)
    assert without["phase"] == "serving"
    argv = ["top", server.url, "--once", "--json", "--interval", 0.1, "--api-key", "s3cret"]
    found = run(*argv).json
    assert (found["note"], found["sessions"]) == (None, [])
    assert found["models"] == ["tiny"]
