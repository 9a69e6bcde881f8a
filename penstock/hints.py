"""What an application may say of its KV: with a request, or between requests.

    Hints(session="agent-7", retain_seconds=300)            # with a request
    Hint("prefetch", session="agent-7")                     # between requests

Everything is judged when it is made. A hint changes what is kept and where, never an answer.
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
        raise _refuse(field, value, f"a session's name of 1 to {MAX_NAME_CHARS} characters")


def _check_seconds(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_RETAIN_SECONDS:  # type: ignore[operator]
        most = f"more than 0 and up to {MAX_RETAIN_SECONDS:.0f} seconds"
        raise _refuse("retain_seconds", value, most)


@dataclass(frozen=True, slots=True)
class Hints:
    """What comes with a request. `prefetch` is held as a tuple, whatever was given."""

    session: str | None = None  # whose turn this is; other hints name it
    retain_seconds: float | None = None  # after the request's end its KV stays in DRAM so long
    on_end: str = "keep"  # demote: its KV goes first; release: what its session retained is free
    prefetch: Sequence[str] = ()  # sessions whose KV is to be brought up to DRAM meanwhile

    def __post_init__(self) -> None:
        if self.session is not None:
            _check_name("session", self.session)
        if self.retain_seconds is not None:
            _check_seconds(self.retain_seconds)
        if self.on_end not in ON_END:
            raise _refuse("on_end", self.on_end, f"one of {', '.join(ON_END)}")
        if not isinstance(self.prefetch, list | tuple):
            raise _refuse("prefetch", self.prefetch, "a list of sessions' names")
        if len(self.prefetch) > MAX_PREFETCHED_SESSIONS:
            raise _refuse("prefetch", self.prefetch, f"at most {MAX_PREFETCHED_SESSIONS} sessions")
        for name in self.prefetch:
            _check_name("prefetch", name)
        object.__setattr__(self, "prefetch", tuple(self.prefetch))  # frozen: only while it is made
        if self.retain_seconds is not None and self.on_end != "keep":
            raise _refuse("on_end", self.on_end, "keep, since retain_seconds is given")
        if self.on_end == "release" and self.session is None:
            raise _refuse("session", self.session, "the name of the session that is to be released")

    @classmethod
    def of(cls, value: object) -> Hints:
        """From what a caller gave: nothing, a mapping, or hints."""
        if value is None:
            return NO_HINTS
        if isinstance(value, cls):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise ConfigError(
                f"hints are {reprlib.repr(value)}: expected some of {', '.join(names)}; leave "
                "out the others"
            )
        return cls(**value)


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Hint:
    """One that comes by itself: for a session, or, without one, for the blocks of a prompt."""

    action: str
    session: str | None = None
    retain_seconds: float | None = None  # with retain, or with prefetch

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise _refuse("action", self.action, f"one of {', '.join(ACTIONS)}")
        if self.session is not None:
            _check_name("session", self.session)
        if self.action == "retain" or self.retain_seconds is not None:
            _check_seconds(self.retain_seconds)
        if self.retain_seconds is not None and self.action not in ("retain", "prefetch"):
            raise _refuse("retain_seconds", self.retain_seconds, f"none with {self.action}")
