"""The books against a model of the world, in any order of completions, faults and cancellations.

The world holds what really lies in every slot. A transfer reads its source at the very end and
has garbage in its target until then, which is the worst any hardware may do; so a slot that was
freed, reused or offered too early shows up as wrong content. The same machine must catch books
that were broken on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.books.audit import audit
from penstock.books.ledger import Ledger
from penstock.books.prefetches import Prefetches
from penstock.books.stack import Limits, TierStack
from penstock.errors import BookError
from penstock.policies import POLICIES
from penstock.policies.base import Policy
from penstock.types import (
    Answer,
    BlockKey,
    Direction,
    Done,
    Outcome,
    Question,
    Slot,
    TicketId,
    Tier,
    Transfer,
    Verdict,
)

KEYS = [BlockKey(bytes([i]) * 32) for i in range(10)]
NUM_DEVICE_SLOTS = 24
GARBAGE = BlockKey(b"garbage")
FAULTS = [v for v in Verdict if v not in (Verdict.OK, Verdict.DROPPED)]

GROUPS = ("one session", "another")

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)


class Books(RuleBasedStateMachine):
    """The real books; subclasses break them."""

    ledger_type: type[Ledger] = Ledger
    stack_type: type[TierStack] = TierStack
    audited = True

    @initialize(
        num_host=st.integers(1, 6),
        num_disk=st.integers(0, 8),
        num_known=st.integers(0, 8),
        policy=st.sampled_from(sorted(POLICIES)),
        max_blocks=st.integers(1, 4),
        max_saves=st.integers(1, 8),
        max_planned=st.integers(1, 6),
    )
    def start(
        self,
        num_host: int,
        num_disk: int,
        num_known: int,
        policy: str,
        max_blocks: int,
        max_saves: int,
        max_planned: int,
    ) -> None:
        self.host = self.make_host(num_host, POLICIES[policy](num_host))
        lower: dict[Tier, Ledger] = {}
        if num_disk:
            lower[Tier.DISK] = self.ledger_type(num_disk, POLICIES[policy](num_disk))
        self.books = {Tier.HOST: self.host, **lower}
        self.shared: set[BlockKey] = set()  # what REMOTE holds: others write there, too
        self.questions: list[Question] = []
        if num_known:
            lower[Tier.REMOTE] = self.ledger_type(num_known, POLICIES["lru"](num_known))
        limits = Limits(
            max_blocks,
            max_blocks,
            max_planned_blocks=max_planned,
            max_pending_loads=4,
            max_pending_saves=max_saves,
            retain_share=0.5,
        )
        self.stack = self.stack_type(4096, self.host, lower, limits)
        self.prefetches = Prefetches(self.stack)
        self.world: dict[Tier, dict[Slot, BlockKey]] = {tier: {} for tier in Tier}
        self.free_device = [Slot(i) for i in range(NUM_DEVICE_SLOTS)]
        self.under_way: list[Transfer] = []
        self.tickets: dict[TicketId, tuple[tuple[BlockKey, ...], list[Slot]]] = {}
        self.now = 0.0

    @rule(keys=some_keys, whole=st.booleans(), write_down=st.booleans())
    def save(self, keys: list[BlockKey], whole: bool, write_down: bool) -> None:
        slots = self.take_device(len(keys))
        if slots is None:
            return
        for slot, key in zip(slots, keys, strict=True):
            self.world[Tier.DEVICE][slot] = key
        ticket = self.stack.save(keys, slots, self.now, whole=whole, write_down=write_down)
        self.tickets[ticket] = (tuple(keys), slots)
        self.collect()

    @rule(keys=some_keys)
    def offer(self, keys: list[BlockKey]) -> None:
        self.stack.offer(keys, self.now)

    @rule(keys=some_keys)
    def keep_together(self, keys: list[BlockKey]) -> None:
        self.stack.checkpoints.keep(keys)

    @rule(keys=some_keys)
    def supersede(self, keys: list[BlockKey]) -> None:
        self.stack.checkpoints.supersede(keys)

    @rule(keys=some_keys, patience=st.one_of(st.none(), st.floats(0, 3)))
    def load(self, keys: list[BlockKey], patience: float | None) -> None:
        slots = self.take_device(len(keys))
        if slots is None:
            return
        for slot in slots:
            self.world[Tier.DEVICE][slot] = GARBAGE
        deadline = None if patience is None else self.now + patience
        ticket = self.stack.load(keys, slots, self.now, deadline)
        self.tickets[ticket] = (tuple(keys), slots)
        self.collect()

    @rule(keys=some_keys)
    def match_changes_nothing(self, keys: list[BlockKey]) -> None:
        match = self.stack.match(keys)
        assert match == self.stack.match(keys)
        for key in keys[: match.num_blocks]:
            assert any(key in book for _, book in self.stack.ledgers)
        runs = [run.tier for run in match.runs for _ in range(run.num_blocks)]
        where = self.stack.where(keys)
        assert where[: len(runs)] == runs
        assert None in where[len(runs) : len(runs) + 1] or len(runs) == len(keys)

    @rule(keys=some_keys, is_written=st.booleans())
    def others_write_or_evict(self, keys: list[BlockKey], is_written: bool) -> None:
        if is_written:
            self.shared.update(keys)
        else:
            self.shared.difference_update(keys)

    @rule(keys=some_keys)
    def lookup(self, keys: list[BlockKey]) -> None:
        lookup_id = self.stack.lookups.ask(keys, self.now)
        assert lookup_id is None or self.stack.lookups.is_open(lookup_id)
        self.questions += self.stack.lookups.take_questions()

    @precondition(lambda self: self.questions)
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        question = self.questions.pop(data.draw(st.integers(0, len(self.questions) - 1)))
        num_said = data.draw(st.integers(0, len(question.keys)))
        present = tuple(key in self.shared for key in question.keys[:num_said])
        error = "" if present else "it hung"
        self.stack.lookups.settle(Answer(question.id, present, 0.001, error), self.now)
        assert not self.stack.lookups.is_open(question.id)

    @rule(keys=some_keys)
    def use(self, keys: list[BlockKey]) -> None:
        self.stack.used(keys, self.now)

    @rule(keys=some_keys, name=st.sampled_from(GROUPS), seconds=st.floats(0, 3))
    def retain(self, keys: list[BlockKey], name: str, seconds: float) -> None:
        num_taken = self.stack.retention.retain(keys, name, self.now + seconds)
        assert 0 <= num_taken <= len(keys)

    @rule(name=st.sampled_from(GROUPS))
    def release(self, name: str) -> None:
        self.stack.retention.release(name)

    @rule(keys=some_keys)
    def demote(self, keys: list[BlockKey]) -> None:
        self.stack.retention.demote(keys)

    @rule(keys=some_keys, patience=st.floats(0, 3), is_retained=st.booleans())
    def prefetch(self, keys: list[BlockKey], patience: float, is_retained: bool) -> None:
        retain = (GROUPS[0], self.now + patience) if is_retained else None
        self.prefetches.ask(keys, patience, retain=retain)
        self.prefetches.advance(self.now)
        self.collect()

    @rule(room=st.integers(1, 4))
    def hand_out(self, room: int) -> None:
        self.start_transfers(room)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def complete(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.under_way) - 1))
        fault = data.draw(st.one_of(st.none(), st.none(), st.sampled_from(FAULTS)))
        broken = data.draw(st.integers(0, 3)) if fault else 0
        self.finish(index, fault, broken)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.stack.cancel(data.draw(st.sampled_from(sorted(self.tickets))), self.now)
        self.collect()

    @rule(seconds=st.floats(0, 2))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.stack.tick(self.now)
        self.collect()

    @rule()
    def empty_host(self) -> None:
        self.stack.empty_host()

    @invariant()
    def books_are_sound(self) -> None:
        if not hasattr(self, "stack"):
            return
        if self.audited:
            audit(self.stack)
        for tier, book in self.books.items():
            for key in book.ready_keys():
                slot = book.slot_of(key)
                assert slot is not None
                assert self.world[tier][slot] == key, "a block on offer is not what it says"

    def teardown(self) -> None:
        """Whatever happened, all of it ends, and nothing stays leased, claimed or unreported."""
        if not hasattr(self, "stack"):
            return
        self.prefetches.clear()
        for _ in range(1000):
            self.start_transfers(100)
            if not self.under_way and not self.stack.has_more_to_plan:
                break
            if not self.under_way:
                continue
            self.finish(0, None, 0)
        assert self.stack.idle
        for name in GROUPS:
            self.stack.retention.release(name)
        assert not self.prefetches, "a prefetch never ended"
        assert not self.tickets, "a ticket was never reported"
        assert len(self.free_device) == NUM_DEVICE_SLOTS
        for _, book in self.stack.ledgers:
            assert not book.leases()
            assert not book.filling_keys()
        self.stack.tick(self.now + 1000)
        assert not len(self.stack.lookups), "somebody waits for ever"
        audit(self.stack)

    def make_host(self, num_slots: int, policy: Policy) -> Ledger:
        return self.ledger_type(num_slots, policy)

    def take_device(self, count: int) -> list[Slot] | None:
        if len(self.free_device) < count:
            return None
        taken, self.free_device = self.free_device[:count], self.free_device[count:]
        return taken

    def start_transfers(self, room: int) -> None:
        self.cancel_unwanted()
        left = {(tier, direction): room for tier in Tier for direction in Direction}

        def has_room(link: Tier, direction: Direction) -> bool:
            return left[link, direction] > 0

        for transfer in self.stack.next_transfers(has_room):
            left[transfer.link, transfer.direction] -= 1
            for slot in transfer.target_slots:
                if transfer.target is not Tier.DEVICE:
                    assert slot not in self.targets_of(transfer.target), "two writers in a slot"
                if transfer.target is not Tier.REMOTE:
                    self.world[transfer.target][slot] = GARBAGE
            self.under_way.append(transfer)
        self.collect()

    def cancel_unwanted(self) -> None:
        # Half of them, as an engine would: some have begun to run and cannot be called back.
        for transfer_id in self.stack.take_cancels():
            for index, transfer in enumerate(self.under_way):
                if transfer.id == transfer_id and transfer_id % 2:
                    self.finish(index, Verdict.CANCELLED, 0, everywhere=True)
                    break

    def targets_of(self, tier: Tier) -> set[Slot]:
        return {s for t in self.under_way if t.target is tier for s in t.target_slots}

    def finish(
        self, index: int, fault: Verdict | None, broken: int, everywhere: bool = False
    ) -> None:
        transfer = self.under_way.pop(index)
        verdicts = []
        for position, (source, target) in enumerate(
            zip(transfer.source_slots, transfer.target_slots, strict=True)
        ):
            key = transfer.keys[position]
            if fault is not None and (everywhere or position >= broken):
                verdicts.append(fault)
            elif transfer.target is Tier.REMOTE:
                assert self.world[transfer.source].get(source) == key, "others would read this"
                self.shared.add(key)
                verdicts.append(Verdict.OK)
            elif transfer.source is Tier.REMOTE:
                is_there = key in self.shared
                self.world[transfer.target][target] = key if is_there else GARBAGE
                verdicts.append(Verdict.OK if is_there else Verdict.MISSING)
            else:
                verdicts.append(Verdict.OK)
                content = self.world[transfer.source].get(source, GARBAGE)
                self.world[transfer.target][target] = content
        self.stack.settle(Outcome(transfer.id, tuple(verdicts), 0.001), self.now)
        self.collect()

    def collect(self) -> None:
        for done in self.stack.tickets.take_dones():
            if self.prefetches.settle(done, self.now) is not None:
                continue
            keys, slots = self.tickets.pop(done.ticket)
            assert done.keys == keys
            assert len(done.verdicts) == len(keys)
            self.judge(done, slots)
            for transfer in self.under_way:
                if Tier.DEVICE in (transfer.source, transfer.target):
                    used = (
                        transfer.source_slots
                        if transfer.source is Tier.DEVICE
                        else transfer.target_slots
                    )
                    assert not set(used) & set(slots), "done, and its slots are still in use"
            for slot in slots:
                self.world[Tier.DEVICE][slot] = GARBAGE
            self.free_device.extend(slots)

    def judge(self, done: Done, slots: Sequence[Slot]) -> None:
        if done.direction is Direction.LOAD:
            for key, slot, verdict in zip(done.keys, slots, done.verdicts, strict=True):
                if verdict is Verdict.OK:
                    assert self.world[Tier.DEVICE][slot] == key, "a load gave the wrong block"


class _NoLease(Ledger):
    """A book that forgets to hold what is being read."""

    def lease(self, keys: Sequence[BlockKey]) -> tuple[Slot, ...]:
        return tuple(self._slot_of[key] for key in keys)

    def release(self, slots: Sequence[Slot]) -> None:
        pass


class _CommitAfterError(TierStack):
    """A book that takes every arrival for a success."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arrive = self.arrivals.arrive

        def believe(keys: Sequence[BlockKey], verdicts: Sequence[Verdict]) -> None:
            arrive(keys, [Verdict.OK] * len(verdicts))

        self.arrivals.arrive = believe  # type: ignore[method-assign]


