"""Transfers whose link to the device is served by other processes.

vLLM's workers own the device; the books, DRAM and the lower tiers are in one process. Transfers
between HOST and the device are kept here until the client sends them to its workers. Each worker
copies its own part of every block, so a transfer has ended once all workers have reported it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.transfer.base import Transfers
from penstock.transfer.seals import Seals
from penstock.types import Answer, Direction, Outcome, Question, Tier, Transfer, TransferId, Verdict


@dataclass(slots=True)
class _Sent:
    transfer: Transfer
    num_missing: int  # workers that have not reported it yet
    merged: Outcome | None = None  # of those that have

    def merge(self, outcome: Outcome) -> None:
        """Add a worker's outcome: a block is OK only if it is OK on all of them."""
        if self.merged is not None:
            pairs = zip(self.merged.verdicts, outcome.verdicts, strict=True)
            outcome = Outcome(
                outcome.transfer_id,
                tuple(one if one is not Verdict.OK else two for one, two in pairs),
                max(self.merged.seconds, outcome.seconds),  # workers copy in parallel
                self.merged.error or outcome.error,
            )
        # Last: an outcome that does not fit raises above, and changes nothing.
        self.merged = outcome
        self.num_missing -= 1


class DelegatingEngine:
    """Passes the device's link to workers and all others to `below`. For one owner."""

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
        """Number of transfers that are not sent to the workers yet, or not reported by all."""
        return len(self._unsent) + len(self._sent)

    def take_unsent(self) -> list[Transfer]:
        """Transfers to send to the workers, in the order in which the books submitted them."""
        unsent, self._unsent = list(self._unsent.values()), {}
        for transfer in unsent:
            self._sent[transfer.id] = _Sent(transfer, self._num_workers)
        return unsent

    def report(self, outcome: Outcome) -> Transfer | None:
        """Record that a worker has finished a transfer. Returns it once all of them have."""
        sent = self._sent.get(outcome.transfer_id)
        if sent is None:
            return None  # `give_up` has already failed it
        sent.merge(outcome)
        if sent.num_missing or sent.merged is None:
            return None
        del self._sent[outcome.transfer_id]
        transfer = sent.transfer
        if transfer.direction is Direction.SAVE:
            sound = [i for i, verdict in enumerate(sent.merged.verdicts) if verdict is Verdict.OK]
            self._seals.seal(
                [transfer.keys[i] for i in sound], [transfer.target_slots[i] for i in sound]
            )
        self._ended.append(sent.merged)
        return transfer

    def has_room(self, link: Tier, direction: Direction) -> bool:
        # Always room: the books limit what is pending, and workers must learn of a save before
        # its blocks are reused.
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
        """Fail all transfers, because the workers are gone and will not report them."""
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
