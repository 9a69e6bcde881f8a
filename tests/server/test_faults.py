"""A disk that fails while it serves costs no request."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server.running import Client, Local, wait_until
from tools import Faulty

from penstock.config import load_config


def fail_with(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def ask(client: Client, name: str) -> str:
    body: dict[str, Any] = {"prompt": f"{name} " * 120, "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_disk_that_takes_no_more(
    local: Callable[..., Local], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    settings = {"host.size": "1MiB", "disk.path": str(tmp_path / "kv"), "disk.size": "8MiB"}
    server = local(load_config(env={}, overrides=settings), kv_offloading_size=None)
    with server.client() as client:
        texts = {name: ask(client, name) for name in ("one", "two")}
        wait_until(lambda: client.metric("penstock_used_blocks", tier="disk") > 0, "it saves")
        faulty = Faulty(os.pwritev, fail_with(number), "slab-")
        monkeypatch.setattr(os, "pwritev", faulty)
        more = {name: ask(client, name) for name in ("three", "four", "five")}
        wait_until(lambda: faulty.num_faults > 0, "it tries")
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
        faulty.on = False
        assert {name: ask(client, name) for name in more} == more
        assert {name: ask(client, name) for name in texts} == texts
        client.check_serves()


def test_a_disk_whose_reads_fail(
    local: Callable[..., Local], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"host.size": "1MiB", "disk.path": str(tmp_path / "kv"), "disk.size": "8MiB"}
    server = local(
        load_config(env={}, overrides=settings), kv_offloading_size=None, device_kv_gib=0.0004
    )
    with server.client() as client:
        names = [f"word{number}" for number in range(8)]
        texts = [ask(client, name) for name in names]
        wait_until(lambda: client.metric("penstock_used_blocks", tier="disk") > 8, "it saves")
        monkeypatch.setattr(os, "preadv", Faulty(os.preadv, fail_with(errno.EIO), "slab-"))
        assert [ask(client, name) for name in names] == texts
        client.check_serves()
