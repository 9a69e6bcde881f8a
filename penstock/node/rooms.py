"""Rooms: the models of a node. Finds, makes and removes rooms, and shares DRAM among them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.build import tier_codecs
from penstock.config import Config, as_typed
from penstock.events import ModelRemoved, NodeEvent
from penstock.node.room import Dram, NodeRoom
from penstock.node.shares import Shares
from penstock.node.values_wire import unpack_values
from penstock.node.wire import WireError, unpack_text
from penstock.stores.shared_cap import DividedFolder
from penstock.types import BlockSpec

log = logging.getLogger(__name__)

_EMPTY_ROOM_SECONDS = 3600.0  # a room without clients keeps its DRAM at least this long
_ABANDON_AGAIN_SECONDS = 5.0  # after a lower tier of a room has not stopped


class Rooms:
    """The rooms that clients can find; and others, until nothing touches their DRAM any more."""

    def __init__(
        self,
        config: Config,
        dram: Dram,
        *,
        notify: Callable[[], None],
        tell: Callable[[NodeEvent], None],
    ) -> None:
        self._config = config
        self._dram = dram
        self._notify = notify
        self._tell = tell
        num_extents = dram.num_bytes // dram.extent_bytes
        cap = max(1, int(num_extents * config.node.model_cap))
        floor = min(cap, int(num_extents * config.node.model_floor))
        self._shares = Shares(num_extents, floor=floor, cap=cap)
        self._disk: DividedFolder | None = None
        if config.disk.path is not None:
            num_models = 1 << 30 if config.disk.read_only else config.node.disk_models
            self._disk = DividedFolder(Path(config.disk.path), config.disk.size_bytes, num_models)
        self._rooms: dict[bytes, NodeRoom] = {}  # by namespace
        # Broken rooms, and those with a tier that hangs: clients or threads may still touch them.
        self._leaving: list[NodeRoom] = []
        self._abandon_again: dict[int, float] = {}  # when, by the numbers of rooms that hang
        self._empty_since: dict[int, float] = {}
        self._next_number = 0

    def __iter__(self) -> Iterator[NodeRoom]:
        """Those that are not broken. The caller may break or remove some meanwhile."""
        return iter(list(self._rooms.values()))

    @property
    def free_bytes(self) -> int:
        """DRAM that no room has."""
        return self._shares.num_free * self._dram.extent_bytes

    @property
    def is_moving(self) -> bool:
        return any(room.offloader.is_moving for room in self._rooms.values())

    def max_blocks(self, room: NodeRoom) -> int:
        """How many blocks a room may have in DRAM, now or once it needs them."""
        return self._shares.cap * self._dram.extent_bytes // room.arena.stride_bytes

    def numbered(self, number: int) -> NodeRoom:
        """A room by its number, also one that is leaving."""
        rooms = (*self._rooms.values(), *self._leaving)
        return next(room for room in rooms if room.number == number)

    def find(self, fields: Mapping[str, Any], now: float) -> NodeRoom:
        """The room for a client's blocks, made if it is the first. Raises PenstockError."""
        spec = BlockSpec(
            bytes.fromhex(fields["namespace"]),
            int(fields["block_bytes"]),
            int(fields["block_tokens"]),
            tuple(
                (unpack_text(name), unpack_text(text))
                for name, text in fields.get("description", [])
            ),
        )
        if len(spec.namespace) != 32 or spec.block_bytes < 1 or spec.block_tokens < 1:
            raise WireError("the blocks of this client are not described correctly")
        codecs = tier_codecs(self._config, unpack_values(fields["values"]))
        if codecs.host.raw_bytes != spec.block_bytes:
            raise WireError("the values of a block do not add up to its size")
        found = self._rooms.get(spec.namespace)
        if found is not None:
            held, wanted = found.codecs.host, codecs.host
            # Packed blocks of the same size may still mean something else: each client unpacks its
            # own way.
            if (held.packed_bytes, held.version) != (wanted.packed_bytes, wanted.version):
                raise WireError(
                    f"{found.model} is in use with blocks of another size or another form: all "
                    "clients with one namespace must have the same layout"
                )
            return found
        if len(self._rooms) >= self._config.node.max_models:
            self._remove_longest_unused()
        if len(self._rooms) >= self._config.node.max_models:
            raise WireError(
                f"the node has {len(self._rooms)} models already, as many as it may have: raise "
                "node.max_models, or wait until one is not used any more"
            )
        with as_typed(self._config):
            self._next_number += 1
            room = NodeRoom(
                self._next_number,
                self._config,
                spec,
                codecs,
                self._dram,
                self._shares,
                in_one=bool(fields.get("in_one", False)),
                divided=self._part_of_disk(spec.namespace),
                notify=self._notify,
                now=now,
            )
        self._rooms[spec.namespace] = room
        return room

    def share_dram(self, room: NodeRoom, now: float) -> None:
        """Let a room that needs less give up DRAM if this one needs more."""
        number = room.wants_more(now)
        donor = None if number is None else self.numbered(number)
        if donor is not None and not donor.is_broken:  # else it gives up all of it soon
            donor.give_up_one(room.number)

    def set_aside(self, room: NodeRoom) -> None:
        """A room's books are broken: nobody finds it any more."""
        room.is_broken = True
        self._rooms.pop(room.spec.namespace, None)
        self._leaving.append(room)

    def remove_unused(self, now: float) -> None:
        """Remove broken rooms that nobody touches, and rooms without clients after a while."""
        for room in [room for room in self._leaving if not room.num_sessions]:
            self._abandon(room, now)
        for namespace, room in list(self._rooms.items()):
            if room.num_sessions:
                self._empty_since.pop(room.number, None)
                continue
            since = self._empty_since.setdefault(room.number, now)
            if now - since > _EMPTY_ROOM_SECONDS and not room.offloader.is_moving:
                self._remove(namespace)

    def check(self) -> None:
        """Raise BookError if the books of a room do not add up."""
        for room in self:
            room.check()
        self._shares.check()

    def close(self, timeout_seconds: float) -> bool:
        """Finish writes to lower tiers. Clients must have given everything back."""
        deadline = time.monotonic() + timeout_seconds
        closed = True
        for room in self._rooms.values():
            closed &= _try_to_end(room.close, max(0.1, deadline - time.monotonic()))
        for room in self._leaving:
            closed &= _try_to_end(room.abandon, max(0.1, deadline - time.monotonic()))
        self._rooms, self._leaving = {}, []
        if self._disk is not None:
            self._disk.close()
        return closed

    def _abandon(self, room: NodeRoom, now: float) -> None:
        """Remove a room that no client touches, once its lower tiers have stopped."""
        again = self._abandon_again.get(room.number)
        if again is not None and now < again:
            return
        # Others wait for this once, and not each time.
        _try_to_end(room.abandon, 1.0 if again is None else 0.0)
        if room.is_released:
            self._leaving.remove(room)
            self._abandon_again.pop(room.number, None)
            return
        if again is None:
            log.warning("a tier of %s hangs: its DRAM stays taken until it has ended", room.model)
        self._abandon_again[room.number] = now + _ABANDON_AGAIN_SECONDS

    def _part_of_disk(self, namespace: bytes) -> DividedFolder | None:
        """The disk, if it has a part for one more model."""
        if self._disk is None:
            return None
        if any(room.spec.namespace == namespace and room.has_disk for room in self._leaving):
            log.warning(
                "a model has no disk, only DRAM: its books broke, and an engine or a tier still "
                "uses its part of the disk. It has the disk again once it was removed, or the "
                "node is restarted."
            )
            return None
        if not self._disk.has_part:
            self._remove_longest_unused(with_disk=True)
        if self._disk.has_part:
            return self._disk
        log.warning(
            "a model has no part of the disk, only DRAM: the disk is used by as many models as "
            "node.disk_models says (%d). Raise it to divide the disk among more models.",
            self._config.node.disk_models,
        )
        return None

    def _remove_longest_unused(self, *, with_disk: bool = False) -> None:
        """Remove the room that has had no clients for longest, if there is one."""
        unused = [
            (self._empty_since.get(room.number, math.inf), namespace)
            for namespace, room in self._rooms.items()
            if not room.num_sessions
            and not room.offloader.is_moving
            and (room.has_disk or not with_disk)
        ]
        if unused:
            self._remove(min(unused)[1])

    def _remove(self, namespace: bytes) -> None:
        room = self._rooms.pop(namespace)
        self._empty_since.pop(room.number, None)
        _try_to_end(room.close, 1.0)
        if not room.is_released:
            room.is_broken = True
            self._leaving.append(room)
        self._tell(ModelRemoved(room.id, is_broken=False))


def _try_to_end(end: Callable[[float], bool], timeout_seconds: float) -> bool:
    """Close or abandon a room. A fault in it must not end the node for the others."""
    try:
        return end(timeout_seconds)
    except Exception:
        log.exception("a model could not be removed correctly")
        return False
