"""Retained blocks survive a flood until their time is over, and never take all of HOST."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from stack_rig import Rig, slots

from penstock.books.audit import audit
from penstock.books.ledger import Ledger
from penstock.books.retention import Retention
from penstock.books.stack import Limits, TierStack
from penstock.errors import BookError
from penstock.events import Retained
from penstock.policies import LRU, POLICIES
from penstock.types import BlockKey, Outcome, Tier, Verdict

K = [BlockKey(bytes([number]) * 32) for number in range(64)]


def filled(num_keys: int, num_host: int = 16, share: float = 0.25) -> tuple[Ledger, Retention]:
    host = Ledger(num_host, LRU(num_host))
    put(host, K[:num_keys])
    return host, Retention(host, share)


def put(host: Ledger, keys: Sequence[BlockKey]) -> None:
    assert host.claim(keys) is not None
    host.commit(keys)


def flood(host: Ledger, start: int = 30, count: int = 30) -> None:
    for key in K[start : start + count]:
        put(host, [key])


def held(host: Ledger, keys: Sequence[BlockKey]) -> list[bool]:
    return [host.is_ready(key) for key in keys]


def test_what_is_retained_survives_a_flood_and_after_its_time_it_does_not() -> None:
    host, retention = filled(8)
    assert retention.retain(K[:3], "a", until=10.0) == 3
    flood(host)
    assert held(host, K[:4]) == [True, True, True, False]
    retention.tick(9.9, 0)
    assert len(retention) == 3
    retention.tick(10.0, 0)
    assert len(retention) == 0
    assert not host.leases()
    flood(host, 10, 16)
    assert held(host, K[:3]) == [False] * 3
    retention.check()


def test_beyond_the_budget_the_leading_blocks_are_retained() -> None:
    host, retention = filled(8)
    assert retention.max_blocks == 4
    assert retention.retain(K[:8], "a", 10.0) == 4
    assert host.leases().keys() == {host.slot_of(key) for key in K[:4]}
    assert retention.retain(K[4:6], "b", 10.0) == 0
    assert retention.retain(K[:2], "b", 10.0) == 2, "what is kept anyway costs nothing"
    assert retention.release("b") == 2
    assert len(retention) == 4
    retention.check()


@pytest.mark.parametrize(
    ("num_host", "share", "expected"),
    [(100, 0.25, 25), (100, 0.0, 0), (100, 0.5, 49), (1, 0.5, 0), (3, 0.5, 1), (4, 0.5, 1)],
)
def test_the_budget_leaves_room_beside_what_waits_to_be_written(
    num_host: int, share: float, expected: int
) -> None:
    retention = Retention(Ledger(num_host, LRU(num_host)), share)
    assert retention.max_blocks == expected
    assert not expected or expected + num_host // 2 < num_host


def test_a_block_stays_while_one_of_its_groups_wants_it() -> None:
    host, retention = filled(4)
    retention.retain(K[:2], "a", 10.0)
    retention.retain(K[1:3], "b", 20.0)
    assert retention.release("a") == 2
    assert retention.release("a") == 0
    assert K[0] not in retention
    assert K[1] in retention
    retention.tick(20.0, 0)
    assert not host.leases()
    retention.check()


def test_a_later_hint_adds_to_a_group_and_sets_its_time_anew() -> None:
    _, retention = filled(4)
    retention.retain(K[:1], "a", 10.0)
    retention.retain(K[1:2], "a", 30.0)
    retention.tick(29.0, 0)
    assert len(retention) == 2
    retention.retain(K[:1], "a", 29.5)
    retention.tick(29.5, 0)
    assert len(retention) == 0


def test_what_is_on_its_way_is_retained_when_it_arrives() -> None:
    host, retention = filled(1)
    host.claim(K[1:3])
    assert retention.retain(K[:4], "a", 10.0) == 3, "the last one is nowhere near"
    assert len(retention) == 1
    host.commit(K[1:2])
    host.abort(K[2:3])
    retention.arrived(K[1:2])
    assert [key in retention for key in K[:4]] == [True, True, False, False]
    retention.check()


def test_a_dropped_block_is_let_go_and_its_slot_is_free() -> None:
    host, retention = filled(2)
    retention.retain(K[:2], "a", 10.0)
    host.drop(K[0])
    with pytest.raises(BookError, match="is not in HOST"):
        retention.check()
    retention.removed([K[0], K[9]])
    assert host.num_free == host.capacity - 1
    retention.check()
    put(host, K[:1])
    retention.arrived(K[:1])
    assert K[0] in retention, "it came again in time"


def test_retention_gives_way_to_what_is_read_in_place() -> None:
    _, retention = filled(8)
    retention.retain(K[:2], "soon", 10.0)
    retention.retain(K[2:4], "later", 20.0)
    retention.tick(0.0, num_pinned=10)  # three of six that are left
    assert [key in retention for key in K[:4]] == [True, False, True, True]
    retention.tick(0.0, num_pinned=15)
    assert len(retention) == 0
    assert retention.retain(K[:4], "more", 20.0) == 0
    retention.tick(0.0, num_pinned=0)
    assert retention.retain(K[:4], "more", 20.0) == 4
    retention.check()


def test_what_groups_want_is_bounded_too() -> None:
    _, retention = filled(4, share=0.25)
    taken = [retention.retain(K[:4], str(number), 10.0) for number in range(10)]
    assert sum(taken) == 4 * retention.max_blocks
    assert taken[-1] == 0
    retention.check()
    retention.clear()
    assert retention.retain(K[:4], "again", 10.0) == 4


# In the stack.


def test_the_audit_counts_what_is_retained() -> None:
    rig = Rig(num_host=8)
    rig.save(*K[:2])
    assert rig.stack.retention.retain(K[:2], "a", 10.0) == 2
    rig.run()  # arrive, are retained, and go down to disk
    audit(rig.stack)
    assert len(rig.stack.retention) == 2
    assert rig.stack.idle
    for key in K[10:12]:
        rig.save(key)
        rig.run()
    for key in K[20:40]:
        rig.save(key)
        rig.run()
    assert rig.host.is_ready(K[0])
    assert not rig.host.is_ready(K[10])
    assert Retained(2, 2) in rig.stack.take_usage(lambda tier, direction: 0)
    rig.stack.tick(10.0)
    audit(rig.stack)
    assert len(rig.stack.retention) == 0
    assert rig.host.num_leased == 0


def test_a_retained_block_that_turns_out_wrong_is_dropped_all_the_same() -> None:
    rig = Rig(num_host=8)
    rig.save(K[0])
    rig.run()
    rig.stack.retention.retain(K[:1], "a", 10.0)
    rig.load(K[0])
    (copy,) = rig.transfers()
    rig.settle(copy, Verdict.CORRUPT)
    assert K[0] not in rig.host
    assert rig.host.num_leased == 0
    rig.load(K[0])
    assert rig.run()[-1].ok
    assert len(rig.stack.retention) == 1, "it came again from disk"
    rig.stack.empty_host()
    assert len(rig.stack.retention) == 0
    audit(rig.stack)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_saves_and_loads_find_room_beside_all_that_may_be_retained(policy: str) -> None:
    """Also while a disk that hangs holds its half of HOST."""
    host = Ledger(8, POLICIES[policy](8))
    disk = Ledger(64, POLICIES[policy](64))
    stack = TierStack(100, host, {Tier.DISK: disk}, Limits(64, 64, retain_share=0.5))

    def bring_up() -> None:
        for transfer in list(stack.next_transfers(lambda link, way: link is Tier.HOST)):
            stack.settle(Outcome(transfer.id, (Verdict.OK,) * len(transfer.keys)), 0.0)

    for key in K[:8]:
        stack.save([key], slots(1), 0.0)
        bring_up()
    assert stack.retention.retain(K[:8], "a", 100.0) == 3
    for key in K[8:40]:
        stack.save([key], slots(1), 0.0)
        bring_up()
        audit(stack)
        assert host.is_ready(key)
    assert [done.ok for done in stack.tickets.take_dones()] == [True] * 40
    assert all(map(host.is_ready, K[:3]))


def test_what_is_demoted_goes_first_unless_it_is_retained() -> None:
    rig = Rig(num_host=8)
    rig.save(*K[:8])
    rig.run()
    rig.stack.retention.retain(K[5:6], "a", 10.0)
    assert rig.stack.retention.demote([*K[4:8], K[20]]) == 3
    rig.save(*K[8:11])
    rig.run()
    assert held(rig.host, K[:8]) == [True] * 4 + [False, True, False, False]
    assert rig.stack.match(K[:8]).num_from(Tier.DISK) == 3


def test_what_is_demoted_before_it_has_arrived_goes_first_too() -> None:
    rig = Rig(num_host=8)
    rig.save(*K[:4])
    rig.run()
    rig.save(*K[4:8])
    assert rig.stack.retention.demote(K[4:8]) == 4
    rig.run()
    rig.save(*K[8:11])
    rig.run()
    assert held(rig.host, K[:8]) == [True] * 5 + [False] * 3
