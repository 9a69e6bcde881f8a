"""What routers are told of a node's blocks, when the node ends and another one comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kv_events.router import CPU, GPU, Router

from penstock.kv_events.held import HeldBlocks, NamedSequence
from penstock.kv_events.wire import events_of
from penstock.types import Tier
from tests.node.nodes import BLOCK_TOKENS, Device, be_patient, node


def test_nothing_is_announced_of_a_node_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise routers would count on its DRAM for ever: the next node does not have it."""
    be_patient(monkeypatch)
    held, router = HeldBlocks(), Router()

    def publish() -> None:
        for event in events_of(held.take(1000) or []):
            router.apply(event)

    with node(tmp_path) as (path, _):
        device = Device(path, num_slots=8)
        device.tiers.observe(held)
        keys = device.keys(1, 4)
        held.name(NamedSequence(keys, list(range(4 * BLOCK_TOKENS)), BLOCK_TOKENS, ""), range(4))
        held.stored(Tier.DEVICE, keys[:2])
        assert device.save(keys)
        _step_until(device, lambda: device.tiers.is_in_host(keys[3]))
        publish()
        assert len(router.prompts(CPU)) == 4
    _step_until(device, lambda: not device.tiers.is_attached)
    publish()
    assert not router.prompts(CPU)
    assert len(router.prompts(GPU)) == 2, "the device still has these"
    held.check()
    with node(tmp_path):
        _step_until(device, lambda: device.tiers.is_attached)
        publish()
        assert not router.prompts(CPU)
        assert device.save(keys[:1])
        device.tiers.step()
        publish()
        assert len(router.prompts(CPU)) == 1
        held.check()
        assert device.tiers.close()


def _step_until(device: Device, is_so: Callable[[], bool]) -> None:
    while not is_so():
        device.tiers.step()
        time.sleep(0.01)
