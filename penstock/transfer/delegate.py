"""Transfers of which one link, the device's, is served by other processes.

vLLM's workers own the device; the books, the lower tiers and DRAM itself stay in one process. What
the books order for HOST's link is kept here until the host carries it to its workers, and counts
as ended once every worker has reported it: each moves its own part of every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.transfer.seals import Seals
from penstock.types import (
    Answer,
    Direction,
    Outcome,
    Question,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)


class Transfers(Protocol):
    """What an Offloader needs of the transfers (see `TransferEngine`)."""

    def has_room(self, link: Tier, direction: Direction) -> bool: ...

    def depth(self, link: Tier, direction: Direction) -> int: ...

    def submit(self, transfer: Transfer) -> bool: ...

    def cancel(self, transfer_id: TransferId) -> None: ...

    def poll(self) -> list[Outcome]: ...

    def ask(self, question: Question) -> None: ...

    def take_answers(self) -> list[Answer]: ...

    def wait(self, timeout_seconds: float) -> bool: ...

    def close(self, timeout_seconds: float = 10.0) -> bool: ...


@dataclass(slots=True)
class _Sent:
    transfer: Transfer
    num_missing: int  # workers that have not reported yet
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


class DelegatingEngine:
    """Every other link is `below`'s. For one owner, like the engine it wraps."""

    def __init__(self, below: Transfers, seals: Seals, num_workers: int) -> None:
        self._below = below
        self._seals = seals
        self._num_workers = num_workers
        self._unsent: dict[TransferId, Transfer] = {}
        self._sent: dict[TransferId, _Sent] = {}
        self._ended: list[Outcome] = []
        self._closed = False

    @property
    def num_flying(self) -> int:
        """Transfers that the workers still have to be told of, or to report."""
        return len(self._unsent) + len(self._sent)

    def take_unsent(self) -> list[Transfer]:
        """What the workers are to be told, in the order the books gave it."""
        unsent, self._unsent = list(self._unsent.values()), {}
        for transfer in unsent:
            self._sent[transfer.id] = _Sent(transfer, self._num_workers)
        return unsent

    def report(
        self,
        transfer_id: TransferId,
        verdicts: Sequence[Verdict],
        seconds: float,
        error: str = "",
        num_workers: int = 1,
    ) -> Transfer | None:
        """So many workers have ended a transfer; returns it once all have."""
        sent = self._sent.get(transfer_id)
        if sent is None:
            return None  # given up by `close`
        if sent.verdicts:
            pairs = zip(sent.verdicts, verdicts, strict=True)
            sent.verdicts = [one if one is not Verdict.OK else other for one, other in pairs]
        else:
            sent.verdicts = list(verdicts)
        sent.seconds = max(sent.seconds, seconds)  # they move their parts side by side
        sent.error = sent.error or error
        sent.num_missing -= num_workers
        if sent.num_missing > 0:
            return None
        del self._sent[transfer_id]
        transfer = sent.transfer
        if transfer.direction is Direction.SAVE:
            sound = [i for i, verdict in enumerate(sent.verdicts) if verdict is Verdict.OK]
            self._seals.seal(
                [transfer.keys[i] for i in sound], [transfer.target_slots[i] for i in sound]
            )
        self._ended.append(Outcome(transfer_id, tuple(sent.verdicts), sent.seconds, sent.error))
        return transfer

    def has_room(self, link: Tier, direction: Direction) -> bool:
        # The books bound what is pending; a save must be told before its blocks are reused.
        return not self._closed if link is Tier.HOST else self._below.has_room(link, direction)

    def depth(self, link: Tier, direction: Direction) -> int:
        if link is not Tier.HOST:
            return self._below.depth(link, direction)
        return sum(transfer.direction is direction for transfer in self._unsent.values())

    def submit(self, transfer: Transfer) -> bool:
        if transfer.link is not Tier.HOST:
            return self._below.submit(transfer)
        if self._closed:
            return False
        if transfer.direction is Direction.SAVE:
            self._seals.open(transfer.target_slots)
        self._unsent[transfer.id] = transfer
        return True

    def cancel(self, transfer_id: TransferId) -> None:
        if (transfer := self._unsent.pop(transfer_id, None)) is not None:
            self._end(transfer, Verdict.CANCELLED)
        elif transfer_id not in self._sent:
            self._below.cancel(transfer_id)

    def poll(self) -> list[Outcome]:
        ended, self._ended = self._ended, []
        return ended + self._below.poll()

    def ask(self, question: Question) -> None:
        self._below.ask(question)

    def take_answers(self) -> list[Answer]:
        return self._below.take_answers()

    def wait(self, timeout_seconds: float) -> bool:
        return bool(self._ended) or self._below.wait(timeout_seconds)

    def give_up(self) -> None:
        """The workers are gone: nothing that they were told will be reported any more."""
        self._closed = True
        for transfer in self._unsent.values():
            self._end(transfer, Verdict.CANCELLED)
        for sent in self._sent.values():
            self._end(sent.transfer, Verdict.FAILED)
        self._unsent.clear()
        self._sent.clear()

    def close(self, timeout_seconds: float = 10.0) -> bool:
        self.give_up()
        return self._below.close(timeout_seconds)

    def _end(self, transfer: Transfer, verdict: Verdict) -> None:
        self._ended.append(Outcome(transfer.id, (verdict,) * len(transfer.keys)))
