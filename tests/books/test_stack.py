"""TierStack, one behaviour at a time; `test_ledgers` tests them together."""

from __future__ import annotations

import pytest
from stack_rig import Rig, slots

from penstock.books.audit import audit
from penstock.books.health import MAX_FAULTS, MIN_REST_SECONDS
from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.errors import BookError
from penstock.events import Lost, Moved, Removed, Stored, TierRested, TierRevived
from penstock.policies import LRU
from penstock.types import (
    BlockKey,
    Direction,
    Outcome,
    Run,
    Slot,
    Tier,
    Transfer,
    Verdict,
)

K = [BlockKey(bytes([i]) * 32) for i in range(12)]
OK = Verdict.OK


def hops(transfers: list[Transfer]) -> list[tuple[Tier, Tier]]:
    return [(transfer.source, transfer.target) for transfer in transfers]


def test_a_save_goes_to_host_and_then_down_to_disk_by_itself() -> None:
    rig = Rig()
    rig.save(K[0], K[1])
    (up,) = rig.transfers()
    assert hops([up]) == [(Tier.DEVICE, Tier.HOST)]
    rig.settle(up)
    (done,) = rig.stack.tickets.take_dones()
    assert done.ok
    assert done.direction is Direction.SAVE
    (down,) = rig.transfers()
    assert hops([down]) == [(Tier.HOST, Tier.DISK)]
    rig.settle(down)
    assert rig.disk.is_ready(K[0])
    assert rig.stack.idle


def test_nothing_is_offered_before_it_has_arrived() -> None:
    rig = Rig()
    rig.save(K[0])
    match = rig.stack.match([K[0]])
    assert (match.num_blocks, match.num_pending) == (1, 1)
    rig.run()
    assert rig.stack.match([K[0]]).num_pending == 0


def test_a_match_tells_where_each_stretch_lies_and_stops_at_the_first_gap() -> None:
    rig = Rig(num_host=2)
    for key in K[:6]:
        rig.save(key)
        rig.run()
    match = rig.stack.match([K[0], K[1], K[4], K[5], K[2], K[9], K[3]])
    assert match.runs == (Run(Tier.DISK, 2), Run(Tier.HOST, 2), Run(Tier.DISK, 1))
    assert match.num_blocks == 5
    assert match.num_asked == 7
    assert rig.stack.match([K[9], K[0]]).num_blocks == 0
    assert rig.stack.match([]).num_blocks == 0


def test_a_load_from_disk_leaves_the_block_in_host() -> None:
    rig = Rig()
    rig.save(K[0])
    rig.run()
    rig.stack.empty_host()
    rig.load(K[0])
    (fill,) = rig.transfers()
    assert hops([fill]) == [(Tier.DISK, Tier.HOST)]
    rig.settle(fill)
    (copy,) = rig.transfers()
    assert hops([copy]) == [(Tier.HOST, Tier.DEVICE)]
    rig.settle(copy)
    (done,) = rig.stack.tickets.take_dones()
    assert done.ok
    assert done.sources == (Tier.DISK,)
    assert rig.host.is_ready(K[0])


def test_two_loads_of_one_block_fetch_it_once() -> None:
    rig = Rig()
    rig.save(K[0])
    rig.run()
    rig.stack.empty_host()
    rig.load(K[0])
    rig.stack.load([K[0]], [Slot(7)], 0.0)
    (fill,) = rig.transfers()
    rig.settle(fill)
    copies = rig.transfers()
    assert [copy.target_slots for copy in copies] == [(0,), (7,)]
    for copy in copies:
        rig.settle(copy)
    assert [done.ok for done in rig.stack.tickets.take_dones()] == [True, True]


def test_a_load_joins_a_save_that_is_under_way() -> None:
    rig = Rig()
    rig.save(K[0])
    (up,) = rig.transfers()
    rig.load(K[0])
    assert rig.transfers() == []
    rig.settle(up)
    assert [done.ok for done in rig.run()] == [True, True]


def test_a_load_that_joined_a_failed_save_is_a_miss() -> None:
    rig = Rig()
    rig.save(K[0])
    (up,) = rig.transfers()
    rig.load(K[0])
    rig.settle(up, Verdict.CANCELLED)
    rig.run()
    audit(rig.stack)
    assert rig.stack.idle


