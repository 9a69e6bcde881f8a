"""A client that starts while its node ends waits for the next node."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from penstock.codecs.blocks import BlockValues, PartValues
from penstock.config import Config, HostConfig, NodeConfig
from penstock.errors import ConfigError
from penstock.node.attach import NodeOpening
from penstock.node.service import NodeService
from penstock.node.wire import Channel
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Tier
from penstock.units import MiB
from tests.node.nodes import BLOCK_BYTES, BLOCK_TOKENS, namespace

CONFIG = Config(HostConfig(size_bytes=16 * MiB))
SETTINGS = {
    "codecs": {str(int(Tier.HOST)): "auto"},
    "load_deadline_seconds": 1.0,
    "has_remote": False,
}


class Dying:
    """A node that ends: each connection after the given number of frames."""

    def __init__(self, path: Path, *num_frames: int) -> None:
        self._path, self._num_frames = path, num_frames
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for num_frames in self._num_frames:
            connection, _ = self._listener.accept()
            channel = Channel(connection)
            heard = 0
            while heard < num_frames:
                for frame in channel.receive():
                    heard += 1
                    if frame.kind == "hello":
                        channel.send("settings", SETTINGS)
                        channel.flush()
                time.sleep(0.005)
            channel.close()
        self._listener.close()

    def wait(self) -> None:
        self._thread.join(20)
        self._path.unlink()


def attach(path: Path, wait_seconds: float) -> None:
    opening = NodeOpening(Config(node=NodeConfig(url=f"unix://{path}", wait_seconds=wait_seconds)))
    spec = namespace().block_spec(BLOCK_BYTES)
    device = HostArena(BlockSpec(bytes(32), BLOCK_BYTES, BLOCK_TOKENS), 4 * BLOCK_BYTES)
    tiers = opening.attach(spec, device, BlockValues((PartValues(BLOCK_BYTES),)))
    assert tiers.is_attached
    tiers.check()
    assert tiers.close()


def test_a_node_that_ends_at_any_word_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    dying = Dying(path, 0, 1, 2)  # before hello, after it, after attach
    done: list[bool] = []

    def work() -> None:
        attach(path, 60.0)
        done.append(True)

    client = threading.Thread(target=work)
    client.start()
    dying.wait()
    service = NodeService(CONFIG, path)
    server = threading.Thread(target=service.serve)
    server.start()
    client.join(60)
    service.stop()
    server.join(10)
    service.close()
    assert done
    assert not service.num_faults, "the node failed to serve somebody; see its log"


def test_a_node_that_does_not_come_back_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    Dying(path, 2)
    with pytest.raises(ConfigError, match="no node is listening"):
        attach(path, 0.5)
