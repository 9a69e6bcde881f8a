"""The longest legal hit, against its definition: try every length, look at every block."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.groups.kinds import Group, Groups, Kind
from penstock.groups.match import legal_hits, longest_hit
from penstock.types import Tier


@dataclass(frozen=True)
class Case:
    groups: Groups
    held: frozenset[tuple[int, int]]  # index of a group, index of a block
    start: int
    num_tokens: int

    def holds(self, group: Group, index: int) -> Tier | None:
        return Tier.HOST if (group.index, index) in self.held else None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = st.sampled_from([1, 2, 3, 4, 6])
    groups = Groups(
        tuple(
            Group(
                index,
                draw(st.sampled_from(Kind)),
                draw(sizes),
                draw(st.integers(1, 24)),
                draw(st.sampled_from([0, 0, 1, 5])),
            )
            for index in range(draw(st.integers(1, 4)))
        )
    )
    num_tokens = draw(st.integers(0, 90))
    start = draw(st.integers(0, num_tokens // groups.align_tokens)) * groups.align_tokens
    blocks = [(g.index, i) for g in groups for i in range(num_tokens // g.block_tokens)]
    # Mostly held, as otherwise hardly any hit is legal.
    absent = draw(st.sets(st.sampled_from(blocks), max_size=8)) if blocks else set()
    whole = draw(st.sets(st.integers(0, 3)))  # groups that lack nothing
    held = frozenset(block for block in blocks if block not in absent or block[0] in whole)
    return Case(groups, held, start, num_tokens)


def brute_force(case: Case) -> list[int]:
    """Every legal hit beyond `start`, longest first, straight from the definition."""
    plain = all(group.kind is Kind.FULL for group in case.groups)
    limit = case.num_tokens if plain else case.num_tokens - 1
    legal = []
    for num in range(limit, case.start, -1):
        if num % lcm(*[group.block_tokens for group in case.groups]):
            continue
        needs = [
            (group, index)
            for group in case.groups
            for index in range(group.first_needed(num), num // group.block_tokens)
            if (index + 1) * group.block_tokens > case.start
        ]
        if all(case.holds(*need) for need in needs):
            legal.append(num)
    return legal


@settings(max_examples=400)
@given(cases())
def test_legal_hits_are_those_of_the_definition(case: Case) -> None:
    expected = brute_force(case)
    found = list(legal_hits(case.groups, case.holds, case.start, case.num_tokens))
    assert found == expected
    longest = longest_hit(case.groups, case.holds, case.start, case.num_tokens)
    assert longest == (expected[0] if expected else case.start)


@given(cases())
def test_every_block_that_a_hit_needs_is_held(case: Case) -> None:
    for num in legal_hits(case.groups, case.holds, case.start, case.num_tokens):
        assert case.start < num <= case.groups.max_hit(case.num_tokens)
        for group in case.groups:
            assert all(case.holds(group, index) for index in group.needed(num, case.start))


@given(cases())
def test_holding_more_never_shortens_a_hit(case: Case) -> None:
    everything = frozenset(
        (group.index, index)
        for group in case.groups
        for index in range(case.num_tokens // group.block_tokens)
    )
    full = Case(case.groups, everything, case.start, case.num_tokens)
    hits = [longest_hit(c.groups, c.holds, c.start, c.num_tokens) for c in (case, full)]
    assert hits[0] <= hits[1] == max(case.start, case.groups.max_hit(case.num_tokens))


def test_a_checkpoint_further_back_is_found_when_the_last_has_a_hole() -> None:
    groups = Groups((Group(0, Kind.FULL, 4), Group(1, Kind.WINDOW, 4, 8)))
    held = {(0, index) for index in range(10)} | {(1, 8), (1, 3), (1, 4)}
    found = list(
        legal_hits(groups, lambda g, i: Tier.DISK if (g.index, i) in held else None, 0, 41)
    )
    assert found == [20]


def test_few_blocks_are_looked_at_when_there_is_no_checkpoint() -> None:
    """A long prompt whose windows were not kept must not cost a scan of each window."""
    groups = Groups((Group(0, Kind.FULL, 16), Group(1, Kind.WINDOW, 16, 4096)))
    num_asked = 0

    def holds(group: Group, index: int) -> Tier | None:
        nonlocal num_asked
        num_asked += 1
        return Tier.HOST if group.is_full else None

    assert longest_hit(groups, holds, 0, 100_000) == 0
    assert num_asked < 20_000  # 6,250 full blocks, and one look per boundary
