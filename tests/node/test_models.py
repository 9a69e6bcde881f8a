"""Several models on one node: DRAM goes where it is needed, and the disk is divided."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from penstock.config.settings import NodeConfig
from penstock.node import shares
from penstock.node.service import NodeService
from penstock.node.wire import pack_keys, pack_slots
from penstock.types import Slot, Tier
from penstock.units import MiB
from tests.node.nodes import Device, check, node
from tests.node.test_hostile import KEYS, Raw


def dram_of(service: NodeService, device: Device) -> int:
    """The DRAM of a device's model."""
    models = {each["namespace"]: each for each in service.describe()["models"]}
    return int(models[device.spec.namespace.hex()]["dram_bytes"])


def save_until(device: Device, service: NodeService, num_bytes: int) -> None:
    """Save prompt after prompt until the model has this much DRAM."""
    for prompt in range(1000):
        device.save(device.keys(prompt, 16))
        if dram_of(service, device) >= num_bytes:
            return
        time.sleep(0.005)
    pytest.fail(f"it has {dram_of(service, device) / MiB} MiB after 1,000 prompts")


def test_dram_moves_to_the_model_that_needs_it(tmp_path: Path) -> None:
    limits = NodeConfig(model_floor=0.1, model_cap=0.9)
    with node(tmp_path, dram=40 * MiB, limits=limits) as (path, service):
        first = Device(path, "first", block_bytes=48 << 10)
        second = Device(path, "second", block_bytes=100 << 10)
        save_until(first, service, 36 * MiB)
        save_until(second, service, 20 * MiB)
        assert dram_of(service, first) == 20 * MiB
        check(service)
        for device in (first, second):
            keys = device.keys(5000, 16)
            assert device.save(keys)
            assert device.load(keys) == 16
        # Both are busy, and equal: nothing moves any more.
        for prompt in range(6000, 6030):
            for device in (first, second):
                device.save(device.keys(prompt, 16))
            assert dram_of(service, first) == dram_of(service, second) == 20 * MiB
        for device in (first, second):
            device.tiers.check()
            assert device.tiers.close()


def test_a_model_without_clients_gives_up_its_dram_to_its_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_IDLE_SECONDS", 0.5)
    limits = NodeConfig(model_floor=0.2)
    with node(tmp_path, dram=20 * MiB, limits=limits) as (path, service):
        first = Device(path, "first")
        save_until(first, service, 20 * MiB)
        assert first.tiers.close()
        second = Device(path, "second", block_bytes=80 << 10)
        time.sleep(0.6)
        save_until(second, service, 16 * MiB)
        again = Device(path, "first")
        assert dram_of(service, again) == 4 * MiB
        check(service)
        assert second.tiers.close()
        assert again.tiers.close()


def test_two_models_share_a_disk_and_find_their_blocks_after_a_restart(tmp_path: Path) -> None:
    disk, limits = tmp_path / "disk", NodeConfig(disk_models=2)
    for _ in range(2):
        with node(tmp_path, dram=20 * MiB, disk=disk, limits=limits) as (path, _):
            devices = [Device(path, "first"), Device(path, "second", block_bytes=100 << 10)]
            for device in devices:
                device.tiers.recover(20)
                keys = device.keys(1, 20)
                if device.tiers.match(keys).num_blocks == 0:
                    assert device.save(keys)
                    assert device.tiers.drain(20)
                device.tiers.empty_host()
                assert device.tiers.where(keys) == [Tier.DISK] * 20
                assert device.load(keys) == 20
            for device in devices:
                assert device.tiers.close()


def test_all_models_together_stay_below_the_disks_size(tmp_path: Path) -> None:
    """Whatever ran before, with however many models."""
    disk = tmp_path / "disk"
    for num_models in (1, 2, 3, 1, 2):
        limits = NodeConfig(disk_models=num_models)
        with node(tmp_path, dram=20 * MiB, disk=disk, limits=limits) as (path, service):
            devices = [
                Device(path, f"model {n}", block_bytes=(64 + 16 * n) << 10)
                for n in range(num_models)
            ]
            for device in devices:
                assert device.tiers.recover(20)
            for prompt in range(60):
                for device in devices:
                    device.save(device.keys(prompt, 16))
            for device in devices:
                assert device.tiers.drain(30)
                assert _disk_bytes(disk) <= 64 * MiB
                last = device.keys(59, 16)
                device.tiers.empty_host()
                assert device.load(last) == 16
            check(service)
            for device in devices:
                assert device.tiers.close()


def test_a_model_beyond_the_disks_parts_has_dram_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with node(tmp_path, dram=20 * MiB, disk=tmp_path / "disk") as (path, _):
        first = Device(path, "first")
        assert first.tiers.recover(20)
        with caplog.at_level(logging.WARNING):
            second = Device(path, "second")
        assert "node.disk_models" in caplog.text
        keys = second.keys(1, 10)
        assert second.save(keys)
        assert second.load(keys) == 10
        assert second.tiers.close()
        assert first.tiers.close()
        # The first has left: its part is free for the next.
        third = Device(path, "third")
        keys = third.keys(1, 10)
        assert third.tiers.recover(20)
        assert third.save(keys)
        assert third.tiers.drain(20)
        third.tiers.empty_host()
        assert third.tiers.where(keys) == [Tier.DISK] * 10
        assert third.load(keys) == 10
        assert third.tiers.close()


def test_a_node_makes_room_for_one_more_model(tmp_path: Path) -> None:
    with node(tmp_path, dram=20 * MiB, limits=NodeConfig(max_models=2)) as (path, service):
        for number in range(5):
            device = Device(path, f"model {number}")
            assert device.save(device.keys(1, 4))
            assert device.tiers.close()
        assert len(service.describe()["models"]) == 2
        check(service)


def _disk_bytes(folder: Path) -> int:
    paths = [folder, *folder.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in paths)


def test_a_model_whose_books_broke_is_served_while_its_part_of_the_disk_is_taken(
    tmp_path: Path,
) -> None:
    """A client may still copy, so the broken model cannot let go of its folder on disk."""
    disk = tmp_path / "disk"
    with node(tmp_path, disk=disk, limits=NodeConfig(disk_models=2)) as (path, service):
        raw = Raw(path)
        raw.send("save", {"ticket": 1}, pack_keys(KEYS[:1]), pack_slots([Slot(0)]))
        raw.hear("transfer")
        (room,) = service._rooms
        room.offloader.step = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        assert "attach again" in raw.is_refused()
        raw.close()
        device = Device(path)
        keys = device.keys(1, 4)
        assert device.save(keys)
        assert device.load(keys) == 4
        device.tiers.check()
        assert device.tiers.close()
        assert service.num_faults == 1
        service._num_faults = 0
