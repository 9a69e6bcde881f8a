"""Every disk fault that released peers were seen with, through the whole façade.

The house rule: the cache may lose, it may not lie. `Rig.load` compares every block that is called
OK; `Rig.settle` proves after each step that nothing hangs and that the books add up.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tools import (
    ODD_BLOCK_BYTES,
    TIMEOUT_SECONDS,
    Faulty,
    Rig,
    content,
    file_sizes,
    flip_bit,
    folder_cap_for,
    key_of,
    keys_of,
    spec,
)

from penstock.build import build_offloader
from penstock.config import Config, DiskConfig, HostConfig
from penstock.errors import ConfigError, Foreign, Locked, PenstockError
from penstock.stores import disk_files, slab
from penstock.stores.directory import remove_store_files
from penstock.stores.host import HostArena
from penstock.types import BlockKey, Slot, Tier, Verdict

Rigs = Callable[..., Rig]
KEYS = keys_of(8)
STRIDE = 8192
REST_IS_OVER_SECONDS = 1000.0

restarts = pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])


@pytest.fixture
def rig(rigs: Rigs, tmp_path: Path) -> Rig:
    """Holds KEYS on disk and nothing in HOST."""
    rig = rigs(tmp_path / "kv")
    assert rig.save(KEYS) == [Verdict.OK] * len(KEYS)
    rig.offloader.empty_host()
    return rig


def reopen(rig: Rig, rigs: Rigs) -> Rig:
    rig.close()
    return rigs(rig.directory, block_spec=rig.spec, num_disk=rig.num_disk)


def expect_loss(rig: Rig, lost: Sequence[BlockKey], keys: Sequence[BlockKey] = KEYS) -> None:
    """These blocks miss, each is counted once, and all others come back right."""
    before = rig.num_lost
    verdicts = rig.load_cold(keys)
    assert [key for key, verdict in zip(keys, verdicts, strict=True) if verdict] == list(lost)
    assert rig.num_lost - before == len(lost)


def fail_with(number: int) -> Callable[..., Any]:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def break_call(
    monkeypatch: pytest.MonkeyPatch, call: str, fault: Callable[..., Any], name: str = "slab-"
) -> Faulty:
    faulty = Faulty(getattr(os, call), fault, name)
    monkeypatch.setattr(os, call, faulty)
    return faulty


# Bytes that change or vanish.


@restarts
@pytest.mark.parametrize("num_left_bytes", [0, 1, 3 * STRIDE, 3 * STRIDE + 4096, 4 * STRIDE - 1])
def test_truncated_slab(rig: Rig, rigs: Rigs, num_left_bytes: int, restart: bool) -> None:
    places = {key: rig.place_of(key) for key in KEYS}
    if restart:
        rig.close()
    os.truncate(rig.slab, num_left_bytes)
    lost = [key for key in KEYS if (places[key] + 1) * STRIDE > num_left_bytes]
    rig = reopen(rig, rigs) if restart else rig
    expect_loss(rig, lost)
    assert rig.num_corrupt == len(lost)
    rig.prove_sound(KEYS)
    rig = reopen(rig, rigs)
    expect_loss(rig, [])


@restarts
def test_slab_of_zeros(rig: Rig, rigs: Rigs, restart: bool) -> None:
    if restart:
        rig.close()
    with rig.slab.open("r+b") as file:
        file.write(bytes(rig.slab.stat().st_size))
    rig = reopen(rig, rigs) if restart else rig
    expect_loss(rig, KEYS)
    assert rig.num_corrupt == len(KEYS)
    rig.prove_sound(KEYS)


@restarts
@pytest.mark.parametrize("offset", [0, STRIDE // 2, STRIDE - 1])
def test_bit_flipped_payload(rig: Rig, rigs: Rigs, offset: int, restart: bool) -> None:
    flip_bit(rig.slab, rig.place_of(KEYS[3]) * STRIDE + offset, bit=offset % 8)
    rig = reopen(rig, rigs) if restart else rig
    expect_loss(rig, [KEYS[3]])
    assert rig.num_corrupt == 1
    expect_loss(rig, [KEYS[3]])  # it is not offered again
    assert rig.num_corrupt == 1
    rig.prove_sound(KEYS)


@restarts
@pytest.mark.parametrize("offset", [0, 4, 8, 16, 47, 48, 80, 88, 110, 120, 127])
def test_bit_flipped_record(rig: Rig, rigs: Rigs, offset: int, restart: bool) -> None:
    flip_bit(rig.index, rig.place_of(KEYS[5]) * slab.RECORD_BYTES + offset)
    rig = reopen(rig, rigs) if restart else rig
    expect_loss(rig, [KEYS[5]])
    assert rig.num_corrupt == 1
    rig.prove_sound(KEYS)
    rig = reopen(rig, rigs)
    expect_loss(rig, [])


@restarts
def test_corrupt_block_is_not_found_again_after_a_restart(
    rig: Rig, rigs: Rigs, restart: bool
) -> None:
    flip_bit(rig.slab, rig.place_of(KEYS[0]) * STRIDE)
    rig = reopen(rig, rigs) if restart else rig
    expect_loss(rig, [KEYS[0]])
    rig = reopen(rig, rigs)
    assert rig.offloader.match(KEYS[:1]).num_blocks == 0


@restarts
def test_index_of_noise(rig: Rig, rigs: Rigs, restart: bool) -> None:
    if restart:
        rig.close()
    with rig.index.open("r+b") as file:
        file.write(random.Random(1).randbytes(rig.index.stat().st_size))
    rig = reopen(rig, rigs) if restart else rig
    expect_loss(rig, KEYS)
    rig.prove_sound(KEYS)


@restarts
@pytest.mark.parametrize("num_left_bytes", [0, 100, 4 * slab.RECORD_BYTES + 5])
def test_truncated_index(rig: Rig, rigs: Rigs, num_left_bytes: int, restart: bool) -> None:
    places = {key: rig.place_of(key) for key in KEYS}
    if restart:
        rig.close()
    os.truncate(rig.index, num_left_bytes)
    rig = reopen(rig, rigs) if restart else rig
    expect_loss(
        rig, [key for key in KEYS if (places[key] + 1) * slab.RECORD_BYTES > num_left_bytes]
    )
    rig.prove_sound(KEYS)


def test_a_truncated_block_can_be_stored_again(rig: Rig, rigs: Rigs) -> None:
    """A peer skips the second store as present, and misses for ever."""
    os.truncate(rig.slab, STRIDE // 2)
    expect_loss(rig, KEYS)
    assert rig.save(KEYS) == [Verdict.OK] * len(KEYS)
    expect_loss(rig, [])
    rig = reopen(rig, rigs)
    expect_loss(rig, [])


@restarts
@pytest.mark.parametrize("length", [0, 1, STRIDE - 1, STRIDE + 1, 1 << 40])
def test_a_value_of_the_wrong_length(rig: Rig, rigs: Rigs, length: int, restart: bool) -> None:
    """Sealed properly, checksum and all, but not as long as a block is."""
    place = rig.place_of(KEYS[2])
    data = content(KEYS[2])[:length]
    record = slab.SlabRecord(
        True, 1, KEYS[2], rig.spec.namespace, length, xxhash.xxh3_128_digest(data)
    )
    with rig.index.open("r+b") as file:
        file.seek(place * slab.RECORD_BYTES)
        file.write(slab.pack_record(record))
    rig = reopen(rig, rigs) if restart else rig
    expect_loss(rig, [KEYS[2]])
    assert rig.num_corrupt == 1
    rig.prove_sound(KEYS)


# Files that vanish.


def test_deleted_slab_before_restart(rig: Rig, rigs: Rigs) -> None:
    rig.close()
    rig.slab.unlink()
    rig = rigs(rig.directory)
    expect_loss(rig, KEYS)
    rig.prove_sound(KEYS)
    rig.prove_sound(keys_of(8, "more"))


@pytest.mark.parametrize("name", ["index", "MANIFEST", "LOCK"])
def test_deleted_file_before_restart(rig: Rig, rigs: Rigs, name: str) -> None:
    rig.close()
    (rig.store / name).unlink()
    rig = rigs(rig.directory)
    expect_loss(rig, [] if name == "LOCK" else KEYS)
    assert (rig.num_corrupt > 0) == (name != "LOCK")
    rig.prove_sound(KEYS)
    rig = reopen(rig, rigs)
    expect_loss(rig, [])
    assert rig.num_corrupt == 0


@pytest.mark.parametrize("name", ["MANIFEST", "LOCK"])
def test_deleted_file_of_the_folder_before_restart(rig: Rig, rigs: Rigs, name: str) -> None:
    """What each namespace is made for stands in its own manifest."""
    rig.close()
    (rig.directory / name).unlink()
    rig = rigs(rig.directory)
    expect_loss(rig, [])
    assert rig.num_corrupt == 0


@pytest.mark.parametrize("damage", ["deleted", "emptied"])
def test_index_lost_before_a_read_only_restart(rig: Rig, rigs: Rigs, damage: str) -> None:
    """Refused with an error of ours, or opened and empty; and nothing is left open."""
    rig.close()
    if damage == "deleted":
        rig.index.unlink()
    else:
        os.truncate(rig.index, 0)
    before = len(os.listdir("/proc/self/fd"))
    try:
        reader = rigs(rig.directory, disk={"read_only": True})
    except (ConfigError, Foreign, Locked):
        assert len(os.listdir("/proc/self/fd")) <= before
    else:
        expect_loss(reader, KEYS)


# A folder that vanishes under a running server.


def expect_notice(rig: Rig, caplog: pytest.LogCaptureFixture, words: str) -> None:
    """It is said once, and counted where everything was lost."""
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert sum(words in message and "created again" in message for message in errors) == 1


def delete(directory: Path) -> None:
    shutil.rmtree(directory)


def rename(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def replace_by_a_copy(directory: Path) -> None:
    shutil.copytree(directory, directory.with_name("copy"))
    delete(directory)
    directory.with_name("copy").rename(directory)


@pytest.mark.parametrize("first", ["load", "save"])
@pytest.mark.parametrize("vanish", [delete, rename, replace_by_a_copy])
def test_folder_gone_while_running(
    rig: Rig,
    rigs: Rigs,
    caplog: pytest.LogCaptureFixture,
    vanish: Callable[[Path], None],
    first: str,
) -> None:
    vanish(rig.directory)
    if first == "load":
        verdicts = rig.load_cold(KEYS)
        # A copy has the same blocks in the same slots, and they are verified as ever.
        assert verdicts == [Verdict.OK if vanish is replace_by_a_copy else Verdict.MISSING] * 8
    else:
        rig.save(keys_of(8, "more"))
    expect_notice(rig, caplog, str(rig.directory))
    assert rig.gauge("penstock_tier_losses_total", tier="disk") == 1
    assert f"{len(KEYS)} blocks were lost" in caplog.text
    rig.prove_sound(KEYS)
    assert rig.gauge("penstock_tier_losses_total", tier="disk") == 1
    rig = reopen(rig, rigs)
    expect_loss(rig, [])  # what was saved since then lies in the new folder


def test_open_files_of_a_deleted_folder_are_closed(rig: Rig) -> None:
    """Their space is given back only then."""
    shutil.rmtree(rig.directory)
    rig.save(keys_of(8, "more"))
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    ours = [link for link in links if link.startswith(str(rig.directory))]
    assert ours
    assert not [link for link in ours if link.endswith("(deleted)")]


def test_a_second_server_takes_a_deleted_folder(
    rig: Rig, rigs: Rigs, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock went with the folder: the first one has to notice by itself, and leave it alone."""
    shutil.rmtree(rig.directory)
    second = rigs(rig.directory)
    theirs = keys_of(8, "second")
    assert second.save(theirs) == [Verdict.OK] * 8
    mine = keys_of(8, "first")
    assert rig.save(mine) == [Verdict.OK] * 8  # into HOST
    assert rig.num_failed_saves > 0
    assert "nothing is saved" in caplog.text
    assert "is being written by" in caplog.text
    assert rig.load_cold(KEYS) == [Verdict.MISSING] * 8
    expect_loss(second, [], theirs)
    second.close()
    rig.clock.advance(REST_IS_OVER_SECONDS)
    rig.prove_sound(mine)  # it is free again


