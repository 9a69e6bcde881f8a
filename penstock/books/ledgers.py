"""The ledgers of all tiers, their health, and the journal of what happened to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.books.health import Health
from penstock.books.ledger import Ledger
from penstock.errors import BookError
from penstock.events import Asked, Event, Lost, Moved, Removed, Stored, TierRested, TierRevived
from penstock.types import (
    Answer,
    BlockKey,
    Direction,
    Outcome,
    Question,
    Slot,
    Tier,
    Transfer,
    Verdict,
)

GONE = (Verdict.MISSING, Verdict.CORRUPT, Verdict.FAILED, Verdict.UNFIT)
"""Verdicts after which a block is dropped from its source tier: trying again would not help."""


def all_ok(verdicts: Sequence[Verdict]) -> bool:
    return verdicts.count(Verdict.OK) == len(verdicts)


class Ledgers:
    """All changes of a tier's blocks go through this class, so that the journal is complete."""

    def __init__(
        self,
        block_bytes: int,
        host: Ledger,
        lower: Mapping[Tier, Ledger],
        lower_bytes: Mapping[Tier, int] | None = None,
    ) -> None:
        self.host = host
        self.lower = dict(sorted(lower.items()))
        self.now = 0.0
        # Called with the blocks that HOST starts or stops offering, before observers see the event.
        self.on_host_stored: list[Callable[[Sequence[BlockKey]], None]] = []
        self.on_host_removed: list[Callable[[Sequence[BlockKey]], None]] = []
        # The same for all tiers. Blocks that were on their way and did not arrive are lost, too.
        self.on_stored: list[Callable[[Tier, Sequence[BlockKey]], None]] = []
        self.on_lost: list[Callable[[Tier, Sequence[BlockKey]], None]] = []
        # What a block has on each link, in bytes.
        self._block_bytes = {Tier.HOST: block_bytes, **dict.fromkeys(self.lower, block_bytes)}
        self._block_bytes.update(lower_bytes or {})
        self._health = {
            (tier, direction): Health() for tier in self.lower for direction in Direction
        }
        self._ends: dict[tuple[Tier, Direction], float] = {}  # of each link's last transfer
        self._events: list[Event] = []

    def __iter__(self) -> Iterator[tuple[Tier, Ledger]]:
        yield Tier.HOST, self.host
        yield from self.lower.items()

    def of(self, tier: Tier) -> Ledger:
        return self.host if tier is Tier.HOST else self.lower[tier]

    def readable(self) -> list[tuple[Tier, Ledger]]:
        """The lower tiers that are not resting."""
        return [
            (tier, ledger)
            for tier, ledger in self.lower.items()
            if not self.is_resting(tier, Direction.LOAD)
        ]

    def is_resting(self, tier: Tier, direction: Direction) -> bool:
        return self._health[tier, direction].resting

    def claim(
        self, tier: Tier, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None] = ()
    ) -> tuple[Slot, ...]:
        """Claim slots. The caller has checked that there is room. `parents`: see `Ledger.claim`."""
        claim = self.of(tier).claim(keys, parents)
        if claim is None:
            raise BookError(
                f"{tier.name} has no room for {len(keys)} blocks; the caller must check first"
            )
        # REMOTE's ledger is only a memory: a block that leaves it is still in the store.
        if tier is not Tier.REMOTE:
            self._note_removed(tier, claim.evicted, evicted=True)
        return claim.slots

    def conclude(self, tier: Tier, keys: Sequence[BlockKey], verdicts: Sequence[Verdict]) -> None:
        """End claims: commit the blocks that arrived and abort the others."""
        ledger, arrived = self.of(tier), keys
        if not all_ok(verdicts):
            pairs = list(zip(keys, verdicts, strict=True))
            arrived = [key for key, verdict in pairs if verdict is Verdict.OK]
            failed = [key for key, verdict in pairs if verdict is not Verdict.OK]
            ledger.abort(failed)
            for listener in self.on_lost:
                listener(tier, failed)
        ledger.commit(arrived)
        self._note_stored(tier, arrived)

    def close_host(self, slots: Sequence[Slot]) -> None:
        """Stop using slots of HOST (see `Ledger.close`). Their blocks count as evicted."""
        self._note_removed(Tier.HOST, self.host.close(slots), evicted=True)

    def drop(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        ledger = self.of(tier)
        for key in keys:
            ledger.drop(key)
        self._note_removed(tier, keys, evicted=False)

    def drop_gone(self, transfer: Transfer, verdicts: Sequence[Verdict]) -> None:
        """Drop blocks that the source failed to deliver, so that they can be stored again."""
        if all_ok(verdicts):
            return
        ledger = self.of(transfer.source)
        triples = zip(transfer.keys, transfer.source_slots, verdicts, strict=True)
        gone = [key for key, slot, v in triples if v in GONE and ledger.slot_of(key) == slot]
        self.drop(transfer.source, gone)

    def adopt(self, tier: Tier, found: Sequence[tuple[Slot, BlockKey | None]]) -> int:
        """Enter slots that a restart found on a lower tier; returns how many blocks are new."""
        ledger = self.lower[tier]
        keys = [key for slot, key in found if ledger.adopt(slot, key) and key is not None]
        self._note_stored(tier, keys)
        return len(keys)

    def learn(self, tier: Tier, keys: Sequence[BlockKey], present: Sequence[bool]) -> None:
        """Enter which blocks a shared tier holds, according to its answer."""
        ledger = self.lower[tier]
        pairs = list(zip(keys, present, strict=True))
        gone = [key for key, is_there in pairs if not is_there and ledger.is_ready(key)]
        if gone:
            self.drop(tier, gone)
        new = [key for key, is_there in pairs if is_there and key not in ledger]
        new = new[: ledger.num_claimable]
        if new:
            self.claim(tier, new)
            ledger.commit(new)
        for key, is_there in pairs:
            if is_there:
                ledger.touch(key)

    def asked(self, question: Question, answer: Answer, *, is_late: bool = False) -> None:
        """Record the answer to a lookup in the journal and in the tier's health.

        A late answer does not count as a sign of health.
        """
        num_present = sum(answer.present)
        self._events.append(
            Asked(question.tier, len(answer.present), num_present, answer.seconds, answer.error)
        )
        if answer.error:
            self.fault(question.tier, Direction.LOAD, answer.error)
        elif not is_late and self._health[question.tier, Direction.LOAD].well():
            self._events.append(TierRevived(question.tier, Direction.LOAD))

    def tick(self) -> None:
        """End the rests of failing tiers whose time is up."""
        for health in self._health.values():
            health.tick(self.now)

    def fault(self, tier: Tier, direction: Direction, error: str) -> None:
        seconds = self._health[tier, direction].fault(self.now)
        if seconds:
            self._events.append(TierRested(tier, direction, seconds, error))

    def report(self, transfer: Transfer, outcome: Outcome) -> None:
        """Record the outcome of a transfer in the journal and in the tier's health."""
        source, target, direction = transfer.source, transfer.target, transfer.direction
        num_ok = outcome.verdicts.count(Verdict.OK)
        if num_ok:
            num_bytes = num_ok * self._block_bytes[transfer.link]
            alone = self._link_seconds(transfer, outcome)
            self._events.append(
                Moved(source, target, direction, num_ok, num_bytes, outcome.seconds, alone)
            )
        if num_ok < len(outcome.verdicts):
            for verdict, num_blocks in sorted(Counter(outcome.verdicts).items()):
                if verdict is not Verdict.OK:
                    self.lose(source, target, verdict, num_blocks, outcome.error)
        if transfer.link in self.lower:
            if Verdict.FAILED in outcome.verdicts:
                self.fault(transfer.link, direction, outcome.error)
            elif num_ok and self._health[transfer.link, direction].well():
                self._events.append(TierRevived(transfer.link, direction))

    def _link_seconds(self, transfer: Transfer, outcome: Outcome) -> float | None:
        """Seconds of this transfer after the link's previous one ended; None if unknown."""
        if outcome.ended is None:
            return None
        link = (transfer.link, transfer.direction)
        last = self._ends.get(link, 0.0)
        self._ends[link] = max(outcome.ended, last)
        return max(0.0, outcome.ended - max(outcome.ended - outcome.seconds, last))

    def lose(
        self, source: Tier, target: Tier, verdict: Verdict, num_blocks: int, error: str = ""
    ) -> None:
        direction = Direction.LOAD if target < source else Direction.SAVE
        self._events.append(Lost(source, target, direction, verdict, num_blocks, error))

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _note_stored(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        if keys:
            self._events.append(Stored(tier, tuple(keys)))
            if tier is Tier.HOST:
                for listener in self.on_host_stored:
                    listener(keys)
            for each in self.on_stored:
                each(tier, keys)

    def _note_removed(self, tier: Tier, keys: Sequence[BlockKey], *, evicted: bool) -> None:
        if keys:
            self._events.append(Removed(tier, tuple(keys), evicted))
            if tier is Tier.HOST:
                for listener in self.on_host_removed:
                    listener(keys)
            for each in self.on_lost:
                each(tier, keys)
