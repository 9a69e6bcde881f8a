"""Clients ask a node what its remote store has. No question stays open for ever."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.node import line
from penstock.node.wire import Channel
from penstock.types import LookupId
from servers import is_skipped
from servers.redis_server import WHY_NOT, RedisServer
from tests.node.node_process import NodeProcess, wait_until
from tests.node.nodes import Device

pytestmark = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def node(tmp_path: Path, redis: RedisServer) -> Iterator[NodeProcess]:
    node = NodeProcess(
        *("--socket", tmp_path / "node.sock", "--remote", redis.url),
        *("--set", "remote.lookup_deadline_seconds=60", "--set", "remote.timeout_seconds=60"),
    )
    yield node
    node.end(signal.SIGKILL)


@pytest.fixture
def device(node: NodeProcess) -> Iterator[Device]:
    device = Device(node.path)
    yield device
    device.tiers.close()


def test_a_lookup_whose_end_comes_with_its_answer(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = device.tiers._line
    pause = line.pause

    def oversleep(timeout_seconds: float, instead: Channel | None = None) -> None:
        """As on a busy machine: the store has answered before this process runs again."""
        time.sleep(0.5)
        pause(timeout_seconds, instead)

    monkeypatch.setattr(line, "pause", oversleep)
    for prompt in range(4):  # the store may be slow to answer the first
        assert device.tiers.lookup(device.keys(prompt, 4)) is not None
    wait_until(lambda: not _is_moving(device), "all have ended")


def test_a_node_that_hangs_while_it_looks_up(
    device: Device, node: NodeProcess, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.pause()
    lookup = device.tiers.lookup(device.keys(1, 4))
    assert lookup is not None
    assert _is_open(device, lookup)
    node.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(line, "ANSWER_SECONDS", 1.0)  # as in production
    wait_until(lambda: not _is_open(device, lookup), "nobody waits for it any more")
    node.process.send_signal(signal.SIGCONT)
    redis.resume()
    wait_until(lambda: _asks(device) is not None, "it answers again")
    wait_until(lambda: not _is_moving(device), "all that was asked has ended")


def _is_open(device: Device, lookup: LookupId) -> bool:
    device.tiers.step()
    return device.tiers.is_looking_up(lookup)


def _asks(device: Device) -> LookupId | None:
    device.tiers.step()
    return device.tiers.lookup(device.keys(2, 4))


def _is_moving(device: Device) -> bool:
    device.tiers.step()
    return device.tiers.is_moving
