"""Clients and nodes are killed at any point, under load: nobody else notices, no byte is wrong."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.node.nodes import Device
from tests.node.processes import (
    await_clients,
    end_client,
    kill,
    node_process,
    start_client,
    start_node,
)


def wait_until_ready(client: subprocess.Popen[str]) -> None:
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"


@pytest.mark.parametrize("num_kills", [4, 100], ids=["short", "long"])
def test_clients_are_killed_at_every_point(tmp_path: Path, num_kills: int) -> None:
    rng = random.Random(num_kills)
    with node_process(tmp_path) as path:
        living = [start_client(path, f"living {n}", n) for n in range(2)]
        for client in living:
            wait_until_ready(client)
        for number in range(num_kills):
            victim = start_client(path, f"victim {number}", 100 + number, "pins")
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.5)  # perhaps before it attaches
            else:
                wait_until_ready(victim)
                time.sleep(rng.random() * 0.3)
            kill(victim)
        description = await_clients(path, {"living 0", "living 1"})
        counts = [end_client(client) for client in living]
        assert all(loaded > 0 for _, loaded, _ in counts)
        assert all(attached == 0 for _, _, attached in counts), "the node was gone in between"
        # Nothing of the dead is left: every slot can be used again.
        after = Device(path, name="after", num_slots=256)
        (model,) = await_clients(path, {"after"})["models"]
        assert model["pinned"] == 0
        assert model["blocks"] == description["models"][0]["blocks"]
        keys = after.keys(12345, model["blocks"])
        assert after.save(keys)
        assert after.load(keys) == len(keys)
        after.tiers.check()
        assert after.tiers.close()


@pytest.mark.parametrize("num_kills", [3, 100], ids=["short", "long"])
def test_a_node_is_killed_stopped_and_restarted(tmp_path: Path, num_kills: int) -> None:
    rng = random.Random(num_kills)
    path = tmp_path / "node.sock"
    node = start_node(path)
    clients = [start_client(path, f"client {n}", n, "pins") for n in range(3)]
    for client in clients:
        wait_until_ready(client)
    for number in range(num_kills):
        time.sleep(rng.random() * (1.5 if num_kills < 10 else 0.8))
        match number % 3:
            case 0:
                kill(node)
            case 1:
                node.send_signal(signal.SIGSTOP)
                time.sleep(rng.random() * 2)
                node.send_signal(signal.SIGCONT)
                continue
            case _:
                node.terminate()
                assert node.wait(20) == 0
                assert node.stdout is not None
                node.stdout.close()
        time.sleep(rng.random() * 0.3)
        node = start_node(path)
    counts = [end_client(client) for client in clients]
    assert all(attached > 0 for _, _, attached in counts)
    assert all(loaded > 0 for _, loaded, _ in counts)
    node.terminate()
    assert node.wait(20) == 0
    assert node.stdout is not None
    node.stdout.close()


def test_a_client_is_stopped_in_the_middle(tmp_path: Path) -> None:
    """Its slots stay its own, others go on, and when it continues no byte is wrong."""
    with node_process(tmp_path) as path:
        stopped = start_client(path, "stopped", 1, "pins")
        living = start_client(path, "living", 2)
        for client in (stopped, living):
            wait_until_ready(client)
        for _ in range(3):
            time.sleep(0.2)
            stopped.send_signal(signal.SIGSTOP)
            time.sleep(0.4)
            stopped.send_signal(signal.SIGCONT)
        for client in (stopped, living):
            operations, loaded, _ = end_client(client)
            assert operations > 0
            assert loaded > 0
