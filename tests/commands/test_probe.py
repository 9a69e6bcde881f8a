from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StoreError
from penstock.plan.probe import links, memory, remote
from penstock.plan.probe.links import Link, Tick
from penstock.stores.base import Answers
from penstock.stores.memory import MemoryClient
from penstock.stores.remote import Item
from servers import free_port, is_skipped
from servers.redis_server import WHY_NOT, RedisServer

Run = Callable[..., Any]
MIB = 1 << 20


class Told:
    """In place of the probes: links that were told, not measured."""

    def measure(self, tick: Tick) -> Iterator[Link]:
        tick("told", 1.0)
        yield Link("fast", 2, 10e9, 2 * MIB / 10e9, loads=True)
        yield Link("slow", 1, 1e6, 2.5, loads=True, note="a note")
        yield Link("sums", 1, 5e9, 1e-3)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_links = links.measure_links
    monkeypatch.setattr(links, "measure_links", lambda _probes, tick: measure_links([Told()], tick))


def test_a_real_probe_measures_every_link_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    small = ["--dir", tmp_path, "--size", "8MiB", "--seconds", "0.02", "--threads", "2"]
    found = run("probe", *small, "--prefill-tokens-per-second", "1500", "--json").json
    names = [link["name"] for link in found["links"]]
    assert names == [
        "memory copy, 1 thread",
        "memory copy, 2 threads",
        "checksum, 1 thread",
        "pack, 1 thread",
        "unpack, 1 thread",
        "disk read, 4 threads",
        "disk write, 4 threads",
    ]
    for link in found["links"]:
        assert link["gb_per_second"] == link["bytes_per_second"] / 1e9 > 0
        assert link["block_seconds"] > 0
        assert 0 <= link["latency_seconds"] < link["block_seconds"]
    unpacking = found["links"][4]
    assert found["lossless_pays_below_bytes_per_second"] == 2 * unpacking["bytes_per_second"]
    assert found["kv_bytes_per_token"] == 23_040
    assert found["prefill"]["source"] == "given"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("told")
def test_break_even_lengths(run: Run) -> None:
    rate = ["--prefill-tokens-per-second", "100"]
    fast, slow, sums = run("probe", *rate, "--json").json["links"]
    assert fast["break_even_tokens"] == 1
    assert slow["break_even_tokens"] is None  # 23 KB a token at 1 MB/s against 10 ms a token
    assert sums["break_even_tokens"] is None
    table = run("probe", *rate).stdout
    for words in ("always", "never", "–", "22.5 KiB of KV per token", "100 tokens/s, given"):
        assert words in table
    assert table.count("Note: a note.") == 1


@pytest.mark.usefixtures("told")
def test_prefill_is_estimated_where_numpy_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure_matrix_product", lambda _seconds: 50e9)
    found = run("probe", "--json").json["prefill"]
    assert found["source"] == "estimated from a matrix product at 50 GFLOP/s"
    assert found["tokens_per_second"] == pytest.approx(50e9 / (2 * 134_515_008))
    assert found["quadratic_seconds_per_token2"] > 0


@pytest.mark.usefixtures("told")
def test_without_numpy_it_says_which_option_to_give(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "measure_matrix_product", lambda _seconds: None)
    ran = run("probe")
    assert ran.code == 0
    assert "give --prefill-tokens-per-second" in " ".join(ran.stdout.split())
    assert run("probe", "--json").json["prefill"]["tokens_per_second"] is None


@pytest.mark.usefixtures("told")
def test_a_model_that_does_not_tell_its_size(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "measure_matrix_product", lambda _seconds: 50e9)
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}')
    assert "number of parameters is unknown" in run("probe", "--model", config).stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--size", "0"], "--size is 0 B"),
        (["--size", "lots"], "--size: 'lots' is not a size"),
        (["--size", "7EiB"], "available memory"),
        (["--dir", "{file}"], "is not a folder"),
        (["--dir", "{folder}/none"], "does not exist"),
        (["--prefill-tokens-per-second", "0"], "--prefill-tokens-per-second is 0.0"),
        (["--prefill-tokens-per-second", "nan"], "expected a number above 0"),
        (["--model", "llama-3.1-9b"], "did you mean llama-3.1-8b?"),
        (["--remote", "ftp://host"], "expected one that begins with redis://"),
        (["--remote", "redis"], "expected a URL such as redis://"),
        (["--remote", "file://{folder}/none"], "cannot be opened"),
        (["--remote", "redis://u:hush@127.0.0.1:{port}"], "redis://…@127.0.0.1:"),
    ],
)
def test_refusals_come_before_any_measurement(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str
) -> None:
    monkeypatch.delattr(links, "move_blocks")
    file = tmp_path / "file"
    file.write_text("mine")
    places = {"file": file, "folder": tmp_path, "port": free_port()}
    refusal = run("probe", *[argument.format(**places) for argument in argv]).refusal
    assert words in refusal
    assert "hush" not in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


REMOTE_NAMES = [
    f"remote {verb}, {size}, {threads}"
    for size, threads in (("1.4 MiB", "2 threads"), ("2.0 MiB", "2 threads"))
    for verb in ("get", "put")
]


