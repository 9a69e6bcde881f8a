from __future__ import annotations

from collections.abc import Sequence

import pytest
from tools import key_of

from penstock.policies.runs import Runs
from penstock.types import BlockKey

KEYS = [key_of(number) for number in range(6)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_of_blocks_used_in_order_one_takes_the_others_along(
    kind: type[list[BlockKey]] | type[tuple[BlockKey, ...]],
) -> None:
    """Whatever they come in: else every block of a long prompt is dealt with by itself."""
    runs = Runs()
    runs.add(KEYS, runs.start(None))

    def last_ones(keys: Sequence[BlockKey]) -> list[BlockKey]:
        return list(runs.last_ones(kind(keys)))

    assert last_ones(KEYS) == [KEYS[-1]]
    assert last_ones(KEYS[:4]) == [KEYS[3]]
    assert last_ones(KEYS[1:4]) == KEYS[1:4]  # not from the beginning: those before are not used
    assert last_ones(KEYS[::-1]) == KEYS[::-1]
