from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tools import Desk, cap_for, flip_bit, key_of, spec

from penstock.commands import disk_audit
from penstock.errors import Foreign
from penstock.stores import folder
from penstock.stores.disk_folder import DiskFolder
from penstock.stores.slab import RECORD_BYTES, SlabRecord, pack_record
from penstock.types import Slot

Run = Callable[..., Any]
SPEC = replace(spec(), description=(("model", "m2/s.gguf"), ("dtype", "bfloat16")))
NUM_SLOTS = 24
SLAB_BYTES = 8 * SPEC.stride_bytes
CAP_BYTES = cap_for(SPEC, NUM_SLOTS, SLAB_BYTES) + folder.FOLDER_BYTES
HELD = (0, 1, 2, 5, 6, 20)


def fill(store: DiskFolder) -> None:
    desk = Desk(SPEC, len(HELD))
    assert not any(store.put(desk.write([key_of(slot) for slot in HELD], HELD)))


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "kv"
    store = DiskFolder(directory, SPEC, CAP_BYTES, slab_bytes=SLAB_BYTES)
    fill(store)
    store.close()
    return directory


@pytest.fixture
def files(store_dir: Path) -> Path:
    """Where the namespace's own files lie."""
    return folder.store_path(store_dir, SPEC.namespace)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_ls(run: Run, store_dir: Path) -> None:
    before = contents(store_dir)
    found = run("store", "ls", store_dir, "--json").json
    (held,) = found.pop("namespaces")
    assert found["disk_bytes"] == held["disk_bytes"] >= len(HELD) * 8192
    assert found | {"disk_bytes": 0} == {
        "directory": str(store_dir),
        "format_version": 2,
        "disk_bytes": 0,
        "quarantines": [],
        "writer": None,
    }
    assert datetime.fromisoformat(held["last_used"]).tzinfo is not None
    assert held | {"disk_bytes": 0, "last_used": ""} == {
        "namespace": SPEC.namespace.hex(),
        "description": {"model": "m2/s.gguf", "dtype": "bfloat16"},
        "problem": None,
        "last_used": "",
        "block_bytes": 8192,
        "block_tokens": 16,
        "codec": "raw",
        "capacity_tokens": NUM_SLOTS * 16,
        "used_tokens": len(HELD) * 16,
        "num_slots": NUM_SLOTS,
        "num_used": len(HELD),
        "num_free": NUM_SLOTS - len(HELD),
        "num_damaged_records": 0,
        "capacity_bytes": NUM_SLOTS * 8192,
        "used_bytes": len(HELD) * 8192,
        "free_bytes": (NUM_SLOTS - len(HELD)) * 8192,
        "disk_bytes": 0,
    }
    assert contents(store_dir) == before


def test_ls_blocks(run: Run, store_dir: Path) -> None:
    blocks = run("store", "ls", store_dir, "--blocks", "--json").json["namespaces"][0]["blocks"]
    assert [block["slot"] for block in blocks] == list(HELD)
    assert [block["key"] for block in blocks] == [key_of(slot).hex() for slot in HELD]
    assert len({block["generation"] for block in blocks}) == len(HELD)
    lines = run("store", "ls", store_dir, "--blocks").stdout.splitlines()[-len(HELD) :]
    for slot, line in zip(HELD, lines, strict=True):
        assert line.split()[:2] == [str(slot), key_of(slot).hex()[:16] + "…"]


def test_ls_draws_what_it_found(run: Run, store_dir: Path, files: Path) -> None:
    flip_bit(files / "index", 5 * RECORD_BYTES + 20)
    ran = run("store", "ls", store_dir)
    assert ran.code == 0
    for words in (
        "m2/s.gguf, bfloat16, blocks of 16 tokens",
        files.name,
        "24 blocks, 384 tokens, 192.0 KiB",
        "5 blocks, 80 tokens, 40.0 KiB (21%)",
        "1 record;",
        "none",
    ):
        assert words in ran.stdout


