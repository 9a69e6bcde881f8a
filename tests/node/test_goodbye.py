"""A client ends while its node hangs: what it had is given back all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.node import line
from tests.node.nodes import Device
from tests.node.processes import await_clients, describe, node_process, start_node


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    pid = describe(path)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(line, "ANSWER_SECONDS", 1.0)  # as in production
            yield
    finally:
        os.kill(pid, signal.SIGCONT)


def fill_socket(device: Device) -> None:
    """Until the node's side takes no more."""
    channel = device.tiers._line._channel
    assert channel is not None
    while not channel.has_unsent:
        channel.send("used", {"tenant": ""}, bytes(32 * 1000))
        channel.flush()


def pinned(description: dict[str, Any]) -> int:
    (model,) = description["models"]
    return int(model["pinned"])


def test_a_client_that_could_not_say_goodbye_is_ended_by_the_next_one(tmp_path: Path) -> None:
    with node_process(tmp_path) as path:
        first = Device(path, name="first")
        keys = first.keys(1, 8)
        assert first.save(keys)
        assert None not in first.tiers.pin(keys)
        with hanging(path):
            fill_socket(first)
            assert first.tiers.close(), "its own copies have ended"
        # This process lives, so the node cannot know whether it still reads the pinned blocks.
        assert pinned(await_clients(path, {"first"})) == 8
        second = Device(path, name="second")
        assert pinned(await_clients(path, {"second"})) == 0
        assert second.load(keys) == 8
        second.tiers.check()
        assert second.tiers.close()
        await_clients(path, set())


def test_a_goodbye_waits_a_moment_for_a_full_socket(tmp_path: Path) -> None:
    with node_process(tmp_path) as path:
        device = Device(path, name="first")
        with hanging(path):
            fill_socket(device)
        assert device.tiers.close()
        await_clients(path, set())


def test_tokens_of_a_node_that_is_gone_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    node = start_node(path)
    first = Device(path, name="first")
    node.kill()
    node.wait()
    assert first.tiers.close()
    start_node(path)
    second = Device(path, name="second")
    assert second.save(second.keys(1, 4))
    assert second.load(second.keys(1, 4)) == 4
    second.tiers.check()
    assert second.tiers.close()
