"""A disk folder in which others leave things, and that changes at the worst moments."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools import Desk, cap_for, keys_of, spec

from penstock.errors import Corrupt, Missing, StoreError
from penstock.stores import folder, shared_cap, slab
from penstock.stores.directory import lock_directory
from penstock.stores.disk import DiskStore
from penstock.stores.disk_folder import DiskFolder
from penstock.types import BlockSpec

A, B = spec(8192, "a"), spec(4096, "b", 8)
NUM_SLOTS = 32
SLAB_BYTES = 8 * 8192
CAP_BYTES = cap_for(A, NUM_SLOTS, SLAB_BYTES) + folder.FOLDER_BYTES


def open_folder(directory: Path, of: BlockSpec = A, **options: Any) -> DiskFolder:
    return DiskFolder(directory, of, CAP_BYTES, slab_bytes=SLAB_BYTES, **options)


def fill(store: DiskFolder, num: int) -> None:
    desk = Desk(store._spec, num)
    assert store.put(desk.write(keys_of(num), range(num))) == [None] * num


@pytest.mark.parametrize("is_link", [False, True])
def test_a_strangers_folder_with_a_name_like_a_namespaces_is_left_alone(
    tmp_path: Path, is_link: bool
) -> None:
    """Names of 32 hexadecimal digits are common: MD5 makes them."""
    kv = tmp_path / "kv"
    strangers = kv / ("0123456789abcdef" * 2)
    files = {"index": "mine", "LOCK": "", "MANIFEST": "mine", "slab-00001": "x" * 100_000}
    home = tmp_path / "home" if is_link else strangers
    home.mkdir(parents=True)
    for name, text in files.items():
        (home / name).write_text(text)
    if is_link:
        kv.mkdir()
        strangers.symlink_to(home)
    store = open_folder(kv)
    fill(store, NUM_SLOTS)  # as much as the cap allows
    store.close()
    assert {path.name: path.read_text() for path in home.iterdir()} == files
    assert folder.store_paths(kv) == [store.store_directory]


def test_a_namespace_of_ours_without_its_manifest_still_gives_up_its_room(tmp_path: Path) -> None:
    store = open_folder(tmp_path, B)
    fill(store, 20)
    store.close()
    (store.store_directory / "MANIFEST").unlink()
    last = open_folder(tmp_path)
    fill(last, NUM_SLOTS)
    last.close()
    assert not store.store_directory.exists()


def test_a_reader_whose_slab_was_given_up_and_made_again_reads_the_new_one(tmp_path: Path) -> None:
    """Not the old one, which it has open: that it would call damaged, until it ends."""
    writer = open_folder(tmp_path)
    fill(writer, NUM_SLOTS)
    reader = open_folder(tmp_path, read_only=True)
    desk = Desk(A, NUM_SLOTS)
    assert reader.get(desk.blank(keys_of(NUM_SLOTS), range(NUM_SLOTS))) == [None] * NUM_SLOTS
    writer.close()
    shelf = folder.look_at(writer.store_directory)
    assert not shared_cap._give_up(shelf, SLAB_BYTES + 1)  # the last slab, and of the one before
    answers = reader.get(desk.blank(keys_of(NUM_SLOTS), range(NUM_SLOTS)))
    assert {type(answer) for answer in answers} == {type(None), Missing}
    writer = open_folder(tmp_path)
    others = keys_of(2 * NUM_SLOTS)[NUM_SLOTS:]
    assert writer.put(desk.write(others, range(NUM_SLOTS))) == [None] * NUM_SLOTS
    blocks = desk.blank(others, range(NUM_SLOTS))
    assert reader.get(blocks) == [None] * NUM_SLOTS
    assert all(map(desk.right, blocks))
    writer.close()
    reader.close()


def test_a_slab_is_never_made_in_what_has_become_anothers_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is replaced between the look at it and the write."""
    kv = tmp_path / "kv"
    first = open_folder(kv)
    second: list[DiskFolder] = []
    honest = DiskStore.write

    def replaced_meanwhile(self: DiskStore, *arguments: Any) -> Any:
        if not second:
            shutil.rmtree(kv)
            second.append(open_folder(kv))
            fill(second[0], 8)
        return honest(self, *arguments)

    monkeypatch.setattr(DiskStore, "write", replaced_meanwhile)
    desk = Desk(A, 8)
    answers = first.put(desk.write(list(reversed(keys_of(8))), range(8)))
    assert all(isinstance(answer, StoreError) for answer in answers)
    blocks = desk.blank(keys_of(8), range(8))
    assert second[0].get(blocks) == [None] * 8
    assert all(map(desk.right, blocks))
    first.close()
    second[0].close()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_even_be_looked_at_is_answered_with_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kv = tmp_path / "kv"
    store = open_folder(kv)
    fill(store, 4)
    shutil.rmtree(kv)
    honest = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and Path(path) == kv:
            raise OSError(number, os.strerror(number), str(path))
        return honest(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    desk = Desk(A, 4)
    answers = store.put(desk.write(keys_of(4), range(4)))
    assert all(isinstance(answer, StoreError) for answer in answers)
    answers = store.get(desk.blank(keys_of(4), range(4)))
    assert all(isinstance(answer, StoreError) for answer in answers)
    assert not any(isinstance(answer, Corrupt) for answer in answers)
    store.drop(keys_of(1)[0], desk.blank(keys_of(1), [0])[0].slot)
    monkeypatch.undo()
    fill(store, 4)
    store.close()


def test_who_only_looks_keeps_nobody_from_writing(tmp_path: Path) -> None:
    os.close(lock_directory(tmp_path))
    stopped = threading.Event()

    def look() -> None:
        while not stopped.is_set():
            folder.find_writer(tmp_path)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(200):
            os.close(lock_directory(tmp_path))
    finally:
        stopped.set()
        for looker in lookers:
            looker.join()


def test_a_model_whose_path_is_not_unicode_has_a_store(tmp_path: Path) -> None:
    odd = replace(A, description=(("model", os.fsdecode(b"/models/caf\xe9")),))
    store = open_folder(tmp_path, odd)
    fill(store, 2)
    store.close()
    geometry = slab.read_manifest(store.store_directory)
    assert geometry is not None
    assert os.fsencode(geometry.description["model"]).endswith(b"\xe9")


def test_a_writer_that_dies_while_it_clears_anothers_records_leaves_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_folder(tmp_path)
    fill(store, NUM_SLOTS)
    store.close()
    calls = [0]

    class Killed(BaseException):
        pass

    def dies_after(number: int) -> None:
        def dying(honest: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                calls[0] += 1
                if calls[0] > number:
                    raise Killed
                return honest(*arguments, **options)

            return call

        for name in ("truncate", "pwrite", "utime"):
            monkeypatch.setattr(os, name, dying(getattr(os, name)))

    for number in range(4):
        calls[0] = 0
        dies_after(number)
        with contextlib.suppress(Killed):
            shared_cap._give_up(folder.look_at(store.store_directory), 3 * 8192)
        monkeypatch.undo()
        again = open_folder(tmp_path)
        assert sum(len(batch) for batch in again.scan()) == NUM_SLOTS
        assert again.take_incidents() == []
        again.close()


def test_what_gave_up_some_room_is_not_taken_for_just_used(tmp_path: Path) -> None:
    stores = []
    for number, of in enumerate((A, B)):
        store = open_folder(tmp_path, of)
        fill(store, 8)
        store.close()
        stores.append(store)
        for name in ("MANIFEST", "index"):
            os.utime(store.store_directory / name, (number + 1.0, number + 1.0))
    shelf = folder.look_at(stores[0].store_directory)
    assert not shared_cap._give_up(shelf, 3 * 8192)
    after = folder.look_at(shelf.path)
    assert after.disk_bytes < shelf.disk_bytes
    assert after.last_used == shelf.last_used == 1.0


def test_a_slab_that_cannot_be_opened_for_a_moment_does_not_lose_its_blocks_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_folder(tmp_path)
    fill(store, NUM_SLOTS)
    store.close()
    honest = os.open

    def too_many(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name == "slab-00001":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return honest(path, *arguments, **options)

    for is_open, num_found in ((False, NUM_SLOTS - 8), (True, NUM_SLOTS)):
        if not is_open:
            monkeypatch.setattr(os, "open", too_many)
        store = open_folder(tmp_path)
        keys = [key for batch in store.scan() for _, key in batch if key is not None]
        assert len(keys) == num_found
        assert sum(one.num_damaged for one in store.take_incidents()) == NUM_SLOTS - num_found
        store.close()
        monkeypatch.undo()


def test_a_lock_removed_while_the_index_is_read_loses_nothing_for_ever(tmp_path: Path) -> None:
    """As an operator does who takes it for one that a dead process left."""
    store = open_folder(tmp_path)
    fill(store, NUM_SLOTS)
    store.close()
    store = open_folder(tmp_path)
    scan = store.scan()
    next(scan)
    (store.store_directory / "LOCK").unlink()
    desk = Desk(A, 1)
    assert store.get(desk.blank(keys_of(1), range(1))) == [None]  # notices, and opens it again
    list(scan)
    store.close()
    store = open_folder(tmp_path)
    assert sum(key is not None for batch in store.scan() for _, key in batch) == NUM_SLOTS
    store.close()


def test_a_folder_that_vanishes_while_it_is_looked_for_is_answered_with_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = tmp_path / "kv"
    store = open_folder(kv)
    shutil.rmtree(kv)
    monkeypatch.setattr(os.path, "exists", lambda path: True)  # as it was a moment ago
    desk = Desk(A, 1)
    (answer,) = store.put(desk.write(keys_of(1), range(1)))
    assert isinstance(answer, StoreError)
    monkeypatch.undo()
    fill(store, 1)
    store.close()
