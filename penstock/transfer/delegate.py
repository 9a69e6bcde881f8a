"""Transfers whose link to the device is served by other processes.

vLLM's workers own the device; the books, DRAM and the lower tiers are in one process. Transfers
between HOST and the device are kept here until the client sends them to its workers. Each worker
copies its own part of every block, so a transfer has ended once all workers have reported it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.transfer.base import Transfers
from penstock.transfer.seals import Seals
from penstock.types import Answer, Direction, Outcome, Question, Tier, Transfer, TransferId, Verdict


class Report(NamedTuple):
    """The result of one transfer on `num_workers` workers. Plain data, sent between processes."""

    verdicts: tuple[Verdict, ...]
    seconds: float
    error: str = ""
    num_workers: int = 1

    def merged(self, other: Report) -> Report:
        """The result on both sets of workers: a block is OK only if it is OK on all of them."""
        pairs = zip(self.verdicts, other.verdicts, strict=True)
        return Report(
            tuple(one if one is not Verdict.OK else two for one, two in pairs),
            max(self.seconds, other.seconds),  # workers copy in parallel
            self.error or other.error,
            self.num_workers + other.num_workers,
        )


@dataclass(slots=True)
class _Sent:
    transfer: Transfer
    report: Report | None = None  # merged from the workers that have reported so far


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
            self._sent[transfer.id] = _Sent(transfer)
        return unsent

    def report(self, transfer_id: TransferId, report: Report) -> Transfer | None:
        """Record that workers have finished a transfer. Returns it once all of them have."""
        sent = self._sent.get(transfer_id)
        if sent is None:
            return None  # `give_up` has already failed it
        sent.report = merged = report if sent.report is None else sent.report.merged(report)
        if merged.num_workers < self._num_workers:
            return None
        del self._sent[transfer_id]
        transfer = sent.transfer
        if transfer.direction is Direction.SAVE:
            sound = [i for i, verdict in enumerate(merged.verdicts) if verdict is Verdict.OK]
            self._seals.seal(
                [transfer.keys[i] for i in sound], [transfer.target_slots[i] for i in sound]
            )
        self._ended.append(Outcome(transfer_id, merged.verdicts, merged.seconds, merged.error))
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
