"""Where the blocks of one sequence are: on the device, or cold, which means pinned in HOST.

Blocks may also be arriving: they have a device slot, which the next step of the sequence fills from
HOST (see `bringing`), where they are pinned until then.

A place is a number: a device slot, or `~slot` (below zero) for a slot of HOST. `Addresses` turns
places into memory addresses, so kernels need not know which tier a block is in. The address of a
block that is packed (see `penstock.codecs.lossless_format`) is marked by its lowest bit: blocks are
aligned, so the bit is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BookError
from penstock.types import Slot

Places = NDArray[np.int64]

PACKED_MARK = 1  # added to the address of a packed block


class BlockTable:
    """A sequence's blocks in order. It grows at its end, and blocks may move between tiers."""

    __slots__ = (
        "_arriving",
        "_arriving_start",
        "_len",
        "_num_cold",
        "_places",
        "num_moves",
        "num_releases",
    )

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
        self._places: Places = np.empty(max(8, len(slots)), np.int64)
        self._len = 0
        self._num_cold = 0
        self._arriving: list[Slot] = []  # HOST slots of blocks that the next step brings ...
        self._arriving_start = 0  # ... and the index of the first one
        self.num_releases = 0  # how often pins were released: while equal, old pins are valid
        self.num_moves = 0  # how often the set of cold blocks has changed
        self.extend(slots)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        return iter(self.places.tolist())

    @property
    def places(self) -> Places:
        """A view that is valid until the table grows."""
        return self._places[: self._len]

    @property
    def num_cold(self) -> int:
        return self._num_cold

    @property
    def num_resident(self) -> int:
        return self._len - self._num_cold

    def place(self, index: int) -> int:
        return int(self._places[index])

    def slot(self, index: int) -> Slot:
        """The device slot of a resident block."""
        return Slot(int(self.places[index]))

    def slots(self, start: int, end: int) -> list[Slot]:
        """The device slots of blocks that are all resident."""
        return [Slot(place) for place in self.places[start:end].tolist()]

    def extend(self, slots: Sequence[Slot]) -> None:
        """Append resident blocks."""
        self._append(slots)

    def extend_places(self, places: Sequence[int]) -> None:
        """Append blocks that are resident or pinned in HOST."""
        self._append(places)
        self._num_cold += sum(place < 0 for place in places)
        self.num_moves += 1

    @property
    def arriving(self) -> range:
        """Indices of blocks that the next step brings from HOST to their device slots."""
        return range(self._arriving_start, self._arriving_start + len(self._arriving))

    @property
    def arriving_pins(self) -> Sequence[Slot]:
        """The HOST slots in which they are pinned."""
        return self._arriving

    def extend_arriving(self, slots: Sequence[Slot], pins: Sequence[Slot]) -> None:
        """Append blocks whose device slots are filled by the next step, from HOST."""
        if self._arriving:
            raise BookError("a sequence has blocks that arrive already")
        if len(slots) != len(pins):
            raise BookError(f"{len(slots)} blocks arrive, but {len(pins)} are pinned")
        self._arriving_start = self._len
        self._arriving = list(pins)
        self._append(slots)

    def end_arriving(self) -> list[Slot]:
        """The step that brings blocks is queued. Returns the HOST slots that it reads."""
        pins, self._arriving = self._arriving, []
        return pins

    def chill_arriving(self) -> list[Slot]:
        """Make arriving blocks cold. Returns the device slots that they leave."""
        arriving, pins = self.arriving, self.end_arriving()
        slots = self.slots(arriving.start, arriving.stop)
        self._places[arriving.start : arriving.stop] = ~np.array(pins, np.int64)
        self._num_cold += len(pins)
        self.num_moves += 1
        return slots

    def chill(self, index: int, pin: Slot) -> Slot:
        """Make a resident block cold. Returns the device slot that it leaves."""
        slot = self.slot(index)
        self._places[index] = ~pin
        self._num_cold += 1
        self.num_moves += 1
        return slot

    def warm(self, index: int, slot: Slot) -> Slot:
        """Make a cold block resident. Returns the HOST slot that it leaves."""
        pin = Slot(~int(self.places[index]))
        self._places[index] = slot
        self._num_cold -= 1
        self.num_moves += 1
        self.num_releases += 1
        return pin

    def resident(self, start: int = 0, end: int | None = None) -> list[int]:
        """Indices of resident blocks, in order."""
        found: list[int] = (np.flatnonzero(self.places[start:end] >= 0) + start).tolist()
        return found

    def cold(self, start: int = 0, end: int | None = None) -> list[int]:
        """Indices of cold blocks, in order."""
        found: list[int] = (np.flatnonzero(self.places[start:end] < 0) + start).tolist()
        return found

    def take_all(self) -> tuple[list[Slot], list[Slot]]:
        """Empty the table. Returns its device slots and its HOST slots, in order."""
        places = self.places
        slots, pins = places[places >= 0].tolist(), (~places[places < 0]).tolist()
        pins += self.end_arriving()
        self._len = self._num_cold = 0
        self.num_moves += 1
        self.num_releases += 1
        return slots, pins

    def _append(self, places: Iterable[int]) -> None:
        new = np.fromiter(places, np.int64)
        end = self._len + len(new)
        if end > len(self._places):
            room = np.empty(max(end, 2 * len(self._places)), np.int64)
            room[: self._len] = self.places
            self._places = room
        self._places[self._len : end] = new
        self._len = end


def arriving_in(tables: Sequence[BlockTable]) -> tuple[Places, Places]:
    """The HOST slots and the device slots of all blocks that arrive in these tables."""
    none: Places = np.zeros(0, np.int64)
    tables = [table for table in tables if table.arriving_pins]
    if not tables:  # most steps: they are short, and arrays take long
        return none, none
    pins = [np.array(table.arriving_pins, np.int64) for table in tables]
    slots = [table.places[table.arriving.start : table.arriving.stop] for table in tables]
    return np.concatenate([none, *pins]), np.concatenate([none, *slots])


def shared_places(tables: Sequence[BlockTable]) -> set[int]:
    """Places that more than one sequence reads."""
    if len(tables) < 2:
        return set()
    places, counts = np.unique(np.concatenate([t.places for t in tables]), return_counts=True)
    return set(places[counts > 1].tolist())


class AddressedSlots(Protocol):
    """Slots in contiguous memory."""

    @property
    def address(self) -> int: ...
    @property
    def stride_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Addresses:
    """Turns places into addresses. `host_address` is 0 if nothing is offloaded.

    If HOST's blocks are packed, `host_address` includes `PACKED_MARK`.
    """

    device_address: int
    device_stride: int
    host_address: int = 0
    host_stride: int = 0

    @classmethod
    def of_arenas(
        cls, device: AddressedSlots, host: AddressedSlots | None, *, is_packed: bool = False
    ) -> Addresses:
        """`is_packed`: whether HOST's blocks are packed."""
        if host is None:
            return cls(device.address, device.stride_bytes)
        first = host.address + PACKED_MARK if is_packed else host.address
        return cls(device.address, device.stride_bytes, first, host.stride_bytes)

    def of(self, places: Places) -> Places:
        resident = self.device_address + places * self.device_stride
        if not self.host_address:
            return resident
        return np.where(places >= 0, resident, self.host_address + ~places * self.host_stride)
