"""Sessions: remembers the blocks of each session's latest request, and applies hints to them.

A request has one chain of blocks, and another for each of its segments (see `engine.anywhere`).

Pure. Session names are separate for each tenant, and keys depend on the tenant, so a hint never
reaches another tenant's blocks. Memory is bounded: the least recently active session is forgotten
first, and a later hint for it has no effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from blake3 import blake3

from penstock.errors import BookError
from penstock.hints import NO_HINTS, Hint, Hints
from penstock.types import NO_PARENTS, BlockKey

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
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> int: ...


class Chain(NamedTuple):
    """Consecutive blocks, each the parent of the next one."""

    keys: Sequence[BlockKey]
    num_found: int = 0  # leading blocks that existed before the session: likely shared


class _Session(NamedTuple):
    chains: tuple[Chain, ...] = ()

    @property
    def num_keys(self) -> int:
        return sum(len(chain.keys) for chain in self.chains)

    @property
    def keys(self) -> list[BlockKey]:
        return _once(self.chains)[0]

    @property
    def own(self) -> list[BlockKey]:
        """The blocks that only this session has, as far as we know."""
        return list(
            dict.fromkeys(key for chain in self.chains for key in chain.keys[chain.num_found :])
        )


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
                keys, parents = _once(known.chains)
                num_blocks += self._tiers.prefetch(keys, tenant=tenant, parents=parents)
        return num_blocks

    def ended(self, hints: Hints, chains: Sequence[Chain], tenant: str = "") -> None:
        """Apply the hints of a request that has ended. Its own blocks come first in `chains`."""
        if hints == NO_HINTS:
            return
        session = _Session(tuple(chains))
        name = _prompt_name(chains)
        if hints.session is not None:
            name = _name_of(hints.session, tenant)
            if session.num_keys:  # a request aborted before it started has none: keep what we know
                session = self._note(name, session)
        if hints.retain_seconds is not None:
            self._tiers.retain(session.keys, hints.retain_seconds, name)
        elif hints.on_end != "keep":
            self._tiers.release(name)
            if hints.on_end == "demote":
                self._tiers.demote(session.own)

    def apply(self, hint: Hint, prompt: Sequence[Chain] = (), tenant: str = "") -> int:
        """Apply a hint to a session, or to the blocks of a prompt; returns how many it affects."""
        session = _Session(tuple(prompt))
        name = _prompt_name(prompt)
        if hint.session is not None:
            name = _name_of(hint.session, tenant)
            session = self._sessions.get(name, _Session())
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
        keys, parents = _once(session.chains)
        if seconds is not None:
            self._tiers.retain(keys, seconds, name)  # blocks that are already in HOST
        return self._tiers.prefetch(
            keys, tenant=tenant, retain_seconds=seconds, name=name, parents=parents
        )

    def clear(self) -> None:
        self._sessions.clear()
        self._num_keys = 0

    def check(self) -> None:
        if self._num_keys != sum(session.num_keys for session in self._sessions.values()):
            raise BookError("the blocks of all sessions are miscounted")
        if self._num_keys > self._max_keys:
            raise BookError("more blocks of sessions are remembered than allowed")

    def _note(self, name: str, session: _Session) -> _Session:
        """Remember a session's latest request. What it had made before is still its own."""
        before = self._sessions.pop(name, None)
        if before is not None:
            self._num_keys -= before.num_keys
            session = _still_own(session, before)
        if 0 < session.num_keys <= self._max_keys:
            self._sessions[name] = session
            self._num_keys += session.num_keys
        while self._num_keys > self._max_keys or len(self._sessions) > _MAX_SESSIONS:
            _, silent = self._sessions.popitem(last=False)
            self._num_keys -= silent.num_keys
        return session


def _still_own(session: _Session, before: _Session) -> _Session:
    """The first chain continues that of the request before; a segment is the same or another."""
    own, *segments = session.chains
    if before.chains:
        own = own._replace(num_found=min(own.num_found, before.chains[0].num_found))
    known = {chain.keys[-1]: chain for chain in before.chains[1:]}
    for index, segment in enumerate(segments):
        num_found = known.get(segment.keys[-1], segment).num_found
        segments[index] = segment._replace(num_found=min(segment.num_found, num_found))
    return _Session((own, *segments))


def _once(chains: Sequence[Chain]) -> tuple[list[BlockKey], dict[int, BlockKey | None]]:
    """The blocks of all chains, each once, and the parents of those that do not follow theirs."""
    keys: dict[BlockKey, None] = {}
    parents: dict[int, BlockKey | None] = {}
    last = None
    for chain in chains:
        parent = None
        for key in chain.keys:
            if key not in keys:
                if parent != last:
                    parents[len(keys)] = parent
                keys[key] = None
                last = key
            parent = key
    return list(keys), parents


def _name_of(session: str, tenant: str) -> str:
    return f"session {tenant!r} {session!r}"  # quoted, so that no two pairs give the same name


def _prompt_name(chains: Sequence[Chain]) -> str:
    """Last keys identify a prompt: they depend on every token and on the tenant."""
    last = [chain.keys[-1] for chain in chains if chain.keys]
    return f"prompt {blake3(b''.join(last)).hexdigest()}" if last else ""
