"""The façade with real threads: what comes back is what was saved, bit for bit, or a miss."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tools import TIMEOUT_SECONDS, Rig, content, key_of, keys_of, spec

from penstock import build
from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.clock import ManualClock
from penstock.costs.rates import LinkRate
from penstock.errors import BookError, ConfigError, Foreign, Locked, PenstockError
from penstock.events import Event, LookedUp, Lost, Recovered, TicketDone, TierRested
from penstock.offload import Offloader
from penstock.policies import LRU
from penstock.stores.base import Block, Found
from penstock.stores.host import HostArena
from penstock.stores.memory import Faults, MemoryStore
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import CopyMover, StoreMover
from penstock.transfer.lanes import LaneSpec
from penstock.transfer.recovery import Recovery
from penstock.transfer.seals import Seals
from penstock.types import BlockKey, Direction, Outcome, Slot, TicketId, Tier, Verdict

Rigs = Callable[..., Rig]


def test_saved_and_loaded_is_the_same_from_dram_from_disk_and_after_a_restart(
    rigs: Rigs, tmp_path: Path
) -> None:
    keys = keys_of(32)
    rig = rigs(tmp_path, num_host=16)
    for start in range(0, 32, 8):
        assert rig.save(keys[start : start + 8]) == [Verdict.OK] * 8
    done = rig.load_done(keys)  # compares every block bit for bit
    assert done.ok
    assert {Tier.HOST, Tier.DISK} == set(done.sources)
    rig.close()
    again = rigs(tmp_path, num_host=16)
    assert again.offloader.match(keys).num_from(Tier.DISK) == 32
    done = again.load_done(keys)
    assert done.ok
    assert set(done.sources) == {Tier.DISK}


@pytest.mark.parametrize("at", [1, 2], ids=["a save", "a write to disk"])
def test_books_that_lost_the_end_of_a_transfer_do_not_add_up(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a client waits for it or not: a block that is written down would be held forever."""
    rig = Rig(tmp_path, num_host=16)
    settle, numbers = rig.offloader._stack.settle, itertools.count(1)

    def fail(outcome: Outcome, now: float) -> None:
        if next(numbers) == at:
            raise RuntimeError("injected")
        settle(outcome, now)

    monkeypatch.setattr(rig.offloader._stack, "settle", fail)
    rig.offloader.check()
    with pytest.raises(RuntimeError, match="injected"):
        rig.save(keys_of(8))
    monkeypatch.undo()
    with pytest.raises(BookError, match="were lost in an error"):
        rig.offloader.check()
    assert rig.offloader.abandon(TIMEOUT_SECONDS)


def test_a_checkpoint_is_saved_whole_offered_later_and_leaves_whole(
    rigs: Rigs, tmp_path: Path
) -> None:
    rig = rigs(tmp_path, num_host=16, num_device=32)
    keys, offloader = keys_of(32), rig.offloader
    slots = [Slot(index) for index in range(32)]
    for key, slot in zip(keys, slots, strict=True):
        rig.device.view(slot)[: rig.spec.block_bytes] = content(key)
    (done,) = offloader.wait([offloader.save(keys[:17], slots[:17], whole=True)])
    assert done.verdicts == (Verdict.DROPPED,) * 17
    first, second = keys[:6], keys[4:12]  # two windows that overlap
    for keys_of_one, places in ((first, slots[:6]), (second, slots[4:12])):
        ticket = offloader.save(keys_of_one, places, whole=True, write_down=False)
        (done,) = offloader.wait([ticket])
        assert done.ok
        offloader.keep_together(keys_of_one)
    rig.settle()
    assert offloader.where(keys[:13]) == [Tier.HOST] * 12 + [None]
    offloader.empty_host()
    assert offloader.where(keys[:12]) == [None] * 12, "nothing was written down"
    (done,) = offloader.wait([offloader.save(keys[:12], slots[:12], whole=True)])
    assert done.ok
    rig.settle()
    offloader.keep_together(first)
    offloader.keep_together(second)
    offloader.supersede(first)
    offloader.wait([offloader.save(keys[20:28], slots[20:28], whole=True, write_down=False)])
    assert offloader.where(keys[:12]) == [Tier.DISK] * 4 + [Tier.HOST] * 8
    offloader.offer(keys[20:24], parents=dict.fromkeys(range(4)))
    rig.settle()
    offloader.empty_host()
    assert offloader.where(keys[20:28]) == [Tier.DISK] * 4 + [None] * 4
    assert rig.load(keys[:12]) == [Verdict.OK] * 12