def test_what_is_there_is_not_saved_again() -> None:
    rig = Rig()
    rig.save(K[0])
    rig.run()
    rig.save(K[0])
    (done,) = rig.stack.tickets.take_dones()
    assert done.ok
    assert rig.transfers() == []


def test_a_load_larger_than_host_passes_through_it_piece_by_piece() -> None:
    rig = Rig(num_host=2, num_disk=8)
    for key in K[:8]:
        rig.save(key)
        rig.run()
    rig.stack.empty_host()
    rig.load(*K[:8])
    (done,) = rig.run()
    assert done.ok
    assert set(done.sources) == {Tier.DISK}


def test_a_load_does_not_evict_what_it_needs_itself() -> None:
    rig = Rig(num_host=2, num_disk=8)
    for key in K[:3]:
        rig.save(key)
        rig.run()
    assert rig.host.is_ready(K[1])
    assert rig.host.is_ready(K[2])
    rig.load(K[0], K[1], K[2])
    first = rig.transfers()
    assert hops(first) == [(Tier.HOST, Tier.DEVICE)]
    assert first[0].keys == (K[1], K[2])
    rig.settle(first[0])
    (done,) = rig.run()
    assert done.ok
    assert done.sources == (Tier.DISK, Tier.HOST, Tier.HOST)


@pytest.mark.parametrize("verdict", [Verdict.CORRUPT, Verdict.MISSING, Verdict.FAILED])
def test_a_block_that_disk_cannot_give_is_a_miss_and_can_be_stored_again(
    verdict: Verdict,
) -> None:
    rig = Rig()
    rig.save(K[0], K[1])
    rig.run()
    rig.stack.empty_host()
    rig.events()
    rig.load(K[0], K[1])
    (fill,) = rig.transfers()
    rig.settle(fill, verdict, OK, error="bad sector")
    (done,) = rig.run()
    assert done.verdicts == (verdict, OK)
    assert done.num_leading_ok == 0
    assert K[0] not in rig.disk
    events = rig.events()
    assert Lost(Tier.DISK, Tier.HOST, Direction.LOAD, verdict, 1, "bad sector") in events
    assert Removed(Tier.DISK, (K[0],), evicted=False) in events
    rig.save(K[0])
    rig.run()
    assert rig.disk.is_ready(K[0])


def test_a_block_that_host_cannot_give_is_dropped_from_host_alone() -> None:
    rig = Rig()
    rig.save(K[0])
    rig.run()
    rig.load(K[0])
    (copy,) = rig.transfers()
    rig.settle(copy, Verdict.CORRUPT)
    (done,) = rig.stack.tickets.take_dones()
    assert done.verdicts == (Verdict.CORRUPT,)
    assert K[0] not in rig.host
    rig.load(K[0])
    (done,) = rig.run()
    assert done.ok
    assert done.sources == (Tier.DISK,)


def test_saves_beyond_the_bound_are_dropped_from_the_tail_and_counted() -> None:
    rig = Rig(num_host=4, limits=Limits(64, 64, max_pending_saves=3))
    rig.save(K[0], K[1])
    rig.save(K[2], K[3], K[4])
    (done,) = (d for d in rig.run() if len(d.keys) == 3)
    assert done.verdicts == (OK, Verdict.DROPPED, Verdict.DROPPED)
    lost = [event for event in rig.events() if isinstance(event, Lost)]
    assert [(event.target, event.num_blocks) for event in lost] == [(Tier.HOST, 2)]


def test_a_save_finds_no_room_while_everything_is_in_use() -> None:
    rig = Rig(num_host=1)
    rig.save(K[0])
    (up,) = rig.transfers()
    rig.save(K[1])
    (done,) = rig.stack.tickets.take_dones()
    assert done.verdicts == (Verdict.DROPPED,)
    rig.settle(up)


