"""Transfers that other processes serve: told once, ended once, and sealed only when all agree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools import TIMEOUT_SECONDS, folder_cap_for, key_of, keys_of, slots, spec

from penstock.build import Delegated, build_delegated
from penstock.clock import ManualClock
from penstock.config import Config, DiskConfig, HostConfig
from penstock.errors import ConfigError
from penstock.stores.host import HostArena
from penstock.transfer.delegate import DelegatingEngine
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import Mover, MoveResult
from penstock.transfer.lanes import LaneSpec
from penstock.transfer.seals import Seals
from penstock.types import Direction, Outcome, Slot, Tier, Transfer, TransferId, Verdict

LOAD, SAVE = Direction.LOAD, Direction.SAVE
OK, MISSING, FAILED, CANCELLED = Verdict.OK, Verdict.MISSING, Verdict.FAILED, Verdict.CANCELLED
NUM_HOST = 8
_ids = count(1)


def transfer(
    direction: Direction = SAVE, *host_slots: int, link: Tier = Tier.HOST, num: int = 0
) -> Transfer:
    """Blocks 100, 101, ... of the upper tier, and these slots of the lower one."""
    number = next(_ids)
    lower = tuple(Slot(slot) for slot in host_slots or range(num or 1))
    upper = tuple(Slot(100 + index) for index in range(len(lower)))
    keys = tuple(key_of((number, slot)) for slot in lower)
    above = Tier(link - 1)
    if direction is LOAD:
        return Transfer(TransferId(number), link, above, keys, lower, upper)
    return Transfer(TransferId(number), above, link, keys, upper, lower)


class WholeMover(Mover):
    """Moves everything at once."""

    def move(self, transfer: Transfer) -> MoveResult:
        return MoveResult([OK] * len(transfer.keys))

    def close(self) -> None:
        pass


class Desk:
    """An engine for workers that the test plays, over a real one for the disk's link."""

    def __init__(self, num_workers: int = 1) -> None:
        self.host = HostArena(spec(), NUM_HOST * spec().stride_bytes)
        self.seals = Seals(self.host)
        self.below = TransferEngine({Tier.DISK: LaneSpec(WholeMover(), 1)}, ManualClock())
        self.engine = DelegatingEngine(self.below, self.seals, num_workers)

    def is_sealed(self, order: Transfer) -> list[bool]:
        host_slots = order.target_slots if order.direction is SAVE else order.source_slots
        return [verdict is OK for verdict in self.seals.verdicts(order.keys, host_slots)]

    def submit(self, *orders: Transfer) -> None:
        for order in orders:
            assert self.engine.submit(order)


@pytest.fixture(params=[1, 2, 3])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = Desk(request.param)
    yield desk
    assert desk.engine.close(TIMEOUT_SECONDS)


@pytest.fixture
def pair() -> Iterator[Desk]:
    """Two workers."""
    desk = Desk(2)
    yield desk
    assert desk.engine.close(TIMEOUT_SECONDS)


@pytest.mark.parametrize("direction", [LOAD, SAVE])
def test_what_is_for_the_device_is_kept_in_order_until_it_is_taken_once(
    desk: Desk, direction: Direction
) -> None:
    orders = [transfer(direction, slot) for slot in range(4)]
    desk.submit(*orders)
    assert desk.engine.poll() == []
    assert desk.engine.depth(Tier.HOST, direction) == 4
    assert desk.engine.num_flying == 4
    assert desk.engine.take_unsent() == orders
    assert desk.engine.take_unsent() == []
    assert desk.engine.depth(Tier.HOST, direction) == 0
    assert desk.engine.num_flying == 4, "told, and not reported yet"
    assert desk.engine.poll() == []


def test_loads_and_saves_are_counted_apart(desk: Desk) -> None:
    desk.submit(transfer(LOAD), transfer(SAVE), transfer(SAVE))
    assert desk.engine.depth(Tier.HOST, LOAD) == 1
    assert desk.engine.depth(Tier.HOST, SAVE) == 2


def test_the_device_link_always_has_room(desk: Desk) -> None:
    """A save that were refused would be of a block that the next step overwrites."""
    for _ in range(1000):
        assert desk.engine.has_room(Tier.HOST, SAVE)
        desk.submit(transfer(SAVE))
    assert len(desk.engine.take_unsent()) == 1000


@given(num_workers=st.integers(1, 5))
def test_a_transfer_ends_when_the_last_worker_has_reported_it(num_workers: int) -> None:
    desk = Desk(num_workers)
    order = transfer(LOAD, num=3)
    desk.submit(order)
    desk.engine.take_unsent()
    for reported in range(1, num_workers + 1):
        assert desk.engine.poll() == []
        ended = desk.engine.report(Outcome(order.id, (OK,) * 3, 0.5))
        assert ended is (order if reported == num_workers else None)
    assert desk.engine.poll() == [Outcome(order.id, (OK,) * 3, 0.5)]
    assert desk.engine.poll() == []
    assert desk.engine.num_flying == 0
    assert desk.engine.close(TIMEOUT_SECONDS)


