"""A LoRA adapter is known by the weights that vLLM computes with, or it is not known at all."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.connectors.vllm.adapters import Adapters

LATER = time.time() + 3600  # an engine that began after all files of these tests were written
BEFORE = 0.0


def lora(path: Path | str, name: str = "sql", number: int = 1, **fields: Any) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **fields)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    write(folder, b"A and B")
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    return folder


def write(folder: Path, weights: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(weights)


def test_engines_that_came_after_the_files_agree_on_a_name(adapter: Path) -> None:
    found = Adapters(started=LATER).name(lora(adapter))
    assert found is not None
    assert "run " not in found
    other = lora(adapter, "another name", 7)
    assert Adapters(started=LATER).name(other) == found, "the name and the id are labels"


def test_weights_that_are_read_from_another_place_have_no_name(adapter: Path) -> None:
    elsewhere = {"tensorizer_dir": "/elsewhere"}
    known = Adapters(started=LATER)
    assert known.name(lora(adapter, tensorizer_config_dict=elsewhere)) is None
    assert known.name(lora(adapter, number=2, tensorizer_config_dict=None)) is not None


def test_weights_config_settings_and_format_count(adapter: Path) -> None:
    found = [Adapters(started=LATER).name(lora(adapter))]
    found.append(Adapters("bfloat16", started=LATER).name(lora(adapter)))
    found.append(Adapters(started=LATER).name(lora(adapter, is_3d_lora_weight=True)))
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 64}')
    found.append(Adapters(started=LATER).name(lora(adapter)))
    write(adapter, b"A and C")
    found.append(Adapters(started=LATER).name(lora(adapter)))
    assert None not in found
    assert len(set(found)) == len(found)


def test_files_newer_than_the_engine_name_kv_of_this_run_alone(adapter: Path) -> None:
    """vLLM may have read what was there before, when somebody loaded the adapter by hand."""
    engine = Adapters(started=BEFORE)
    found = engine.name(lora(adapter))
    assert found is not None
    assert found == engine.name(lora(adapter))
    assert found != Adapters(started=BEFORE).name(lora(adapter))
    assert found != engine.name(lora(adapter, number=2)), "loaded anew under another id"


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_adapters_that_may_be_replaced_unseen_name_kv_of_this_run_alone(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", value)
    found = Adapters(started=LATER).name(lora(adapter))
    assert found is not None
    assert found != Adapters(started=LATER).name(lora(adapter))


def overwrite(folder: Path) -> None:
    write(folder, b"A and C")


def overwrite_in_its_time(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    stat = file.stat()
    write(folder, b"A and C")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def swap(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("new"))
    write(folder.with_name("new"), b"A and C")
    folder.rename(folder.with_name("old"))
    folder.with_name("new").rename(folder)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("change", [overwrite, overwrite_in_its_time, swap, remove])
@pytest.mark.parametrize("started", [LATER, BEFORE], ids=["later", "before"])
def test_an_adapter_whose_files_change_has_no_name_any_more(
    adapter: Path, started: float, change: Callable[[Path], None]
) -> None:
    engine = Adapters(started=started)
    assert engine.name(lora(adapter)) is not None
    change(adapter)
    assert engine.name(lora(adapter)) is None
    assert engine.name(lora(adapter)) is None


def test_files_that_are_put_back_do_not_bring_the_name_back(adapter: Path) -> None:
    """In between vLLM may have read the others."""
    engine = Adapters(started=LATER)
    engine.name(lora(adapter))
    kept = adapter.with_name("kept")
    adapter.rename(kept)
    assert engine.name(lora(adapter)) is None
    kept.rename(adapter)
    assert engine.name(lora(adapter)) is None


def test_unloaded_and_loaded_again_from_one_path_it_is_another(adapter: Path) -> None:
    """As vLLM's server does: the same name, the same path, another id."""
    engine = Adapters(may_change=True)
    before = engine.name(lora(adapter, number=1))
    write(adapter, b"A and C")
    after = engine.name(lora(adapter, number=2))
    assert None not in (before, after)
    assert before != after
    assert engine.name(lora(adapter, number=1)) is None, "for requests that still run with it"


def test_loaded_in_place_it_has_no_name(adapter: Path) -> None:
    engine = Adapters(started=LATER)
    assert engine.name(lora(adapter)) is not None
    assert engine.name(lora(adapter, load_inplace=True)) is None
    assert engine.name(lora(adapter)) is None, "nor have requests that still run with it"
    assert engine.name(lora(adapter, number=2)) is not None


def test_an_id_that_stands_for_two_adapters_has_no_name(adapter: Path, tmp_path: Path) -> None:
    """vLLM goes on with the weights that it has under the id, whatever the path says."""
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    engine = Adapters(started=LATER)
    assert engine.name(lora(adapter)) is not None
    assert engine.name(lora(other)) is None
    assert engine.name(lora(adapter)) is None


@pytest.mark.parametrize("path", ["someone/on-the-hub", "/nowhere", "s3://bucket/adapter"])
def test_an_adapter_whose_files_are_not_here_has_no_name(path: str) -> None:
    assert Adapters(started=LATER).name(lora(path)) is None


def test_a_folder_without_weights_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert Adapters(started=LATER).name(lora(tmp_path)) is None
