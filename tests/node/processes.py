"""Nodes and clients as processes of their own, to be killed. Run as a program by the tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config import Config, HostConfig
from penstock.node.connection import connect, wait_for_frame
from penstock.node.service import NodeService
from penstock.node.wire import VERSION
from penstock.types import Slot
from penstock.units import MiB
from tests.node.leftovers import at_end, end_process
from tests.node.nodes import Device, content, num_files

ROOT = Path(__file__).parents[2]


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.node.processes", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)
    at_end(lambda: end_process(process))
    return process


def start_node(path: Path, dram: int = 16 * MiB) -> subprocess.Popen[str]:
    process = start("node", str(path), str(dram))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def node_process(folder: Path, dram: int = 16 * MiB) -> Iterator[Path]:
    path = folder / "node.sock"
    process = start_node(path, dram)
    try:
        yield path
    finally:
        process.terminate()
        assert process.wait(20) == 0, "the node did not stop, or ended with an error"
        if process.stdout is not None:
            process.stdout.close()


def start_client(path: Path, name: str, seed: int, manner: str = "") -> subprocess.Popen[str]:
    """Uses the node at random and compares every byte, until its input ends."""
    return start("client", str(path), name, str(seed), manner, stdin=subprocess.PIPE)


def end_client(process: subprocess.Popen[str]) -> list[int]:
    """Ask a client to end; returns its counts: operations, blocks loaded, further sessions."""
    assert process.stdin is not None
    process.stdin.close()
    assert process.stdout is not None
    answer = process.stdout.read()
    assert process.wait(60) == 0, answer
    process.stdout.close()
    return [int(word) for word in answer.split()]


def kill(process: subprocess.Popen[str]) -> None:
    end_process(process)


def describe(path: Path) -> dict[str, Any]:
    channel = connect(path, 5.0)
    channel.send("describe", {"protocol": VERSION})
    try:
        return dict(wait_for_frame(channel, 10.0).fields)
    finally:
        channel.close()


def await_clients(path: Path, names: set[str]) -> dict[str, Any]:
    """Wait until a node has only these clients, and nothing of others."""
    deadline = time.monotonic() + 20
    while True:
        description = describe(path)
        there = {name for model in description["models"] for name in model["clients"]}
        if there == names or time.monotonic() > deadline:
            assert there == names
            return description
        time.sleep(0.05)


def _run_node(path: str, dram: str) -> None:
    service = NodeService(Config(host=HostConfig(size_bytes=int(dram))), Path(path))
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    print("ready", flush=True)
    service.serve()
    service.check()
    assert service.close()
    assert not service.num_faults, "the node failed to serve somebody; see its log"


def _num_mappings() -> int:
    """Of memory that nodes share."""
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def _run_client(path: str, name: str, seed: str, manner: str) -> None:
    rng = random.Random(int(seed))
    device = Device(Path(path), name=name, num_slots=96)
    tiers = device.tiers
    prompts = [device.keys(prompt, 24) for prompt in range(40)]
    num_operations = num_loaded = num_attached = 0
    os.set_blocking(0, False)
    files, mappings = num_files(), _num_mappings()
    token = tiers.place.token
    print("ready", flush=True)
    pins: list[Slot] = []
    while not _has_ended():
        num_operations += 1
        keys = rng.choice(prompts)[: rng.randint(1, 24)]
        match rng.randrange(6):
            case 0 | 1:
                ticket = tiers.save(keys, device.fill(keys))
                _wait(device, ticket)
            case 2 | 3:
                num_loaded += device.load(keys)
            case 4:
                slots = tiers.pin(keys)
                for key, slot in zip(keys, slots, strict=True):
                    if slot is not None:
                        size = device.memory.block_bytes
                        found = bytes(tiers.read_host(slot)[:size])
                        assert found == content(key, size), "a pinned block has other bytes"
                taken = [slot for slot in slots if slot is not None]
                if manner == "pins" and len(pins) < 64:
                    pins += taken
                else:
                    tiers.unpin(taken)
            case _:
                tiers.match(keys)
                tiers.lookup(keys)
        num_attached += tiers.place.token != token
        token = tiers.place.token
        if not tiers.is_attached:
            tiers.unpin(pins)
            pins = []
            tiers.pause(0.02)
    tiers.unpin(pins)
    deadline = time.monotonic() + 60
    while not tiers.is_attached and time.monotonic() < deadline:
        tiers.step()
        tiers.pause(0.05)
    num_attached += tiers.place.token != token
    # It works at the end, however busy the machine was before.
    while not num_loaded and time.monotonic() < deadline:
        _wait(device, tiers.save(prompts[0], device.fill(prompts[0])))
        num_loaded += device.load(prompts[0])
    tiers.check()
    assert num_files() <= files + 1, "descriptors leak"
    assert _num_mappings() <= mappings + 1, "mappings leak"
    assert tiers.close()
    print(num_operations, num_loaded, num_attached, flush=True)


def _has_ended() -> bool:
    """Whether the input has ended, and with it this client's work."""
    try:
        return os.read(0, 1) == b""
    except BlockingIOError:
        return False


def _wait(device: Device, ticket: Any) -> None:
    began = time.monotonic()
    while not any(done.ticket == ticket for done in device.tiers.wait([ticket], 1.0)):
        assert time.monotonic() - began < 30, "a save never ends"


if __name__ == "__main__":
    {"node": _run_node, "client": _run_client}[sys.argv[1]](*sys.argv[2:])