@pytest.mark.parametrize("block_bytes", [100, 4096, 9001, 368_640])
def test_any_block_size_will_do(rigs: Rigs, tmp_path: Path, block_bytes: int) -> None:
    rig = rigs(tmp_path, block_spec=spec(block_bytes), num_host=4, num_disk=16, num_device=8)
    keys = keys_of(8)
    for key in keys:
        rig.save([key])
    assert rig.load(keys) == [Verdict.OK] * 8
    assert rig.load_cold(keys) == [Verdict.OK] * 8


def test_random_work_never_yields_a_wrong_block(rigs: Rigs, tmp_path: Path) -> None:
    """Hundreds of overlapping saves, loads and cancellations over tiers far too small for them."""
    rig = rigs(tmp_path, num_host=12, num_disk=40, num_device=64, batch_blocks=3)
    rng = random.Random(7)
    universe = keys_of(80)
    free = [Slot(i) for i in range(64)]
    open_tickets: dict[TicketId, tuple[str, list[BlockKey], list[Slot]]] = {}
    num_loaded = 0

    def collect() -> None:
        nonlocal num_loaded
        for done in rig.offloader.step():
            kind, keys, slots = open_tickets.pop(done.ticket)
            for key, slot, verdict in zip(keys, slots, done.verdicts, strict=True):
                view = rig.device.view(slot)[: rig.spec.block_bytes]
                if kind == "load" and verdict is Verdict.OK:
                    assert view == content(key), "the cache lied"
                    num_loaded += 1
                view[:] = bytes(len(view))  # the slot is ours again: use it at once
            free.extend(slots)

    for _ in range(1500):
        keys = rng.sample(universe, rng.randint(1, 6))
        if len(free) < len(keys):
            collect()
            continue
        slots = [free.pop(rng.randrange(len(free))) for _ in keys]
        if rng.random() < 0.5:
            for key, slot in zip(keys, slots, strict=True):
                rig.device.view(slot)[: rig.spec.block_bytes] = content(key)
            open_tickets[rig.offloader.save(keys, slots)] = ("save", keys, slots)
        else:
            open_tickets[rig.offloader.load(keys, slots)] = ("load", keys, slots)
        if open_tickets and rng.random() < 0.1:
            rig.offloader.cancel(rng.choice(list(open_tickets)))
        if rng.random() < 0.05:
            rig.offloader.empty_host()
        if rng.random() < 0.3:
            collect()
        if rng.random() < 0.1:  # let some of it land, or everything ends up cancelled or dropped
            while open_tickets:
                collect()
            rig.offloader.check()
    while open_tickets:
        collect()
    rig.settle()
    assert num_loaded > 100, "the test hardly loads anything"