def test_ls_of_a_store_in_use(run: Run, store_dir: Path) -> None:
    store = DiskFolder(store_dir, SPEC, CAP_BYTES)
    try:
        assert f"process {os.getpid()}" in run("store", "ls", store_dir, "--json").json["writer"]
        assert run("store", "check", store_dir).code == 0
    finally:
        store.close()
    assert run("store", "ls", store_dir, "--json").json["writer"] is None


def test_check_of_a_sound_store(run: Run, store_dir: Path) -> None:
    before = contents(store_dir)
    ran = run("store", "check", store_dir, "--json")
    assert ran.code == 0
    assert (ran.json["directory"], ran.json["sound"]) == (str(store_dir), True)
    (found,) = ran.json["namespaces"]
    assert found == {
        "namespace": SPEC.namespace.hex(),
        "num_ok": len(HELD),
        "num_corrupt": 0,
        "num_empty": NUM_SLOTS - len(HELD),
        "num_changed": 0,
        "num_cleared": 0,
        "damaged": [],
    }
    assert "sound" in run("store", "check", store_dir).stdout
    assert contents(store_dir) == before


def damage_in_every_way(directory: Path) -> dict[int, str]:
    """Slots 1, 5, 6 and 20, of 8 slots to a slab."""
    flip_bit(directory / "slab-00000", 1 * 8192 + 100)
    flip_bit(directory / "index", 5 * RECORD_BYTES + 60)
    os.truncate(directory / "slab-00000", 6 * 8192 + 4096)
    os.unlink(directory / "slab-00002")
    return {
        1: "the block fails its checksum",
        5: "the record is damaged",
        6: "slab-00000 is truncated",
        20: "slab-00002 is missing",
    }


def test_check_finds_every_kind_of_damage(run: Run, store_dir: Path, files: Path) -> None:
    damage = damage_in_every_way(files)
    before = contents(store_dir)
    ran = run("store", "check", store_dir, "--json")
    assert ran.code == 1
    assert ran.stderr == ""
    assert not ran.json["sound"]
    (found,) = ran.json["namespaces"]
    assert {entry["slot"]: entry["problem"] for entry in found["damaged"]} == damage
    keys = [entry["key"] for entry in found["damaged"]]
    assert keys == [key_of(1).hex(), None, key_of(6).hex(), key_of(20).hex()]
    assert (found["num_ok"], found["num_corrupt"], found["num_empty"]) == (2, 4, 18)
    drawn = run("store", "check", store_dir)
    assert drawn.code == 1
    for problem in damage.values():
        assert problem in drawn.stdout
    assert contents(store_dir) == before


def test_repair_clears_what_is_damaged_and_keeps_the_rest(
    run: Run, store_dir: Path, files: Path
) -> None:
    damage = damage_in_every_way(files)
    ran = run("store", "check", store_dir, "--repair", "--json")
    assert ran.code == 1  # there was damage
    assert ran.json["namespaces"][0]["num_cleared"] == len(damage)
    again = run("store", "check", store_dir, "--json")
    assert again.code == 0
    assert again.json["namespaces"][0]["num_ok"] == 2
    blocks = run("store", "ls", store_dir, "--blocks", "--json").json["namespaces"][0]["blocks"]
    assert [block["slot"] for block in blocks] == [0, 2]


def test_a_record_of_another_model_is_damage(run: Run, store_dir: Path, files: Path) -> None:
    data = bytearray((files / "index").read_bytes())
    data[:RECORD_BYTES] = pack_record(SlabRecord(True, 7, key_of(0), bytes(32), 8192, bytes(16)))
    (files / "index").write_bytes(data)
    (damage,) = run("store", "check", store_dir, "--json").json["namespaces"][0]["damaged"]
    assert (damage["slot"], damage["problem"]) == (
        0,
        "the block belongs to another model or layout",
    )


