"""Transfers of which one link, the device's, is served by other processes.

vLLM's workers own the device; the books, the lower tiers and DRAM itself stay in one process. What
the books order for HOST's link is kept here until the host carries it to its workers, and counts
as ended once every worker has reported it: each moves its own part of every block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.transfer.base import Transfers
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
