"""Weights are known by every byte of their files, and read only when they may have changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.connectors.vllm import fingerprint
from penstock.connectors.vllm.fingerprint import (
    fingerprint_files,
    is_unchanged,
    process_start,
    state_of,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-00001.safetensors").write_bytes(b"first" * 1000)
    (folder / "model-00002.safetensors").write_bytes(b"second" * 1000)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "fingerprints.json"


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    file=st.sampled_from(["model-00001.safetensors", "model-00002.safetensors"]),
    position=st.integers(0, 4999),
    bit=st.integers(0, 7),
)
def test_any_byte_of_any_weights_file_counts(
    model: Path, memory: Path, file: str, position: int, bit: int
) -> None:
    before = fingerprint_files(model, memory)
    flip(model / file, position, bit)
    assert fingerprint_files(model, memory) != before
    flip(model / file, position, bit)
    assert fingerprint_files(model, memory) == before


def test_files_that_are_no_weights_do_not_count(model: Path, memory: Path) -> None:
    before = fingerprint_files(model, memory)
    (model / "config.json").write_text('{"torch_dtype": "float16"}')
    (model / "README.md").write_text("words")
    (model / "checkpoints.bin").mkdir()
    (model / "tokenizer.json").unlink()
    assert fingerprint_files(model, memory) == before


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",
        "hf_quant_config.json",
        "params.json",
        "modeling.py",
        "consolidated.00.pth",
        "weights.npz",
        "weights.of-a-new-kind",
        "encoder/model.safetensors",
        "encoder/deeper/more.bin",
    ],
)
def test_every_file_counts_that_is_not_known_to_be_harmless(
    model: Path, memory: Path, name: str
) -> None:
    found = {fingerprint_files(model, memory)}
    path = model / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for content in (b"one", b"other"):
        path.write_bytes(content)
        found.add(fingerprint_files(model, memory))
    assert len(found) == 3


@pytest.mark.parametrize(
    "name", ["original/consolidated.00.pth", ".cache/huggingface/x.bin", "LICENSE", "merges.txt"]
)
def test_what_vllm_does_not_read_does_not_count(model: Path, memory: Path, name: str) -> None:
    before = fingerprint_files(model, memory)
    path = model / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"anything")
    assert fingerprint_files(model, memory) == before


def test_a_link_to_a_folder_above_is_not_followed_for_ever(model: Path, memory: Path) -> None:
    (model / "again").symlink_to(model)
    assert fingerprint_files(model, memory) is not None


def test_all_parts_of_a_split_file_count(tmp_path: Path, memory: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"part")
    (tmp_path / "another.gguf").write_bytes(b"another model")
    first = tmp_path / "m-00001-of-00002.gguf"
    found = {fingerprint_files(first, memory)}
    (tmp_path / "another.gguf").write_bytes(b"another model, changed")
    found.add(fingerprint_files(first, memory))
    assert len(found) == 1
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"PART")
    found.add(fingerprint_files(first, memory))
    (tmp_path / "mmproj-m.gguf").write_bytes(b"projector")
    found.add(fingerprint_files(first, memory))
    assert len(found) == 3


def touch_weights(model: Path) -> None:
    (model / "model-00001.safetensors").write_bytes(b"other")


def add_a_file(model: Path) -> None:
    (model / "deep").mkdir()
    (model / "deep" / "more.bin").write_bytes(b"more")


def add_a_file_deep_down(model: Path) -> None:
    (model / "within" / "more.bin").write_bytes(b"more")


def remove_a_file(model: Path) -> None:
    (model / "model-00002.safetensors").unlink()


def replace_the_folder(model: Path) -> None:
    shutil.copytree(model, model.with_name("copy"))
    shutil.rmtree(model)
    model.with_name("copy").rename(model)


@pytest.mark.parametrize(
    "change",
    [touch_weights, add_a_file, add_a_file_deep_down, remove_a_file, replace_the_folder],
)
def test_a_state_is_that_of_files_that_nobody_touched(
    model: Path, change: Callable[[Path], None]
) -> None:
    (model / "within").mkdir()
    (model / "within" / "some.bin").write_bytes(b"some")
    before = state_of(model)
    assert is_unchanged(before)
    assert state_of(model) == before
    change(model)
    assert not is_unchanged(before)
    assert state_of(model) != before


@pytest.mark.parametrize("part", ["itself", "above"])
def test_a_link_that_is_turned_changes_the_state(model: Path, tmp_path: Path, part: str) -> None:
    """Both folders are old; only the link is new."""
    (tmp_path / "two" / "model").mkdir(parents=True)
    (tmp_path / "two" / "model" / "other.bin").write_bytes(b"other")
    link = tmp_path / "latest"
    link.symlink_to(model if part == "itself" else model.parent)
    source = link if part == "itself" else link / "model"
    before = state_of(source)
    link.unlink()
    link.symlink_to(tmp_path / "two" / ("model" if part == "itself" else ""))
    assert not is_unchanged(before)
    assert state_of(source).changed >= before.changed


def test_this_process_began_before_now_and_after_its_parent() -> None:
    assert process_start() <= time.time()
    later = subprocess.run(
        [
            sys.executable,
            "-c",
            "from penstock.connectors.vllm.fingerprint import process_start as p; print(p())",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    assert float(later.stdout) > process_start()


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".pth", ".gguf"])
def test_every_kind_of_weights_file_counts(model: Path, memory: Path, suffix: str) -> None:
    before = fingerprint_files(model, memory)
    (model / f"more{suffix}").write_bytes(b"more")
    assert fingerprint_files(model, memory) != before


def test_names_and_limits_of_files_count(model: Path, memory: Path) -> None:
    """The same bytes in all, cut or named otherwise, are other weights."""
    found = {fingerprint_files(model, memory)}
    first, second = sorted(model.glob("*.safetensors"))
    data = first.read_bytes() + second.read_bytes()
    first.write_bytes(data[:100])
    second.write_bytes(data[100:])
    found.add(fingerprint_files(model, memory))
    second.rename(model / "model-00003.safetensors")
    found.add(fingerprint_files(model, memory))
    first.write_bytes(b"")  # an empty file can be read too
    found.add(fingerprint_files(model, memory))
    assert len(found) == 4


def test_the_place_of_a_model_does_not_count(model: Path, memory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, copy)
    assert fingerprint_files(copy, memory) == fingerprint_files(model, memory)
    link = tmp_path / "link"
    link.symlink_to(model)
    assert fingerprint_files(link, memory) == fingerprint_files(model, memory)


def test_one_file_is_known_by_its_content_alone(tmp_path: Path, memory: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.weights"
    one.write_bytes(b"the same")
    other.write_bytes(b"the same")
    assert fingerprint_files(one, memory) == fingerprint_files(other, memory)
    other.write_bytes(b"not the same")
    assert fingerprint_files(one, memory) != fingerprint_files(other, memory)


def test_without_weights_there_is_no_fingerprint(tmp_path: Path, memory: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint_files(tmp_path, memory) is None
    assert not memory.exists()


def test_what_has_not_changed_is_not_read_again(
    model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint_files(model, memory)
    assert len(json.loads(memory.read_text())) == 2
    monkeypatch.setattr(fingerprint, "blake3", _Refusing)
    assert fingerprint_files(model, memory) == before


class _Refusing:
    """Hashes what is handed to it, and reads no file."""

    AUTO = -1

    def __init__(self, data: bytes = b"", **_: object) -> None:
        from blake3 import blake3

        self._hasher = blake3(data)
        self.update = self._hasher.update
        self.hexdigest = self._hasher.hexdigest

    def update_mmap(self, path: Path) -> None:
        raise AssertionError(f"{path} was read again")


def test_a_file_changed_within_its_size_and_time_is_read_again(model: Path, memory: Path) -> None:
    before = fingerprint_files(model, memory)
    file = model / "model-00001.safetensors"
    stat = file.stat()
    flip(file, 0)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as cp -p and rsync do
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert fingerprint_files(model, memory) != before


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "5", '"words"', "\x00\xff", '{"a": 5}', "not json"]
)
def test_a_corrupt_memory_costs_a_read_and_nothing_else(
    model: Path, memory: Path, content: str
) -> None:
    before = fingerprint_files(model, memory)
    memory.write_text(content)
    assert fingerprint_files(model, memory) == before
    assert len(json.loads(memory.read_text())) >= 2, "and is written anew"


@pytest.mark.parametrize("value", [5, None, [], "zz"])
def test_a_remembered_digest_that_is_none_is_read_again(
    model: Path, memory: Path, value: object
) -> None:
    before = fingerprint_files(model, memory)
    memory.write_text(json.dumps(dict.fromkeys(json.loads(memory.read_text()), value)))
    assert fingerprint_files(model, memory) == before


def test_bytes_that_are_no_text_are_no_memory(model: Path, memory: Path) -> None:
    before = fingerprint_files(model, memory)
    memory.write_bytes(b"\xff\xfe\x00")
    assert fingerprint_files(model, memory) == before


def test_a_folder_that_cannot_be_written_is_done_without(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    memory = tmp_path / "file" / "fingerprints.json"
    assert fingerprint_files(model, memory) == fingerprint_files(model, tmp_path / "other.json")


def test_nothing_is_left_beside_the_memory(model: Path, memory: Path) -> None:
    fingerprint_files(model, memory)
    assert [path.name for path in memory.parent.iterdir()] == [memory.name]


def test_by_default_it_is_remembered_in_the_users_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    fingerprint_files(model)
    assert (tmp_path / "mine" / "penstock" / "fingerprints.json").is_file()


@pytest.mark.parametrize("name", ["README.safetensors", "LICENSE.bin"])
def test_weights_count_whatever_they_are_called(model: Path, memory: Path, name: str) -> None:
    before = fingerprint_files(model, memory)
    (model / name).write_bytes(b"weights that vLLM reads with the others")
    assert fingerprint_files(model, memory) != before
