"""Which blocks each kind of group needs at a hit: counted by hand, and by the tokens themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.groups.kinds import Group, Groups, Kind


@pytest.mark.parametrize(
    ("group", "num_tokens", "expected"),
    [
        (Group(0, Kind.FULL, 4), 12, range(3)),
        (Group(0, Kind.FULL, 4), 0, range(0)),
        # The next token, number 16, sees itself and the 11 before it: 5 to 15.
        (Group(0, Kind.WINDOW, 4, 12), 16, range(1, 4)),
        (Group(0, Kind.WINDOW, 4, 13), 16, range(1, 4)),
        (Group(0, Kind.WINDOW, 4, 14), 16, range(4)),
        (Group(0, Kind.WINDOW, 4, 12, extra_tokens=2), 16, range(4)),
        (Group(0, Kind.WINDOW, 4, 1), 16, range(4, 4)),
        (Group(0, Kind.WINDOW, 4, 100), 16, range(4)),
        (Group(0, Kind.CHUNK, 4, 8), 20, range(4, 5)),
        (Group(0, Kind.CHUNK, 4, 8), 16, range(4, 4)),  # a chunk begins: nothing before it counts
        (Group(0, Kind.CHUNK, 8, 12), 16, range(1, 2)),  # the chunk begins within a block
        (Group(0, Kind.STATE, 4), 16, range(3, 4)),
    ],
)
def test_needed_blocks(group: Group, num_tokens: int, expected: range) -> None:
    assert list(group.needed(num_tokens)) == list(expected)


def test_blocks_on_the_device_are_not_needed() -> None:
    assert list(Group(0, Kind.FULL, 4).needed(16, start=8)) == [2, 3]
    assert list(Group(0, Kind.WINDOW, 4, 12).needed(16, start=8)) == [2, 3]
    assert list(Group(0, Kind.WINDOW, 4, 6).needed(32, start=8)) == [6, 7]
    assert list(Group(0, Kind.STATE, 4).needed(16, start=8)) == [3]


def _sees(group: Group, token: int, other: int) -> bool:
    """Whether computing `token` reads the KV of `other`, from the definition of attention."""
    match group.kind:
        case Kind.FULL:
            return other < token
        case Kind.WINDOW:
            return token - other < group.span + group.extra_tokens and other < token
        case Kind.CHUNK:
            return other < token and other // group.span == token // group.span
        case Kind.STATE:
            return other == token - 1


any_group = st.builds(
    Group,
    st.just(0),
    st.sampled_from(Kind),
    st.integers(1, 6),
    st.integers(1, 30),
    st.integers(0, 5),
)


@given(any_group, st.integers(1, 20))
def test_needed_blocks_are_those_that_the_next_token_sees(group: Group, num_blocks: int) -> None:
    num_tokens = num_blocks * group.block_tokens
    seen = {
        other // group.block_tokens
        for other in range(num_tokens)
        if _sees(group, num_tokens, other)
    }
    assert set(group.needed(num_tokens)) == seen


@given(any_group, st.integers(1, 20), st.integers(1, 20))
def test_all_later_tokens_see_nothing_else_of_the_prefix(
    group: Group, num_blocks: int, ahead: int
) -> None:
    """The blocks needed at a hit are enough for everything computed after it."""
    if group.kind is Kind.STATE:
        return  # a later state is computed from the one at the hit
    num_tokens = num_blocks * group.block_tokens
    needed = set(group.needed(num_tokens))
    for other in range(num_tokens):
        if _sees(group, num_tokens + ahead, other):
            assert other // group.block_tokens in needed


def test_units_alignment_and_the_longest_hit() -> None:
    groups = Groups((Group(0, Kind.FULL, 8), Group(1, Kind.WINDOW, 12, 24)))
    assert (groups.unit_tokens, groups.align_tokens) == (4, 24)
    assert [groups.max_hit(num) for num in (0, 24, 25, 49)] == [0, 0, 24, 48]
    plain = Groups((Group(0, Kind.FULL, 8),))
    assert plain.is_plain
    assert [plain.max_hit(num) for num in (7, 8, 17)] == [0, 8, 16]
    assert [group.index for group in groups.full] == [0]
    assert [group.index for group in groups.partial] == [1]
    assert not groups.all_full
    assert len(groups) == len(list(groups)) == 2


@pytest.mark.parametrize(
    ("kind", "block_tokens", "span", "says"),
    [
        (Kind.FULL, 0, 0, "blocks of 0 tokens"),
        (Kind.WINDOW, 4, 0, "a window group has a span of 0"),
        (Kind.CHUNK, 4, -1, "a chunk group has a span of -1"),
    ],
)
def test_impossible_groups_are_refused(kind: Kind, block_tokens: int, span: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Group(0, kind, block_tokens, span)


def test_a_model_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to keep"):
        Groups(())
