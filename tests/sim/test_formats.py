"""Traces from files: each format as its makers write it, and all that can be wrong with one."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, TraceError
from penstock.sim.formats import FORMATS, lines, read_record, read_trace, write_trace
from penstock.sim.trace import Trace, TraceRequest
from penstock.sim.workloads import generate
from penstock.types import KEY_BYTES, BlockKey, Tier

ROOT = Path(__file__).parent.parent.parent
MOONCAKE = (
    Path(os.environ.get("PENSTOCK_TRACES", ROOT.parent / "shared" / "traces"))
    / "mooncake"
    / "conversation_trace.jsonl"
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Makes a file of lines, each as it is or as JSON."""

    def make(*given: object, name: str = "trace.jsonl", end: str = "\n") -> Path:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in given]
        (tmp_path / name).write_text("\n".join(texts) + end)
        return tmp_path / name

    return make


def moon(timestamp: object = 0, num_input: object = 1000, ids: object = (1, 2), **more: Any) -> Any:
    fields = {"timestamp": timestamp, "input_length": num_input, "output_length": 5}
    return {**fields, "hash_ids": list(ids) if isinstance(ids, tuple) else ids, **more}


def num_shared(first: TraceRequest, second: TraceRequest) -> int:
    """How many leading blocks of the second the first has made."""
    there = {*first.prompt_blocks, *first.output_blocks}
    found = [block in there for block in second.prompt_blocks]
    return found.index(False) if False in found else len(found)


def test_mooncake(write: Callable[..., Path]) -> None:
    path = write(moon(500), moon(2000, 1500, (1, 2, 3)), moon(2000, 512, (9,)), name="a.b.jsonl")
    trace = read_trace(path)
    assert (trace.name, trace.block_tokens) == ("a.b", 512)
    assert [request.arrival_seconds for request in trace.requests] == [0, 1.5, 1.5]
    assert [request.num_input_tokens for request in trace.requests] == [1000, 1500, 512]
    assert [request.num_output_tokens for request in trace.requests] == [5, 5, 5]
    first, second, third = (request.prompt_blocks for request in trace.requests)
    assert second[:2] == first
    assert third[0] not in second
    assert {len(key) for key in (*second, *third)} == {KEY_BYTES}
    assert second[0] is first[0]  # kept once


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"needs the Mooncake trace at {MOONCAKE.name}")
def test_the_mooncake_trace() -> None:
    trace = read_trace(MOONCAKE)
    assert len(trace.requests) == 12031
    seen: set[BlockKey] = set()
    num_hits = num_blocks = 0
    for request in trace.requests:
        num_blocks += len(request.prompt_blocks)
        hits = [block in seen for block in request.prompt_blocks]
        num_hits += hits.index(False) if False in hits else len(hits)
        seen.update(request.prompt_blocks)
    assert num_blocks == 288500
    assert round(num_hits / num_blocks, 3) == 0.366  # as published for an unbounded cache
    assert len({id(key) for request in trace.requests for key in request.prompt_blocks}) == len(
        seen
    )


def test_bailian(write: Callable[..., Path]) -> None:
    def line(when: float, chat: int, parent: int, *ids: int) -> object:
        return moon(when, 16 * len(ids) - 5, ids, chat_id=chat, parent_chat_id=parent, type="text")

    path = write(line(61.5, 7, -1, 1, 2, 3), line(62, 9, 7, 1, 2, 3, 4), line(63, 11, 9, 5, 2, 3))
    trace = read_trace(path)
    first, second, third = trace.requests
    assert trace.block_tokens == 16
    assert second.arrival_seconds == 0.5
    assert [each.session for each in trace.requests] == ["7", "7", "7"]
    assert num_shared(first, second) == 3
    assert not set(second.prompt_blocks) & set(third.prompt_blocks)  # an id is its block alone


