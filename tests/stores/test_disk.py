from __future__ import annotations

import errno
import gc
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tools import (
    ODD_BLOCK_BYTES,
    TIMEOUT_SECONDS,
    Desk,
    cap_for,
    content,
    file_sizes,
    flip_bit,
    key_of,
    keys_of,
    spec,
)

from penstock.errors import (
    ConfigError,
    Corrupt,
    Foreign,
    Locked,
    Missing,
    PenstockError,
    ReadOnly,
    StoreError,
)
from penstock.stores import disk, disk_files, slab
from penstock.stores.base import Block
from penstock.stores.directory import remove_store_files
from penstock.stores.disk import DiskStore
from penstock.stores.host import HostArena
from penstock.types import BlockKey, BlockSpec, Slot

Stores = Callable[..., DiskStore]
SLAB_SLOTS = 4
SLAB_BYTES = SLAB_SLOTS * 8192


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Opens stores in tmp_path / "kv", with slabs of a few slots; closes them at the end."""
    opened: list[DiskStore] = []

    def open_store(num_slots: int = 16, of: BlockSpec | None = None, **options: Any) -> DiskStore:
        of = of or spec()
        options.setdefault("slab_bytes", SLAB_SLOTS * of.stride_bytes)
        cap = options.pop("cap_bytes", cap_for(of, num_slots, options["slab_bytes"]))
        opened.append(DiskStore(tmp_path / "kv", of, cap, **options))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def put(store: DiskStore, keys: Sequence[BlockKey], places: Sequence[int]) -> None:
    desk = Desk(store._spec, len(keys))
    assert store.put(desk.write(keys, places)) == [None] * len(keys)


def get(
    store: DiskStore, keys: Sequence[BlockKey], places: Sequence[int]
) -> list[StoreError | None]:
    """What the store answers; what it calls good is compared bit for bit."""
    desk = Desk(store._spec, len(keys))
    blocks = desk.blank(keys, places)
    answers = store.get(blocks)
    assert len(answers) == len(keys)
    for block, answer in zip(blocks, answers, strict=True):
        assert answer is not None or desk.right(block), "the store lied"
    return answers


def kinds(answers: Sequence[StoreError | None]) -> list[type | None]:
    return [None if answer is None else type(answer) for answer in answers]


def found(store: DiskStore) -> dict[BlockKey, int]:
    """What a scan finds, after making sure that it names every slot exactly once."""
    pairs = [pair for batch in store.scan() for pair in batch]
    assert sorted(slot for slot, _ in pairs) == list(range(store.num_slots))
    return {key: slot for slot, key in pairs if key is not None}


# Round trips.


@pytest.mark.parametrize("block_bytes", [8192, 4096, 1, 4095, 4097, ODD_BLOCK_BYTES])
@pytest.mark.parametrize(
    "places",
    [[0], [0, 1, 2], [1, 3, 9], [2, 3, 4, 5], [15, 0, 7, 8, 6, 4], list(range(16))],
    ids=["one", "neighbours", "scattered", "across-slabs", "unordered", "all"],
)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_blocks_come_back_bit_for_bit(
    stores: Stores, block_bytes: int, places: list[int], direct: bool
) -> None:
    store = stores(of=spec(block_bytes), direct=direct)
    keys = keys_of(len(places))
    put(store, keys, places)
    assert get(store, keys, places) == [None] * len(keys)
    assert get(store, keys[::-1], places[::-1]) == [None] * len(keys)
    assert found(store) == dict(zip(keys, places, strict=True))


def test_a_thousand_blocks(stores: Stores) -> None:
    store = stores(1000, slab_bytes=300 * 8192)
    keys = keys_of(1000)
    places = list(range(1000))
    random.Random(1).shuffle(places)
    put(store, keys, places)
    assert get(store, keys, places) == [None] * 1000
    store.close()
    store = stores(1000, slab_bytes=300 * 8192)
    assert found(store) == dict(zip(keys, places, strict=True))
    assert get(store, keys, places) == [None] * 1000


def test_more_blocks_in_a_row_than_one_system_call_takes(stores: Stores) -> None:
    num = disk._MAX_RUN + 100
    store = stores(num, of=spec(4096), slab_bytes=slab.SLAB_BYTES)
    put(store, keys_of(num), range(num))
    assert get(store, keys_of(num), range(num)) == [None] * num


def test_nothing_is_moved_when_nothing_is_asked(stores: Stores) -> None:
    store = stores()
    assert store.put([]) == store.get([]) == []


def test_a_slot_written_again_holds_the_new_block_only(stores: Stores) -> None:
    store = stores()
    old, new = keys_of(2)
    put(store, [old], [3])
    put(store, [new], [3])
    assert kinds(get(store, [old, new], [3, 3])) == [Missing, None]
    assert found(store) == {new: 3}


def test_a_dropped_block_is_gone_also_after_reopening(stores: Stores) -> None:
    store = stores()
    keys = keys_of(3)
    put(store, keys, [0, 1, 2])
    store.drop(keys[1], Slot(1))
    store.drop(keys[2], Slot(0))  # another block lies there: it stays
    assert kinds(get(store, keys, [0, 1, 2])) == [None, Missing, None]
    store.close()
    assert found(stores()) == {keys[0]: 0, keys[2]: 2}


def test_one_bad_block_costs_none_of_its_neighbours(stores: Stores, tmp_path: Path) -> None:
    store = stores(slab_bytes=slab.SLAB_BYTES)
    keys = keys_of(8)
    put(store, keys, range(8))
    flip_bit(tmp_path / "kv" / "slab-00000", 3 * 8192 + 100)
    flip_bit(tmp_path / "kv" / "index", 5 * slab.RECORD_BYTES + 20)
    asked = [*keys[:7], key_of("stranger")]
    expected = [None, None, None, Corrupt, None, Corrupt, None, Missing]
    assert kinds(get(store, asked, range(8))) == expected


def test_threads_that_write_different_slots_do_not_disturb_each_other(stores: Stores) -> None:
    store = stores(256, slab_bytes=64 * 8192)
    keys = keys_of(256)
    bad: list[object] = []

    def work(part: int) -> None:
        places = range(part, 256, 8)
        desk = Desk(spec(), len(places))
        mine = [keys[place] for place in places]
        for _ in range(3):
            bad.extend(filter(None, store.put(desk.write(mine, places))))
            blocks = desk.blank(mine, places)
            bad.extend(filter(None, store.get(blocks)))
            bad.extend(block.slot for block in blocks if not desk.right(block))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert bad == []
    assert get(store, keys, range(256)) == [None] * 256


# The cap.

MARGINS = [0, 1, 127, 128, 4095, 4096, 8191, 8319]


def check_cap(directory: Path, cap_bytes: int) -> None:
    size, used = file_sizes(directory)
    assert size <= cap_bytes
    assert used <= cap_bytes


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("num_slots", [1, 31, 32, 33, 100])
def test_a_full_store_stays_below_its_cap(
    stores: Stores, tmp_path: Path, num_slots: int, margin: int
) -> None:
    slab_bytes = 40 * 8192
    cap = cap_for(spec(), num_slots, slab_bytes) + margin
    store = stores(cap_bytes=cap, slab_bytes=slab_bytes)
    put(store, keys_of(store.num_slots), range(store.num_slots))
    check_cap(tmp_path / "kv", cap)


@pytest.mark.parametrize("slab_slots", [16, 1 << 20], ids=["many-slabs", "one-slab"])
def test_a_store_half_written_stays_below_its_cap(
    stores: Stores, tmp_path: Path, slab_slots: int
) -> None:
    """Every other slot: filesystems keep the most books then, and count them to the file."""
    slab_bytes = slab_slots * 8192
    cap = cap_for(spec(), 1024, slab_bytes)
    store = stores(cap_bytes=cap, slab_bytes=slab_bytes)
    for place in range(0, store.num_slots, 2):
        put(store, [key_of(place)], [place])
    check_cap(tmp_path / "kv", cap)


@pytest.mark.parametrize("second", [100, 64, 37, 1, 150])
def test_the_cap_holds_after_reopening_with_another(
    stores: Stores, tmp_path: Path, second: int
) -> None:
    slab_bytes = 16 * 8192
    store = stores(100, slab_bytes=slab_bytes)
    keys = keys_of(100)
    put(store, keys, range(100))
    store.close()
    cap = cap_for(spec(), second, slab_bytes)
    store = stores(cap_bytes=cap)  # the slabs stay as they are, whatever is asked for now
    assert store.num_slots == second
    check_cap(tmp_path / "kv", cap)
    kept = min(second, 100)
    assert found(store) == dict(zip(keys[:kept], range(kept), strict=True))
    assert get(store, keys[:kept], range(kept)) == [None] * kept
    more = keys_of(second, "more")
    put(store, more, range(second))
    assert get(store, more, range(second)) == [None] * second
    check_cap(tmp_path / "kv", cap)


def test_a_cap_that_shrank_and_grew_finds_nothing_in_what_was_cut_off(stores: Stores) -> None:
    keys = keys_of(20)
    for num_slots in (20, 10, 20):
        store = stores(num_slots)
        if num_slots == 20 and not found(store):
            put(store, keys, range(20))
        store.close()
    store = stores(20)
    assert found(store) == dict(zip(keys[:10], range(10), strict=True))
    assert None not in get(store, keys[10:], range(10, 20))


def test_restarts_and_rewrites_do_not_add_up(stores: Stores, tmp_path: Path) -> None:
    cap = cap_for(spec(), 50, SLAB_BYTES)
    for turn in range(5):
        store = stores(cap_bytes=cap)
        put(store, keys_of(50, str(turn)), range(50))
        check_cap(tmp_path / "kv", cap)
        store.close()
        check_cap(tmp_path / "kv", cap)


def test_what_killed_writers_left_behind_counts_against_the_cap(
    stores: Stores, tmp_path: Path
) -> None:
    """A writer that dies while it replaces the manifest leaves a temporary behind."""
    cap = cap_for(spec(), 32, SLAB_BYTES)
    stores(cap_bytes=cap).close()
    for number in range(4):
        (tmp_path / "kv" / f".MANIFEST-dead{number}").write_bytes(b"{")
    store = stores(cap_bytes=cap)
    put(store, keys_of(32), range(32))
    check_cap(tmp_path / "kv", cap)


def test_a_cap_too_small_for_a_block_says_what_is_needed(stores: Stores, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk\.size .* at least"):
        stores(cap_bytes=cap_for(spec(), 1, SLAB_BYTES) - 1)
    assert stores(1).num_slots == 1


# Files.


def test_files_and_directory_are_for_their_owner_only(stores: Stores, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = stores()
        put(store, keys_of(16), range(16))
    finally:
        os.umask(before)
    directory = tmp_path / "kv"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["LOCK", "MANIFEST", "index", *(f"slab-0000{i}" for i in range(4))]
    for name in names:
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600, name


def test_the_bytes_on_disk_are_where_the_format_says(stores: Stores, tmp_path: Path) -> None:
    store = stores(of=spec(ODD_BLOCK_BYTES))
    key = key_of("block")
    put(store, [key], [SLAB_SLOTS + 2])
    store.close()
    payload = (tmp_path / "kv" / "slab-00001").read_bytes()[2 * 12_288 :][:ODD_BLOCK_BYTES]
    assert payload == content(key, ODD_BLOCK_BYTES)
    index = (tmp_path / "kv" / "index").read_bytes()
    record = slab.unpack_record(index[(SLAB_SLOTS + 2) * 128 :][:128])
    assert record is not None
    assert (record.key, record.length) == (key, ODD_BLOCK_BYTES)
    assert record.namespace == spec().namespace


@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_is_a_file_is_refused(stores: Stores, tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "kv").touch()
    with pytest.raises(ConfigError, match="is a file"):
        stores(read_only=read_only)


def test_descriptors_are_given_back(stores: Stores) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests left open would be closed meanwhile
    before = num_open()
    store = stores()
    put(store, keys_of(16), range(16))
    reader = stores(read_only=True)
    get(reader, keys_of(16), range(16))
    assert num_open() > before
    with pytest.raises(Locked):
        stores()
    reader.close()
    store.close()
    store.close()
    for wrong in (spec(4096), spec(namespace="other")):
        with pytest.raises(Foreign):
            stores(of=wrong)
    with pytest.raises(ConfigError):
        stores(cap_bytes=1)
    assert num_open() <= before


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A filesystem that does not know O_DIRECT. Returns the paths it was tried on."""
    real_open = os.open
    tried = []

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            tried.append(str(path))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    return tried


