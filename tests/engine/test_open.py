"""A device whose memory is full at start: a sentence, and nothing stays open."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from server.running import make_tiny, wait_until

from penstock.engine import engine as engines
from penstock.engine.open import open_engine
from penstock.engine.options import EngineOptions
from penstock.engine.runner import TorchRunner
from penstock.errors import ConfigError


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
        patch.setattr(engines, "TorchRunner", runner)
        with pytest.raises(ConfigError, match=r"beside a pool of 20\.5 MiB") as refusal:
            open_engine(options)
    assert "More." not in str(refusal.value)
    wait_until(lambda: before.issuperset(threading.enumerate()), "its threads end")
    open_engine(options).close()  # the disk's folder is not locked
