"""A device whose memory is full at start: a sentence, and nothing stays open."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from server.running import make_tiny, wait_until

from penstock.config.options import EngineOptions
from penstock.engine import parts, weights
from penstock.engine.open import open_engine
from penstock.engine.runner import TorchRunner
from penstock.errors import ConfigError
from penstock.units import GiB


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.\nMore.")


class FullAtFirst(TorchRunner):
    """No room for what it reads ahead."""

    __init__ = full


class FullAtWarmUp(TorchRunner):
    """No room for a graph's own memory."""

    warm_up = full


@pytest.mark.parametrize("runner", [FullAtFirst, FullAtWarmUp])
def test_no_room_to_compute_in(
    runner: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(
        str(make_tiny(cache)),
        device="cpu",
        device_kv_gib=0.02,
        kv_offloading_size=0.05,
        disk_path=str(tmp_path / "kv"),
        disk_size=0.05,
    )
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(parts, "TorchRunner", runner)
        with pytest.raises(ConfigError, match=r"with a KV pool of 20\.5 MiB") as refusal:
            open_engine(options)
    assert "More." not in str(refusal.value)
    wait_until(lambda: before.issuperset(threading.enumerate()), "its threads end")
    open_engine(options).close()  # the disk's folder is not locked


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_offloading_size": 5000 / GiB}, "kv_offloading_size is 4.9 KiB, less than one block"),
        ({"disk_size": 30000 / GiB}, "disk_size is 29.3 KiB, too little for one block"),
        ({"device_kv_gib": 5000 / GiB}, "less than one block"),
        ({"remote": "http://foo"}, "remote is 'http://foo': expected one that begins with"),
        ({"disk_path": "/proc/x"}, "disk_path /proc/x cannot be created"),
        ({"device_low_watermark": 1.0}, "the watermarks are"),
    ],
)
def test_what_cannot_be_is_refused_before_the_weights_are_read(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    words: str,
) -> None:
    tiers = {"kv_offloading_size": 0.05, "disk_path": str(tmp_path / "kv"), "disk_size": 0.05}
    options = EngineOptions(str(make_tiny(cache)), device="cpu", **{**tiers, **given})

    def read(*_: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(weights, "read_weights", read)
    with pytest.raises(ConfigError, match=re.escape(words)):
        open_engine(options)
    assert list(tmp_path.iterdir()) == []
