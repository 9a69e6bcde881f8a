from __future__ import annotations

from collections.abc import Sequence


def turn_borders(token_ids: Sequence[int], border_ids: frozenset[int]) -> list[int]:
    return []