def test_a_slot_rewritten_during_the_check_is_not_damage(
    run: Run, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer replaces one block and drops another, between the index and the payload."""
    writer = DiskFolder(store_dir, SPEC, CAP_BYTES)
    read_index = disk_audit.read_index

    def read_index_then_write(directory: Path) -> Any:
        entries = list(read_index(directory))
        desk = Desk(SPEC, 1)
        assert writer.put(desk.write([key_of("new")], [1])) == [None]
        writer.drop(key_of(2), Slot(2))
        return iter(entries)

    monkeypatch.setattr(disk_audit, "read_index", read_index_then_write)
    try:
        ran = run("store", "check", store_dir, "--json")
    finally:
        writer.close()
    assert ran.code == 0
    (found,) = ran.json["namespaces"]
    assert (found["num_ok"], found["num_changed"]) == (len(HELD) - 1, 1)


def test_repair_refuses_a_store_in_use(run: Run, store_dir: Path) -> None:
    store = DiskFolder(store_dir, SPEC, CAP_BYTES)
    try:
        assert "is being written by" in run("store", "check", store_dir, "--repair").refusal
    finally:
        store.close()


@pytest.mark.parametrize("name", ["index", "MANIFEST"])
def test_a_namespace_that_cannot_be_read_is_damage(
    run: Run, store_dir: Path, files: Path, name: str
) -> None:
    (files / name).unlink()
    (found,) = run("store", "ls", store_dir, "--json").json["namespaces"]
    clear = f"penstock store clear {store_dir} --namespace {files.name}"
    assert clear in found["problem"]
    assert found["namespace"].startswith(files.name)
    assert "problem" in run("store", "ls", store_dir).stdout
    ran = run("store", "check", store_dir, "--repair", "--json")
    assert ran.code == 1
    (damage,) = ran.json["namespaces"][0]["damaged"]
    assert (damage["slot"], clear in damage["problem"]) == (None, True)
    assert run(*clear.split()[1:], "--yes").code == 0
    assert not files.exists()
    assert run("store", "check", store_dir).code == 0


def test_clear_deletes_the_store_and_nothing_else(run: Run, store_dir: Path) -> None:
    (store_dir / "notes.txt").write_text("mine")
    (store_dir / "slab-of-marble").write_text("mine")
    ran = run("store", "clear", store_dir, "--yes", "--json")
    assert ran.code == 0
    assert ran.json["freed_bytes"] >= len(HELD) * 8192
    left = sorted(path.name for path in store_dir.iterdir())
    assert left == ["LOCK", "notes.txt", "slab-of-marble"]
    assert "holds no Penstock store" in run("store", "clear", store_dir, "--yes").refusal


@pytest.mark.parametrize("manifest", ["", "{", "[1]", '{"format_version": 99}', "\0" * 50])
def test_clear_takes_what_cannot_be_opened(run: Run, store_dir: Path, manifest: str) -> None:
    (store_dir / "MANIFEST").write_text(manifest)
    assert "store clear" in run("store", "ls", store_dir).refusal
    assert run("store", "clear", store_dir, "--yes").code == 0
    assert [path.name for path in store_dir.iterdir()] == ["LOCK"]


def test_clear_spares_another_program_s_manifest(run: Run, tmp_path: Path) -> None:
    (tmp_path / "MANIFEST").write_text("include README.md\n")
    (tmp_path / "index").write_text("mine")
    before = contents(tmp_path)
    assert "holds no Penstock store" in run("store", "clear", tmp_path, "--yes").refusal
    assert contents(tmp_path) == before


def test_clear_refuses_a_store_in_use(run: Run, store_dir: Path) -> None:
    store = DiskFolder(store_dir, SPEC, CAP_BYTES)
    try:
        before = contents(store_dir)
        assert "is being written by" in run("store", "clear", store_dir, "--yes").refusal
        assert contents(store_dir) == before
    finally:
        store.close()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_clear_asks(
    run: Run, store_dir: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    ran = run("store", "clear", store_dir)
    assert ran.code == code
    assert "Delete all" in ran.stderr
    assert (store_dir / "MANIFEST").exists() is (code == 1)
    if code == 1:
        assert "nothing was done" in ran.stderr


def test_clear_with_json_does_not_ask(run: Run, store_dir: Path) -> None:
    assert "--yes" in run("store", "clear", store_dir, "--json").refusal
    assert (store_dir / "MANIFEST").exists()


@pytest.mark.parametrize("command", ["ls", "check", "clear"])
def test_what_is_no_store_is_refused_and_left_alone(run: Run, tmp_path: Path, command: str) -> None:
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_text("mine")
    empty.mkdir()
    yes = ["--yes"] if command == "clear" else []
    assert "is not a folder" in run("store", command, file, *yes).refusal
    assert "does not exist" in run("store", command, tmp_path / "none", *yes).refusal
    assert "holds no Penstock store" in run("store", command, empty, *yes).refusal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert list(empty.iterdir()) == []


# Several namespaces in one folder.

OTHER = replace(spec(4096, "other", 8), description=(("model", "m2/s.gguf"), ("dtype", "float32")))


@pytest.fixture
def two(store_dir: Path) -> Path:
    store = DiskFolder(store_dir, OTHER, CAP_BYTES, slab_bytes=SLAB_BYTES)
    assert not any(store.put(Desk(OTHER, 1).write([key_of("other")], [3])))
    store.close()
    return store_dir


def test_ls_lists_all_namespaces_the_last_used_first(run: Run, two: Path) -> None:
    other, first = run("store", "ls", two, "--json").json["namespaces"]
    assert (first["namespace"], other["namespace"]) == (SPEC.namespace.hex(), OTHER.namespace.hex())
    assert (first["num_used"], first["block_tokens"]) == (len(HELD), 16)
    assert (other["num_used"], other["block_tokens"]) == (1, 8)
    drawn = run("store", "ls", two).stdout
    assert "m2/s.gguf, float32, blocks of 8 tokens" in drawn
    assert "m2/s.gguf, bfloat16, blocks of 16 tokens" in drawn


def test_check_looks_at_all_namespaces(run: Run, two: Path) -> None:
    flip_bit(folder.store_path(two, OTHER.namespace) / "slab-00000", 3 * 4096)
    ran = run("store", "check", two, "--json")
    assert ran.code == 1
    other, first = ran.json["namespaces"]
    assert (first["num_ok"], first["num_corrupt"]) == (len(HELD), 0)
    assert (other["num_ok"], other["num_corrupt"]) == (0, 1)
    assert "float32" in run("store", "check", two).stdout


def test_clear_of_one_namespace_keeps_the_other(run: Run, two: Path) -> None:
    assert "does not hold" in run("store", "clear", two, "--namespace", "0" * 32, "--yes").refusal
    ran = run("store", "clear", two, "--namespace", OTHER.namespace.hex()[:32], "--yes")
    assert ran.code == 0
    (left,) = run("store", "ls", two, "--json").json["namespaces"]
    assert (left["namespace"], left["num_used"]) == (SPEC.namespace.hex(), len(HELD))


def test_a_folder_of_an_earlier_format_is_refused_and_can_be_cleared(
    run: Run, tmp_path: Path
) -> None:
    """As version 1 left it: the folder itself was the store of one namespace."""
    (tmp_path / "MANIFEST").write_text(json.dumps({"format_version": 1, "namespace": "00" * 32}))
    (tmp_path / "LOCK").write_text("process 1 on elsewhere\n")
    (tmp_path / "index").write_bytes(bytes(RECORD_BYTES))
    (tmp_path / "slab-00000").write_bytes(bytes(8192))
    before = contents(tmp_path)
    for command in ("ls", "check"):
        refusal = run("store", command, tmp_path).refusal
        assert "earlier Penstock" in refusal
        assert "store clear" in refusal
    assert contents(tmp_path) == before
    assert run("store", "clear", tmp_path, "--yes").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]


HOSTILE = "\x1b]0;owned\x07\x1b[2J[/red]\u202e\ud800\r\n"


def test_a_hostile_description_gives_the_terminal_no_orders(
    run: Run, store_dir: Path, files: Path
) -> None:
    fields = json.loads((files / "MANIFEST").read_text())
    fields["description"] = {"model": f"m{HOSTILE}", HOSTILE: HOSTILE}
    (files / "MANIFEST").write_text(json.dumps(fields))
    flip_bit(files / "slab-00000", 5)
    (store_dir / "LOCK").write_text("\x1b[2J")
    with (store_dir / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = run("store", "ls", store_dir, "--blocks").stdout
        assert "m\N{REPLACEMENT CHARACTER}" in shown
        refused = run("store", "clear", store_dir, "--yes").refusal
    shown += refused + run("store", "check", store_dir).stdout
    assert all(char.isprintable() for char in shown.replace("\n", ""))
    assert (
        run("store", "ls", store_dir, "--json").json["namespaces"][0]["description"]
        == (fields["description"])
    )


@pytest.mark.parametrize(
    "change",
    [
        {"block_bytes": 1 << 61, "stride_bytes": 1 << 61},
        {"stride_bytes": 1 << 61},
        {"stride_bytes": 1},
        {"block_tokens": 1 << 61},
        {"slots_per_slab": 1},
        {"slots_per_slab": 1 << 61},
        {"epoch": (1 << 62) - 1},
        {HOSTILE: 1},
        {"format_version": HOSTILE},
        {"description": {"model": "m" * 100_000}},
    ],
    ids=str,
)
def test_hostile_numbers_in_a_manifest_are_reported_and_no_traceback(
    run: Run, store_dir: Path, files: Path, change: dict[str, Any]
) -> None:
    fields = json.loads((files / "MANIFEST").read_text())
    (files / "MANIFEST").write_text(json.dumps(fields | change))
    shown = run("store", "ls", store_dir).stdout
    shown += run("store", "check", store_dir).stdout
    assert all(char.isprintable() for char in shown.replace("\n", ""))


@pytest.mark.parametrize("change", [{"epoch": 1 << 24}, {"stride_bytes": 4096}], ids=str)
def test_one_damaged_manifest_is_told_and_the_other_namespaces_are_checked(
    run: Run, store_dir: Path, files: Path, change: dict[str, Any]
) -> None:
    other = DiskFolder(store_dir, spec(4096, "other"), CAP_BYTES, slab_bytes=SLAB_BYTES)
    other.close()
    fields = json.loads((files / "MANIFEST").read_text())
    (files / "MANIFEST").write_text(json.dumps(fields | change))
    found = run("store", "check", store_dir, "--json")
    assert found.code == 1
    damaged = {one["namespace"]: one["num_corrupt"] for one in found.json["namespaces"]}
    assert damaged == {files.name: 1, spec(4096, "other").namespace.hex(): 0}
    with pytest.raises(Foreign, match="number is impossible"):
        DiskFolder(store_dir, SPEC, CAP_BYTES, slab_bytes=SLAB_BYTES)


def test_ls_shows_a_quarantine(run: Run, store_dir: Path) -> None:
    path = store_dir / f"quarantine-{SPEC.namespace.hex()[:32]}.json"
    path.write_text("{}")
    assert run("store", "ls", store_dir, "--json").json["quarantines"] == [str(path)]
    assert "quarantine" in run("store", "ls", store_dir).stdout
    run("store", "clear", store_dir, "--yes")
    assert path.exists(), "clearing KV does not end a quarantine: its cause may still be there"
