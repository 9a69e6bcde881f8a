"""Where the turns of a chat begin, seen in the tokens of its prompt. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_NUM_FIRST = 2  # the ends of what many chats share: a system prompt, tools
_NUM_LAST = 2  # where this chat is continued, or its last turn is asked again


def turn_borders(token_ids: Sequence[int], border_ids: Collection[int]) -> list[int]:
    """The positions at which turns begin, in order: the first few and the last few.

    `border_ids` are the tokens that open a turn. Position 0 is left out: nothing lies before it.
    """
    if not border_ids:
        return []
    first: list[int] = []
    for position in range(1, len(token_ids)):
        if token_ids[position] in border_ids:
            first.append(position)
            if len(first) == _NUM_FIRST:
                break
    else:
        return first  # that is all there are
    last: list[int] = []
    for position in range(len(token_ids) - 1, first[-1], -1):
        if token_ids[position] in border_ids:
            last.append(position)
            if len(last) == _NUM_LAST:
                break
    return [*first, *reversed(last)]