@pytest.mark.parametrize("name", ["index", "LOCK", "slab-00000", "../LOCK", "."])
def test_deleted_file_while_running(
    rig: Rig, rigs: Rigs, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = rig.store / name
    delete(path) if path.is_dir() else path.unlink()
    holds_blocks = "LOCK" not in name
    expect_loss(rig, KEYS if holds_blocks else [])
    expect_notice(rig, caplog, str(rig.directory))
    assert "LOCK" not in name or os.path.exists(path)
    with pytest.raises(Locked):
        rigs(rig.directory)
    rig.prove_sound(KEYS)
    rig = reopen(rig, rigs)
    expect_loss(rig, [])


def test_deleted_folder_is_said_at_the_end_even_if_nothing_was_moved(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(rig.directory)
    rig.close()
    assert f"{rig.directory} was deleted" in caplog.text
    assert not rig.directory.exists()


def test_deleted_folder_under_a_reader(
    rig: Rig, rigs: Rigs, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has open is right as it is, so it goes on; it makes nothing."""
    reader = rigs(rig.directory, disk={"read_only": True})
    rig.close()
    shutil.rmtree(rig.directory)
    expect_loss(reader, [])
    expect_loss(reader, [])
    assert caplog.text.count("keeps reading the files it has open") == 1
    assert not rig.directory.exists()


def test_unmounted_while_running_and_mounted_again(
    small_disk: Path, tmp_path: Path, rigs: Rigs, caplog: pytest.LogCaptureFixture
) -> None:
    """Below the mount point lies another filesystem: it is not filled in place of ours."""
    mount = tmp_path / "mount"
    mount.mkdir()
    _mount("--bind", str(small_disk), str(mount))
    try:
        rig = rigs(mount / "kv")
        rig.save(KEYS)
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
        assert rig.load_cold(KEYS) == [Verdict.MISSING] * 8
        rig.save(KEYS)
        assert rig.num_failed_saves == 8
        assert "another filesystem" in caplog.text
        assert list(mount.iterdir()) == []
        _mount("--bind", str(small_disk), str(mount))
        rig.clock.advance(REST_IS_OVER_SECONDS)
        rig.prove_sound(KEYS)
        rig.close()
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_a_disk_that_cannot_say_what_lies_there_is_not_taken_for_an_empty_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def fail_in_the_folder(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(rig.directory)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", fail_in_the_folder)
    verdicts = rig.load_cold(KEYS)
    monkeypatch.undo()
    assert verdicts == [Verdict.OK] * len(KEYS)
    assert rig.gauge("penstock_tier_losses_total", tier="disk") == 0


# What is said of damage.


def test_damage_is_logged_at_once_and_then_once_a_minute(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if "found damaged" in r.getMessage()]

    for key in KEYS[:5]:
        flip_bit(rig.slab, rig.place_of(key) * STRIDE)
    for number, key in enumerate(KEYS[:4], 1):
        rig.load_cold([key])
        assert len(lines()) == 1, f"after block {number}"
    assert lines()[0].startswith("DISK: 1 block was found damaged")
    assert str(rig.store) in lines()[0]
    assert "checksum" in lines()[0]
    rig.clock.advance(61.0)
    rig.settle()
    assert len(lines()) == 2
    assert lines()[1].startswith("DISK: 3 blocks were found damaged")
    rig.load_cold([KEYS[4]])
    rig.close()
    assert lines()[2].startswith("DISK: 1 block was found damaged")
    assert rig.num_corrupt == 5


@pytest.mark.parametrize("read_only", [False, True])
def test_damage_to_the_index_is_logged_and_counted_at_the_start(
    rig: Rig, rigs: Rigs, caplog: pytest.LogCaptureFixture, read_only: bool
) -> None:
    for key in KEYS[:3]:
        flip_bit(rig.index, rig.place_of(key) * slab.RECORD_BYTES + 20)
    rig.close()
    rig = rigs(rig.directory, disk={"read_only": read_only})
    expect_loss(rig, KEYS[:3])
    assert rig.num_corrupt == 3
    assert f"{rig.store}: 3 records of the index are damaged" in caplog.text
    rig = reopen(rig, rigs)
    # A writer clears them, so that they are not told of again and again.
    assert rig.num_corrupt == (3 if read_only else 0)


# Writes that fail.


def write_half(call: Callable[..., int], descriptor: int, buffers: Any, offset: int) -> int:
    return call(descriptor, [buffers[0][:4096]], offset)


@pytest.mark.parametrize("block_bytes", [STRIDE, ODD_BLOCK_BYTES])
@pytest.mark.parametrize("num", [1, 8])
def test_short_write(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int, block_bytes: int
) -> None:
    rig = rigs(tmp_path / "kv", block_spec=spec(block_bytes))
    keys = KEYS[:num]
    faulty = break_call(monkeypatch, "pwritev", write_half)
    assert rig.save(keys) == [Verdict.OK] * num  # into HOST
    assert rig.num_failed_saves == num
    expect_loss(rig, keys, keys)
    rig = reopen(rig, rigs)
    expect_loss(rig, keys, keys)  # no short block became visible
    faulty.on = False
    rig.prove_sound(keys)


@pytest.mark.parametrize("call", ["pwritev", "pwrite"], ids=["payload", "record"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_error_on_write(
    rig: Rig, rigs: Rigs, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    more = keys_of(8, "more")
    name = "slab-" if call == "pwritev" else "index"
    faulty = break_call(monkeypatch, call, fail_with(number), name)
    assert rig.save(more) == [Verdict.OK] * 8
    assert faulty.num_faults > 0
    assert rig.num_failed_saves == 8
    expect_loss(rig, more, [*KEYS, *more])
    faulty.on = False
    rig.prove_sound([*KEYS, *more])
    rig = reopen(rig, rigs)
    expect_loss(rig, [], [*KEYS, *more])


def test_error_on_write_of_one_block_costs_only_that_block(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(tmp_path / "kv")

    def fail_for_third(call: Callable[..., int], descriptor: int, buffers: Any, offset: int) -> int:
        if content(KEYS[2]) in buffers:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(descriptor, buffers, offset)

    faulty = break_call(monkeypatch, "pwritev", fail_for_third)
    rig.save(KEYS)
    assert rig.num_failed_saves == 1
    expect_loss(rig, [KEYS[2]])
    faulty.on = False
    rig.prove_sound(KEYS)


@pytest.mark.parametrize("call", ["preadv", "pread"], ids=["payload", "record"])
def test_eio_on_read(rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    name = "slab-" if call == "preadv" else "index"
    faulty = break_call(monkeypatch, call, fail_with(errno.EIO), name)
    expect_loss(rig, KEYS)
    assert faulty.num_faults > 0
    assert rig.lost(Verdict.FAILED, Tier.DISK, Tier.HOST) == len(KEYS)
    faulty.on = False
    rig.prove_sound(KEYS)


def test_eio_on_read_of_one_block_costs_only_that_block(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = rig.place_of(KEYS[4]) * STRIDE

    def fail_at_bad(call: Callable[..., int], descriptor: int, buffers: Any, offset: int) -> int:
        if offset <= bad < offset + STRIDE * len(buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(descriptor, buffers, offset)

    faulty = break_call(monkeypatch, "preadv", fail_at_bad)
    expect_loss(rig, [KEYS[4]])
    faulty.on = False
    rig.prove_sound(KEYS)


def test_short_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = break_call(monkeypatch, "preadv", write_half)
    expect_loss(rig, KEYS)
    assert rig.num_corrupt == len(KEYS)
    faulty.on = False
    rig.prove_sound(KEYS)


def test_eio_while_the_index_is_read_at_the_start(
    rig: Rig, rigs: Rigs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.close()
    faulty = break_call(monkeypatch, "pread", fail_with(errno.EIO), "index")
    with caplog.at_level(logging.WARNING):
        rig = rigs(rig.directory)
    assert "records cannot be read" in caplog.text
    faulty.on = False
    expect_loss(rig, KEYS)
    rig.prove_sound(KEYS)


def test_a_disk_that_keeps_failing_is_left_alone_and_comes_back(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(tmp_path / "kv")
    faulty = break_call(monkeypatch, "pwritev", fail_with(errno.EIO))
    for turn in range(10):
        assert rig.save([key_of(turn)]) == [Verdict.OK]
    assert rig.gauge("penstock_tier_resting", tier="disk", direction="save") == 1
    num_tried = faulty.num_faults
    rig.save([key_of("while it rests")])
    assert faulty.num_faults == num_tried
    rig.offloader.empty_host()
    rig.settle()
    assert rig.num_never_written == 11
    faulty.on = False
    rig.clock.advance(REST_IS_OVER_SECONDS)
    rig.prove_sound([*(key_of(turn) for turn in range(10)), key_of("while it rests")])
    assert rig.gauge("penstock_tier_resting", tier="disk", direction="save") == 0


# A full disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount))
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def _mount(*args: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    try:
        done = subprocess.run(["mount", *args], capture_output=True, text=True, timeout=10)
    except OSError as error:
        pytest.skip(f"mount cannot be run: {error}")
    if done.returncode:
        pytest.skip(f"mount is refused: {done.stderr.strip()}")


def fill(directory: Path) -> Path:
    """Leave not a single page."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(directory).f_bavail == 0
    return ballast


def test_enospc(small_disk: Path, rigs: Rigs) -> None:
    rig = rigs(small_disk / "kv", num_disk=128)
    ballast = fill(small_disk)
    assert rig.save(KEYS) == [Verdict.OK] * len(KEYS)  # into HOST
    assert rig.num_failed_saves == len(KEYS)
    expect_loss(rig, KEYS)
    ballast.unlink()
    rig.prove_sound(KEYS)
    rig = reopen(rig, rigs)
    expect_loss(rig, [])


def test_enospc_half_way(small_disk: Path, rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "_GROW_BYTES", 16 * STRIDE)
    rig = rigs(small_disk / "kv", num_disk=128)
    rig.save(KEYS)
    ballast = fill(small_disk)
    groups = [keys_of(8, str(number)) for number in range(3)]
    for group in groups:
        assert rig.save(group) == [Verdict.OK] * 8
    verdicts = [verdict for group in [KEYS, *groups] for verdict in rig.load_cold(group)]
    assert verdicts[:8] == [Verdict.OK] * 8
    assert verdicts.count(Verdict.MISSING) == rig.num_failed_saves
    assert len(set(verdicts)) <= 2
    ballast.unlink()
    rig.prove_sound([key for group in groups for key in group])


def test_a_new_store_takes_disk_space_in_steps(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it may need one day is not taken with the first block."""
    monkeypatch.setattr(disk_files, "_GROW_BYTES", 16 * STRIDE)
    rig = rigs(tmp_path / "kv", num_disk=128)
    rig.save(KEYS)
    assert rig.slab.stat().st_blocks * 512 <= 16 * STRIDE
    rig.prove_sound(KEYS)


def test_enospc_for_long_and_saving_works_again_once_space_is_back(
    small_disk: Path, rigs: Rigs
) -> None:
    rig = rigs(small_disk / "kv", num_disk=128)
    ballast = fill(small_disk)
    keys = keys_of(20)
    for key in keys:
        assert rig.save([key]) == [Verdict.OK]
    assert rig.gauge("penstock_tier_resting", tier="disk", direction="save") == 1
    assert rig.load_cold(keys) == [Verdict.MISSING] * 20
    assert rig.num_never_written == 20
    ballast.unlink()
    rig.clock.advance(REST_IS_OVER_SECONDS)
    rig.prove_sound(keys)


def test_a_full_disk_leaks_no_host_slot(small_disk: Path, rigs: Rigs) -> None:
    """A peer loses the staging buffer of every write that finds no room."""
    rig = rigs(small_disk / "kv", num_host=8, num_disk=128)
    ballast = fill(small_disk)
    for turn in range(6):
        keys = keys_of(8, str(turn))
        assert rig.save(keys) == [Verdict.OK] * 8  # settle() has seen that nothing is leased
        assert rig.load(keys) == [Verdict.OK] * 8
        assert rig.gauge("penstock_used_blocks", tier="disk") == 0
    ballast.unlink()
    rig.clock.advance(REST_IS_OVER_SECONDS)
    rig.prove_sound(keys_of(4, "0"))  # half of HOST at most waits for the disk


def test_a_block_that_missed_the_disk_gets_there_with_its_next_save(
    small_disk: Path, rigs: Rigs
) -> None:
    """It is still in HOST, so the save is no copy; but the disk lacks it, and has room now."""
    rig = rigs(small_disk / "kv")
    ballast = fill(small_disk)
    rig.save(KEYS)
    ballast.unlink()
    rig.clock.advance(REST_IS_OVER_SECONDS)
    assert rig.save(KEYS) == [Verdict.OK] * len(KEYS)
    expect_loss(rig, [])


def test_a_restart_on_a_full_disk_serves_or_is_refused_clearly(
    small_disk: Path, rigs: Rigs
) -> None:
    rig = rigs(small_disk / "kv")
    rig.save(KEYS)
    rig.close()
    ballast = fill(small_disk)
    try:
        full = rigs(rig.directory)
    except PenstockError:
        pass
    else:
        expect_loss(full, [])
        full.close()
    ballast.unlink()
    rig = rigs(rig.directory)
    expect_loss(rig, [])


# A directory that cannot be written.


def test_read_only_directory(small_disk: Path, rigs: Rigs) -> None:
    rig = rigs(small_disk / "kv")
    rig.save(KEYS)
    rig.close()
    _mount("-o", "remount,ro", str(small_disk))
    with pytest.raises(ConfigError, match=r"read_only"):
        rigs(rig.directory)
    reader = rigs(rig.directory, disk={"read_only": True})
    expect_loss(reader, [])
    assert reader.save([key_of("new")]) == [Verdict.OK]
    expect_loss(reader, [key_of("new")], [*KEYS, key_of("new")])
    reader.close()
    _mount("-o", "remount,rw", str(small_disk))
    rigs(rig.directory).prove_sound(KEYS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_permission(rig: Rig, rigs: Rigs) -> None:
    rig.close()
    rig.directory.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="not writable"):
            rigs(rig.directory)
        expect_loss(rigs(rig.directory, disk={"read_only": True}), [])
    finally:
        rig.directory.chmod(0o700)


def test_corrupt_block_in_a_read_only_store_misses_every_time(rig: Rig, rigs: Rigs) -> None:
    flip_bit(rig.slab, rig.place_of(KEYS[1]) * STRIDE)
    for _ in range(2):
        reader = rigs(rig.directory, disk={"read_only": True})
        expect_loss(reader, [KEYS[1]])
        assert reader.num_corrupt == 1
        assert reader.save(KEYS) == [Verdict.OK] * len(KEYS)
        assert reader.load(KEYS) == [Verdict.OK] * len(KEYS)
    expect_loss(rig, [KEYS[1]])
    rig.prove_sound(KEYS)


# Two instances.


def test_two_instances(rig: Rig, rigs: Rigs) -> None:
    with pytest.raises(Locked, match=f"process {os.getpid()} "):
        rigs(rig.directory)
    expect_loss(rig, [])
    rig.prove_sound(keys_of(8, "more"))
    reader = rigs(rig.directory, disk={"read_only": True})
    expect_loss(reader, [])


def test_two_instances_where_the_writer_overtakes_the_reader(rigs: Rigs, tmp_path: Path) -> None:
    writer = rigs(tmp_path / "kv", num_disk=8)
    writer.save(KEYS)
    reader = rigs(tmp_path / "kv", disk={"read_only": True})
    more = keys_of(8, "more")
    writer.save(more)  # into the slots that the reader knows as KEYS
    expect_loss(writer, KEYS, [*KEYS, *more])
    expect_loss(reader, KEYS)
    assert reader.lost(Verdict.MISSING, Tier.DISK, Tier.HOST) == len(KEYS)
    assert reader.num_corrupt == 0
    writer.prove_sound(KEYS)


# Another version, another model.


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"format_version": 2', '"format_version": 99'),
        lambda text: text[:40],
        lambda text: text.replace('"epoch": 1', '"epoch": 1.5'),
    ],
    ids=["version", "torn", "not-whole"],
)
def test_wrong_version_or_damaged_manifest(
    rig: Rig, rigs: Rigs, damage: Callable[[str], str]
) -> None:
    rig.close()
    manifest = rig.store / "MANIFEST"
    sound = manifest.read_text()
    manifest.write_text(damage(sound))
    before = len(os.listdir("/proc/self/fd"))
    for read_only in (False, True):
        with pytest.raises(Foreign, match="store clear"):
            rigs(rig.directory, disk={"read_only": read_only})
    assert len(os.listdir("/proc/self/fd")) <= before
    manifest.write_text(sound)
    again = rigs(rig.directory)
    expect_loss(again, [])
    again.close()
    manifest.write_text(damage(sound))
    remove_store_files(rig.store)
    rigs(rig.directory).prove_sound(KEYS)


@pytest.mark.parametrize("other", [spec(4096), spec(tokens=8)], ids=str)
def test_changed_layout(rig: Rig, rigs: Rigs, other: Any) -> None:
    rig.close()
    with pytest.raises(Foreign, match="another model or layout"):
        rigs(rig.directory, block_spec=other)
    expect_loss(rigs(rig.directory), [])


# Time, and the cap.


def test_clock_going_backwards(rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()

    def earlier() -> float:
        nonlocal now
        now -= 3600
        return now

    newest = -1
    for turn in range(3):
        monkeypatch.setattr(time, "time", earlier)
        monkeypatch.setattr(time, "time_ns", lambda: int(earlier() * 1e9))
        rig = rigs(tmp_path / "kv")
        mine = keys_of(8, str(turn))
        assert rig.save(mine) == [Verdict.OK] * 8
        for old in range(turn + 1):
            assert rig.load_cold(keys_of(8, str(old))) == [Verdict.OK] * 8
        data = rig.index.read_bytes()
        records = [slab.unpack_record(data[i : i + 128]) for i in range(0, len(data), 128)]
        generations = [r.generation for r in records if r is not None and r.key in mine]
        assert len(generations) == 8
        assert min(generations) > newest
        newest = max(generations)
        rig.close()
        monkeypatch.undo()


def test_cap_remembered_after_restart(rigs: Rigs, tmp_path: Path) -> None:
    """A peer forgets at each restart what it has used; its cap of 4 TB grew to 14 TB."""
    cap = folder_cap_for(spec(), 64)
    for turn in range(4):
        rig = rigs(tmp_path / "kv", num_disk=64)
        rig.settle()
        assert rig.gauge("penstock_used_blocks", tier="disk") == (64 if turn else 0)
        for part in range(4):
            rig.save(keys_of(24, f"{turn} {part}"))
            size, used = file_sizes(rig.directory)
            assert size <= cap
            assert used <= cap
        last = keys_of(24, f"{turn} 3")
        assert rig.load_cold(last) == [Verdict.OK] * 24
        rig.close()


def test_index_kept_over_a_restart(rig: Rig, rigs: Rigs) -> None:
    rig = reopen(rig, rigs)
    assert rig.offloader.match(KEYS).num_from(Tier.DISK) == len(KEYS)
    expect_loss(rig, [])


# A disk that does not answer.


class Hang:
    """A fault that holds every call until released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        self.entered.set()
        self.gate.wait()
        return call(*args)


def test_a_hung_read_costs_its_load_and_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = Hang()
    faulty = break_call(monkeypatch, "preadv", hang)
    try:
        ticket = rig.offloader.load(KEYS, [Slot(i) for i in range(8)])
        assert hang.entered.wait(TIMEOUT_SECONDS)
        assert rig.offloader.step() == []
        rig.clock.advance(11.0)
        (done,) = rig.offloader.wait([ticket], TIMEOUT_SECONDS)
        assert done.verdicts == (Verdict.EXPIRED,) * 8
        more = keys_of(4, "more")
        (saved,) = rig.offloader.wait([rig.offloader.save(more, [Slot(i) for i in range(8, 12)])])
        assert saved.ok
        (loaded,) = rig.offloader.wait([rig.offloader.load(more, [Slot(i) for i in range(4)])])
        assert loaded.ok
        rig.offloader.check()
    finally:
        faulty.on = False
        hang.gate.set()
    rig.settle()
    assert rig.num_lost >= 8
    rig.prove_sound(KEYS)


def test_a_hung_read_does_not_keep_the_offloader_from_closing(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(tmp_path / "kv")
    rig.save(KEYS)
    rig.offloader.empty_host()
    hang = Hang()
    break_call(monkeypatch, "preadv", hang)
    try:
        rig.offloader.load(KEYS, [Slot(i) for i in range(8)])
        assert hang.entered.wait(TIMEOUT_SECONDS)
        assert not rig.offloader.close(0.1)
        rig.offloader.check()
    finally:
        hang.gate.set()
    assert rig.offloader._engine.close(TIMEOUT_SECONDS)
    rig.offloader._close_stores()


def test_a_hung_write_leaves_host_in_service(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that wait for the disk are leased in HOST: they must not come to fill it."""
    rig = rigs(tmp_path / "kv", num_host=16)
    hang = Hang()
    faulty = break_call(monkeypatch, "pwritev", hang)
    refused = []
    try:
        for number in range(40):
            key = key_of(number)
            (saved,) = rig.offloader.wait([rig.offloader.save([key], [Slot(0)])], TIMEOUT_SECONDS)
            (loaded,) = rig.offloader.wait([rig.offloader.load([key], [Slot(1)])], TIMEOUT_SECONDS)
            if not (saved.ok and loaded.ok):
                refused.append(number)
        rig.offloader.check()
        assert hang.entered.wait(TIMEOUT_SECONDS)
    finally:
        faulty.on = False
        hang.gate.set()
    rig.settle()
    assert rig.num_lost > 0
    assert refused == []


def test_a_hung_scan_keeps_neither_saves_nor_close_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk dies between the opening of a store and the reading of its index."""
    rig.close()
    hang = Hang()
    break_call(monkeypatch, "pread", hang, "index")
    block_spec = spec()
    offloader = build_offloader(
        Config(
            host=HostConfig(size_bytes=16 * STRIDE),
            disk=DiskConfig(path=str(rig.directory), size_bytes=folder_cap_for(block_spec, 64)),
        ),
        block_spec,
        HostArena(block_spec, 8 * STRIDE),
    )
    closing = threading.Thread(target=offloader.close, args=(0.1,), daemon=True)
    try:
        assert hang.entered.wait(TIMEOUT_SECONDS)
        places = [Slot(i) for i in range(8)]
        (saved,) = offloader.wait([offloader.save(KEYS, places)], TIMEOUT_SECONDS)
        assert saved.ok
        (loaded,) = offloader.wait([offloader.load(KEYS, places)], TIMEOUT_SECONDS)
        assert loaded.ok
        assert not offloader.recover(0.1)
        closing.start()
        closing.join(TIMEOUT_SECONDS)
        hangs = closing.is_alive()
    finally:
        hang.gate.set()
        closing.join(TIMEOUT_SECONDS)
        offloader._close_stores()
    assert not hangs, "close() outlived its timeout by far"


def test_loads_given_up_leave_no_lease_behind(rig: Rig) -> None:
    """Leaked pins drove a peer's hit rate to 0."""
    places = [Slot(i) for i in range(8)]
    for turn in range(50):
        ticket = rig.offloader.load(KEYS, places)
        if turn % 2:
            rig.offloader.step()
        rig.offloader.cancel(ticket)
        assert ticket in [done.ticket for done in rig.offloader.wait([ticket], TIMEOUT_SECONDS)]
        if turn % 5 == 0:
            rig.offloader.empty_host()
    rig.settle()
    rig.prove_sound(KEYS)
