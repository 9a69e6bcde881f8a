"""KV outlives a server that is killed: the next one answers from disk."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.running import Client, Local, Spawned, wait_until

from penstock.config import load_config

STORY = "A penstock carries water from the reservoir to the turbine. " * 8
TO_DISK = {"source": "host", "target": "disk", "direction": "save"}


def ask(client: Client) -> tuple[str, int]:
    body: dict[str, Any] = {"prompt": STORY, "max_tokens": 6, "temperature": 0}
    answer = client.post("/v1/completions", json=body).json()
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


def test_killed_and_started_again(
    spawn: Callable[..., Spawned], local: Callable[..., Local], tmp_path: Path, tiny: Path
) -> None:
    killed = spawn(
        *(tiny, "--device-kv-gib", 0.02, "--block-tokens", 16, "--dtype", "float32"),
        *("--kv-offloading-size", 0.1, "--disk-path", tmp_path / "kv", "--disk-size", 0.1),
    )
    assert killed.wait_ready()["models"] == ["tiny-llama"]
    with killed.client() as client:
        text, cached = ask(client)
        assert cached == 0
        wait_until(lambda: client.metric("penstock_blocks_total", **TO_DISK) >= 6, "it saves")
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL

    settings = {"host.size": "100MiB", "disk.path": str(tmp_path / "kv"), "disk.size": "100MiB"}
    server = local(
        load_config(env={}, overrides=settings), kv_offloading_size=None, dtype="float32"
    )
    with server.client() as client:
        wait_until(lambda: client.metric("penstock_recovered_ratio", tier="disk") == 1, "it reads")
        again, cached = ask(client)
        assert again == text
        assert cached >= 80
    assert any(" blocks recovered" in told for told in server.told)
