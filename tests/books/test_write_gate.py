from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools import BLOCK_BYTES, Rig, key_of, keys_of

from penstock.books import write_gate
from penstock.books.write_gate import DAY_SECONDS, ByteWindow, WriteGate
from penstock.types import Tier, Verdict


def test_without_bounds_everything_is_taken() -> None:
    gate = WriteGate(100)
    assert gate.is_worth_it(key_of("a"))
    gate.charge("x", 0.0)
    assert not gate.refusal("x", 0.0)


def test_from_the_second_use_on() -> None:
    gate = WriteGate(100, from_second_use=True)
    a, b = keys_of(2)
    assert not gate.is_worth_it(a)
    assert not gate.is_worth_it(b)
    assert gate.is_worth_it(a)
    assert not gate.is_worth_it(a), "it was written, and begins anew if the store lost it"


def test_what_is_seen_once_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_gate, "_MAX_SEEN_ONCE", 10)
    gate = WriteGate(100, from_second_use=True)
    keys = keys_of(11)
    assert not any(map(gate.is_worth_it, keys))
    assert gate.is_worth_it(keys[-1])
    assert not gate.is_worth_it(keys[0]), "ten others came since it was used"


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    opened: list[Rig] = []

    def open_rig(**disk: Any) -> Rig:
        opened.append(Rig(tmp_path, disk=disk))
        return opened[-1]

    yield open_rig
    for rig in opened:
        rig.close()


def num_on_disk(rig: Rig) -> float:
    return rig.gauge("penstock_used_blocks", tier="disk")


def test_a_disk_takes_all_by_default(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.save(keys_of(8))
    assert num_on_disk(rig) == 8


def test_a_disk_may_take_only_what_is_used_twice(rigs: Callable[..., Rig]) -> None:
    rig = rigs(admit="second-use")
    keys = keys_of(8)
    rig.save(keys)
    assert num_on_disk(rig) == 0
    assert rig.load(keys[:3]) == [Verdict.OK] * 3
    assert num_on_disk(rig) == 3
    rig.offloader.used(keys[3:5])  # found on the device itself
    rig.settle()
    assert num_on_disk(rig) == 5
    rig.save(keys[5:6])  # computed again
    assert num_on_disk(rig) == 6
    rig.load(keys)
    assert num_on_disk(rig) == 8
    assert rig.load_cold(keys) == [Verdict.OK] * 8


def test_a_budget_holds_for_what_is_used_twice(rigs: Callable[..., Rig]) -> None:
    rig = rigs(admit="second-use", write_per_day_bytes=2 * BLOCK_BYTES)
    keys = keys_of(8)
    rig.save(keys)
    rig.load(keys[:4])
    assert num_on_disk(rig) == 2
    assert rig.lost(Verdict.DROPPED, Tier.HOST, Tier.DISK) == 2, "what was not wanted is not lost"


def test_a_day_has_its_budget() -> None:
    gate = WriteGate(100, max_bytes_per_day=250)
    for _ in range(2):
        assert not gate.refusal("", 0.0)
        gate.charge("", 0.0)
    assert "day" in gate.refusal("", 3600.0)
    assert "day" in gate.refusal("", DAY_SECONDS - 1)
    assert not gate.refusal("", 1.1 * DAY_SECONDS)


def test_tenants_have_budgets_of_their_own() -> None:
    gate = WriteGate(100, max_bytes_per_tenant=100, tenant_seconds=60)
    gate.charge("a", 0.0)
    assert "tenant" in gate.refusal("a", 30.0)
    assert not gate.refusal("b", 30.0)
    assert not gate.refusal("a", 70.0)


def test_tenants_who_write_no_more_are_forgotten() -> None:
    gate = WriteGate(1, max_bytes_per_tenant=10, tenant_seconds=1)
    for number in range(20_000):
        gate.charge(str(number), float(number))
    assert len(gate._tenants) < 4000


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 100)), max_size=50), st.floats(1, 100))
def test_a_window_counts_what_lies_within_it(
    steps: list[tuple[float, int]], seconds: float
) -> None:
    window, now, noted = ByteWindow(seconds), 0.0, []
    for wait, num_bytes in steps:
        now += wait
        window.add(num_bytes, now)
        noted.append((now, num_bytes))
        least = sum(n for at, n in noted if at > now - seconds)
        most = sum(n for at, n in noted if at > now - seconds * 26 / 24)
        assert least <= window.total(now) <= most