# OK is the only verdict that gives way; between two others either is a loss.
@given(st.lists(st.lists(st.sampled_from(Verdict), min_size=4, max_size=4), min_size=2, max_size=4))
def test_a_block_is_ok_only_where_every_worker_says_so(verdicts: list[list[Verdict]]) -> None:
    desk = Desk(len(verdicts))
    order = transfer(SAVE, num=4)
    desk.submit(order)
    desk.engine.take_unsent()
    for mine in verdicts:
        desk.engine.report(Outcome(order.id, tuple(mine), 0.0))
    (outcome,) = desk.engine.poll()
    for position, verdict in enumerate(outcome.verdicts):
        said = [mine[position] for mine in verdicts]
        assert verdict in said
        assert (verdict is OK) == all(one is OK for one in said)
    assert desk.is_sealed(order) == [verdict is OK for verdict in outcome.verdicts]
    assert desk.engine.close(TIMEOUT_SECONDS)


def test_workers_move_side_by_side_and_the_first_error_is_told(pair: Desk) -> None:
    order = transfer(LOAD, num=2)
    pair.submit(order)
    pair.engine.take_unsent()
    pair.engine.report(Outcome(order.id, (OK, FAILED), 0.25, "out of luck"))
    pair.engine.report(Outcome(order.id, (OK, OK), 0.75, "never heard"))
    assert pair.engine.poll() == [Outcome(order.id, (OK, FAILED), 0.75, "out of luck")]


def test_a_save_opens_its_slots_at_once_and_seals_them_when_all_have_written(pair: Desk) -> None:
    before = transfer(SAVE, 0, 1, 2)
    pair.seals.seal(before.keys, before.target_slots)
    assert pair.is_sealed(before) == [True] * 3
    order = transfer(SAVE, 0, 2)
    pair.submit(order)
    assert pair.is_sealed(before) == [False, True, False], "only the slots that are written"
    pair.engine.take_unsent()
    pair.engine.report(Outcome(order.id, (OK, OK), 0.0))
    assert pair.is_sealed(order) == [False, False], "the other worker's part is not there yet"
    pair.engine.report(Outcome(order.id, (OK, FAILED), 0.0))
    assert pair.is_sealed(order) == [True, False]
    assert pair.is_sealed(before) == [False, True, False]


def test_a_load_leaves_seals_alone(pair: Desk) -> None:
    order = transfer(LOAD, 3, 4)
    pair.seals.seal(order.keys[:1], order.source_slots[:1])
    pair.submit(order)
    pair.engine.take_unsent()
    for _ in range(2):
        pair.engine.report(Outcome(order.id, (OK, OK), 0.0))
    assert pair.is_sealed(order) == [True, False]


def test_what_was_not_told_yet_can_be_cancelled(desk: Desk) -> None:
    kept, cancelled = transfer(LOAD, num=2), transfer(LOAD, num=2)
    desk.submit(kept, cancelled)
    desk.engine.cancel(cancelled.id)
    assert desk.engine.poll() == [Outcome(cancelled.id, (CANCELLED,) * 2)]
    assert desk.engine.take_unsent() == [kept]


def test_what_was_told_runs_to_its_end(desk: Desk) -> None:
    order = transfer(LOAD)
    desk.submit(order)
    desk.engine.take_unsent()
    desk.engine.cancel(order.id)
    assert desk.engine.poll() == []
    assert desk.engine.num_flying == 1


def test_cancelling_what_nobody_knows_changes_nothing(desk: Desk) -> None:
    desk.engine.cancel(TransferId(10**9))
    assert desk.engine.poll() == []


def test_other_links_are_served_below(desk: Desk) -> None:
    order = transfer(SAVE, link=Tier.DISK, num=2)
    assert desk.engine.has_room(Tier.DISK, SAVE)
    desk.submit(order)
    assert desk.engine.take_unsent() == []
    assert desk.engine.num_flying == 0, "workers have nothing to do with it"
    assert desk.engine.wait(TIMEOUT_SECONDS)
    (outcome,) = desk.engine.poll()
    assert (outcome.transfer_id, outcome.verdicts) == (order.id, (OK, OK))
    assert desk.engine.depth(Tier.DISK, SAVE) == 0


def test_both_sides_are_polled_together_and_waited_for(desk: Desk) -> None:
    mine, below = transfer(LOAD), transfer(SAVE, link=Tier.DISK)
    desk.submit(mine, below)
    desk.engine.cancel(mine.id)
    assert desk.engine.wait(0.0), "what ended here needs no waiting"
    found: set[TransferId] = set()
    while len(found) < 2:
        assert desk.engine.wait(TIMEOUT_SECONDS)
        found.update(outcome.transfer_id for outcome in desk.engine.poll())
    assert found == {mine.id, below.id}