def test_without_direct_io_the_page_cache_serves_and_the_log_says_so_once(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING):
        store = stores()
        put(store, keys_of(16), range(16))
        assert get(store, keys_of(16), range(16)) == [None] * 16
    assert len(tried) == 1
    assert [record.message for record in caplog.records if "direct I/O" in record.message] == [
        f"{store.directory} does not support direct I/O; reads and writes go through the page cache"
    ]
    assert not store.files.direct


def test_direct_io_is_not_tried_when_not_wanted(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = refuse_direct(monkeypatch)
    store = stores(direct=False)
    put(store, keys_of(16), range(16))
    assert tried == []


# Generations.


def test_generations_grow_across_reopening(stores: Stores) -> None:
    newest = -1
    for turn in range(4):
        store = stores()
        put(store, keys_of(4, str(turn)), range(4 * turn, 4 * turn + 4))
        mine = [r.generation for slot, r in store.records() if slot >= 4 * turn]
        assert min(mine) > newest
        newest = max(mine)
        store.close()


def test_a_scan_names_the_oldest_block_first(stores: Stores) -> None:
    store = stores(slab_bytes=slab.SLAB_BYTES)
    keys = keys_of(3)
    for key, place in zip(keys, (9, 2, 5), strict=True):
        put(store, [key], [place])
    store.close()
    order = [key for batch in stores().scan() for _, key in batch if key is not None]
    assert order == keys


def test_a_scan_is_complete_over_several_batches(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SCAN_RECORDS", 7)
    store = stores(24)
    keys = keys_of(5)
    put(store, keys, [0, 6, 7, 13, 23])
    assert found(store) == dict(zip(keys, [0, 6, 7, 13, 23], strict=True))
    assert all(0 < len(batch) <= 7 for batch in store.scan())


def test_a_scan_sees_every_flipped_bit_of_a_record(stores: Stores, tmp_path: Path) -> None:
    store = stores(3)
    keys = keys_of(3)
    put(store, keys, range(3))
    sound = (tmp_path / "kv" / "index").read_bytes()
    with (tmp_path / "kv" / "index").open("r+b", buffering=0) as index:
        for bit in range(8 * slab.RECORD_BYTES):
            damaged = bytearray(sound)
            damaged[slab.RECORD_BYTES + bit // 8] ^= 1 << bit % 8
            index.seek(0)
            index.write(damaged)
            assert found(store) == {keys[0]: 0, keys[2]: 2}, f"bit {bit}"


def test_an_index_that_cannot_be_read_holds_nothing(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()
    put(store, keys_of(16), range(16))

    def fail(*args: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    assert found(store) == {}
    assert kinds(get(store, keys_of(2), range(2))) == [StoreError, StoreError]
    store.drop(key_of("any"), Slot(0))


# Readers beside the writer.


def test_a_reader_reads_and_never_writes(stores: Stores, tmp_path: Path) -> None:
    writer = stores()
    keys = keys_of(4)
    put(writer, keys, range(4))
    reader = stores(read_only=True)
    assert reader.num_slots == writer.num_slots
    assert found(reader) == dict(zip(keys, range(4), strict=True))
    assert get(reader, keys, range(4)) == [None] * 4
    desk = Desk(spec(), 1)
    assert kinds(reader.put(desk.write(keys[:1], [9]))) == [ReadOnly]
    reader.drop(keys[0], Slot(0))
    assert get(writer, keys, range(4)) == [None] * 4


def test_a_reader_finds_what_was_written_after_it_opened(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs take their space in steps: a reader must not keep to the first one it saw."""
    monkeypatch.setattr(disk_files, "_GROW_BYTES", 4 * 8192)
    writer = stores(slab_bytes=slab.SLAB_BYTES)
    early, late = keys_of(2)
    put(writer, [early], [0])
    reader = stores(read_only=True)
    assert get(reader, [early], [0]) == [None]
    put(writer, [late], [12])
    assert get(reader, [late], [12]) == [None]


def test_a_reader_that_is_behind_misses(stores: Stores) -> None:
    writer = stores()
    keys = keys_of(4)
    put(writer, keys, range(4))
    reader = stores(read_only=True)
    put(writer, [key_of("new")], [1])
    writer.drop(keys[2], Slot(2))
    assert kinds(get(reader, keys, range(4))) == [None, Missing, Missing, None]


@pytest.mark.parametrize("rewritten", ["same-slot", "dropped"])
def test_a_block_rewritten_under_a_read_is_missing(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, rewritten: str
) -> None:
    """Between the reader's look at the record and its read of the payload."""
    writer = stores()
    old, new = keys_of(2)
    put(writer, [old], [0])
    reader = stores(read_only=True)
    real_preadv = os.preadv

    def preadv(*args: Any) -> int:
        monkeypatch.setattr(os, "preadv", real_preadv)
        put(writer, [new], [0])
        if rewritten == "dropped":
            writer.drop(new, Slot(0))
        return real_preadv(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    assert kinds(get(reader, [old], [0])) == [Missing]


def test_a_reader_beside_a_busy_writer_never_gets_wrong_bytes(stores: Stores) -> None:
    writer = stores()
    keys = keys_of(64)
    put(writer, keys[:16], range(16))
    reader = stores(read_only=True)
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        rng = random.Random(1)
        try:
            while not stop.is_set():
                places = rng.sample(range(16), 4)
                put(writer, rng.sample(keys, 4), places)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        num_right = 0
        for _ in range(200):
            records = list(reader.records())
            answers = get(
                reader, [record.key for _, record in records], [slot for slot, _ in records]
            )
            num_right += answers.count(None)
    finally:
        stop.set()
        thread.join(TIMEOUT_SECONDS)
    assert failures == []
    assert num_right > 0


def test_a_reader_of_an_index_cut_short_misses(stores: Stores) -> None:
    writer = stores(16)
    keys = keys_of(16)
    put(writer, keys, range(16))
    reader = stores(read_only=True)
    assert found(reader)
    writer.close()
    stores(4)
    answers = get(reader, keys, range(16))
    assert answers[:4] == [None] * 4
    assert None not in answers[4:]


@pytest.mark.parametrize("name", ["index", "MANIFEST"])
def test_a_reader_needs_the_store_to_be_whole(stores: Stores, tmp_path: Path, name: str) -> None:
    """What it raises is in the contract of build_offloader, not a bare OSError."""
    stores().close()
    (tmp_path / "kv" / name).unlink()
    with pytest.raises(PenstockError):
        stores(read_only=True)


def test_a_reader_of_nothing_is_refused(stores: Stores, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        stores(read_only=True)
    (tmp_path / "kv").mkdir()
    with pytest.raises(Foreign, match="no store"):
        stores(read_only=True)
    assert list((tmp_path / "kv").iterdir()) == []


# One writer.


def test_a_second_writer_is_told_who_the_first_is(stores: Stores, tmp_path: Path) -> None:
    store = stores()
    put(store, keys_of(16), range(16))
    before = {path.name: path.read_bytes() for path in (tmp_path / "kv").iterdir()}
    with pytest.raises(Locked, match=rf"process {os.getpid()} on .*read_only"):
        stores(2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "kv").iterdir()} == before
    store.close()
    stores(2)


HOLDER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from tools import Desk, cap_for, keys_of, spec
from penstock.stores.disk import DiskStore

store = DiskStore(Path(sys.argv[1]), spec(), cap_for(spec(), 64))
desk = Desk(spec(), 4)
keys = keys_of(256)
print("ready", flush=True)
for turn in range(1 << 30):
    start = 4 * turn % 256
    places = [(7 * place) % 64 for place in range(start, start + 4)]
    assert store.put(desk.write(keys[start : start + 4], places)) == [None] * 4
    if turn == 64:
        print("filled", flush=True)
"""


def test_a_killed_writer_leaves_no_lock_and_no_lie(stores: Stores, tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "kv"), tests],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(Locked, match=f"process {holder.pid} "):
            stores(64, slab_bytes=slab.SLAB_BYTES)
        assert holder.stdout.readline() == "filled\n"
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(TIMEOUT_SECONDS)
        holder.stdout.close()
    store = stores(64, slab_bytes=slab.SLAB_BYTES)
    index = found(store)
    assert len(index) >= 60  # at most the four under way are lost
    assert get(store, list(index), list(index.values())) == [None] * len(index)


# What is not ours is not read.


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "other",
    [spec(namespace="other"), spec(4096), spec(ODD_BLOCK_BYTES), spec(8191), spec(tokens=32)],
    ids=["namespace", "block-bytes", "odd-block-bytes", "same-stride", "block-tokens"],
)
def test_a_store_of_another_model_is_refused_and_left_alone(
    stores: Stores, tmp_path: Path, other: BlockSpec, read_only: bool
) -> None:
    store = stores()
    keys = keys_of(4)
    put(store, keys, range(4))
    store.close()
    with pytest.raises(Foreign, match="another model or layout"):
        stores(of=other, read_only=read_only)
    store = stores()
    assert get(store, keys, range(4)) == [None] * 4


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"format_version": 2', '"format_version": 1'),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace("block_bytes", "block_bites"),
    ],
    ids=["version", "torn", "empty", "misspelt"],
)
def test_a_damaged_manifest_is_refused_and_everything_left_alone(
    stores: Stores, tmp_path: Path, damage: Callable[[str], str], read_only: bool
) -> None:
    store = stores()
    put(store, keys_of(4), range(4))
    store.close()
    manifest = tmp_path / "kv" / "MANIFEST"
    sound = manifest.read_text()
    manifest.write_text(damage(sound))
    with pytest.raises(Foreign, match="store clear"):
        stores(read_only=read_only)
    manifest.write_text(sound)
    assert get(stores(), keys_of(4), range(4)) == [None] * 4


@pytest.mark.parametrize("wrong", [1, 3, 5, 16, 1000])
def test_any_slots_per_slab_in_the_manifest_never_makes_it_lie(
    stores: Stores, tmp_path: Path, wrong: int
) -> None:
    """The one number of the geometry that nobody expects beforehand."""
    store = stores()
    put(store, keys_of(16), range(16))
    store.close()
    manifest = tmp_path / "kv" / "MANIFEST"
    field = '"slots_per_slab": '
    assert f"{field}4," in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(f"{field}4,", f"{field}{wrong},"))
    store = stores()
    num = store.num_slots
    get(store, keys_of(num), range(num))
    put(store, keys_of(num, "more"), range(num))
    assert get(store, keys_of(num, "more"), range(num)) == [None] * num
    check_cap(tmp_path / "kv", cap_for(spec(), 16, SLAB_BYTES))


def forge(store: DiskStore, slot: int, **changes: Any) -> None:
    """Replace a record by one that is sealed properly and says something else."""
    index = store.directory / "index"
    with index.open("r+b") as file:
        file.seek(slot * slab.RECORD_BYTES)
        record = slab.unpack_record(file.read(slab.RECORD_BYTES))
        assert record is not None
        file.seek(slot * slab.RECORD_BYTES)
        file.write(slab.pack_record(record._replace(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": spec(namespace="other").namespace},
        {"length": 8191},
        {"length": 8193},
        {"length": 0},
        {"length": 2**64 - 1},
        {"checksum": bytes(16)},
    ],
    ids=["namespace", "shorter", "longer", "nothing", "endless", "checksum"],
)
def test_a_record_that_vouches_for_something_else_is_corrupt(
    stores: Stores, changes: dict[str, Any]
) -> None:
    store = stores()
    keys = keys_of(3)
    put(store, keys, range(3))
    forge(store, 1, **changes)
    assert kinds(get(store, keys, range(3))) == [None, Corrupt, None]
    if "checksum" not in changes:
        assert found(store) == {keys[0]: 0, keys[2]: 2}


def test_swapped_payloads_and_swapped_records_are_no_answer(stores: Stores, tmp_path: Path) -> None:
    store = stores(of=spec(4096))
    keys = keys_of(4)
    put(store, keys, range(4))
    for name, size, first, second in (("slab-00000", 4096, 0, 1), ("index", 128, 2, 3)):
        path = tmp_path / "kv" / name
        data = bytearray(path.read_bytes())
        one, two = (
            slice(first * size, (first + 1) * size),
            slice(second * size, (second + 1) * size),
        )
        data[one], data[two] = data[two], data[one]
        with path.open("r+b") as file:
            file.write(data)
    assert kinds(get(store, keys, range(4))) == [Corrupt, Corrupt, Missing, Missing]


def test_without_a_manifest_nothing_vouches_for_the_files(stores: Stores, tmp_path: Path) -> None:
    store = stores()
    put(store, keys_of(16), range(16))
    store.close()
    (tmp_path / "kv" / "MANIFEST").unlink()
    store = stores()
    assert found(store) == {}
    assert None not in get(store, keys_of(16), range(16))
    check_cap(tmp_path / "kv", cap_for(spec(), 16, SLAB_BYTES))


def test_clearing_removes_what_the_store_made_and_nothing_else(
    stores: Stores, tmp_path: Path
) -> None:
    store = stores()
    put(store, keys_of(16), range(16))
    store.close()
    (tmp_path / "kv" / "notes.txt").write_text("mine")
    assert remove_store_files(tmp_path / "kv") >= 16 * 8192
    assert sorted(os.listdir(tmp_path / "kv")) == ["LOCK", "notes.txt"]


def test_a_strangers_file_is_not_deleted_for_want_of_a_manifest(
    stores: Stores, tmp_path: Path
) -> None:
    """A path given by mistake, such as a .git folder, may well hold a file named index."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "index").write_bytes(b"DIRC" + bytes(1000))
    with suppress(PenstockError):
        stores()
    assert (tmp_path / "kv" / "index").read_bytes().startswith(b"DIRC")


# A full disk at the start.


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "pwrite"])
def test_a_start_without_room_serves_or_is_refused_and_leaves_nothing_open(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with suppress(PenstockError):
            stores().close()
    assert len(os.listdir("/proc/self/fd")) <= before
    stores()


def test_room_behind_a_block_in_dram_stays_there(stores: Stores) -> None:
    """Some stores want a head right behind the block: a disk keeps the block alone."""
    store, keys = stores(), keys_of(6)
    arena = HostArena(spec(), 6 * (spec().stride_bytes + 4096), headroom_bytes=4096)
    assert arena.num_slots == 6
    blocks = [Block(key, Slot(n), arena.view(Slot(n))) for n, key in enumerate(keys)]
    for block in blocks:
        block.memory[: spec().block_bytes] = content(block.key)
        block.memory[spec().stride_bytes :] = b"\x55" * 4096
    assert store.put(blocks) == [None] * 6
    for block in blocks:
        block.memory[: spec().stride_bytes] = bytes(spec().stride_bytes)
    assert store.get(blocks) == [None] * 6
    for block in blocks:
        assert block.memory[: spec().block_bytes] == content(block.key)
        assert block.memory[spec().stride_bytes :] == b"\x55" * 4096
