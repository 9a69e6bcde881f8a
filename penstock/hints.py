"""Hints: what an application says about the future use of its KV.

    Hints(session="agent-7", retain_seconds=300)            # with a request
    Hint("prefetch", session="agent-7")                     # between requests

Hints are validated on construction. They change what is kept and where, never an answer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from penstock.errors import ConfigError

MAX_RETAIN_SECONDS = 86_400.0  # a day
MAX_NAME_CHARS = 256
MAX_PREFETCHED_SESSIONS = 16
ON_END = ("keep", "demote", "release")
ACTIONS = ("retain", "demote", "prefetch", "release")


def _refuse(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"hint {name} is {reprlib.repr(value)}: expected {expected}; correct it, or leave it out"
    )


def _check_name(field: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise _refuse(field, value, f"a session name of 1 to {MAX_NAME_CHARS} characters")


def _check_seconds(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_RETAIN_SECONDS:  # type: ignore[operator]
        most = f"more than 0 and up to {MAX_RETAIN_SECONDS:.0f} seconds"
        raise _refuse("retain_seconds", value, most)


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints that come with a request. `prefetch` is stored as a tuple."""

    session: str | None = None  # the session this request belongs to; later hints refer to it
    retain_seconds: float | None = None  # how long its KV stays in DRAM after the request ends
    on_end: str = "keep"  # demote: evict its KV first; release: stop retaining its session's KV
    prefetch: Sequence[str] = ()  # sessions whose KV to load into DRAM meanwhile

    def __post_init__(self) -> None:
        if self.session is not None:
            _check_name("session", self.session)
        if self.retain_seconds is not None:
            _check_seconds(self.retain_seconds)
        if self.on_end not in ON_END:
            raise _refuse("on_end", self.on_end, f"one of {', '.join(ON_END)}")
        if not isinstance(self.prefetch, list | tuple):
            raise _refuse("prefetch", self.prefetch, "a list of session names")
        if len(self.prefetch) > MAX_PREFETCHED_SESSIONS:
            raise _refuse("prefetch", self.prefetch, f"at most {MAX_PREFETCHED_SESSIONS} sessions")
        for name in self.prefetch:
            _check_name("prefetch", name)
        object.__setattr__(self, "prefetch", tuple(self.prefetch))  # it is frozen
        if self.retain_seconds is not None and self.on_end != "keep":
            raise _refuse("on_end", self.on_end, "keep, since retain_seconds is given")
        if self.on_end == "release" and self.session is None:
            raise _refuse("session", self.session, "the name of the session to release")

    @classmethod
    def of(cls, value: object) -> Hints:
        """Build hints from None, a mapping, or existing hints."""
        if value is None:
            return NO_HINTS
        if isinstance(value, cls):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise ConfigError(
                f"hints are {reprlib.repr(value)}: expected a mapping with some of "
                f"{', '.join(names)}; remove all other keys"
            )
        return cls(**value)


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint between requests, for a session or, without one, for the blocks of a prompt."""

    action: str
    session: str | None = None
    retain_seconds: float | None = None  # only for retain and prefetch

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise _refuse("action", self.action, f"one of {', '.join(ACTIONS)}")
        if self.session is not None:
            _check_name("session", self.session)
        if self.action == "retain" or self.retain_seconds is not None:
            _check_seconds(self.retain_seconds)
        if self.retain_seconds is not None and self.action not in ("retain", "prefetch"):
            raise _refuse(
                "retain_seconds", self.retain_seconds, f"no value for the action {self.action}"
            )