def test_azure(write: Callable[..., Path]) -> None:
    first_lines = "TIMESTAMP,ContextTokens,GeneratedTokens", "OutputTokens,PromptTokens,TIMESTAMP"
    rows = [
        ("2023-11-16 18:17:03.9799600,300,10", "2023-11-16 18:17:04.4799600,300,129"),
        ("10,300,2024-05-10 00:00:00.5+00:00", "129,300,2024-05-10 00:00:01+00:00"),
    ]
    for head, given in zip(first_lines, rows, strict=True):
        trace = read_trace(write(head, *given, name="azure.csv"))
        first, second = trace.requests
        assert second.arrival_seconds == pytest.approx(0.5)
        assert (first.num_input_tokens, first.num_output_tokens) == (300, 10)
        assert (len(first.prompt_blocks), len(first.output_blocks)) == (2, 0)
        assert (len(second.prompt_blocks), len(second.output_blocks)) == (2, 1)
        assert num_shared(first, second) == 0


def test_requests_with_token_ids(write: Callable[..., Path]) -> None:
    prompt, output = list(range(40)), list(range(100, 110))
    path = write(
        {"timestamp": 5, "prompt_token_ids": prompt, "output_token_ids": output, "user": "a"},
        {"timestamp": 6.25, "input_ids": [*prompt, *output, *prompt], "output_length": 7},
        {"timestamp": 7, "prompt": [1, *prompt]},
    )
    first, second, third = read_trace(path).requests
    assert (first.num_input_tokens, first.num_output_tokens, first.session) == (40, 10, "a")
    assert (len(first.prompt_blocks), len(first.output_blocks)) == (2, 1)
    assert num_shared(first, second) == 3
    assert (second.arrival_seconds, second.num_output_tokens) == (1.25, 7)
    assert num_shared(second, third) == 0
    assert third.num_output_tokens == 1
    wide = read_trace(path, block_tokens=50)
    assert [len(each.prompt_blocks) for each in wide.requests] == [0, 1, 0]
    # The answer's last token is not read, so that it completes no block.
    assert wide.requests[0].output_blocks == ()


def test_requests_with_text(write: Callable[..., Path]) -> None:
    story = "Once upon a time, a penstock carried water to the turbine below the dam. " * 4
    chat = [{"role": "system", "content": story}, {"role": "user", "content": "Why?"}]
    parts = [{"type": "text", "text": story}]
    path = write(
        {"arrival_time": "2025-01-31T12:00:00Z", "prompt": story, "output": "Yes it did."},
        {"arrival_time": "2025-01-31T12:00:03Z", "text": story + "The end."},
        {"arrival_time": "2025-01-31T12:00:04Z", "messages": chat},
        {
            "arrival_time": "2025-01-31T12:00:05Z",
            "messages": [{"role": "system", "content": parts}, chat[1], chat[1]],
        },
    )
    first, second, third, fourth = read_trace(path).requests
    assert second.arrival_seconds == 3
    assert 4 * 14 < first.num_input_tokens < 4 * 22  # 14 words, and punctuation
    assert num_shared(first, second) == len(first.prompt_blocks) == first.num_input_tokens // 16
    assert num_shared(third, fourth) == len(third.prompt_blocks) > 0
    assert first.num_output_tokens == 4


VLLM_NEW = """\
(APIServer pid=9) INFO:     Application startup complete.
(APIServer pid=9) DEBUG 12-31 23:59:58 [logger.py:41] Request a-1 details: prompt: None, \
prompt_token_ids: {first}, prompt_embeds shape: None.
(APIServer pid=9) INFO 12-31 23:59:58 [logger.py:49] Received request a-1: params: \
SamplingParams(n=1, stop=[], stop_token_ids=[5], max_tokens=100), lora_request: None.
(APIServer pid=9) INFO 12-31 23:59:59 [logger.py:80] Generated response a-1 (streaming delta): \
output: ', output_token_ids: [1]', output_token_ids: [50, 51], finish_reason: None
(APIServer pid=9) INFO 12-31 23:59:59 [logger.py:80] Generated response a-1 (streaming delta): \
output: 'x', output_token_ids: [52], finish_reason: length
(APIServer pid=9) INFO 12-31 23:59:59 [logger.py:80] Generated response a-1 (streaming complete): \
output: 'x', output_token_ids: None, finish_reason: streaming_complete
(APIServer pid=9) DEBUG 01-01 00:00:01 [logger.py:41] Request a-2 details: prompt: 'it\\'s', \
prompt_token_ids: {second}, prompt_embeds shape: None."""
VLLM_OLD = """\
INFO 10-01 18:43:27 logger.py:36] Received request a-1: prompt: 'What is', params: \
SamplingParams(n=1, stop_token_ids=[]), prompt_token_ids: {first}, lora_request: None, \
prompt_adapter_request: None.
INFO 10-01 18:43:30 logger.py:36] Received request a-2: prompt: "it's", prefix_pos: None, \
sampling params: SamplingParams(n=1), prompt token ids: {second}, lora_request: None."""