class _FreeBeforeLanding(TierStack):
    """A book that calls a cancelled ticket done while a copy still writes to its slots."""

    def cancel(self, ticket_id: TicketId, now: float) -> None:
        super().cancel(ticket_id, now)
        ticket = self.tickets._open.pop(ticket_id, None)
        if ticket is not None:
            ticket.judge(ticket.open_positions(), Verdict.CANCELLED)
            self.tickets._dones.append(ticket.done(now))


_SETTINGS = settings(
    max_examples=500,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestBooks = Books.TestCase
TestBooks.settings = _SETTINGS


@pytest.mark.parametrize("audited", [True, False], ids=["audit", "content"])
@pytest.mark.parametrize("broken", [_NoLease, _CommitAfterError, _FreeBeforeLanding])
def test_broken_books_are_caught(broken: type, audited: bool) -> None:
    """By the books' own audit; and, with the audit off, by what the blocks hold."""

    class Broken(Books):
        ledger_type = broken if issubclass(broken, Ledger) else Ledger
        stack_type = broken if issubclass(broken, TierStack) else TierStack

    Broken.audited = audited
    hunt = settings(
        _SETTINGS,
        max_examples=2000,
        phases=[Phase.generate],  # finding it is enough: no shrinking, no second bug
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        database=None,
        derandomize=True,
    )
    with pytest.raises((AssertionError, BookError, KeyError)):
        run_state_machine_as_test(Broken, settings=hunt)
