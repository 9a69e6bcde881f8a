"""A client that starts while its node ends waits for the next node."""

from __future__ import annotations

import gc
import mmap
import socket
import threading
import time
from pathlib import Path

import pytest

from penstock.codecs.blocks import BlockValues, PartValues
from penstock.config import Config, HostConfig, NodeConfig
from penstock.errors import ConfigError
from penstock.node import client_memory, handshake
from penstock.node.attach import NodeOpening
from penstock.node.service import NodeService
from penstock.node.wire import Channel
from penstock.stores.host import HostArena
from penstock.transfer.engine import TransferEngine
from penstock.types import BlockSpec, Tier
from penstock.units import MiB
from tests.node.node_process import wait_until
from tests.node.nodes import BLOCK_BYTES, BLOCK_TOKENS, Device, namespace, node, num_files

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

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

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
        attach(path, 3.0)


def test_clients_that_pack_one_namespace_in_other_forms_do_not_share_dram(tmp_path: Path) -> None:
    """The same bytes of bfloat16 in one piece or in two: packed, they have the same size too."""
    num_bytes = 2 * 6144 * 2

    def values(*stretches: int) -> BlockValues:
        return BlockValues((PartValues(num_bytes, "bfloat16", stretches),), on_gpu=True)

    whole, halves = values(num_bytes), values(num_bytes // 2, num_bytes // 2)
    one, two = (each.open("lossless") for each in (whole, halves))
    assert one.packed_bytes == two.packed_bytes
    assert one.version != two.version
    with node(tmp_path) as (path, _):
        assert (
            Device(path, block_bytes=num_bytes, values=whole).tiers.codecs[Tier.HOST] == "lossless"
        )
        with pytest.raises(ConfigError, match="another form"):
            Device(path, block_bytes=num_bytes, values=halves)
        Device(path, block_bytes=num_bytes, values=whole)


def test_a_client_that_attaches_again_while_the_node_ends_tries_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a node that refuses it is left alone for long."""
    monkeypatch.setattr(handshake, "_REFUSED_RETRY_SECONDS", 1e9)
    path = tmp_path / "node.sock"
    with node(tmp_path):
        device = Device(path)
    dying = Dying(path, 0, 1, 2)
    wait_until(lambda: not _attached(device) and not dying.is_running, "it tries three times")
    dying.wait()
    with node(tmp_path):
        wait_until(lambda: _attached(device), "it attaches again")
        assert device.save(device.keys(1, 4))
        assert device.tiers.close()


@pytest.mark.parametrize("where", ["copies", "memory"])
def test_a_client_that_cannot_use_the_memory_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class Failing(Device):
        def _copies(self, *_: object) -> TransferEngine:
            raise RuntimeError("the device cannot pin it")

    with node(tmp_path) as (path, service):
        Device(path).tiers.close()
        wait_until(lambda: not service.describe()["num_clients"], "it has left")
        gc.collect()
        files = num_files()
        if where == "memory":
            monkeypatch.setattr(client_memory, "_map_seals", lambda place: mmap.mmap(-1, 0))
            with pytest.raises(OSError, match="Invalid argument"):
                Device(path)
        else:
            with pytest.raises(RuntimeError, match="cannot pin"):
                Failing(path)
        wait_until(lambda: not service.describe()["num_clients"], "nothing waits for the process")
        gc.collect()  # mappings have files of their own
        wait_until(lambda: num_files() <= files, "all files are closed")


def test_a_quarantine_reaches_the_node_that_comes_next(tmp_path: Path) -> None:
    path, disk = tmp_path / "node.sock", tmp_path / "disk"
    with node(tmp_path, disk=disk):
        device = Device(path)
    device.tiers.step()
    assert not device.tiers.is_attached
    device.tiers.quarantine()  # the node has written wrong KV to its disk before
    with node(tmp_path, disk=disk):
        other = Device(path)
        assert not other.tiers.is_quarantined
        wait_until(lambda: _attached(device), "it attaches again")
        wait_until(lambda: not _attached(other) or other.tiers.is_quarantined, "it is told")
        assert other.tiers.is_quarantined
    with node(tmp_path, disk=disk):
        assert Device(path).tiers.is_quarantined, "also after a restart"


def test_after_a_restart_without_lower_tiers_only_engines_from_before_load_nothing(
    tmp_path: Path,
) -> None:
    """They do not audit any more, so they must not load either."""
    path = tmp_path / "node.sock"
    with node(tmp_path):
        finder, other = Device(path), Device(path)
        finder.tiers.quarantine()
        wait_until(lambda: not _attached(other) or other.tiers.is_quarantined, "it is told")
        finder.tiers.drain()
    with node(tmp_path):
        fresh = Device(path)
        for device in (finder, other):
            wait_until(lambda device=device: _attached(device), "it attaches again")  # type: ignore[misc]
        keys = fresh.keys(1, 4)
        assert fresh.save(keys)
        assert fresh.load(keys) == 4
        assert not fresh.tiers.is_quarantined
        for device in (finder, other):
            assert device.load(keys) == 0


def _attached(device: Device) -> bool:
    device.tiers.step()
    return device.tiers.is_attached
