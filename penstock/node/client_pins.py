"""ClientPins: the blocks in a node's DRAM that a client reads in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.errors import BookError
from penstock.node.client_memory import ClientMemory
from penstock.node.line import Line
from penstock.node.wire import WireError, pack_slots
from penstock.types import BlockKey, Slot, Verdict


class ClientPins:
    def __init__(self, line: Line, memory: ClientMemory) -> None:
        self._line = line
        self._memory = memory
        self._pins: Counter[Slot] = Counter()

    def __len__(self) -> int:
        """The number of slots that are pinned."""
        return len(self._pins)

    def enter(self, keys: Sequence[BlockKey], slots: Sequence[Slot | None]) -> list[Slot | None]:
        """Enter what the node has pinned, except for blocks that cannot be read here.

        These are given back. Raises WireError.
        """
        if len(slots) != len(keys):
            raise WireError("the node pinned another number of blocks")
        reach = self._memory.host.num_for_device
        taken = [slot for slot in slots if slot is not None]
        here = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
        verdicts = self._memory.seals.verdicts(here, taken)
        bad = {
            slot
            for slot, verdict in zip(taken, verdicts, strict=True)
            if verdict is not Verdict.OK or slot >= reach
        }
        self.give_back([slot for slot in taken if slot in bad])
        found = [None if slot in bad else slot for slot in slots]
        self._pins.update(slot for slot in found if slot is not None)
        return found

    def remove(self, slots: Sequence[Slot]) -> None:
        """The client does not read these any more. Raises BookError."""
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] < 0:
                raise BookError(f"slot {slot} of HOST is unpinned more often than pinned")
            if not self._pins[slot]:
                del self._pins[slot]
        self.give_back(slots)

    def remove_all(self) -> None:
        self.remove(list(self._pins.elements()))

    def give_back(self, slots: Sequence[Slot | None]) -> None:
        """Tell the node, also if it hangs, of pins that are not entered here."""
        if taken := [slot for slot in slots if slot is not None]:
            self._line.queue("unpin", {}, pack_slots(taken))
            self._line.flush()
