"""Copies go to the client that asked for them, and end exactly once."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.clock import SystemClock
from penstock.node.switchboard import Port, Switchboard
from penstock.stores.host import HostArena
from penstock.transfer.engine import TransferEngine
from penstock.transfer.seals import Seals
from penstock.types import (
    BlockKey,
    BlockSpec,
    Direction,
    Outcome,
    Slot,
    TicketId,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)

A, B = (BlockKey(bytes([n]) * 32) for n in (1, 2))
OK, FAILED, CANCELLED = Verdict.OK, Verdict.FAILED, Verdict.CANCELLED


def slots_in_use(ports: Sequence[Port]) -> set[int]:
    """The slots of DRAM that copies of these clients may touch."""
    return {
        slot
        for port in ports
        for transfer in (*port.unsent.values(), *port.sent.values())
        for slot in (
            transfer.target_slots if transfer.direction is Direction.SAVE else transfer.source_slots
        )
    }


def board() -> tuple[Switchboard, Seals]:
    spec = BlockSpec(bytes(32), 4096, 4)
    seals = Seals(HostArena(spec, 16 * spec.stride_bytes))
    return Switchboard(TransferEngine({}, SystemClock()), seals), seals


def copy(number: int, ticket: int | None = 1, *, save: bool = True) -> Transfer:
    ends = (Tier.DEVICE, Tier.HOST) if save else (Tier.HOST, Tier.DEVICE)
    slots = (Slot(number), Slot(number + 1))
    id_ = None if ticket is None else TicketId(ticket)
    return Transfer(TransferId(number), *ends, (A, B), slots, slots, None, ticket=id_)


def outcome(number: int, *verdicts: Verdict) -> Outcome:
    return Outcome(TransferId(number), verdicts)


def test_a_copy_goes_to_its_ticket_s_client_and_is_sealed_when_reported() -> None:
    switchboard, seals = board()
    one, two = Port(), Port()
    with switchboard.on_behalf_of(one):
        switchboard.submit(copy(1, 7))  # its number is not known yet
    switchboard.assign(TicketId(8), two)
    switchboard.submit(copy(3, 8))
    assert [t.id for t in one.take_unsent()] == [1]
    assert [t.id for t in two.take_unsent()] == [3]
    assert slots_in_use([one]) == {1, 2}
    assert not switchboard.report(two, outcome(1, OK, OK)), "not its own"
    assert not switchboard.report(one, outcome(1, OK)), "too few verdicts"
    assert switchboard.poll() == []
    assert switchboard.report(one, outcome(1, OK, FAILED))
    assert not switchboard.report(one, outcome(1, OK, OK)), "already reported"
    assert [o.verdicts for o in switchboard.poll()] == [(OK, FAILED)]
    assert seals.verdicts([A, B], [Slot(1), Slot(2)]) == [OK, Verdict.MISSING]


def test_what_was_not_sent_is_cancelled_at_once_and_what_was_sent_waits() -> None:
    switchboard, _ = board()
    port = Port()
    switchboard.assign(TicketId(1), port)
    switchboard.submit(copy(1))
    port.take_unsent()
    switchboard.submit(copy(3))
    switchboard.cancel(TransferId(3))
    switchboard.cancel(TransferId(1))
    assert [o.transfer_id for o in switchboard.poll()] == [3]
    assert port.take_cancels() == [1]
    switchboard.submit(copy(5))
    switchboard.hang_up(port)
    assert [o.transfer_id for o in switchboard.poll()] == [5]
    assert slots_in_use([port]) == {1, 2}, "its process may still write there"
    switchboard.submit(copy(7))
    assert [o.verdicts for o in switchboard.poll()] == [(CANCELLED,) * 2], "nobody listens"
    switchboard.give_up(port)
    assert [(o.transfer_id, o.verdicts) for o in switchboard.poll()] == [(1, (FAILED,) * 2)]
    switchboard.give_up(port)
    assert switchboard.poll() == []


def test_a_copy_for_nobody_is_cancelled() -> None:
    switchboard, _ = board()
    assert switchboard.submit(copy(1, 99))
    assert [o.verdicts for o in switchboard.poll()] == [(CANCELLED,) * 2]


def test_closing_fails_what_is_under_way() -> None:
    switchboard, _ = board()
    port = Port()
    switchboard.assign(TicketId(1), port)
    switchboard.submit(copy(1, save=False))
    port.take_unsent()
    assert switchboard.close()
    assert [o.verdicts for o in switchboard.poll()] == [(FAILED,) * 2]
    assert not switchboard.submit(copy(3))
