"""`vllm serve` with the flag that `penstock vllm-config` prints, asked by the openai client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, MODEL

WORDS = "The water falls through the penstock and turns the wheel. " * 24


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _post(url: str, path: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url + path, method="POST"), timeout=30).read()


def _metrics(url: str) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    text = urllib.request.urlopen(url + "/metrics", timeout=30).read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            tier = sample.labels.get("tier") or sample.labels.get("target") or ""
            name = f"{sample.name} {tier}".strip()
            found[name] = found.get(name, 0) + sample.value
    return found


@pytest.fixture(scope="module")
def events_port() -> int:
    return _free_port()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, events_port: int) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "penstock", "vllm-config", "--kv-offloading-size", "1"]
    command += ["--disk-path", str(folder / "kv"), "--disk-size", "1", "--always-load"]
    flag = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    port = _free_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",
    }
    serve = [str(Path(sys.executable).parent / "vllm"), "serve", MODEL, "--port", str(port)]
    serve += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    serve += ["--block-size", str(BLOCK), "--served-model-name", "smol"]
    serve += ["--kv-transfer-config", flag, "--kv-events-config", json.dumps(events)]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(serve, stdout=log, stderr=subprocess.STDOUT, env=env)
    address = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(address + "/health", timeout=2)
            break
        except OSError:
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(1)
    yield address
    server.terminate()
    server.wait(60)


def test_a_returning_prompt_is_loaded_and_everybody_can_see_it(url: str, events_port: int) -> None:
    import msgspec
    import zmq
    from openai import OpenAI
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.connect(f"tcp://127.0.0.1:{events_port}")
    listener.setsockopt(zmq.SUBSCRIBE, b"")
    client = OpenAI(base_url=url + "/v1", api_key="none")

    def ask() -> tuple[str, int]:
        answer = client.completions.create(model="smol", prompt=WORDS, max_tokens=8, temperature=0)
        told = answer.model_extra.get("kv_transfer_params") or {}
        return answer.choices[0].text, sum(
            told.get("penstock", {}).get("loaded_tokens", {}).values()
        )

    first, loaded = ask()
    assert loaded == 0
    ends = time.monotonic() + 60
    while loaded < 5 * BLOCK:  # saves take a moment
        assert time.monotonic() < ends, f"{loaded} tokens were loaded"
        _post(url, "/reset_prefix_cache")
        time.sleep(0.5)
        again, loaded = ask()
        assert again == first
    ask()  # a step more, so that what happened last has been counted
    found = _metrics(url)
    assert found["penstock_hit_blocks_total host"] * BLOCK >= loaded
    assert found["penstock_blocks_total host"] > 0
    assert found["penstock_blocks_total device"] * BLOCK >= loaded
    assert found["penstock_used_blocks host"] > 0
    assert found.get("penstock_corrupt_blocks_total", 0) == 0

    stored: dict[str, set[bytes]] = {}
    ends = time.monotonic() + 60
    while (there_is := listener.poll(1000)) or ("CPU" not in stored and time.monotonic() < ends):
        if not there_is:
            continue
        batch = msgspec.msgpack.decode(listener.recv_multipart()[-1], type=KVEventBatch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                stored.setdefault(event.medium, set()).update(event.block_hashes)
    assert stored["CPU"]
    assert stored["CPU"] <= stored["GPU"]  # under the very names that vLLM gives them


def test_salted_blocks_are_published_with_their_salt(url: str, events_port: int) -> None:
    import msgspec
    import zmq
    from openai import OpenAI
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    client = OpenAI(base_url=url + "/v1", api_key="none")
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.connect(f"tcp://127.0.0.1:{events_port}")
        listener.setsockopt(zmq.SUBSCRIBE, b"")
        for number in range(60):  # a subscription takes a moment: what is said before is lost
            client.completions.create(model="smol", prompt=f"{number} {WORDS}", max_tokens=1)
            if listener.poll(500):
                break
        while listener.poll(2000):
            listener.recv_multipart()
        firsts: list[BlockStored] = []
        hashes: dict[str | None, set[object]] = {}
        for salt in (None, "pepper"):
            body = {} if salt is None else {"cache_salt": salt}
            words = "Salt is not pepper, and pepper is not salt. " * 16
            for _ in range(2):  # the second one, so that what happened last is published
                client.completions.create(
                    model="smol", prompt=words, max_tokens=8, temperature=0, extra_body=body
                )
            while listener.poll(2000):
                batch = msgspec.msgpack.decode(listener.recv_multipart()[-1], type=KVEventBatch)
                stored = [event for event in batch.events if isinstance(event, BlockStored)]
                firsts += [event for event in stored if event.parent_block_hash is None]
                for event in stored:
                    hashes.setdefault(salt, set()).update(event.block_hashes)
    assert not hashes[None] & hashes["pepper"]
    for medium in ("GPU", "CPU"):
        told = [event for event in firsts if event.medium == medium]
        assert [event.extra_keys and event.extra_keys[0] for event in told] == [None, ("pepper",)]


def test_chat_streams(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=url + "/v1", api_key="none")
    messages = [{"role": "user", "content": "Say one word."}]
    pieces = client.chat.completions.create(
        model="smol", messages=messages, max_tokens=5, stream=True
    )
    assert sum(1 for _ in pieces) >= 2


def test_the_dashboard_and_top_show_it(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=url + "/v1", api_key="none")

    def ask() -> None:
        client.completions.create(model="smol", prompt=WORDS, max_tokens=8, temperature=0)

    ask()
    _post(url, "/reset_prefix_cache")
    time.sleep(0.5)
    ask()  # from DRAM
    ask()  # a step more, so that what happened last has been counted
    penstock = [sys.executable, "-m", "penstock"]
    top = [*penstock, "top", url, "--once", "--json"]
    done = subprocess.run(top, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    _check_shown(json.loads(done.stdout))

    advise = [*penstock, "advise", url, "--json"]
    done = subprocess.run(advise, capture_output=True, text=True, check=True)
    advised = json.loads(done.stdout)
    assert advised["hit_rate"] > 0
    assert all(each["finding"] for each in advised["advice"])

    command = [*penstock, "dashboard", "--metrics", url, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dashboard:
        try:
            assert dashboard.stdout is not None
            there = json.loads(dashboard.stdout.readline())["url"]
            page = urllib.request.urlopen(there, timeout=30)
            assert page.headers["Content-Type"].startswith("text/html")
            state = urllib.request.urlopen(f"{there}/v1/penstock/state", timeout=30).read()
            _check_shown(json.loads(state))
        finally:
            dashboard.terminate()
    assert dashboard.returncode == 0


def _check_shown(state: dict[str, Any]) -> None:
    assert (state["host"], state["models"], state["phase"]) == ("vllm", ["smol"], "serving")
    view = state["view"]
    tiers = {tier["name"]: tier for tier in view["tiers"]}
    assert set(tiers) == {"device", "host", "disk"}
    assert tiers["device"]["capacity_blocks"] > 1
    assert tiers["host"]["used_bytes"] > 0
    assert tiers["host"]["capacity_bytes"] <= 1 << 30
    moved = {(flow["source"], flow["target"]): flow["total_bytes"] for flow in view["flows"]}
    assert moved["device", "host"] > 0
    assert moved["host", "device"] > 0
    assert view["hit_rate_since_start"] > 0
    assert view["tokens_saved"] >= 5 * BLOCK
    assert {"running", "waiting"} <= set(view["sequences"])
    assert "all" in view["first_token_seconds"]
    assert not any(view["corrupt_blocks"].values())
