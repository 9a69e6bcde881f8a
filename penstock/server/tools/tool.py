"""A tool that a model may call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def schema_text(self) -> str:
        """The schema of the arguments, written in one line as chat templates write JSON."""
        style = {
            "item_separator": ", ",
            "key_separator": ": ",
            "whitespace_flexible": False,
            "lenient": not self.strict,
        }
        schema = {"type": "object", **self.parameters, "x-guidance": style}
        return json.dumps(schema, ensure_ascii=False)
