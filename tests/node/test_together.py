"""What a node says at once arrives at once: an answer, and the end of what it began."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.events import Event, TicketDone
from tests.node.nodes import Device, node


def before_it_hears(
    device: Device, happens: Callable[[], object], patch: pytest.MonkeyPatch
) -> None:
    """Let something happen after the device's next call is sent, and before it hears anything."""
    line = device.tiers._line
    exchange = line._exchange

    def late() -> None:
        patch.setattr(line, "_exchange", exchange)
        happens()
        exchange()

    patch.setattr(line, "_exchange", late)


def test_a_block_that_is_removed_while_a_client_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as (path, _):
        other = Device(path)
        keys = other.keys(1, 4)
        assert other.save(keys)
        device = Device(path)  # it has not heard of what was saved before

        def remove() -> None:
            assert other.tiers.empty_host() == 4
            other.tiers.drain()  # the node has told everybody

        before_it_hears(device, remove, monkeypatch)
        assert device.tiers.is_in_host(keys[0]), "it was there when the node answered"
        assert not device.tiers.is_in_host(keys[0])


def test_a_prefetch_that_has_ended_before_its_answer_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path, disk=tmp_path / "disk") as (path, _):
        other, device = Device(path), Device(path)
        keys = other.keys(1, 4)
        assert other.save(keys)
        assert other.tiers.drain()
        assert other.tiers.empty_host() == 4
        before_it_hears(device, other.tiers.drain, monkeypatch)
        assert device.tiers.prefetch(keys) == 4
        assert device.tiers.drain()
        assert not device.tiers.is_prefetching
        assert not device.tiers.is_moving


@pytest.mark.parametrize("end", ["drain", "close"])
def test_observers_are_told_once_of_a_ticket_that_has_ended(tmp_path: Path, end: str) -> None:
    with node(tmp_path) as (path, _):
        device = Device(path)
        seen: list[Event] = []
        device.tiers.observe(seen.append)
        keys = device.keys(1, 4)
        device.tiers.save(keys, device.fill(keys))
        device.tiers.load(device.keys(2, 4), device.fill(device.keys(2, 4), 4))
        assert getattr(device.tiers, end)()
        if end == "drain":
            assert len(device.tiers.step()) == 2
        assert sum(isinstance(event, TicketDone) for event in seen) == 2