def test_vllm(write: Callable[..., Path]) -> None:
    prompt = list(range(30))
    texts = {"first": prompt, "second": [*prompt, 50, 51, 7, *prompt]}
    first, second = read_trace(write(VLLM_NEW.format(**texts), name="vllm.log")).requests
    assert (first.num_input_tokens, first.num_output_tokens) == (30, 3)
    assert (len(first.prompt_blocks), len(first.output_blocks)) == (1, 1)
    assert num_shared(first, second) == 2
    assert second.arrival_seconds == 3  # over the end of a year
    first, second = read_trace(write(VLLM_OLD.format(**texts))).requests
    assert (first.num_input_tokens, first.num_output_tokens) == (30, 1)
    assert num_shared(first, second) == 1
    assert second.arrival_seconds == 3


def test_vllm_in_json_lines_and_without_ids(write: Callable[..., Path]) -> None:
    text = " ".join(f"word{number}" for number in range(20)) + ", 'quoted'"
    message = "Request {} details: prompt: {!r}, prompt_token_ids: None, prompt_embeds shape: None."
    path = write(
        {"timestamp": "2025-01-01T00:00:00", "level": "INFO", "message": "starting"},
        {"timestamp": "2025-01-01T00:00:01,500", "message": message.format("a", text)},
        {"timestamp": "2025-01-01T00:00:02,750", "message": message.format("b", text + ' "x"')},
    )
    first, second = read_trace(path).requests
    assert second.arrival_seconds == 1.25
    assert first.num_input_tokens == 24
    assert num_shared(first, second) == 1


def test_a_vllm_log_without_prompts_says_what_to_switch_on(write: Callable[..., Path]) -> None:
    bare = "INFO 02-13 11:33:33 [logger.py:49] Received request a: params: SamplingParams(n=1)."
    with pytest.raises(TraceError, match="VLLM_LOGGING_LEVEL=DEBUG"):
        read_trace(write(bare))


def sglang(event: str, rid: object, when: str, ids: object, **more: Any) -> Any:
    obj = {"rid": rid, "text": None, "input_ids": ids, "session_params": {"id": "s"}}
    return {"timestamp": when, "event": f"request.{event}", "rid": rid, "obj": obj, **more}


def test_sglang(write: Callable[..., Path]) -> None:
    prompt = list(range(30))
    out = {"output_ids": [50, 51, 52], "meta_info": {"completion_tokens": 3, "e2e_latency": 2.0}}
    longer = [*prompt, 50, 51, 7]
    path = write(
        sglang("received", "HEALTH_CHECK_1", "2025-08-04T11:51:40", [0]),
        sglang("received", "a", "2025-08-04T11:51:41.5", prompt),
        sglang("received", "b", "2025-08-04T11:51:43", longer),
        sglang("received", ["c", "d"], "2025-08-04T11:51:43", [prompt, prompt]),
        sglang("finished", "b", "2025-08-04T11:51:44", longer, out=out),
        sglang("finished", "a", "2025-08-04T11:51:45", prompt, out=out),
        sglang("finished", "early", "2025-08-04T11:51:43.25", prompt, out=out),
        sglang("received", "never ends", "2025-08-04T11:51:46", prompt),
    )
    trace = read_trace(path)
    early, a, b, last = trace.requests
    arrivals = [request.arrival_seconds for request in trace.requests]
    assert arrivals == pytest.approx([0, 0.25, 1.75, 4.75])
    assert (a.num_input_tokens, a.num_output_tokens, a.session) == (30, 3, "s")
    assert num_shared(a, b) == 2
    assert last.num_output_tokens == 1
    assert early.prompt_blocks == a.prompt_blocks


