"""Clients of a node share every block, and give back what they had."""

from __future__ import annotations

from pathlib import Path

from tests.node.node_process import wait_until
from tests.node.nodes import Device, check, node


def test_what_one_client_saves_another_loads(tmp_path: Path) -> None:
    with node(tmp_path) as (path, service):
        one, two = Device(path, name="one"), Device(path, name="two")
        keys = one.keys(1, 20)
        assert one.save(keys)
        assert two.tiers.match(keys).num_blocks == 20
        assert two.load(keys) == 20
        assert one.load(keys) == 20
        one.tiers.check()
        assert one.tiers.close()
        assert two.load(keys) == 20
        assert two.tiers.close()
        wait_until(lambda: not service.describe()["num_clients"], "all have left")
        check(service)
