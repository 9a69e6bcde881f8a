"""Finds the longest legal hit over several groups. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.groups.kinds import Group, Groups
from penstock.types import Tier

Holds = Callable[[Group, int], Tier | None]
"""The fastest tier that holds the block at an index of a group, or None."""


def legal_hits(groups: Groups, holds: Holds, start: int, num_tokens: int) -> Iterator[int]:
    """The legal hits of a prompt, longest first. All are longer than `start`.

    The first `start` tokens are on the device, in every group as far as it needs them.
    """
    align = groups.align_tokens
    num = full_bound(groups, holds, start, groups.max_hit(num_tokens)) // align * align
    while num > start:
        missing = _first_missing(groups, holds, start, num)
        if missing is None:
            yield num
            num -= align
        else:
            # Every shorter hit that still covers this block needs it too.
            group, index = missing
            num = min(num - align, index * group.block_tokens // align * align)


def longest_hit(groups: Groups, holds: Holds, start: int, num_tokens: int) -> int:
    """The longest legal hit, or `start` if there is none longer."""
    return next(legal_hits(groups, holds, start, num_tokens), start)


def full_bound(groups: Groups, holds: Holds, start: int, limit: int) -> int:
    """How many leading tokens all full groups hold."""
    bound = limit
    for group in groups.full:
        index = start // group.block_tokens
        while index < bound // group.block_tokens and holds(group, index) is not None:
            index += 1
        bound = min(bound, max(start, index * group.block_tokens))
    return bound


def _first_missing(groups: Groups, holds: Holds, start: int, num: int) -> tuple[Group, int] | None:
    for group in groups.partial:
        for index in group.needed(num, start):
            if holds(group, index) is None:
                return group, index
    return None