def test_sglang_metrics(write: Callable[..., Path]) -> None:
    def line(when: float, **params: object) -> object:
        more = {"completion_tokens": 9, "request_received_ts": when, "e2e_latency": 1.0}
        return {"request_parameters": json.dumps(params), **more}

    prompt = list(range(40))
    path = write(line(100.5, rid="b", text="one two"), line(100.0, rid="a", input_ids=prompt))
    first, second = read_trace(path).requests
    assert (first.num_input_tokens, len(first.prompt_blocks)) == (40, 2)
    assert (second.arrival_seconds, second.num_input_tokens) == (0.5, 2)
    with pytest.raises(TraceError, match=r"line 1: the request has no prompt.*level 3"):
        read_trace(write(line(1.0, rid="a")))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    trace = generate("chat", num_requests=50, seed=3, block_tokens=32)
    for name in ("chat.jsonl", "chat.jsonl.gz"):
        write_trace(trace, tmp_path / name)
        assert read_trace(tmp_path / name) == trace
    with pytest.raises(TraceError, match="block_tokens is 16, but the record's blocks have 32"):
        read_trace(tmp_path / "chat.jsonl", block_tokens=16)


HEADING = {"penstock_record": 1, "block_tokens": 16, "model": "m", "started_seconds": 1000.0}


def recorded(arrival: float, *names: str, **more: Any) -> Any:
    fields = {"arrival_seconds": arrival, "input_tokens": 40, "output_tokens": 9}
    return {**fields, "prompt_blocks": list(names), "output_blocks": [], "session": "", **more}


def test_a_record_knows_what_became_of_its_requests(write: Callable[..., Path]) -> None:
    a, b = "0a" * 16, "0b" * 16
    truth = {"hit_tokens": {"device": 16, "disk": 32}, "first_token_seconds": 0.5}
    path = write(
        {**HEADING, "settings": {"host_blocks": 7}},
        recorded(2.0, a, b, total_seconds=3.0, finish_reason="stop", **truth),
        recorded(1.0, a, total_seconds=1.0, finish_reason="abort"),
        {**HEADING, "started_seconds": 1500.0},  # the server went on with the file
        recorded(0.5, b),
    )
    record = read_record(path)
    assert (record.model, record.block_tokens, record.settings) == ("m", 16, {"host_blocks": 7})
    aborted, stopped, later = record.requests
    assert aborted.first_token_seconds is None
    assert stopped.hit_tokens == {Tier.DEVICE: 16, Tier.DISK: 32}
    assert (stopped.first_token_seconds, stopped.total_seconds) == (0.5, 3.0)
    assert later.request.arrival_seconds == 500.5
    assert later.total_seconds is None
    assert num_shared(aborted.request, stopped.request) == 1
    assert read_trace(path) == record.trace
    assert {len(key) for key in stopped.request.prompt_blocks} == {KEY_BYTES}


