"""Where turns begin in a prompt."""

from __future__ import annotations

from penstock.groups.turns import turn_borders

START = 7


def chat(*lengths: int) -> list[int]:
    """A prompt of turns of these lengths, each opened by a border token."""
    return [token for length in lengths for token in [START, *[1] * (length - 1)]]


def test_the_first_turn_begins_where_the_system_prompt_ends() -> None:
    assert turn_borders(chat(10, 5), {START}) == [10]
    assert turn_borders([1, 1, *chat(10, 5)], {START}) == [2, 12]


def test_of_many_turns_the_first_and_the_last_ones_are_given() -> None:
    assert turn_borders(chat(10, 1, 1, 1, 1, 1, 5), {START, 9}) == [10, 11, 14, 15]
    assert turn_borders(chat(10, 2, 3, 4), {START}) == [10, 12, 15]
    assert turn_borders(chat(10, 2, 3), {START}) == [10, 12]


def test_without_borders_there_are_no_turns() -> None:
    assert turn_borders(chat(10, 5), set()) == []
    assert turn_borders([1] * 100, {START}) == []
    assert turn_borders([], {START}) == []
    assert turn_borders([START], {START}) == []
