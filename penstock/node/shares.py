"""Shares: which room of a node owns which extents of its DRAM. Pure.

DRAM is divided into extents of equal size. A room (the blocks of one model) gets free extents when
it needs them. When none is free, a room that needs more takes from one that needs less: first from
rooms that have not needed DRAM for a while, then from rooms with more than an equal share. No room
falls below its floor in that way, and none grows above its cap. An extent that is given up goes to
the room for which it was, not back to the one that gave it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.errors import BookError
from penstock.types import round_up
from penstock.units import MiB

_HUGE_PAGE = 2 * MiB
_IDLE_SECONDS = 60.0


def extent_size(num_bytes: int) -> int:
    """The size of an extent: whole huge pages, and at most 256 extents."""
    return round_up(max(num_bytes // 256, min(64 * MiB, num_bytes // 16)), _HUGE_PAGE)


@dataclass(slots=True)
class _Share:
    extents: set[int] = field(default_factory=set)
    going: dict[int, int] = field(default_factory=dict)  # those being given up -> the next room
    num_coming: int = 0  # that others are giving up for this room
    needed: float = 0.0  # when it last needed more

    @property
    def num_kept(self) -> int:
        """How many it will have."""
        return len(self.extents) - len(self.going) + self.num_coming


class Shares:
    def __init__(self, num_extents: int, *, floor: int = 0, cap: int | None = None) -> None:
        """`floor` and `cap` are in extents, for each room."""
        self._num_extents = num_extents
        self._floor = floor
        self._cap = num_extents if cap is None else max(1, min(cap, num_extents))
        self._free = set(range(num_extents))
        self._shares: dict[int, _Share] = {}  # by room

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def cap(self) -> int:
        return self._cap

    def owned(self, room: int) -> frozenset[int]:
        return frozenset(self._shares[room].extents)

    def add(self, room: int, now: float) -> None:
        self._shares[room] = _Share(needed=now)

    def remove(self, room: int) -> None:
        """Take all extents of a room that is gone."""
        share = self._shares.pop(room)
        self._free |= share.extents
        for heir in share.going.values():
            if heir in self._shares:
                self._shares[heir].num_coming -= 1

    def grant(self, room: int, num_extents: int, now: float) -> list[int]:
        """Give a room up to `num_extents` free ones, next to its own if possible."""
        share = self._shares[room]
        share.needed = now
        granted: list[int] = []
        while len(granted) < num_extents and share.num_kept < self._cap and self._free:
            extent = self._nearest_free(share)
            self._free.remove(extent)
            share.extents.add(extent)
            granted.append(extent)
        return granted

    def donor(self, room: int, now: float) -> int | None:
        """The room that should give up one extent for `room`, which needs it now; or None."""
        share = self._shares[room]
        share.needed = now
        if self._free or share.num_kept >= self._cap:
            return None
        # If the rooms are so many that their floors do not fit, all have an equal share.
        floor = min(self._floor, self._num_extents // len(self._shares))
        others = [
            (other, id_)
            for id_, other in self._shares.items()
            if id_ != room and other.num_kept > floor and len(other.extents) > len(other.going)
        ]
        idle = [pair for pair in others if now - pair[0].needed >= _IDLE_SECONDS]
        if idle:
            return min(idle, key=lambda pair: pair[0].needed)[1]
        # Both need DRAM: the larger one gives until they are equal, or the other has its floor.
        must = share.num_kept < floor
        larger = [p for p in others if must or p[0].num_kept > share.num_kept + 1]
        return max(larger, key=lambda pair: pair[0].num_kept)[1] if larger else None

    def give_up(self, room: int, extent: int, heir: int) -> None:
        """A room begins to empty one of its extents, for another room."""
        share = self._shares[room]
        if extent not in share.extents or extent in share.going or heir == room:
            raise BookError(f"room {room} cannot give up extent {extent}")
        self._shares[heir].num_coming += 1
        share.going[extent] = heir

    def gave_up(self, room: int, extent: int) -> int | None:
        """An extent is empty. Returns the room that owns it now; None if it is free."""
        share = self._shares[room]
        heir = share.going.pop(extent)
        share.extents.remove(extent)
        if heir not in self._shares:
            self._free.add(extent)
            return None
        self._shares[heir].num_coming -= 1
        self._shares[heir].extents.add(extent)
        return heir

    def num_going(self) -> int:
        """How many extents are being emptied."""
        return sum(len(share.going) for share in self._shares.values())

    def check(self) -> None:
        """Raise BookError unless every extent has exactly one place."""
        places = [*self._free, *(e for share in self._shares.values() for e in share.extents)]
        if sorted(places) != list(range(self._num_extents)):
            raise BookError("the extents of DRAM do not add up")
        coming = Counter(heir for share in self._shares.values() for heir in share.going.values())
        for room, share in self._shares.items():
            if not share.going.keys() <= share.extents or share.num_kept > self._cap:
                raise BookError(f"room {room} has more DRAM than it may, or gives up others'")
            if share.num_coming != coming[room]:
                raise BookError(f"what is given up for room {room} is miscounted")

    def _nearest_free(self, share: _Share) -> int:
        """Neighbors waste no slot between them. A new room begins inside a free stretch."""
        if share.extents:
            return min(self._free, key=lambda e: (min(abs(e - own) for own in share.extents), e))
        stretches: list[list[int]] = []
        for extent in sorted(self._free):
            if stretches and stretches[-1][-1] == extent - 1:
                stretches[-1].append(extent)
            else:
                stretches.append([extent])
        largest = max(stretches, key=len)
        return largest[0] if largest[0] == 0 else largest[len(largest) // 2]