def test_a_match_costs_nothing_until_noted(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(tmp_path)
    seen: list[Event] = []
    rig.offloader.observe(seen.append)
    keys = keys_of(4)
    rig.save(keys[:3])
    rig.load(keys[:3])
    seen.clear()
    match = rig.offloader.match(keys)
    assert match.num_blocks == 3
    assert match.load_seconds > 0, "rates were learnt from the load before"
    assert seen == []
    rig.offloader.note(match)
    assert seen == [LookedUp(4, ((Tier.HOST, 3),))]


def test_every_ticket_ends_in_an_event(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(tmp_path)
    seen: list[Event] = []
    rig.offloader.observe(seen.append)
    rig.save(keys_of(3))
    rig.load([*keys_of(3), key_of("nowhere")])
    ends = [(e.num_blocks, e.num_ok) for e in seen if isinstance(e, TicketDone)]
    assert ends == [(3, 3), (4, 3)]


class Hung:
    """An Offloader over a fake store that hangs, fails or lies when told to."""

    def __init__(self, num_host: int = 8) -> None:
        self.spec = spec()
        self.clock = ManualClock()
        self.events: list[Event] = []
        self.faults = Faults()
        self.device = HostArena(self.spec, 16 * self.spec.stride_bytes)
        host = HostArena(self.spec, num_host * self.spec.stride_bytes)
        seals = Seals(host, checksums=True)
        store = MemoryStore(self.spec, 32, self.faults)
        lanes = {
            Tier.HOST: LaneSpec(CopyMover(self.device, host, seals), 1),
            Tier.DISK: LaneSpec(StoreMover(host, store, seals), 1),
        }
        self.host = host
        self.ledger = Ledger(num_host, LRU(num_host))
        stack = TierStack(
            self.spec.block_bytes, self.ledger, {Tier.DISK: Ledger(32, LRU(32))}, Limits(2)
        )
        self.offloader = Offloader(
            stack,
            TransferEngine(lanes, self.clock),
            self.clock,
            block_bytes=self.spec.block_bytes,
            load_deadline_seconds=5.0,
            observers=[self.events.append],
        )

    def save(self, keys: list[BlockKey]) -> None:
        slots = [Slot(i) for i in range(len(keys))]
        for key, slot in zip(keys, slots, strict=True):
            self.device.view(slot)[: self.spec.block_bytes] = content(key)
        self.offloader.wait([self.offloader.save(keys, slots)], TIMEOUT_SECONDS)
        assert self.offloader.drain(TIMEOUT_SECONDS)

    def start_load(self, keys: list[BlockKey]) -> TicketId:
        return self.offloader.load(keys, [Slot(i) for i in range(len(keys))])

    def end_load(self, ticket: TicketId) -> tuple[Verdict, ...]:
        (done,) = self.offloader.wait([ticket], TIMEOUT_SECONDS)
        for slot, (key, verdict) in enumerate(zip(done.keys, done.verdicts, strict=True)):
            if verdict is Verdict.OK:
                assert self.device.view(Slot(slot))[: self.spec.block_bytes] == content(key)
        return done.verdicts


@pytest.fixture
def hung() -> Iterator[Hung]:
    rig = Hung()
    yield rig
    rig.faults.gate.set()
    assert rig.offloader.close(TIMEOUT_SECONDS)


def test_a_store_that_hangs_delays_a_load_by_its_deadline_and_no_more(hung: Hung) -> None:
    keys = keys_of(4)
    hung.save(keys)
    hung.offloader.empty_host()
    hung.faults.gate.clear()
    ticket = hung.start_load(keys)
    hung.offloader.step()
    hung.clock.advance(5.0)
    assert hung.end_load(ticket) == (Verdict.EXPIRED,) * 4
    hung.offloader.check()
    # DRAM goes on serving while the store hangs.
    fresh = keys_of(2, "fresh")
    slots = [Slot(10), Slot(11)]
    (saved,) = hung.offloader.wait([hung.offloader.save(fresh, slots)], TIMEOUT_SECONDS)
    assert saved.ok
    (loaded,) = hung.offloader.wait([hung.offloader.load(fresh, slots)], TIMEOUT_SECONDS)
    assert loaded.ok
    hung.faults.gate.set()
    assert hung.offloader.drain(TIMEOUT_SECONDS)
    hung.offloader.check()
    assert hung.end_load(hung.start_load(keys)) == (Verdict.OK,) * 4


def test_patience_begins_when_ones_turn_has_come(
    hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = keys_of(4, "first"), keys_of(2, "second")
    hung.save(first)
    hung.save(second)
    hung.offloader.empty_host()
    block_a_second = LinkRate(hung.spec.block_bytes)
    monkeypatch.setattr(Offloader, "rates", property(lambda _: {Tier.DISK: block_a_second}))
    hung.faults.gate.clear()
    before = hung.start_load(first)
    hung.offloader.step()
    ticket = hung.offloader.load(second, [Slot(8), Slot(9)], patience_seconds=0.5)
    hung.clock.advance(4.0)  # as long as the others need
    assert hung.offloader.step() == []
    hung.clock.advance(0.6)
    (late,) = hung.offloader.wait([ticket], TIMEOUT_SECONDS)
    assert late.verdicts == (Verdict.EXPIRED,) * 2
    hung.faults.gate.set()
    hung.end_load(before)


def test_a_store_that_keeps_failing_is_left_alone_and_tried_again(hung: Hung) -> None:
    keys = keys_of(8)
    for start in (0, 4):
        hung.save(keys[start : start + 4])
    hung.offloader.empty_host()
    hung.faults.failing = True
    for key in keys[:4]:
        assert hung.end_load(hung.start_load([key])) == (Verdict.FAILED,)
    assert any(isinstance(event, TierRested) for event in hung.events)
    assert hung.offloader.match(keys[4:]).num_blocks == 0
    hung.faults.failing = False
    hung.clock.advance(1.0)
    hung.offloader.step()
    assert hung.offloader.match(keys[4:]).num_blocks == 4
    assert hung.end_load(hung.start_load(keys[4:])) == (Verdict.OK,) * 4


def test_a_store_that_corrupts_is_caught_block_by_block(hung: Hung) -> None:
    keys = keys_of(4)
    hung.save(keys)
    hung.offloader.empty_host()
    hung.faults.corrupting = True
    hung.faults.only = lambda key: key == keys[2]
    verdicts = hung.end_load(hung.start_load(keys))
    assert verdicts == (Verdict.OK, Verdict.OK, Verdict.CORRUPT, Verdict.OK)
    hung.faults.corrupting = False
    hung.save(keys)
    hung.offloader.empty_host()
    assert hung.end_load(hung.start_load(keys)) == (Verdict.OK,) * 4


def test_a_full_store_costs_nothing_but_its_copies(hung: Hung) -> None:
    keys = keys_of(4)
    hung.faults.full = True
    hung.save(keys)
    assert hung.end_load(hung.start_load(keys)) == (Verdict.OK,) * 4
    hung.offloader.check()


def test_dram_that_was_overwritten_behind_the_books_is_a_miss(hung: Hung) -> None:
    keys = keys_of(2)
    hung.save(keys)
    slot = hung.ledger.slot_of(keys[0])
    assert slot is not None
    hung.host.view(slot)[17] ^= 1
    assert hung.end_load(hung.start_load(keys)) == (Verdict.CORRUPT, Verdict.OK)
    assert hung.end_load(hung.start_load(keys)) == (Verdict.OK, Verdict.OK), "from the store"


def test_a_scan_that_breaks_off_loses_blocks_but_no_slot() -> None:
    class Broken(MemoryStore):
        def scan(self) -> Iterator[list[Found]]:
            yield [(Slot(0), None), (Slot(1), key_of("found"))]
            raise OSError("the disk went away")

    store = Broken(spec(), 10)
    recovery = Recovery(Tier.DISK, store, 10)
    found: list[Found] = []
    while not recovery.complete:
        found.extend(recovery.take(TIMEOUT_SECONDS) or [])
    assert [slot for slot, _ in found] == list(range(10))
    assert [key for _, key in found if key] == [key_of("found")]


def test_recovery_is_told_as_it_goes(rigs: Rigs, tmp_path: Path) -> None:
    first = rigs(tmp_path)
    first.save(keys_of(20))
    first.close()
    told: list[Event] = []
    rig = rigs(tmp_path, observers=[told.append])  # a rig waits for its recovery
    assert rig.gauge("penstock_recovered_ratio", tier="disk") == 1.0
    progress = [event for event in told if isinstance(event, Recovered)]
    assert progress[-1].complete
    assert progress[-1].num_blocks == 20
    assert rig.load(keys_of(20)) == [Verdict.OK] * 20


def test_loads_are_served_while_the_index_is_still_being_read() -> None:
    gate = threading.Event()

    class Slow(MemoryStore):
        def scan(self) -> Iterator[list[Found]]:
            for number, batch in enumerate(super().scan()):
                if number == 4:
                    assert gate.wait(TIMEOUT_SECONDS)
                yield batch

    block_spec, clock = spec(), ManualClock()
    store = Slow(block_spec, 32)
    device = HostArena(block_spec, 8 * block_spec.stride_bytes)
    host = HostArena(block_spec, 8 * block_spec.stride_bytes)
    keys = keys_of(8)
    for slot, key in enumerate(keys):
        host.view(Slot(0))[: block_spec.block_bytes] = content(key)
        store.put([Block(key, Slot(slot), host.view(Slot(0)))])
    seals = Seals(host)
    lanes = {
        Tier.HOST: LaneSpec(CopyMover(device, host, seals), 1),
        Tier.DISK: LaneSpec(StoreMover(host, store, seals), 1),
    }
    offloader = Offloader(
        TierStack(
            block_spec.block_bytes,
            Ledger(8, LRU(8)),
            {Tier.DISK: Ledger(32, LRU(32), recovering=True)},
        ),
        TransferEngine(lanes, clock),
        clock,
        block_bytes=block_spec.block_bytes,
        load_deadline_seconds=5.0,
        recovery=Recovery(Tier.DISK, store, 32),
    )
    while offloader.match(keys).num_blocks < 4:
        offloader.step()
    (done,) = offloader.wait([offloader.load(keys[:4], [Slot(i) for i in range(4)])])
    assert done.ok
    assert offloader.match(keys).num_blocks == 4
    gate.set()
    assert offloader.recover(TIMEOUT_SECONDS)
    assert offloader.match(keys).num_blocks == 8
    offloader.check()
    assert offloader.close(TIMEOUT_SECONDS)


def test_blocks_saved_before_the_index_is_read_are_written_before_it_is_drained() -> None:
    gate = threading.Event()

    class Slow(MemoryStore):
        def scan(self) -> Iterator[list[Found]]:
            assert gate.wait(TIMEOUT_SECONDS)
            yield from super().scan()

    block_spec, clock = spec(), ManualClock()
    store = Slow(block_spec, 8)
    device, host = (HostArena(block_spec, 8 * block_spec.stride_bytes) for _ in range(2))
    seals = Seals(host)
    lanes = {
        Tier.HOST: LaneSpec(CopyMover(device, host, seals), 1),
        Tier.DISK: LaneSpec(StoreMover(host, store, seals), 1),
    }
    offloader = Offloader(
        TierStack(
            block_spec.block_bytes,
            Ledger(8, LRU(8)),
            {Tier.DISK: Ledger(8, LRU(8), recovering=True)},
        ),
        TransferEngine(lanes, clock),
        clock,
        block_bytes=block_spec.block_bytes,
        load_deadline_seconds=5.0,
        recovery=Recovery(Tier.DISK, store, 8),
    )
    keys = keys_of(4)
    offloader.wait([offloader.save(keys, [Slot(i) for i in range(4)])])
    assert not offloader.drain(0.1), "nothing has been written yet"
    gate.set()
    assert offloader.drain(TIMEOUT_SECONDS)
    assert offloader.empty_host() == 4
    assert offloader.where(keys) == [Tier.DISK] * 4
    assert offloader.close(TIMEOUT_SECONDS)


def test_closing_twice_is_closing_once(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(tmp_path)
    rig.save(keys_of(2))
    assert rig.offloader.close(TIMEOUT_SECONDS)
    assert rig.offloader.close(TIMEOUT_SECONDS)


def test_a_closed_offloader_takes_no_more_work(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(tmp_path)
    rig.offloader.close(TIMEOUT_SECONDS)
    with pytest.raises(PenstockError, match="closed"):
        rig.offloader.save(keys_of(1), [Slot(0)])
    with pytest.raises(PenstockError, match="closed"):
        rig.offloader.load(keys_of(1), [Slot(0)])


def test_tickets_that_end_while_draining_are_told_by_the_next_step(
    rigs: Rigs, tmp_path: Path
) -> None:
    rig = rigs(tmp_path)
    ticket = rig.offloader.save(keys_of(4), [Slot(i) for i in range(4)])
    assert rig.offloader.drain(TIMEOUT_SECONDS)
    assert [done.ticket for done in rig.offloader.step()] == [ticket]
    assert rig.offloader.step() == []


def test_nobody_pauses_for_a_ticket_that_has_ended(rigs: Rigs, tmp_path: Path) -> None:
    """What needs no transfer ends within the call, and nothing would wake the client."""
    rig = rigs(tmp_path)
    rig.save(keys_of(4))
    assert rig.offloader.drain(TIMEOUT_SECONDS)
    ticket = rig.offloader.load(keys_of(4), [None] * 4)
    rig.offloader.pause(1e6)
    (done,) = rig.offloader.step()
    assert (done.ticket, done.ok) == (ticket, True)
    rig.offloader.unpin([pin for pin in done.pins if pin is not None])


def test_an_observer_that_fails_stops_nothing(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(tmp_path)

    def fail(event: Event) -> None:
        raise ValueError("a dashboard's bug")

    rig.offloader.observe(fail)
    rig.save(keys_of(4))
    assert rig.load(keys_of(4)) == [Verdict.OK] * 4


def test_a_build_that_fails_half_way_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(build, "TransferEngine", refuse)
    with pytest.raises(RuntimeError, match="no more threads"):
        Rig(tmp_path)
    monkeypatch.undo()
    Rig(tmp_path).close()  # the directory is not locked


def test_a_tier_that_cannot_be_had_is_one_clear_error(rigs: Rigs, tmp_path: Path) -> None:
    rigs(tmp_path / "a")
    with pytest.raises(Locked, match="being written by process"):
        Rig(tmp_path / "a")
    rigs(tmp_path / "b").close()
    with pytest.raises(Foreign, match="another model or layout"):
        Rig(tmp_path / "b", block_spec=spec(4096))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError):
        Rig(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_read_in_place_and_damaged_is_told(
    rigs: Rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Event] = []
    rig = rigs(tmp_path, verify=True, observers=[told.append])
    keys = keys_of(3)
    rig.save(keys)
    pins = rig.offloader.pin(keys)
    assert None not in pins
    rig.offloader.unpin(pins)
    assert rig.offloader.host is not None
    view = rig.offloader.host.view(pins[1])
    view[7] ^= 1
    again = rig.offloader.pin(keys)
    assert [pin is None for pin in again] == [False, True, False]
    (lost,) = [event for event in told if isinstance(event, Lost)]
    assert lost == Lost(Tier.HOST, Tier.DEVICE, Direction.LOAD, Verdict.CORRUPT, 1)
    assert "HOST: 1 block was found damaged" in caplog.text
    rig.offloader.unpin([pin for pin in again if pin is not None])


def test_saves_without_write_down_stay_in_dram_and_can_be_discarded(
    rigs: Rigs, tmp_path: Path
) -> None:
    rig = rigs(tmp_path, num_host=16)
    keys = keys_of(4)
    ticket = rig.offloader.save(keys, [Slot(number) for number in range(4)], write_down=False)
    rig.offloader.wait([ticket], TIMEOUT_SECONDS)
    assert rig.offloader.drain(TIMEOUT_SECONDS)
    assert rig.offloader.match(keys).num_from(Tier.HOST) == 4
    pins = rig.offloader.pin(keys[:1])
    assert rig.offloader.discard([*keys, key_of(99)]) == 4
    assert rig.offloader.match(keys).num_blocks == 0
    rig.offloader.unpin([slot for slot in pins if slot is not None])
    rig.offloader.check()


def test_in_quarantine_nothing_is_offered_or_written_down(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(tmp_path, num_host=16)
    keys = keys_of(12)
    rig.save(keys[:8])
    assert rig.offloader.drain(TIMEOUT_SECONDS)
    rig.offloader.empty_host()
    loading = rig.offloader.load(keys[:4], [Slot(number) for number in range(4)])
    rig.offloader.quarantine()
    rig.offloader.wait([loading], TIMEOUT_SECONDS)
    assert rig.offloader.match(keys).num_blocks == 0
    assert rig.offloader.lookup(keys) is None
    assert rig.offloader.prefetch(keys) == 0
    assert rig.offloader.drain(TIMEOUT_SECONDS)
    rig.offloader.step()
    assert not any(map(rig.offloader.is_in_host, keys)), "a block that was fetched is in DRAM"
    # A running sequence may still use DRAM.
    rig.save(keys[8:])
    assert rig.offloader.drain(TIMEOUT_SECONDS)
    assert all(map(rig.offloader.is_in_host, keys[8:]))
    rig.offloader.check()
    rig.close()
    again = rigs(tmp_path, num_host=16)
    assert again.offloader.match(keys).num_blocks == 8