def test_what_disk_has_no_time_for_is_written_later_if_host_still_has_it() -> None:
    rig = Rig(num_host=4, num_disk=8)
    rig.save(*K[:4])
    (up,) = rig.transfers()
    rig.settle(up)
    assert rig.host.num_leased == 2, "half of HOST may wait for DISK, the rest stays evictable"
    assert not rig.stack.idle
    rig.run()
    assert all(rig.disk.is_ready(key) for key in K[:4])
    assert rig.stack.idle


def test_what_host_evicts_before_disk_took_it_is_dropped_and_counted() -> None:
    rig = Rig(num_host=4, num_disk=8)
    rig.save(*K[:4])
    (up,) = rig.transfers()
    rig.settle(up)
    rig.save(K[4], K[5])
    rig.run()
    lost = [event for event in rig.events() if isinstance(event, Lost)]
    assert [(e.target, e.verdict, e.num_blocks) for e in lost] == [(Tier.DISK, Verdict.DROPPED, 2)]
    assert sum(rig.disk.is_ready(key) for key in K[:6]) == 4


def test_too_many_loads_are_refused_at_once() -> None:
    rig = Rig(limits=Limits(max_pending_loads=1))
    rig.save(K[0], K[1])
    rig.run()
    rig.load(K[0])
    rig.load(K[1])
    (done,) = rig.stack.tickets.take_dones()
    assert done.verdicts == (Verdict.DROPPED,)
    assert [d.ok for d in rig.run()] == [True]


def test_a_missing_block_is_a_verdict_not_an_error() -> None:
    rig = Rig()
    rig.load(K[0], K[1])
    (done,) = rig.stack.tickets.take_dones()
    assert done.verdicts == (Verdict.MISSING, Verdict.MISSING)


def test_an_empty_ticket_is_done_at_once() -> None:
    rig = Rig()
    rig.load()
    rig.save()
    assert [done.ok for done in rig.stack.tickets.take_dones()] == [True, True]


def test_past_its_deadline_a_load_ends_though_the_disk_still_hangs() -> None:
    rig = Rig()
    rig.save(K[0])
    rig.run()
    rig.stack.empty_host()
    rig.load(K[0], deadline=1.0)
    (fill,) = rig.transfers()
    rig.now = 1.0
    rig.stack.tick(rig.now)
    (done,) = rig.stack.tickets.take_dones()
    assert done.verdicts == (Verdict.EXPIRED,)
    assert rig.stack.take_cancels() == [fill.id]
    assert rig.host.is_filling(K[0]), "the hanging read may still write there"
    rig.settle(fill)
    assert rig.host.is_ready(K[0]), "late is not lost"


def test_a_cancelled_load_is_done_only_when_its_device_slots_are_left_alone() -> None:
    rig = Rig()
    rig.save(K[0])
    rig.run()
    rig.stack.load([K[0]], [Slot(3)], 0.0)
    (copy,) = rig.transfers()
    ticket = next(iter(rig.stack.tickets)).id
    rig.stack.cancel(ticket, 0.0)
    assert rig.stack.tickets.take_dones() == []
    assert rig.stack.take_cancels() == [copy.id]
    rig.settle(copy, Verdict.CANCELLED)
    (done,) = rig.stack.tickets.take_dones()
    assert done.verdicts == (Verdict.CANCELLED,)


def test_cancelling_what_was_not_handed_out_ends_it_at_once() -> None:
    rig = Rig()
    rig.save(K[0])
    rig.run()
    rig.stack.empty_host()
    rig.load(K[0])
    ticket = next(iter(rig.stack.tickets)).id
    rig.stack.cancel(ticket, 0.0)
    assert [done.verdicts for done in rig.stack.tickets.take_dones()] == [(Verdict.CANCELLED,)]
    assert rig.transfers() == []
    assert rig.stack.idle
    rig.stack.cancel(ticket, 0.0)  # a second time changes nothing


