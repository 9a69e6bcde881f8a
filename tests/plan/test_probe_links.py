from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path

import pytest

from penstock.costs.rates import break_even_tokens
from penstock.errors import ConfigError, StoreError
from penstock.plan.probe import disk, links
from penstock.plan.probe.disk import DiskProbe
from penstock.plan.probe.links import BLOCK_BYTES, Link, measure_links, move_blocks
from penstock.plan.probe.memory import (
    ChecksumProbe,
    CopyProbe,
    measure_matrix_product,
    thread_counts,
)
from penstock.shapes.gpu_rates import estimate_prefill
from penstock.shapes.sizing import PRESETS, ModelShape
from penstock.stores.host import HostArena
from penstock.types import Slot

SIZE = 4 * BLOCK_BYTES
SHORT = 0.02


def no_tick(_name: str, _share: float) -> None: ...


def test_ticks_name_the_link_and_never_go_back(tmp_path: Path) -> None:
    ticks: list[tuple[str, float]] = []
    probes = [CopyProbe(SIZE, SHORT, 2), ChecksumProbe(SHORT), DiskProbe(tmp_path, SIZE, SHORT)]
    found = measure_links(probes, lambda name, share: ticks.append((name, share)))
    assert len(found) == 5
    names = {name for name, _ in ticks}
    assert {"memory copy, 1 thread", "checksum, 1 thread"} <= names <= {link.name for link in found}
    shares = [share for _, share in ticks]
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)


def test_only_ways_towards_the_device_load(tmp_path: Path) -> None:
    probes = [CopyProbe(SIZE, SHORT, 1), ChecksumProbe(SHORT), DiskProbe(tmp_path, SIZE, SHORT)]
    found = measure_links(probes, no_tick)
    loads = [link.name for link in found if link.loads]
    assert loads == ["memory copy, 1 thread", "disk read, 4 threads"]


def test_latency_is_what_the_rate_does_not_explain() -> None:
    at_rate = BLOCK_BYTES / 2e9
    assert Link("x", 1, 2e9, at_rate + 0.5).rate.latency_seconds == pytest.approx(0.5)
    assert Link("x", 1, 2e9, at_rate / 2).rate.latency_seconds == 0.0  # noise


def test_thread_counts() -> None:
    assert [thread_counts(most) for most in (1, 2, 3, 4, 6)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
    ]


def test_walk_moves_every_block_once() -> None:
    moved: list[int] = []
    num, seconds = move_blocks(
        lambda _, block: moved.append(block), iter(range(100)), 3, 60.0, lambda _share: None
    )
    assert sorted(moved) == list(range(100))
    assert num == 100
    assert 0 < seconds < 60


def test_walk_ends_its_threads_when_interrupted() -> None:
    before = threading.active_count()

    def interrupt(_share: float) -> None:
        raise KeyboardInterrupt

    endless = iter(int, 1)
    with pytest.raises(KeyboardInterrupt):
        move_blocks(lambda _thread, _block: None, endless, 2, 60.0, interrupt)
    assert threading.active_count() == before


def test_copies_do_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = []
    new_arena = links.new_arena

    def keep(size_bytes: int) -> HostArena:
        arenas.append(new_arena(size_bytes))
        return arenas[-1]

    monkeypatch.setattr(links, "new_arena", keep)
    measure_links([CopyProbe(SIZE, SHORT, 1)], no_tick)
    source, target = arenas
    blocks = [bytes(source.view(Slot(slot))) for slot in range(4)]
    assert blocks == [bytes(target.view(Slot(slot))) for slot in range(4)]
    assert len(set(blocks)) == 4
    assert all(block.count(0) < BLOCK_BYTES // 100 for block in blocks)


def test_direct_io_refused_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = disk.fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, argument)

    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    found = measure_links([DiskProbe(tmp_path, SIZE, SHORT)], no_tick)
    assert len(found) == 2
    for link in found:
        assert link.bytes_per_second > 0
        assert "direct I/O was refused" in link.note
    assert list(tmp_path.iterdir()) == []


def test_memory_is_not_taken_for_a_disk() -> None:
    if not os.path.ismount("/dev/shm") or not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no memory filesystem here")
    found = measure_links([DiskProbe(Path("/dev/shm"), SIZE, SHORT)], no_tick)
    assert ["is in memory" in link.note for link in found] == [True, True]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, StoreError), (errno.ENOSPC, ConfigError)],
)
def test_a_failing_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(_descriptor: int, _memory: memoryview, _offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, "pwrite", fail)
    with pytest.raises(kind, match=str(tmp_path)):
        measure_links([DiskProbe(tmp_path, SIZE, SHORT)], no_tick)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_disk_probe_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(links, "single_seconds", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_links([DiskProbe(tmp_path, SIZE, SHORT)], no_tick)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_on_disk(tmp_path: Path) -> None:
    usage = os.statvfs(tmp_path)
    with pytest.raises(ConfigError, match="lower --size or choose another --dir"):
        DiskProbe(tmp_path, 2 * usage.f_blocks * usage.f_frsize, SHORT)


def test_too_little_memory() -> None:
    with pytest.raises(ConfigError, match="of available memory"):
        CopyProbe(1 << 62, SHORT, 1)


def test_a_matrix_product_gives_a_prefill_rate() -> None:
    pytest.importorskip("numpy")
    operations_per_second = measure_matrix_product(0.01)
    assert operations_per_second is not None
    assert operations_per_second > 1e6


def test_without_numpy_there_is_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert measure_matrix_product(0.01) is None


def test_estimated_prefill_counts_parameters_and_pairs() -> None:
    shape = PRESETS["smollm2-135m"]
    prefill = estimate_prefill(shape, 1e12)
    assert prefill is not None
    num_tokens = 1000
    matrices = 2 * 134_515_008 * num_tokens
    # Scores and values, 2 operations an element, for each token and those up to it.
    attention = 4 * 30 * 9 * 64 * num_tokens * num_tokens / 2
    assert prefill.seconds(num_tokens) == pytest.approx((matrices + attention) / 1e12)
    assert break_even_tokens(Link("x", 1, 1e12, 1e-5).rate, prefill, shape.bytes_per_token) == 1


def test_a_shape_of_unknown_size_has_no_estimate() -> None:
    assert estimate_prefill(ModelShape(2, 2, 8), 1e12) is None
