from __future__ import annotations

from typing import Any


def turn_tokens(model_config: Any) -> frozenset[int]:
    return frozenset()