def test_a_tier_that_keeps_failing_rests_and_is_tried_again() -> None:
    rig = Rig(num_host=1)
    for key in K[:6]:
        rig.save(key)
        rig.run()
    rig.events()
    for key in K[:MAX_FAULTS]:
        rig.load(key)
        (fill,) = rig.transfers()
        rig.settle(fill, Verdict.FAILED, error="I/O error")
    assert TierRested(Tier.DISK, Direction.LOAD, MIN_REST_SECONDS, "I/O error") in rig.events()
    assert rig.stack.ledgers.is_resting(Tier.DISK, Direction.LOAD)
    assert not rig.stack.ledgers.is_resting(Tier.DISK, Direction.SAVE)
    assert rig.stack.match([K[4]]).num_blocks == 0
    rig.now += MIN_REST_SECONDS
    rig.stack.tick(rig.now)
    assert rig.stack.match([K[4]]).num_blocks == 1
    rig.load(K[4])
    rig.run()
    assert TierRevived(Tier.DISK, Direction.LOAD) in rig.events()


def test_a_full_disk_stops_writes_but_not_reads() -> None:
    rig = Rig(num_host=1)
    rig.save(K[0])
    rig.run()
    for key in K[1 : MAX_FAULTS + 1]:
        rig.save(key)
        (up,) = rig.transfers()
        rig.settle(up)
        (down,) = rig.transfers()
        rig.settle(down, Verdict.FAILED, error="no space left")
    assert rig.stack.ledgers.is_resting(Tier.DISK, Direction.SAVE)
    rig.load(K[0])
    dones = rig.run()
    assert dones[-1].ok


def test_a_read_only_tier_is_never_written() -> None:
    host, disk = Ledger(2, LRU(2)), Ledger(4, LRU(4))
    stack = TierStack(100, host, {Tier.DISK: disk}, read_only=frozenset({Tier.DISK}))
    stack.save([K[0]], slots(1), 0.0)
    (up,) = stack.next_transfers(lambda link, direction: True)
    stack.settle(Outcome(up.id, (OK,)), 0.0)
    assert list(stack.next_transfers(lambda link, direction: True)) == []
    assert stack.idle


def test_while_its_index_is_read_a_tier_serves_what_is_known_and_writes_wait() -> None:
    host = Ledger(4, LRU(4))
    disk = Ledger(2, LRU(2), recovering=True)
    stack = TierStack(100, host, {Tier.DISK: disk})
    assert stack.ledgers.adopt(Tier.DISK, [(Slot(1), K[5])]) == 1
    assert stack.match([K[5]]).num_blocks == 1
    stack.save([K[0]], slots(1), 0.0)
    (up,) = stack.next_transfers(lambda link, direction: True)
    stack.settle(Outcome(up.id, (OK,)), 0.0)
    (down,) = stack.next_transfers(lambda link, direction: True)
    assert down.target_slots == (1,), "the only slot known so far"
    stack.ledgers.adopt(Tier.DISK, [(Slot(0), None)])
    audit(stack)


def test_events_tell_what_moved_and_what_is_where() -> None:
    rig = Rig()
    rig.save(K[0])
    rig.run()
    events = rig.events()
    assert Moved(Tier.DEVICE, Tier.HOST, Direction.SAVE, 1, 100, 0.5) in events
    assert Moved(Tier.HOST, Tier.DISK, Direction.SAVE, 1, 100, 0.5) in events
    assert Stored(Tier.HOST, (K[0],)) in events
    assert Stored(Tier.DISK, (K[0],)) in events


@pytest.mark.parametrize(
    "wrong",
    [
        lambda stack: stack.load([K[0], K[0]], slots(2), 0.0),
        lambda stack: stack.load([K[0]], slots(2), 0.0),
        lambda stack: stack.save([K[0], K[0]], slots(2), 0.0),
        lambda stack: stack.settle(Outcome(99, ()), 0.0),  # type: ignore[arg-type]
    ],
)
def test_a_broken_contract_is_refused(wrong: object) -> None:
    rig = Rig()
    with pytest.raises(BookError):
        wrong(rig.stack)  # type: ignore[operator]
    audit(rig.stack)
    assert rig.stack.idle


def test_an_outcome_that_does_not_fit_changes_nothing() -> None:
    rig = Rig()
    rig.save(K[0], K[1])
    (transfer,) = rig.transfers()
    with pytest.raises(BookError, match="1 verdicts for 2 blocks"):
        rig.stack.settle(Outcome(transfer.id, (OK,)), rig.now)
    audit(rig.stack)
    rig.settle(transfer)
    with pytest.raises(BookError, match="already settled"):
        rig.settle(transfer)
