"""Kill a server in the middle of an answer, and resume the conversation from its disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage import DTYPE, MODEL, Answer, Stage, ask
from texts import question

SEED = 500
_WORDS_BEFORE_KILL = 4
_MAX_SECONDS = 120
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's answer to one request."""

    text: str
    first_token_seconds: float
    num_prompt: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Restart:
    first: Reply  # turn 1: computed
    num_words_before_kill: int  # of turn 2's answer, when the server was killed
    resumed: Reply  # turn 2, sent again to the second server
    computed_seconds: float  # turn 2's first token by an engine without tiers
    start_seconds: tuple[float, float]  # of the two servers
    disk_bytes: int
    identical: bool


def play(stage: Stage, num_tokens: int, num_answer: int, directory: Path) -> Restart:
    """Run turn 1, kill -9 during turn 2, restart, repeat turn 2; compute both without tiers."""
    screen, first_turn = stage.screen, _opening(stage, num_tokens)
    with _serve(stage, directory) as (url, process, first_start):
        _chat(url, [{"role": "user", "content": "Good morning."}], 2)  # warm
        with screen.progress(f"turn 1 of the conversation, {num_tokens:,} tokens"):
            first = _chat(url, first_turn, num_answer)
        screen.say(f"  turn 1: first token after {first.first_token_seconds:.2f} s, computed")
        second_turn = [
            *first_turn,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": question(SEED + 1)},
        ]
        words = []
        for word in _words(url, second_turn, num_answer, {}):
            words.append(word)
            if len(words) == _WORDS_BEFORE_KILL:
                process.send_signal(signal.SIGKILL)
                break
    screen.say(f"  turn 2: kill -9 after {len(words)} words of the answer", style="red")
    with _serve(stage, directory) as (url, _, second_start):
        _chat(url, [{"role": "user", "content": "Good morning."}], 2)  # warm
        with screen.progress("turn 2 again, with a new server on the same disk"):
            resumed = _chat(url, second_turn, num_answer)
    screen.say(
        f"  turn 2 again: first token after {resumed.first_token_seconds:.2f} s, "
        f"{resumed.num_cached:,} of {resumed.num_prompt:,} tokens from disk"
    )
    disk_bytes = sum(file.stat().st_blocks * 512 for file in directory.rglob("*"))
    texts, computed = _without_tiers(stage, [first_turn, second_turn], num_answer)
    hold = stage.comparison.hold
    same = [
        hold("the server's turn 1", texts[0], first.text),
        hold("turn 2 up to the kill", texts[1][: len("".join(words))], "".join(words)),
        hold("turn 2 after the restart", texts[1], resumed.text),
    ]
    return Restart(
        first,
        len(words),
        resumed,
        computed[1].first_token_seconds,
        (first_start, second_start),
        disk_bytes,
        all(same),
    )


def _opening(stage: Stage, num_tokens: int) -> Messages:
    text = f"{stage.writer.text(SEED, num_tokens - 50)}\n\n{question(SEED)}"
    return [{"role": "user", "content": text}]


def _without_tiers(
    stage: Stage, turns: list[Messages], num_answer: int
) -> tuple[list[str], list[Answer]]:
    """Run the same prompts in an engine without tiers, with an empty pool for each."""
    prompts = [stage.writer.chat(messages) for messages in turns]
    answers = []
    with stage.engine(len(prompts[-1]) + num_answer + 64, 32) as engine:
        for number, prompt in enumerate(prompts, 1):
            engine.pool.forget()
            with stage.screen.progress(f"turn {number} without tiers, for comparison") as tick:
                answers += ask(engine, [prompt], num_answer, tick)
    decode = stage.loaded.tokenizer.decode
    return [decode(answer.token_ids, skip_special_tokens=True) for answer in answers], answers


@contextmanager
def _serve(stage: Stage, directory: Path) -> Iterator[tuple[str, subprocess.Popen[str], float]]:
    """Run a server on a free port; it is stopped at the end, unless it was killed before."""
    command = [sys.executable, "-m", "penstock", "serve", MODEL, "--dtype", DTYPE]
    command += ["--kv-offloading-size", "0.5", "--disk-path", str(directory), "--disk-size", "1"]
    command += ["--host", "127.0.0.1", "--port", "0", "--json"]
    log = directory.with_suffix(".log")
    started = time.monotonic()
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            with stage.screen.progress("starting penstock serve"):
                url = _url(process, log)
            yield url, process, time.monotonic() - started
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            url = json.loads(line)["url"]
        except (ValueError, KeyError, TypeError):
            continue
        return str(url)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")


def _chat(url: str, messages: Messages, max_tokens: int) -> Reply:
    usage: dict[str, Any] = {}
    started = time.monotonic()
    first, text = 0.0, ""
    for word in _words(url, messages, max_tokens, usage):
        first = first or time.monotonic() - started
        text += word
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(text, first, usage["prompt_tokens"], cached)


def _words(url: str, messages: Messages, max_tokens: int, usage: dict[str, Any]) -> Iterator[str]:
    """The answer as it is streamed; `usage` is filled at its end."""
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_MAX_SECONDS) as stream:
        for line in stream:
            data = line.decode().strip().removeprefix("data: ")
            if not data.startswith("{"):
                continue
            chunk = json.loads(data)
            usage.update(chunk.get("usage") or {})
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
