"""`serve --record`: what it writes of real requests, what it keeps to itself, and how it fails."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server.running import TIMEOUT_SECONDS, Client, Spawned, wait_until
from tools import Faulty

from penstock.errors import ConfigError
from penstock.events import Refused, Served
from penstock.server.record import Recorder
from penstock.sim.formats import read_record, read_trace
from penstock.types import BlockKey, Tier

STORY = "A penstock carries water from the reservoir to the turbine. " * 12
BLOCK_TOKENS = 16


def ask(client: Client, prompt: Any, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_real_requests_are_recorded(spawn: Callable[..., Spawned], tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    server = spawn("--record", path, "--block-tokens", BLOCK_TOKENS, "--kv-offloading-size", 0.1)
    server.wait_ready()
    with server.client() as client:
        answers = [ask(client, STORY), ask(client, STORY)]
        text = STORY + answers[0]["choices"][0]["text"] + " And then it went on to say more."
        answers += [ask(client, text), ask(client, STORY, cache_salt="secret-name")]
        mark = {"penstock": {"reuse": "anywhere"}}
        marked_text = {"segments": ["Read this first.", {"text": STORY * 2, **mark}, "What is it?"]}
        answers.append(ask(client, marked_text))
        wait_until(lambda: num_lines(path) == 6, "the lines are written while it serves")
    assert server.end() == 0

    record = read_record(path)
    assert (record.block_tokens, record.model) == (BLOCK_TOKENS, "smollm2-135m")
    assert int(record.settings["device_blocks"]) > 0
    for answer, each in zip(answers, record.requests, strict=True):
        usage, request = answer["usage"], each.request
        assert request.num_input_tokens == usage["prompt_tokens"]
        assert request.num_output_tokens == usage["completion_tokens"] == 20
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert sum(each.hit_tokens.values()) == cached
        assert len(request.prompt_blocks) == usage["prompt_tokens"] // BLOCK_TOKENS
        num_there = (usage["total_tokens"] - 1) // BLOCK_TOKENS
        assert len(request.prompt_blocks) + len(request.output_blocks) == num_there
        assert each.first_token_seconds is not None
        assert each.total_seconds is not None
        assert 0 < each.first_token_seconds < each.total_seconds
        assert each.finish_reason == "length"
    first, second, longer, other, marked = record.requests
    details = answers[-1]["usage"]["prompt_tokens_details"]
    assert marked.num_reused_tokens == details["reused_tokens"] > 0
    assert marked.num_mended_tokens == details["mended_tokens"] == 64
    (segment,) = marked.request.segments
    assert segment.num_first_tokens == 64
    num_blocks = len(first.request.prompt_blocks)  # the segment begins with the same text
    assert segment.blocks[: num_blocks - 1] == first.request.prompt_blocks[: num_blocks - 1]
    assert len(marked.request.plain_blocks) == len(marked.request.prompt_blocks)
    assert marked.request.plain_blocks != marked.request.prompt_blocks
    assert read_trace(path).has_segments
    assert first.hit_tokens == {}
    assert set(second.hit_tokens) == {Tier.DEVICE}
    assert second.request.prompt_blocks == first.request.prompt_blocks
    # What was found is what an earlier request had made, block by block.
    there = [*first.request.prompt_blocks, *first.request.output_blocks]
    num_found = longer.hit_tokens[Tier.DEVICE] // BLOCK_TOKENS
    assert list(longer.request.prompt_blocks[:num_found]) == there[:num_found]
    assert num_found >= len(first.request.prompt_blocks)
    assert not set(other.request.prompt_blocks) & set(first.request.prompt_blocks)
    assert (first.request.session == "") != (other.request.session == "")
    assert read_trace(path) == record.trace
    written = path.read_text()
    for secret in ("penstock carries", "turbine", "secret-name", "cache_salt", str(tmp_path)):
        assert secret not in written
    assert path.stat().st_mode & 0o077 == 0


def test_when_the_disk_is_full_it_warns_once_and_serves_on(
    spawn: Callable[..., Spawned], tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "record.jsonl"
    server = spawn(tiny, "--record", path, "--kv-offloading-size", 0, "--device-kv-gib", 0.02)
    server.wait_ready()
    with server.client() as client:
        ask(client, "One two")
        wait_until(lambda: num_lines(path) == 2, "a line is written")
        size = path.stat().st_size + 10  # room for a part of a line
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, size))
        for _ in range(3):
            ask(client, "One two")
        wait_until(lambda: "recording has ended" in server.stderr, "it warns")
        client.check_serves()
    assert server.end() == 0
    assert server.stderr.count("can no longer be written") == 1
    assert len(read_trace(path).requests) == 1  # no half line is left


def test_a_server_goes_on_with_its_record(
    spawn: Callable[..., Spawned], tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "record.jsonl"
    options = ("--record", path, "--kv-offloading-size", 0, "--device-kv-gib", 0.02)
    server = spawn(tiny, *options)
    server.wait_ready()
    with server.client() as client:
        ask(client, STORY)
        wait_until(lambda: num_lines(path) == 2, "a line is written")
        busy = spawn(tiny, *options)
        assert busy.process.wait(120) == 2
        assert "is being written by another server" in busy.stderr
    server.end(signal.SIGKILL)
    with path.open("ab") as file:
        file.write(b'{"arrival_seconds": 5, "inp')  # as a crash leaves it
    again = spawn(tiny, *options)
    again.wait_ready()
    with again.client() as client:
        ask(client, STORY)
    assert again.end() == 0
    first, second = read_trace(path).requests
    assert second.arrival_seconds > first.arrival_seconds
    assert not set(second.prompt_blocks) & set(first.prompt_blocks)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "cannot be written (Is a directory)"),
        (lambda path: path.write_text("Dear diary"), "exists and is not a record"),
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.symlink_to("/dev/full"), "is not a regular file"),
        (
            lambda path: path.symlink_to(path.parent / "nowhere" / "x"),
            "(No such file or directory)",
        ),
    ],
    ids=["folder", "other", "pipe", "device", "nowhere"],
)
def test_a_file_that_cannot_be_had_is_refused_at_once(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    make(path)
    with pytest.raises(ConfigError) as raised:
        Recorder(path)
    assert words in str(raised.value)
    assert str(raised.value).startswith(f"--record {path} ")
    if path.is_file():
        assert path.read_text() == "Dear diary"


def served(number: int, **fields: Any) -> Served:
    facts: dict[str, Any] = {
        "arrival": time.monotonic(),
        "num_prompt": 40,
        "num_output": 3,
        "prompt_keys": (BlockKey(bytes([number]) * 32),),
        "output_keys": (),
        "found": ((Tier.DEVICE, 1), (Tier.REMOTE, 2)),
        "tenant": "",
        "reason": "stop",
        "seconds": 1.0,
        "first_token_seconds": None,
    }
    return Served(**{**facts, **fields})


def test_other_events_are_passed_over_and_all_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "record"
    recorder = Recorder(path)
    recorder(served(0))  # before it has begun: nobody knows the block's size yet
    recorder.begin(16, "m", {})
    recorder(Refused("busy"))
    for number in range(600):
        recorder(served(number % 250))
    recorder.close()
    record = read_record(path)
    assert len(record.requests) == 600
    assert record.requests[0].hit_tokens == {Tier.DEVICE: 16, Tier.REMOTE: 32}
    assert len({each.request.prompt_blocks for each in record.requests}) == 250
    assert json.loads(path.read_text().splitlines()[1])["prompt_blocks"][0] != "00" * 16


def test_another_block_size_needs_another_file(tmp_path: Path) -> None:
    path = tmp_path / "record"
    first = Recorder(path)
    first.begin(16, "m", {})
    first.close()
    second = Recorder(path)
    with pytest.raises(
        ConfigError, match="has blocks of 16 tokens, but this server's blocks have 32"
    ):
        second.begin(32, "m", {})
    second.close()


def test_a_disk_that_is_full_at_the_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", Faulty(os.write, full, "record"))
    recorder = Recorder(tmp_path / "record")
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        recorder.begin(16, "m", {})
    recorder.close()


def test_what_cannot_be_written_in_time_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.server")
    path = tmp_path / "record"
    recorder = Recorder(path)
    recorder.begin(16, "m", {})

    may_write = threading.Event()

    def slow(call: Callable[..., int], *args: Any) -> int:
        assert may_write.wait(TIMEOUT_SECONDS)
        return call(*args)

    monkeypatch.setattr(os, "write", Faulty(os.write, slow, "record"))
    for _ in range(6000):  # more than are kept waiting: it waits for no disk
        recorder(served(1))
    may_write.set()
    recorder.close()
    num_written = len(read_trace(path).requests)
    assert 4096 <= num_written < 6000
    assert f"requests left out of {path}: {6000 - num_written}\n" in caplog.text
    assert caplog.text.count("is too slow") == 1
