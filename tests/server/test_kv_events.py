"""KV events of real servers, read by Dynamo's real indexer: who holds which tokens, and where."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.running import Client, Local, Spawned, wait_until
from tiny import always_load

import servers
from penstock.config import load_config
from servers import dynamo_indexer, free_port
from servers.dynamo_indexer import DynamoIndexer

pytestmark = pytest.mark.skipif(
    servers.is_skipped(dynamo_indexer.WHY_NOT), reason=str(dynamo_indexer.WHY_NOT)
)

BLOCK = 16
PROMPT = list(range(1000, 1000 + 5 * BLOCK + 3))
FULL = 5 * BLOCK  # tokens of PROMPT in full blocks


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    made = DynamoIndexer(tmp_path / "indexer", BLOCK)
    yield made
    made.kill()


def ask(client: Client, prompt: list[int], **fields: Any) -> int:
    """Complete a prompt; returns how many of its tokens were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def await_tiers(
    indexer: DynamoIndexer, worker: int, *expected: int, salt: str | None = None
) -> None:
    """Until the indexer knows that so many tokens of PROMPT are in gpu, cpu, disk and above."""

    def found() -> tuple[int, ...]:
        tiers = indexer.query(PROMPT, salt).get(worker, {})
        return tuple(tiers.get(name, 0) for name in ("gpu", "cpu", "disk"))

    wait_until(
        lambda: found() == expected,
        f"worker {worker} should have {expected}, has {found()}\n{indexer.log}",
    )


def documented_options(ports: list[int]) -> list[str]:
    """The options of the indexer that docs/routing.md shows, with the ports of this test."""
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text()
    command = page[page.index("python -m dynamo.indexer ") :].split("\ncurl")[0]
    command = command.replace("\\\n", " ")
    for host, port in zip(("host-a", "host-b"), ports, strict=True):
        command = command.replace(f"{host}:5557", f"127.0.0.1:{port}")
    _python, _m, _module, _port, _number, *options = shlex.split(command)
    assert (_module, _port) == ("dynamo.indexer", "--port")
    return options


def fillers(count: int) -> list[list[int]]:
    """Prompts that share nothing with PROMPT, and take 30 blocks each."""
    return [list(range(2000 + 500 * n, 2000 + 500 * n + 30 * BLOCK)) for n in range(count)]


def test_it_knows_what_is_evicted_from_which_tier(
    local: Callable[..., Local], indexer: DynamoIndexer, tmp_path: Path
) -> None:
    """The device has room for 65 blocks, DRAM for 131."""
    settings = {"host.size": "1MiB", "disk.path": str(tmp_path / "kv"), "disk.size": "64MiB"}
    port = free_port()
    server = local(
        load_config(env={}, overrides=settings),
        kv_offloading_size=None,
        device_kv_gib=0.0005,
        kv_events=f"tcp://127.0.0.1:{port}",
    )
    assert server.serving is not None
    always_load(server.serving.service.engine)
    indexer.register(1, f"tcp://127.0.0.1:{port}")  # without replay
    with server.client() as client:
        assert ask(client, PROMPT) == 0
        await_tiers(indexer, 1, FULL, FULL, FULL)
        for prompt in fillers(3):
            ask(client, prompt)
        await_tiers(indexer, 1, 0, FULL, FULL)
        for prompt in fillers(8)[3:]:
            ask(client, prompt)
        await_tiers(indexer, 1, 0, 0, FULL)
        assert ask(client, PROMPT) == FULL  # it told the truth
        await_tiers(indexer, 1, FULL, FULL, FULL)
    server.stop()
    server.serving.service.engine.check()
    await_tiers(indexer, 1, 0, 0, 0)


def test_salted_prompts_are_not_mistaken_for_others(
    local: Callable[..., Local], indexer: DynamoIndexer
) -> None:
    port = free_port()
    server = local(kv_events=f"tcp://127.0.0.1:{port}")
    indexer.register(1, f"tcp://127.0.0.1:{port}")
    with server.client() as client:
        ask(client, PROMPT, cache_salt="pepper")
        await_tiers(indexer, 1, FULL, FULL, FULL, salt="pepper")
        assert indexer.query(PROMPT) == indexer.query(PROMPT, "salt") == {}
        answer = client.post(
            "/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 1},
            headers={"X-Penstock-Tenant": "acme"},
        )
        assert answer.status_code == 200
        await_tiers(indexer, 1, FULL, FULL, FULL, salt="X-Penstock-Tenant:acme")
        assert indexer.query(PROMPT) == {}
        ask(client, PROMPT)
        await_tiers(indexer, 1, FULL, FULL, FULL)


@pytest.mark.parametrize("has_replay", [False, True])
def test_two_servers_one_of_which_is_killed(
    spawn: Callable[..., Spawned], tiny: Path, has_replay: bool, tmp_path: Path
) -> None:
    ports = {worker: (free_port(), free_port()) for worker in (1, 2)}

    def serve(worker: int) -> Spawned:
        events, replay = ports[worker]
        return spawn(
            *(tiny, "--device-kv-gib", 0.02, "--block-tokens", BLOCK, "--dtype", "float32"),
            *("--kv-offloading-size", 0.1, "--disk-size", 0.1),
            *("--disk-path", tmp_path / f"kv{worker}"),
            *("--kv-events", f"tcp://*:{events}", "--kv-events-replay", f"tcp://*:{replay}"),
            *("--kv-events-topic", f"kv@pod{worker}@tiny"),
        )

    options = [] if has_replay else documented_options([events for events, _ in ports.values()])
    indexer = DynamoIndexer(tmp_path / "indexer", BLOCK, *options)
    try:
        check_two_servers(serve, indexer, ports if has_replay else {})
    finally:
        indexer.kill()


def check_two_servers(
    serve: Callable[[int], Spawned], indexer: DynamoIndexer, ports: dict[int, tuple[int, int]]
) -> None:
    both = [serve(1), serve(2)]
    for worker, (events, replay) in ports.items():
        indexer.register(worker, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
    for server in both:
        server.wait_ready()
    assert "publishing KV events on tcp://" in both[0].stderr
    with both[0].client() as first, both[1].client() as second:
        ask(first, PROMPT)
        ask(second, PROMPT[: 2 * BLOCK + 1])
        await_tiers(indexer, 1, FULL, FULL, FULL)
        await_tiers(indexer, 2, 2 * BLOCK, 2 * BLOCK, 2 * BLOCK)
    assert both[0].end(signal.SIGKILL) == -signal.SIGKILL
    again = serve(1)
    again.wait_ready()
    await_tiers(indexer, 1, 0, 0, 0)  # a disk's blocks have no tokens until a prompt brings them
    await_tiers(indexer, 2, 2 * BLOCK, 2 * BLOCK, 2 * BLOCK)
    with again.client() as first:
        wait_until(
            lambda: first.metric("penstock_recovered_ratio", tier="disk") == 1, "its disk is read"
        )
        assert ask(first, PROMPT[: 3 * BLOCK + 1]) == 3 * BLOCK
        await_tiers(indexer, 1, 3 * BLOCK, 3 * BLOCK, 3 * BLOCK)
    assert again.end() == 0
    await_tiers(indexer, 1, 0, 0, 0)
    assert both[1].end() == 0
