"""Unknown fields of requests: ignored, as in vLLM, and logged once each.

Routers and clients send their own fields, so refusing them would break many clients. The log
helps to find misspelt fields: it suggests the nearest known name.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

log = logging.getLogger("penstock.server")

_MAX_REMEMBERED = 256  # fields; after that, one last line says that no more are logged
_MAX_NAME_CHARS = 80


class UnknownFields:
    """Logs unknown fields, each once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, body: BaseModel) -> None:
        """Log the unknown fields that no earlier request had, in one line."""
        if len(self._told) >= _MAX_REMEMBERED:
            return
        known: list[str] = []
        new: dict[str, str] = {}
        for path in unknown_fields(body):
            if path in self._told:
                continue
            self._told.add(path)
            known = known or list(field_names(type(body)))
            close = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
            # Escaped: a name may contain line breaks, to forge lines of the log.
            new[path] = ascii(path)[1:-1] + (f" (did you mean {close[0]}?)" if close else "")
            if len(self._told) >= _MAX_REMEMBERED:
                break
        if new:
            log.info("ignored unknown fields: %s", ", ".join(new.values()))
        if len(self._told) >= _MAX_REMEMBERED:
            log.info("%d unknown fields were named; others are ignored silently", _MAX_REMEMBERED)


def unknown_fields(model: BaseModel, path: str = "") -> Iterator[str]:
    """The paths of unknown fields, without indices: messages.contnet."""
    for name in model.model_extra or ():
        yield f"{path}{name[:_MAX_NAME_CHARS]}"
    for name in type(model).model_fields:
        value = getattr(model, name)
        inner = value if isinstance(value, list) else [value]
        if inner and isinstance(inner[0], BaseModel):
            for each in inner:
                if isinstance(each, BaseModel):  # a prompt's segments may also be texts
                    yield from unknown_fields(each, f"{path}{name}.")


def field_names(model: Any) -> Iterator[str]:
    """The field names of a model and of all models inside it."""
    for name, field in getattr(model, "model_fields", {}).items():
        yield name
        pending = [field.annotation]
        while pending:
            kind = pending.pop()
            pending.extend(get_args(kind))
            yield from field_names(kind)
