"""Config objects of the shape that vLLM's have: dataclasses, known by the name of their class."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any


def config_object(kind: str, **fields: Any) -> Any:
    return make_dataclass(kind, list(fields))(**fields)
