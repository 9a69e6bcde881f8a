"""Which requests are audited, and the keys of their blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.audits.sample import AuditSample, audit_key, spread
from penstock.types import BlockKey

KEYS = [BlockKey(bytes([number]) * 32) for number in range(200)]


def test_all_or_none() -> None:
    assert all(map(AuditSample(1.0, b"").draws, KEYS))
    assert not any(map(AuditSample(0.0, b"").draws, KEYS))


def test_a_share_is_drawn_even_of_one_prompt() -> None:
    sample = AuditSample(0.1, b"salt")
    assert 700 < sum(sample.draws(KEYS[0]) for _ in range(10_000)) < 1300


def test_the_salt_decides_which() -> None:
    def drawn(salt: bytes) -> list[bool]:
        return list(map(AuditSample(0.5, salt).draws, KEYS))

    assert drawn(b"one") == drawn(b"one")
    assert drawn(b"one") != drawn(b"other")


def test_no_two_audits_share_a_key() -> None:
    keys = {audit_key(key, number) for key in KEYS for number in range(10)}
    assert len(keys) == 2000
    assert not keys & set(KEYS)
    assert all(len(key) == 32 for key in keys)


@given(st.integers(0, 300), st.integers(0, 40))
def test_blocks_are_spread_over_a_prompt(num_blocks: int, num_wanted: int) -> None:
    positions = spread(num_blocks, num_wanted)
    assert len(positions) == min(num_blocks, num_wanted)
    assert positions == sorted(set(positions))
    assert all(0 <= position < num_blocks for position in positions)
    if positions and num_wanted > 1:
        assert (positions[0], positions[-1]) == (0, num_blocks - 1)