def test_giving_up_ends_all_that_the_workers_had_or_were_to_have(desk: Desk) -> None:
    told, untold, save = transfer(LOAD, num=2), transfer(LOAD), transfer(SAVE)
    desk.submit(told, save)
    desk.engine.take_unsent()
    desk.submit(untold)
    desk.engine.give_up()
    found = {outcome.transfer_id: outcome.verdicts for outcome in desk.engine.poll()}
    assert found == {told.id: (FAILED, FAILED), save.id: (FAILED,), untold.id: (CANCELLED,)}
    assert desk.engine.num_flying == 0
    assert desk.is_sealed(save) == [False], "half a block is no block"
    late = transfer(LOAD)
    if desk.engine.submit(late):
        assert desk.engine.poll() == [Outcome(late.id, (CANCELLED,))]
    assert desk.engine.take_unsent() == []
    assert desk.engine.has_room(Tier.DISK, SAVE), "the tiers below go on"


def test_a_report_that_comes_too_late_is_passed_over(desk: Desk) -> None:
    order = transfer(SAVE)
    desk.submit(order)
    desk.engine.take_unsent()
    desk.engine.give_up()
    desk.engine.poll()
    assert desk.engine.report(Outcome(order.id, (OK,), 0.0)) is None
    assert desk.engine.poll() == []
    assert desk.is_sealed(order) == [False]


# The whole façade over such an engine.


def delegated(directory: Path | None, *, num_workers: int = 1, num_host: int = 8) -> Delegated:
    disk = DiskConfig()
    if directory is not None:
        disk = DiskConfig(path=str(directory), size_bytes=folder_cap_for(spec(), 32), threads=1)
    config = Config(host=HostConfig(size_bytes=num_host * spec().stride_bytes), disk=disk)
    # No deadline ever passes: what ends, ends by itself.
    built = build_delegated(config, spec(), num_workers, clock=ManualClock())
    assert built.offloader.recover(TIMEOUT_SECONDS)
    return built


def end_all(built: Delegated, verdict: Verdict = OK) -> None:
    """Play workers that carry everything out."""
    while orders := built.engine.take_unsent():
        for order in orders:
            built.engine.report(Outcome(order.id, (verdict,) * len(order.keys), 0.001))
        built.offloader.step()


def test_an_offloader_saves_and_loads_through_workers() -> None:
    built = delegated(None, num_workers=2)
    keys = keys_of(3)
    ticket = built.offloader.save(keys, slots(5, 6, 7))
    (save,) = built.engine.take_unsent()
    assert (save.keys, save.source_slots) == (tuple(keys), (5, 6, 7))
    assert built.offloader.match(keys).num_pending == 3
    assert built.engine.report(Outcome(save.id, (OK,) * 3, 0.1)) is None
    assert built.offloader.step() == []
    built.engine.report(Outcome(save.id, (OK, OK, FAILED), 0.1))
    (done,) = built.offloader.step()
    assert (done.ticket, done.verdicts) == (ticket, (OK, OK, FAILED))
    assert built.offloader.match(keys).num_blocks == 2
    built.offloader.check()
    assert built.offloader.close(TIMEOUT_SECONDS)


def test_an_offloader_closes_at_once_when_its_workers_are_gone() -> None:
    built = delegated(None)
    keys = keys_of(4)
    built.offloader.save(keys[:2], slots(0, 1))
    end_all(built)
    built.offloader.load(keys[:2], slots(4, 5))
    built.engine.take_unsent()  # told, and never to be reported
    built.offloader.save(keys[2:], slots(2, 3))  # never told
    built.engine.give_up()
    assert built.offloader.close(TIMEOUT_SECONDS)
    built.offloader.check()


def test_an_offloader_closes_when_loads_on_their_way_from_the_disk_are_cancelled(
    tmp_path: Path,
) -> None:
    keys = keys_of(6)
    built = delegated(tmp_path / "kv")
    built.offloader.save(keys, slots(*range(6)))
    end_all(built)
    assert built.offloader.drain(TIMEOUT_SECONDS)
    built.offloader.empty_host()
    ticket = built.offloader.load(keys, slots(*range(6)))
    built.engine.give_up()
    built.offloader.cancel(ticket)  # or it waits for its deadline: the device is out of reach
    assert built.offloader.close(TIMEOUT_SECONDS)
    built.offloader.check()


def test_what_had_reached_dram_reaches_the_disk_although_the_workers_are_gone(
    tmp_path: Path,
) -> None:
    keys = keys_of(6)
    built = delegated(tmp_path / "kv")
    built.offloader.save(keys, slots(*range(6)))
    end_all(built)
    built.engine.give_up()
    assert built.offloader.close(TIMEOUT_SECONDS)
    again = delegated(tmp_path / "kv")
    assert again.offloader.match(keys).num_from(Tier.DISK) == 6
    assert again.offloader.close(TIMEOUT_SECONDS)


def test_checksums_of_dram_that_others_write_are_refused() -> None:
    config = Config(host=HostConfig(size_bytes=1 << 20, verify=True))
    with pytest.raises(ConfigError, match=r"host\.verify"):
        build_delegated(config, spec(), 1)
