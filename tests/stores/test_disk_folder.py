"""Several namespaces side by side in one folder, under one cap."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools import ODD_BLOCK_BYTES, Desk, cap_for, file_sizes, key_of, keys_of, spec

from penstock.errors import ConfigError, Foreign, Locked
from penstock.stores import folder, shared_cap, slab
from penstock.stores.disk_folder import DiskFolder
from penstock.types import BlockKey, BlockSpec

Folders = Callable[..., DiskFolder]
A = replace(spec(8192, "a"), description=(("model", "m2/s.gguf"), ("dtype", "bfloat16")))
B = replace(spec(4096, "b", 8), description=(("model", "m2/s.gguf"), ("dtype", "float32")))
C = spec(ODD_BLOCK_BYTES, "c", 32)
NUM_SLOTS = 32
SLAB_BYTES = 8 * 8192
CAP_BYTES = cap_for(A, NUM_SLOTS, SLAB_BYTES) + folder.FOLDER_BYTES


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    opened: list[DiskFolder] = []

    def open_folder(of: BlockSpec = A, **options: Any) -> DiskFolder:
        options = {"slab_bytes": SLAB_BYTES, **options}
        cap = options.pop("cap_bytes", CAP_BYTES)
        opened.append(DiskFolder(tmp_path / "kv", of, cap, **options))
        return opened[-1]

    yield open_folder
    for one in opened:
        one.close()


def put(store: DiskFolder, keys: Sequence[BlockKey], places: Sequence[int]) -> None:
    desk = Desk(store._spec, len(keys))
    assert store.put(desk.write(keys, places)) == [None] * len(keys)


def num_right(store: DiskFolder, keys: Sequence[BlockKey], places: Sequence[int]) -> int:
    """How many come back; what the store calls good is compared bit for bit."""
    desk = Desk(store._spec, len(keys) or 1)
    blocks = desk.blank(keys, places)
    good = [b for b, answer in zip(blocks, store.get(blocks), strict=True) if answer is None]
    assert all(map(desk.right, good)), "the store lied"
    return len(good)


def found(store: DiskFolder) -> dict[BlockKey, int]:
    pairs = [pair for batch in store.scan() for pair in batch]
    assert sorted(slot for slot, _ in pairs) == list(range(store.num_slots))
    return {key: slot for slot, key in pairs if key is not None}


def check_cap(directory: Path, cap_bytes: int = CAP_BYTES) -> None:
    assert max(file_sizes(directory)) <= cap_bytes


def test_namespaces_lie_side_by_side_and_each_finds_its_own(folders: Folders) -> None:
    keys = keys_of(4)
    for of in (A, B, C):
        store = folders(of)
        assert found(store) == {}
        put(store, keys, range(4))
        store.close()
    for of in (A, B, C):
        store = folders(of)
        assert found(store) == dict(zip(keys, range(4), strict=True))
        assert num_right(store, keys, range(4)) == 4
        assert store.take_incidents() == []
        store.close()


def test_the_one_in_use_takes_room_from_the_one_unused_for_longest(
    folders: Folders, tmp_path: Path
) -> None:
    for number, of in enumerate((A, B)):
        store = folders(of)
        put(store, keys_of(8), range(8))
        store.close()
        path = folder.store_path(tmp_path / "kv", of.namespace)
        for name in ("MANIFEST", "index"):
            os.utime(path / name, (1000.0 + number, 1000.0 + number))
    store = folders(C)
    path_of_a, path_of_b = (folder.store_path(tmp_path / "kv", of.namespace) for of in (A, B))
    whole_b = folder.disk_bytes(path_of_b)
    for place in range(store.num_slots):
        assert not path_of_a.exists() or folder.disk_bytes(path_of_b) == whole_b
        put(store, [key_of(place)], [place])
        check_cap(tmp_path / "kv")
    assert num_right(store, [key_of(p) for p in range(store.num_slots)], range(store.num_slots))
    assert [shelf.geometry.spec for shelf in folder.look_into(tmp_path / "kv") or ()] == [C]
    store.close()
    for of in (A, B):
        store = folders(of)
        assert found(store) == {}
        store.close()


def test_what_gives_up_a_part_keeps_the_rest_and_is_not_damaged(
    folders: Folders, tmp_path: Path
) -> None:
    store = folders(A)
    keys = keys_of(NUM_SLOTS)
    put(store, keys, range(NUM_SLOTS))
    store.close()
    store = folders(B)
    put(store, [key_of("b")], [0])
    check_cap(tmp_path / "kv")
    store.close()
    store = folders(A)
    kept = found(store)
    assert 0 < len(kept) < NUM_SLOTS
    assert num_right(store, list(kept), list(kept.values())) == len(kept)
    assert store.take_incidents() == []
    put(store, keys, range(NUM_SLOTS))
    check_cap(tmp_path / "kv")
    assert num_right(store, keys, range(NUM_SLOTS)) == NUM_SLOTS


@pytest.mark.parametrize("seed", range(6))
def test_the_cap_holds_whatever_is_opened_and_written_in_turn(
    folders: Folders, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        of = rng.choice((A, B, C))
        cap = rng.choice((CAP_BYTES, CAP_BYTES // 2, 2 * CAP_BYTES))
        store = folders(of, cap_bytes=cap)
        check_cap(tmp_path / "kv", cap)
        kept = found(store)
        assert num_right(store, list(kept), list(kept.values())) == len(kept)
        for place in rng.sample(range(store.num_slots), rng.randrange(store.num_slots)):
            put(store, [key_of((of.namespace, place))], [place])
            check_cap(tmp_path / "kv", cap)
        assert store.take_incidents() == []
        store.close()


_CHILD = """
import random, sys
from pathlib import Path
from tools import Desk, key_of
from test_disk_folder import A, B, C, CAP_BYTES, SLAB_BYTES
from penstock.stores.disk_folder import DiskFolder

rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    of = rng.choice((A, B, C))
    store = DiskFolder(Path(sys.argv[1]), of, CAP_BYTES, slab_bytes=SLAB_BYTES)
    desk = Desk(of, 1)
    for place in rng.sample(range(store.num_slots), rng.randrange(store.num_slots)):
        store.put(desk.write([key_of((of.namespace, place))], [place]))
        print(place, flush=True)
    store.close()
"""


@pytest.mark.parametrize("seed", range(4))
def test_the_cap_holds_and_nothing_lies_after_a_kill(
    folders: Folders, tmp_path: Path, seed: int
) -> None:
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path / "kv"), str(seed)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
    )
    assert child.stdout is not None
    for _ in range(random.Random(seed).randrange(60, 200)):
        assert child.stdout.readline(), "the child died by itself"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    check_cap(tmp_path / "kv")
    for of in (A, B, C):
        store = folders(of)
        check_cap(tmp_path / "kv")
        kept = found(store)
        assert num_right(store, list(kept), list(kept.values())) == len(kept)
        store.close()


def test_a_killed_eviction_leaves_no_record_of_what_is_gone(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folders(A)
    put(store, keys_of(NUM_SLOTS), range(NUM_SLOTS))
    store.close()

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        shared_cap._give_up(
            folder.look_at(folder.store_path(tmp_path / "kv", A.namespace)), 1 << 40
        )
    monkeypatch.undo()
    store = folders(A)
    assert len(found(store)) == 24  # the last of four slabs was to go first
    assert store.take_incidents() == []


def test_one_process_writes_to_a_folder_whatever_the_namespace(folders: Folders) -> None:
    store = folders(A)
    with pytest.raises(Locked, match=f"process {os.getpid()}"):
        folders(B)
    store.close()
    folders(B)


def test_a_reader_of_another_namespace_is_told_what_there_is(folders: Folders) -> None:
    store = folders(A)
    put(store, keys_of(1), range(1))
    assert num_right(folders(A, read_only=True), keys_of(1), range(1)) == 1
    with pytest.raises(Foreign) as refusal:
        folders(B, read_only=True)
    assert "no store for m2/s.gguf, float32, blocks of 8 tokens" in str(refusal.value)
    assert "has stores for m2/s.gguf, bfloat16, blocks of 16 tokens" in str(refusal.value)


def test_a_reader_misses_what_was_given_up_under_it(folders: Folders) -> None:
    store = folders(A)
    keys = keys_of(NUM_SLOTS)
    put(store, keys, range(NUM_SLOTS))
    store.close()
    reader = folders(A, read_only=True)
    assert num_right(reader, keys, range(NUM_SLOTS)) == NUM_SLOTS
    put(folders(B), [key_of("b")], [0])
    assert num_right(reader, keys, range(NUM_SLOTS)) < NUM_SLOTS


def test_a_cap_too_small_for_a_block_says_what_is_needed(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk\.size .* at least"):
        folders(A, cap_bytes=folder.FOLDER_BYTES + 4096)
    need = slab.Geometry.of(A).min_cap_bytes + folder.FOLDER_BYTES
    store = folders(A, cap_bytes=need)
    assert store.num_slots == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_a_flat_folder_of_format_1_is_refused_and_left_alone(
    folders: Folders, tmp_path: Path, read_only: bool
) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    fields = {"format_version": 1, "namespace": A.namespace.hex(), "block_bytes": 8192}
    (directory / "MANIFEST").write_text(json.dumps(fields))
    (directory / "index").write_bytes(slab.MAGIC + bytes(124))
    (directory / "slab-00000").write_bytes(bytes(8192))
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(Foreign, match=r"earlier Penstock.*store clear"):
        folders(A, read_only=read_only)
    after = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "LOCK"}
    assert after == before


def test_a_namespace_is_not_taken_for_a_folder(folders: Folders, tmp_path: Path) -> None:
    folders(A).close()
    with pytest.raises(Foreign, match="use its parent directory"):
        DiskFolder(folder.store_path(tmp_path / "kv", A.namespace), A, CAP_BYTES)


def test_another_label_of_the_same_namespace_takes_its_place(
    folders: Folders, tmp_path: Path
) -> None:
    folders(A).close()
    folders(replace(A, description=(("model", "/m2/s.gguf"),))).close()
    (shelf,) = folder.look_into(tmp_path / "kv") or ()
    assert shelf.title == "/m2/s.gguf, blocks of 16 tokens"


def test_a_strangers_files_are_left_alone(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "index").write_text("mine")
    with pytest.raises(Foreign, match="not Penstock's"):
        folders(A)
    assert (tmp_path / "kv" / "index").read_text() == "mine"