def small(tmp_path: Path, url: str, *size: str) -> list[object]:
    """Of all links but the remote ones as little as can be measured."""
    rest = ["--seconds", "0.02", "--threads", "1", "--prefill-tokens-per-second", "1500"]
    return ["--dir", tmp_path, "--remote", url, "--size", *(size or ["64MiB"]), *rest]


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_remote_store_is_measured_and_left_as_it_was(run: Run, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "mine").write_text("mine")
    found = run("probe", *small(tmp_path, f"file://{shared}"), "--json").json
    remote = found["links"][-4:]
    assert [link["name"] for link in remote] == REMOTE_NAMES
    assert [link["block_bytes"] for link in remote] == [1_474_560] * 2 + [2 * MIB] * 2
    assert [link["loads"] for link in remote] == [True, False, True, False]
    for link in remote:
        assert link["gb_per_second"] > 0
        assert link["block_seconds"] > 0
        assert (link["break_even_tokens"] is None) is not link["loads"]
        assert "page cache" in link["note"]
    assert found["remote"]["url"] == f"file://{shared}"
    lookups = found["remote"]["lookups"]
    assert lookups["num_names"] == 512
    assert lookups["names_per_second"] == pytest.approx(512 / lookups["seconds"])
    assert left(shared) == [shared / "mine"]


def test_without_a_remote_store_none_is_told(run: Run, told: None) -> None:
    assert run("probe", "--prefill-tokens-per-second", "100", "--json").json["remote"] is None
    drawn = run("probe", "--prefill-tokens-per-second", "100").stdout
    assert "2.0 MiB block" in drawn
    assert "lookups" not in drawn


@pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))
def test_a_redis_is_measured_and_left_as_it_was(run: Run, tmp_path: Path) -> None:
    import redis

    server = RedisServer(tmp_path / "redis", "--requirepass", "hush")
    try:
        url = server.url.replace("redis://", "redis://:hush@")
        ran = run("probe", *small(tmp_path, url))
        assert (ran.code, ran.stderr) == (0, "")
        for words in (*REMOTE_NAMES, "one block", "A block has 2.0 MiB", "Remote lookups:"):
            assert words in ran.stdout
        assert run("probe", *small(tmp_path, url, "2MiB"), "--json").code == 0
        held = redis.Redis(port=server.port, password="hush")
        assert held.dbsize() == 0

        held.config_set("maxmemory", "16mb")
        full = run("probe", *small(tmp_path, url)).refusal
        assert "has no room for 64.0 MiB" in full
        assert "lower --size" in full
        assert held.dbsize() == 0
        assert "hush" not in full + ran.stdout
    finally:
        server.kill()


class Kept(MemoryClient):
    """Several clients of one store in memory, which closes with none of them."""

    def close(self) -> None: ...


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    client = Kept()
    client.values["mine"] = b"mine"
    monkeypatch.setattr(remote, "open_client", lambda _url, _timeout_seconds: client)
    return client


def test_what_a_probe_writes_lies_apart_and_bears_no_secret(
    run: Run, tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    sizes: set[int] = set()
    most = 0

    def put(items: Sequence[Item], ttl_seconds: float | None) -> Answers:
        nonlocal most
        answers = MemoryClient.put(kept, items, ttl_seconds)
        names.update(item.name for item in items)
        sizes.update(len(item.body) for item in items)
        most = max(most, sum(len(value) for value in list(kept.values.values())))
        assert ttl_seconds is not None  # should it be killed
        return answers

    monkeypatch.setattr(kept, "put", put)
    assert run("probe", *small(tmp_path, "redis://cache")).code == 0
    assert sizes == {1_474_560, 2 * MIB}
    assert len({name.split("/")[2] for name in names}) == 1
    assert all(name.startswith("penstock/probe/") for name in names)
    assert most < 65 * MIB
    assert kept.values == {"mine": b"mine"}


@pytest.mark.parametrize("verb", ["put", "get", "exists"])
def test_a_store_that_fails_while_measured_is_cleaned(
    run: Run, tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    real = getattr(kept, verb)
    num_calls = 0

    def fail(things: Sequence[Any], *rest: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 2:  # the first question is whether it is there at all
            return real(things, *rest)
        if verb == "exists":
            raise StoreError("it broke")
        return [StoreError("it broke")] * len(things)

    monkeypatch.setattr(kept, verb, fail)
    refusal = run("probe", *small(tmp_path, "redis://u:hush@cache")).refusal
    assert refusal == "redis://…@cache failed during the measurement: it broke"
    assert kept.values == {"mine": b"mine"}


def test_what_cannot_be_removed_is_told(
    run: Run, tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_names: Sequence[str]) -> None:
        raise StoreError("it broke")

    monkeypatch.setattr(kept, "remove", fail)
    refusal = run("probe", *small(tmp_path, "redis://cache")).refusal
    assert "could not be removed (it broke); delete everything under penstock/probe/" in refusal


def test_interrupting_a_remote_probe_leaves_nothing(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    options = ["--dir", str(tmp_path), "--remote", f"file://{shared}", "--size", "8MiB"]
    command = [sys.executable, "-m", "penstock", "probe", *options, "--threads", "1", "--json"]
    # So long that it is surely interrupted, and so short that the other links are soon over.
    process = subprocess.Popen(
        [*command, "--seconds", "1", "--prefill-tokens-per-second", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not left(shared):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "penstock: interrupted\n"
    assert left(shared) == []
