from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tools import key_of, keys_of

from penstock.write_gate import DAY_SECONDS, ByteWindow, WriteGate


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