GOOD_REQUEST = {"timestamp": 1, "prompt_token_ids": [1, 2]}
BAD: dict[str, tuple[list[object], str]] = {
    "a missing time": ([moon(), {"hash_ids": [1]}], "line 2: there is no `timestamp`"),
    "missing ids": (
        [moon(), {"timestamp": 1, "input_length": 3}],
        "line 2: there is no `hash_ids`",
    ),
    "missing length": ([{"hash_ids": [1], "timestamp": 1}], "line 1: there is no `input_length`"),
    "unsorted": ([moon(5), moon(), moon(4)], "line 2: `timestamp` goes back by 0.005 s"),
    "time as text": ([moon("soon")], "line 1: `timestamp` is 'soon': expected a time in milli"),
    "time that is none": (['{"timestamp": NaN, "hash_ids": []}'], "`timestamp` is nan"),
    "endless time": ([moon(10**400)], "line 1: .*timestamp"),
    "a length in text": ([moon(num_input="9")], "`input_length` is '9': expected an integer"),
    "a length as true": ([moon(num_input=True)], "`input_length` is True"),
    "half a token": ([moon(num_input=0.5)], "`input_length` is 0.5"),
    "fewer than no tokens": ([moon(num_input=-1)], "`input_length` is -1"),
    "too many tokens": ([moon(num_input=10**12)], "`input_length` is 1000000000000"),
    "ids as text": ([moon(ids="1,2")], "`hash_ids` is '1,2': expected a list of ids"),
    "an id as text": ([moon(ids=(1, "2"))], "`hash_ids` is .*expected a list of ids"),
    "an id as true": ([moon(ids=(1, True))], "`hash_ids` is"),
    "too few ids": ([moon(ids=())], "0 `hash_ids` for 1000 tokens: expected one for every 512"),
    "other blocks": ([moon(num_input=4000)], "2 `hash_ids` for 4000 tokens"),
    "no chat": (
        [moon(num_input=32, chat_id="a")],
        "line 1: `chat_id` and `parent_chat_id`: expected integers",
    ),
    "an endless id": (
        [moon(num_input=32, ids=(1, 2**70), chat_id=1)],
        "line 1: `hash_ids`: expected",
    ),
    "no JSON": ([moon(), "timestamp 5"], "line 2: this is not a JSON object"),
    "a list": (
        [moon(), "[1, 2]"],
        r"line 2: this is \[1, 2\]: expected one JSON object per line",
    ),
    "deep": ([moon(), "[" * 100_000], "line 2: this is not a JSON object"),
    "another file": (
        ["# A readme", "of some kind"],
        "line 1: this is not a trace in a known format",
    ),
    "another object": ([{"a": 1}], "line 1: this is not a trace in a known format"),
    "a short row": (
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-01-01,5"],
        "line 2: .*columns",
    ),
    "a bad date": (
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,5,5"],
        "line 2: `TIMESTAMP` is 'yesterday'",
    ),
    "a bad count": (
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-01-01 00:00:00,5,many"],
        "line 2: `GeneratedTokens` is 'many': expected an integer number of tokens",
    ),
    "unsorted rows": (
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-01-02,5,5", "2023-01-01,5,5"],
        "line 3: `TIMESTAMP` goes back by 86400.000 s",
    ),
    "only a heading": (["TIMESTAMP,ContextTokens,GeneratedTokens"], "it contains no request"),
    "no prompt": ([GOOD_REQUEST, {"timestamp": 2}], "line 2: there is no prompt"),
    "no time": ([GOOD_REQUEST, {"prompt": "x"}], "line 2: there is no time"),
    "time back": ([GOOD_REQUEST, {"timestamp": 0, "prompt": "x"}], "line 2: `timestamp` goes back"),
    "a bad token": ([{"timestamp": 1, "prompt_token_ids": [-1]}], "line 1: token ids must be"),
    "a cut log": (
        [sglang("received", "a", "2025-01-01", [1, "...", 2])],
        "line 1: `input_ids` is .*the log was cut",
    ),
    "bad messages": ([{"timestamp": 1, "messages": "hi"}], "`messages`: expected a list"),
    "requests before the heading": (
        [HEADING | {"a": 1}, recorded(-1)],
        "line 2: `arrival_seconds`",
    ),
    "another version": ([HEADING | {"penstock_record": 2}], "line 1: the record has version 2"),
    "another size": (
        [HEADING, HEADING | {"block_tokens": 8}],
        "line 2: from here on blocks have 8",
    ),
    "no size": ([HEADING | {"block_tokens": 0}], "line 1: `block_tokens` is 0"),
    "a name that is none": ([HEADING, recorded(1, "xyz")], "line 2: `prompt_blocks`: expected"),
    "a short name": ([HEADING, recorded(1, "0a0b")], "line 2: `prompt_blocks`: expected"),
    "an unknown tier": (
        [HEADING, recorded(1, total_seconds=1, hit_tokens={"tape": 1})],
        "line 2: `hit_tokens` names 'tape'",
    ),
    "a record of nothing": ([HEADING], "it contains no request"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces_are_told_with_their_line(name: str, write: Callable[..., Path]) -> None:
    given, words = BAD[name]
    with pytest.raises(TraceError, match=words) as raised:
        read_trace(write(*given))
    assert str(raised.value).startswith(str(write(*given)))
    assert len(str(raised.value)) < 500


def test_files_that_are_none(tmp_path: Path, write: Callable[..., Path]) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank").write_bytes(b"\n \n\n")
    (tmp_path / "latin").write_bytes(json.dumps(moon()).encode() + b'\n{"a": "caf\xe9"}\n')
    whole = gzip.compress((json.dumps(moon()) + "\n").encode() * 20000)
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "damaged.gz").write_bytes(whole[:10] + b"\xff" * 20)
    for name, words in {
        "empty": "empty: it is empty",
        "blank": "blank: it is empty",
        "latin": "latin, line 2: the bytes are not UTF-8",
        "cut.gz": r"cut.gz, line \d+: the gzip data is damaged or cut off",
        "damaged.gz": "damaged.gz, line 1: the gzip data is damaged",
        "nothing": "nothing: there is no such file",
        "": "this is a folder",
    }.items():
        with pytest.raises(TraceError, match=words):
            read_trace(tmp_path / name)
    with pytest.raises(TraceError, match="line 2: the last line is cut off"):
        read_trace(write(moon(), json.dumps(moon())[:-9], end=""))
    rows = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-01-01,5,5", "2023-01-01,")
    with pytest.raises(TraceError, match="line 3: the last line is cut off"):
        read_trace(write(*rows, end=""))
    assert len(read_trace(write(moon(), moon(), end="")).requests) == 2  # whole, only not ended


def test_a_huge_line_is_refused(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    path = write(moon(), moon(note="x" * (1 << 20)))
    with pytest.raises(TraceError, match="line 2: longer than 1 MiB"):
        read_trace(path)


def test_forms_of_a_file(tmp_path: Path) -> None:
    text = "\r\n".join(map(json.dumps, [moon(), moon(5)])) + "\r\n\r\n"
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + text.encode())
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(plain) == read_trace(packed) == read_trace(plain, format="mooncake")
    assert read_trace(packed).name == "t"


def test_formats_by_name(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="no trace format 'moon': expected record, mooncake"):
        read_trace(write(moon()), format="moon")
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        read_trace(write(moon()), block_tokens=0)
    for name in FORMATS:
        if name not in ("mooncake", "bailian"):
            with pytest.raises(TraceError):
                read_trace(write(moon()), format=name)
    assert all(each.description for each in FORMATS.values())


def test_nothing_is_recognised_twice() -> None:
    first_lines: dict[str, object] = {
        "record": HEADING,
        "mooncake": moon(),
        "bailian": moon(chat_id=1),
        "sglang": sglang("received", "a", "2025-01-01", []),
        "requests": GOOD_REQUEST,
        "azure": "TIMESTAMP,ContextTokens,GeneratedTokens",
        "vllm": VLLM_OLD,
    }
    for name, head in first_lines.items():
        text = head if isinstance(head, str) else json.dumps(head)
        found = [each for each, format in FORMATS.items() if format.recognises(text.splitlines())]
        assert found == [name]


def test_traces_are_plain_values() -> None:
    trace = Trace("t", 16, (TraceRequest(0.0, 1, 1, ()),))
    assert trace == Trace("t", 16, (TraceRequest(0.0, 1, 1, (), (), ""),))
