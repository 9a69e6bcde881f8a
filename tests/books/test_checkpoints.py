"""Blocks that are of use only together are saved, kept and evicted together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from stack_rig import Rig, slots

from penstock.books.audit import audit
from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.policies import LRU, POLICIES
from penstock.types import BlockKey, Outcome, Tier, Verdict

K = [BlockKey(bytes([number]) * 32) for number in range(200)]
OK, DROPPED = Verdict.OK, Verdict.DROPPED


def saved(rig: Rig, keys: Sequence[BlockKey], *, whole: bool = True, down: bool = True) -> str:
    """Save to the end; returns one letter a block: o if it is in HOST, d if it was dropped."""
    rig.stack.save(keys, slots(len(keys)), rig.now, whole=whole, write_down=down)
    *_, done = rig.run()
    return "".join({OK: "o", DROPPED: "d"}[verdict] for verdict in done.verdicts)


def in_host(rig: Rig, keys: Sequence[BlockKey]) -> str:
    return "".join("x" if rig.host.is_ready(key) else "." for key in keys)


def on_disk(rig: Rig, keys: Sequence[BlockKey]) -> str:
    return "".join("x" if rig.disk.is_ready(key) else "." for key in keys)


# Where each block is.


def test_where_names_the_fastest_tier_of_each_block() -> None:
    rig = Rig(num_host=2)
    for key in K[:4]:
        rig.save(key)
        rig.run()
    rig.save(K[9])  # on its way into HOST, and evicts K[2]
    where = rig.stack.where([K[0], K[3], K[8], K[9], K[2]])
    assert where == [Tier.DISK, Tier.HOST, None, Tier.HOST, Tier.DISK]
    assert rig.stack.where([]) == []


def test_a_resting_tier_is_not_where_anything_is() -> None:
    rig = Rig(num_host=2)
    rig.save(K[0])
    rig.run()
    rig.stack.empty_host()
    for _ in range(10):
        rig.load(K[0])
        rig.settle(rig.transfers()[0], Verdict.FAILED, error="it broke")
        rig.save(K[0])
        rig.run()
        rig.stack.empty_host()
        if rig.stack.where([K[0]]) == [None]:
            break
    assert rig.stack.where([K[0]]) == [None]
    assert rig.stack.match([K[0]]).num_blocks == 0


# Saved whole or not at all.


def test_a_whole_save_that_does_not_fit_changes_nothing() -> None:
    rig = Rig(num_host=4)
    saved(rig, K[:2])
    rig.stack.pins.pin(K[:2])
    assert saved(rig, K[2:5]) == "ddd"
    assert saved(rig, K[2:5], whole=False) == "ood"
    rig.stack.pins.clear()


def test_what_is_in_host_already_stays_there_and_needs_no_room() -> None:
    rig = Rig(num_host=4)
    saved(rig, K[:3])
    rig.stack.pins.pin([K[0]])
    assert saved(rig, K[1:6]) == "ooddd", "K[0] is pinned, and K[1:3] are part of this save"
    assert in_host(rig, K[:3]) == "xxx"
    assert saved(rig, K[1:4]) == "ooo"
    rig.stack.pins.clear()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_whole_save_does_not_evict_its_own_blocks(policy: str) -> None:
    host = Ledger(4, POLICIES[policy](4))
    stack = TierStack(100, host)
    for keys in (K[:2], [K[7], K[8]], [K[0], K[1], K[2], K[3]]):
        stack.save(keys, slots(len(keys)), 0.0, whole=True)
        for transfer in list(stack.next_transfers(lambda link, direction: True)):
            stack.settle(Outcome(transfer.id, (OK,) * len(transfer.keys), 0.5), 0.0)
        audit(stack)
    assert all(map(host.is_ready, K[:4]))


def test_a_whole_save_is_planned_in_one_go() -> None:
    rig = Rig(num_host=8, limits=Limits(64, 64, max_planned_blocks=3))
    assert saved(rig, K[:8]) == "o" * 8
    assert saved(rig, K[20:29]) == "d" * 9
    assert in_host(rig, K[:8]) == "x" * 8


def test_a_whole_save_counts_against_the_blocks_under_way() -> None:
    rig = Rig(num_host=8, limits=Limits(64, 64, max_pending_saves=4))
    rig.save(K[0], K[1])
    rig.stack.save(K[2:5], slots(3), rig.now, whole=True)
    verdicts = [done.verdicts for done in rig.run()]
    assert sorted(verdicts, key=len) == [(OK, OK), (DROPPED,) * 3]


# Offered to the lower tiers, or not yet.


def test_without_write_down_blocks_stay_in_host_until_they_are_offered() -> None:
    rig = Rig(num_host=4)
    assert saved(rig, K[:3], down=False) == "ooo"
    assert on_disk(rig, K[:3]) == "..."
    assert saved(rig, K[:3], down=False) == "ooo"
    assert on_disk(rig, K[:3]) == "...", "a second save that is not written down either"
    rig.save(K[9])  # on its way: not offered
    rig.stack.offer([*K[:2], K[9], K[5]], rig.now)
    rig.run()
    assert on_disk(rig, K[:3]) == "xx."


def test_a_load_offers_blocks_that_were_not_written_down() -> None:
    rig = Rig(num_host=4)
    saved(rig, K[:2], down=False)
    rig.load(*K[:2])
    rig.run()
    assert on_disk(rig, K[:2]) == "xx"


def test_offering_without_lower_tiers_does_nothing() -> None:
    stack = TierStack(100, Ledger(4, LRU(4)))
    stack.offer(K[:2], 0.0)
    assert stack.idle


# Evicted together.


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_checkpoint_that_lost_a_block_is_evicted_next(policy: str) -> None:
    rig = Rig(num_host=8)
    rig.host = Ledger(8, POLICIES[policy](8))
    rig.stack = TierStack(100, rig.host)
    for keys in (K[:3], K[3:6]):
        saved(rig, keys)
        rig.stack.checkpoints.keep(keys)
    rig.stack.ledgers.drop(Tier.HOST, [K[4]])
    saved(rig, K[10:15])  # three slots are free, so two blocks must leave
    assert in_host(rig, K[:6]) == "xxx..."
    assert len(rig.stack.checkpoints) == 1
    audit(rig.stack)


def test_eviction_breaks_a_checkpoint_as_loss_does() -> None:
    rig = Rig(num_host=6)
    for keys in (K[:3], K[3:6]):
        saved(rig, keys)
        rig.stack.checkpoints.keep(keys)
    rig.host.touch(K[1])
    rig.host.touch(K[2])
    saved(rig, [K[10]])  # evicts K[0]
    saved(rig, [K[11]])
    saved(rig, [K[12]])
    assert in_host(rig, K[:6]) == "...xxx"


def test_a_block_of_another_unbroken_checkpoint_is_not_demoted() -> None:
    rig = Rig(num_host=6)
    saved(rig, K[:5], down=False)
    rig.stack.checkpoints.keep(K[:3])
    rig.stack.checkpoints.keep(K[2:5])
    rig.stack.ledgers.drop(Tier.HOST, [K[0]])
    saved(rig, K[10:12], down=False)
    saved(rig, [K[12]], down=False)
    assert in_host(rig, K[:5]) == "..xxx"
    rig.stack.ledgers.drop(Tier.HOST, [K[2]])
    assert len(rig.stack.checkpoints) == 1, "the first has none of its blocks left in HOST"


def test_blocks_of_two_checkpoints_that_break_together_are_demoted() -> None:
    rig = Rig(num_host=6)
    saved(rig, K[:5])
    rig.stack.checkpoints.keep(K[:3])
    rig.stack.checkpoints.keep(K[2:5])
    saved(rig, [K[20]])
    rig.stack.ledgers.drop(Tier.HOST, [K[2]])
    saved(rig, K[10:14])
    saved(rig, [K[14]])
    assert in_host(rig, [*K[:5], K[20]]) == ".....x"


def test_disk_evicts_a_checkpoint_as_a_unit_too() -> None:
    rig = Rig(num_host=16, num_disk=6)
    for keys in (K[:3], K[3:6]):
        saved(rig, keys)
        rig.stack.checkpoints.keep(keys)
    rig.disk.touch(K[1])
    rig.disk.touch(K[2])
    for key in K[10:13]:
        saved(rig, [key])
    assert on_disk(rig, K[:6]) == "...xxx"
    assert in_host(rig, K[:6]) == "xxxxxx", "HOST lost nothing, so it is whole there"
    assert len(rig.stack.checkpoints) == 2


def test_a_block_that_never_arrives_breaks_its_checkpoint() -> None:
    rig = Rig(num_host=4, num_disk=4)
    rig.stack.save(K[:3], slots(3), rig.now, whole=True, write_down=False)
    rig.stack.checkpoints.keep(K[:3])
    (copy,) = rig.transfers()
    rig.settle(copy, OK, Verdict.FAILED, OK)
    assert in_host(rig, K[:3]) == "x.x"
    saved(rig, K[10:12], down=False)  # all four slots are used
    saved(rig, K[12:14], down=False)
    assert in_host(rig, [*K[:3], *K[10:14]]) == "...xxxx"
    assert not len(rig.stack.checkpoints)


def test_a_checkpoint_that_is_complete_again_is_not_evicted_first() -> None:
    rig = Rig(num_host=6, num_disk=16)
    for keys in (K[:3], K[3:6]):
        saved(rig, keys)
        rig.stack.checkpoints.keep(keys)
    rig.stack.ledgers.drop(Tier.HOST, [K[4]])
    rig.load(*K[3:6])
    rig.run()
    saved(rig, K[10:13])
    assert in_host(rig, K[:6]) == "...xxx"


def test_retained_blocks_are_not_demoted() -> None:
    rig = Rig(num_host=8)
    saved(rig, K[:3])
    rig.stack.checkpoints.keep(K[:3])
    rig.stack.retention.retain([K[1]], "name", until=10.0)
    rig.stack.ledgers.drop(Tier.HOST, [K[0]])
    saved(rig, K[10:17])
    assert in_host(rig, K[:3]) == ".x."


# Superseded by a later one.


def test_a_superseded_checkpoint_leaves_except_for_what_the_next_one_needs() -> None:
    rig = Rig(num_host=6, num_disk=6)
    saved(rig, [K[20]])
    saved(rig, K[:4])
    rig.stack.checkpoints.keep(K[:3])
    rig.stack.checkpoints.keep(K[2:4])
    rig.stack.checkpoints.supersede(K[:3])
    saved(rig, K[10:13])
    assert in_host(rig, [K[20], *K[:4]]) == "x..xx"
    assert on_disk(rig, [K[20], *K[:4]]) == "x..xx"
    assert len(rig.stack.checkpoints) == 1


def test_a_superseded_checkpoint_that_is_still_being_written_is_demoted_on_arrival() -> None:
    rig = Rig(num_host=6, num_disk=3)
    saved(rig, [K[5]])
    rig.stack.save(K[:2], slots(2), rig.now, whole=True)
    rig.stack.checkpoints.keep(K[:2])
    (copy,) = rig.transfers()
    rig.settle(copy)
    (down,) = rig.transfers()
    rig.stack.checkpoints.supersede(K[:2])
    rig.settle(down)
    saved(rig, [K[6]])
    saved(rig, [K[7]])
    assert on_disk(rig, [*K[:2], *K[5:8]]) == "..xxx"


# Bounded.


def test_checkpoints_are_forgotten_with_their_blocks() -> None:
    rig = Rig(num_host=4, num_disk=4)
    rig.stack.checkpoints.keep(K[:3])
    assert not len(rig.stack.checkpoints), "none of its blocks is held"
    for start in range(0, 150, 3):
        saved(rig, K[start : start + 3])
        rig.stack.checkpoints.keep(K[start : start + 3])
        audit(rig.stack)
    assert len(rig.stack.checkpoints) <= 8
    rig.stack.empty_host()
    rig.stack.forget(Tier.DISK)
    assert not len(rig.stack.checkpoints)


def test_the_oldest_are_forgotten_if_blocks_belong_to_very_many() -> None:
    rig = Rig(num_host=8, num_disk=8)
    saved(rig, K[:8])
    for first in range(8):
        for last in range(first + 1, 9):
            rig.stack.checkpoints.keep(K[first:last])
            audit(rig.stack)
    assert 8 <= len(rig.stack.checkpoints) < 36


def test_naming_a_checkpoint_again_does_not_count_twice() -> None:
    rig = Rig()
    saved(rig, K[:3])
    for _ in range(100):
        rig.stack.checkpoints.keep(K[:3])
    assert len(rig.stack.checkpoints) == 1
    audit(rig.stack)
