"""NodeRoom: the blocks of one model on a node, and the part of DRAM that they have."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from penstock.audits.auditor import advice
from penstock.audits.quarantine import Quarantine
from penstock.build import build_shared
from penstock.codecs.blocks import TierCodecs
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.events import Event, ModelId
from penstock.node.shares import Shares
from penstock.node.switchboard import Switchboard
from penstock.offload import Offloader
from penstock.stores.host import HostArena
from penstock.stores.memory_file import end_changes, make_memory_file
from penstock.stores.remotes import headroom_bytes
from penstock.stores.shared_cap import DividedFolder
from penstock.transfer.base import Transfers
from penstock.transfer.seals import Seals
from penstock.types import KEY_BYTES, BlockSpec, Slot, Tier
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_MAX_GOING = 4  # extents that are emptied at the same time, on the whole node


@dataclass(frozen=True, slots=True)
class Dram:
    """The node's memory for blocks: one file in memory, divided into extents."""

    file: int
    num_bytes: int
    extent_bytes: int


class NodeRoom:
    """Slots are numbered over the whole DRAM, in units of this room's blocks.

    Slot n is bytes n * stride to (n + 1) * stride of the file. It is open if all of its extents
    belong to the room. So a slot's address follows from its number, whatever the room owns.
    """

    def __init__(
        self,
        number: int,
        config: Config,
        spec: BlockSpec,
        codecs: TierCodecs,
        dram: Dram,
        shares: Shares,
        *,
        in_one: bool,
        divided: DividedFolder | None,
        notify: Callable[[], None],
        now: float,
    ) -> None:
        self.number = number
        self.spec = spec
        self.codecs = codecs
        self._dram = dram
        self._shares = shares
        headroom = headroom_bytes(config.remote.url)
        host_spec = codecs.spec(Tier.HOST, spec)
        stride = host_spec.stride_bytes + headroom
        most = shares.cap * dram.extent_bytes
        if stride > most:
            raise ConfigError(
                f"a block of this model has {format_bytes(stride)}, but a model may have only "
                f"{format_bytes(most)} of the node's DRAM: expected room for at least one block; "
                "raise host.size or node.model_cap of the node"
            )
        self.arena = HostArena.over(dram.file, host_spec, dram.num_bytes, headroom)
        seals_bytes = self.arena.num_slots * KEY_BYTES
        self.seals_file = make_memory_file("penstock-seals", seals_bytes)
        memory = mmap.mmap(self.seals_file, seals_bytes, flags=mmap.MAP_SHARED)
        end_changes(self.seals_file, is_written_here_only=True)
        seals = Seals(self.arena, memory=memoryview(memory))
        self.events: list[Event] = []
        boards: list[Switchboard] = []

        def link(below: Transfers) -> Transfers:
            boards.append(Switchboard(below, seals))
            return boards[0]

        try:
            self.offloader: Offloader = build_shared(
                config,
                spec,
                codecs,
                self.arena,
                seals,
                link,
                in_one=in_one,
                divided=divided,
                observers=[self.events.append],
                notify=notify,
            )
        except BaseException:
            os.close(self.seals_file)
            raise
        self.switchboard = boards[0]
        self._going: list[int] = []  # extents that are being emptied
        self._is_short = False  # blocks came in for which there was no free slot
        self.has_disk = divided is not None
        self.is_broken = False
        self.is_released = False  # its DRAM may be another room's
        self.num_sessions = 0
        shares.add(number, now)
        self.make_room(1, now)
        disk = config.disk.path
        self._persists = disk is not None or config.remote.url is not None
        self._quarantine = Quarantine(
            spec.namespace, None if disk is None else Path(disk), persists=self._persists
        )
        if (path := self._quarantine.find()) is not None:
            log.error("stored KV of %s is in quarantine: %s", self.model, advice(path))
            self.offloader.quarantine()

    @property
    def model(self) -> str:
        return dict(self.spec.description).get("model", self.spec.namespace.hex()[:8])

    @property
    def id(self) -> ModelId:
        return ModelId(self.model, self.spec.namespace.hex()[:8])

    @property
    def num_bytes(self) -> int:
        """The DRAM that the room owns."""
        return len(self._shares.owned(self.number)) * self._dram.extent_bytes

    def make_room(self, num_blocks: int, now: float) -> None:
        """Before blocks come in: take free extents if there are not enough free slots."""
        missing = num_blocks - self.offloader.num_free_host_blocks
        if missing <= 0:
            return
        stride, size = self.arena.stride_bytes, self._dram.extent_bytes
        # Slots at the ends of a stretch of extents may not fit: ask again until they do.
        while missing > 0:
            granted = self._shares.grant(self.number, max(1, missing * stride // size), now)
            if not granted:
                self._is_short = True
                return
            self.open(granted)
            missing = num_blocks - self.offloader.num_free_host_blocks

    def wants_more(self, now: float) -> int | None:
        """The room that should give up an extent for this one; None if there is no need.

        A room that is full needs no more as long as nothing new comes in.
        """
        if not self._is_short or self._shares.num_going() >= _MAX_GOING:
            return None
        self._is_short = False
        return self._shares.donor(self.number, now)

    def give_up_one(self, heir: int) -> None:
        """Begin to empty the last of the room's extents for another: its blocks are evicted."""
        going = set(self._going)
        kept = [extent for extent in self._shares.owned(self.number) if extent not in going]
        extent = max(kept)
        self._shares.give_up(self.number, extent, heir)
        self._going.append(extent)
        log.info("%s gives up %d MiB of DRAM", self.model, self._dram.extent_bytes >> 20)

    def advance_going(self) -> list[tuple[int, int]]:
        """Close what can be closed of the extents that are being emptied.

        Returns those that are empty now and belong to another room, each with that room.
        """
        given = []
        for extent in list(self._going):
            if self.offloader.close_host(self._touching(extent)):
                self._going.remove(extent)
                heir = self._shares.gave_up(self.number, extent)
                if heir is not None:
                    given.append((extent, heir))
        return given

    def quarantine(self, found_by: str) -> None:
        """A client's audit has found wrong KV: load and store nothing, also after a restart.

        Without a lower tier nothing survives a restart, so there is nothing to write down.
        """
        if self.offloader.is_quarantined:
            return
        self.offloader.quarantine()
        path = self._quarantine.find()
        if path is None and self._persists:
            path = self._quarantine.impose(
                {
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                    "model": self.model,
                    "namespace": self.spec.namespace.hex(),
                    "block_tokens": self.spec.block_tokens,
                    "found_by": found_by,
                    "findings": "see the report of that process",
                }
            )
        log.error(
            "an audit of %s found wrong KV of %s: nothing of it is loaded or stored any more. %s",
            found_by or "a client",
            self.model,
            advice(path)
            if self._persists
            else "To end this, restart the node and then its engines.",
        )

    def check(self) -> None:
        """Raise BookError if the books do not add up."""
        self.offloader.check()
        self._shares.check()

    def close(self, timeout_seconds: float) -> bool:
        """Finish writes to lower tiers, and `abandon`. False if they were not finished."""
        closed = self.offloader.close(timeout_seconds)
        return self.abandon(0.0) and closed

    def abandon(self, timeout_seconds: float) -> bool:
        """Release DRAM without finishing anything. False if a tier hangs: try again later.

        A thread of it may still write to DRAM, which must not become another model's meanwhile.
        """
        if self.offloader.abandon(timeout_seconds) and not self.is_released:
            self.is_released = True
            self._shares.remove(self.number)
            os.close(self.seals_file)
        return self.is_released

    def open(self, extents: Sequence[int]) -> None:
        """Start using extents that the room owns since now."""
        owned = self._shares.owned(self.number) - set(self._going)
        slots = sorted({slot for extent in extents for slot in self._touching(extent)})
        self.offloader.open_host([slot for slot in slots if self._is_inside(slot, owned)])

    def _touching(self, extent: int) -> list[Slot]:
        """The slots that have at least one byte in an extent."""
        stride, size = self.arena.stride_bytes, self._dram.extent_bytes
        first = extent * size // stride
        end = -(-(extent + 1) * size // stride)
        return [Slot(slot) for slot in range(first, min(end, self.arena.num_slots))]

    def _is_inside(self, slot: Slot, owned: frozenset[int] | set[int]) -> bool:
        stride, size = self.arena.stride_bytes, self._dram.extent_bytes
        first = slot * stride // size
        last = ((slot + 1) * stride - 1) // size
        return all(extent in owned for extent in range(first, last + 1))
