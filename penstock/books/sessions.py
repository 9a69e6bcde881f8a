"""Sessions: remembers the blocks of each session's latest request, and applies hints to them.

Pure. Session names are separate for each tenant, and keys depend on the tenant, so a hint never
reaches another tenant's blocks. Memory is bounded: the least recently active session is forgotten
first, and a later hint for it has no effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.errors import BookError
from penstock.hints import NO_HINTS, Hint, Hints
from penstock.types import BlockKey

_MAX_KEYS = 1 << 18  # about 25 MB
_MAX_SESSIONS = 1 << 14


class HintTiers(Protocol):
    """What hints need of an Offloader."""

    def retain(self, keys: Sequence[BlockKey], seconds: float, name: str) -> int: ...
    def release(self, name: str) -> int: ...
    def demote(self, keys: Sequence[BlockKey]) -> int: ...
    def prefetch(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str,
        retain_seconds: float | None = None,
        name: str = "",
    ) -> int: ...


class _Session(NamedTuple):
    keys: tuple[BlockKey, ...]
    num_found: int  # leading blocks that existed before the session: likely shared

    @property
    def own(self) -> tuple[BlockKey, ...]:
        """The blocks that only this session has, as far as we know."""
        return self.keys[self.num_found :]


class Sessions:
    def __init__(self, tiers: HintTiers, max_keys: int = _MAX_KEYS) -> None:
        self._tiers = tiers
        self._max_keys = max_keys
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # least recently active first
        self._num_keys = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def began(self, hints: Hints, tenant: str = "") -> int:
        """Prefetch the sessions that a new request names; returns how many blocks."""
        num_blocks = 0
        for session in hints.prefetch:
            name = _name_of(session, tenant)
            if (known := self._sessions.get(name)) is not None:
                num_blocks += self._tiers.prefetch(known.keys, tenant=tenant)
        return num_blocks

    def ended(
        self, hints: Hints, keys: Sequence[BlockKey], num_found: int, tenant: str = ""
    ) -> None:
        """Apply the hints of a request that has ended; `num_found` of its blocks existed before."""
        if hints == NO_HINTS:
            return
        name = _prefix_name(keys)
        own = keys[num_found:]
        if hints.session is not None:
            name = _name_of(hints.session, tenant)
            if keys:  # a request aborted before it started has none: keep what we know
                own = self._note(name, keys, num_found).own
        if hints.retain_seconds is not None:
            self._tiers.retain(keys, hints.retain_seconds, name)
        elif hints.on_end != "keep":
            self._tiers.release(name)
            if hints.on_end == "demote":
                self._tiers.demote(own)

    def apply(self, hint: Hint, prefix: Sequence[BlockKey] = (), tenant: str = "") -> int:
        """Apply a hint to a session, or to the blocks of a prefix; returns how many it affects."""
        session = _Session(tuple(prefix), 0)
        name = _prefix_name(prefix)
        if hint.session is not None:
            name = _name_of(hint.session, tenant)
            session = self._sessions.get(name, _Session((), 0))
        match hint.action:
            case "retain":
                assert hint.retain_seconds is not None
                return self._tiers.retain(session.keys, hint.retain_seconds, name)
            case "release":
                return self._tiers.release(name)
            case "demote":
                self._tiers.release(name)
                return self._tiers.demote(session.own)
            case _:
                return self._prefetch(session, hint, name, tenant)

    def _prefetch(self, session: _Session, hint: Hint, name: str, tenant: str) -> int:
        seconds = hint.retain_seconds
        if seconds is not None:
            self._tiers.retain(session.keys, seconds, name)  # blocks that are already in HOST
        return self._tiers.prefetch(session.keys, tenant=tenant, retain_seconds=seconds, name=name)

    def clear(self) -> None:
        self._sessions.clear()
        self._num_keys = 0

    def check(self) -> None:
        if self._num_keys != sum(len(session.keys) for session in self._sessions.values()):
            raise BookError("the blocks of all sessions are miscounted")
        if self._num_keys > self._max_keys:
            raise BookError("more blocks of sessions are remembered than allowed")

    def _note(self, name: str, keys: Sequence[BlockKey], num_found: int) -> _Session:
        before = self._sessions.pop(name, None)
        if before is not None:
            self._num_keys -= len(before.keys)
            num_found = min(num_found, before.num_found)
        session = _Session(tuple(keys), num_found)
        if 0 < len(keys) <= self._max_keys:
            self._sessions[name] = session
            self._num_keys += len(keys)
        while self._num_keys > self._max_keys or len(self._sessions) > _MAX_SESSIONS:
            _, silent = self._sessions.popitem(last=False)
            self._num_keys -= len(silent.keys)
        return session


def _name_of(session: str, tenant: str) -> str:
    return f"session {tenant!r} {session!r}"  # quoted, so that no two pairs give the same name


def _prefix_name(keys: Sequence[BlockKey]) -> str:
    """The last key identifies a prefix: it depends on every token and on the tenant."""
    return f"prefix {keys[-1].hex()}" if keys else ""
