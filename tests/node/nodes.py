"""A node in a thread, and clients with small devices, for tests."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.clock import SystemClock
from penstock.codecs.base import BlockCodec
from penstock.codecs.blocks import BlockValues, PartValues, TierCodecs
from penstock.config import Config, DiskConfig, HostConfig
from penstock.config.settings import NodeConfig
from penstock.keys import Namespace, chain
from penstock.node import line
from penstock.node.client import NodeTiers
from penstock.node.handshake import open_node
from penstock.node.service import NodeService
from penstock.stores.host import HostArena
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import CopyMover
from penstock.transfer.lanes import LaneSpec
from penstock.transfer.seals import Seals
from penstock.types import BlockKey, BlockSpec, Slot, Tier
from penstock.units import MiB
from tests.node.leftovers import at_end

BLOCK_BYTES = 64 << 10
BLOCK_TOKENS = 4


def namespace(model: str = "tiny") -> Namespace:
    return Namespace(model, f"{model}-weights", "bfloat16", "test", BLOCK_TOKENS)


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a node that takes a second to answer does not hang."""
    monkeypatch.setattr(line, "ANSWER_SECONDS", 60.0)


class Device:
    """A client of a node, with a device of its own in plain memory."""

    def __init__(
        self,
        path: Path,
        model: str = "tiny",
        num_slots: int = 64,
        block_bytes: int = BLOCK_BYTES,
        name: str = "",
        values: BlockValues | None = None,
    ) -> None:
        self.namespace = namespace(model)
        self.spec = self.namespace.block_spec(block_bytes)
        device_spec = BlockSpec(bytes(32), block_bytes, BLOCK_TOKENS)
        self.memory = HostArena(device_spec, num_slots * device_spec.stride_bytes)
        values = values or BlockValues((PartValues(block_bytes),))
        channel, settings = open_node(path, 5.0)
        codecs = TierCodecs.choose(settings.codecs, values)
        self.tiers = NodeTiers(
            path, channel, settings, self.spec, values, codecs, self._copies, name=name
        )
        at_end(lambda: self.tiers.abandon(5.0))

    def _copies(
        self, host: HostArena, seals: Seals, codec: BlockCodec, notify: object
    ) -> TransferEngine:
        mover = CopyMover(self.memory, host, seals, codec)
        assert callable(notify)
        return TransferEngine({Tier.HOST: LaneSpec(mover, 2)}, SystemClock(), notify=notify)

    def keys(self, prompt: int, num_blocks: int) -> list[BlockKey]:
        rng = random.Random(prompt)
        return chain(
            self.namespace, (rng.randrange(1000) for _ in range(num_blocks * BLOCK_TOKENS))
        )

    def fill(self, keys: list[BlockKey], first: int = 0) -> list[Slot]:
        """Write each key's own bytes to the device."""
        slots = [Slot(first + n) for n in range(len(keys))]
        for key, slot in zip(keys, slots, strict=True):
            self.memory.view(slot)[:] = content(key, self.memory.stride_bytes)
        return slots

    def holds(self, keys: list[BlockKey], slots: list[Slot]) -> bool:
        size = self.memory.block_bytes
        return all(
            bytes(self.memory.view(slot)[:size]) == content(key, size)
            for key, slot in zip(keys, slots, strict=True)
        )

    def wipe(self) -> None:
        self.memory.buffer[:] = bytes(len(self.memory.buffer))

    def save(self, keys: list[BlockKey], first: int = 0) -> bool:
        ticket = self.tiers.save(keys, self.fill(keys, first))
        (done,) = (d for d in self.tiers.wait([ticket], 10) if d.ticket == ticket)
        return done.ok

    def load(self, keys: list[BlockKey]) -> int:
        """How many leading blocks were loaded. They are compared."""
        self.wipe()
        slots = [Slot(n) for n in range(len(keys))]
        ticket = self.tiers.load(keys, slots)
        (done,) = (d for d in self.tiers.wait([ticket], 15) if d.ticket == ticket)
        num = done.num_leading_ok
        assert self.holds(keys[:num], slots[:num])
        return num


def content(key: BlockKey, num_bytes: int) -> bytes:
    return (key * (num_bytes // len(key) + 1))[:num_bytes]


@contextmanager
def node(
    folder: Path,
    *,
    dram: int = 16 * MiB,
    disk: Path | None = None,
    limits: NodeConfig | None = None,
) -> Iterator[tuple[Path, NodeService]]:
    path = folder / "node.sock"
    config = Config(
        host=HostConfig(size_bytes=dram),
        disk=DiskConfig(path=None if disk is None else str(disk), size_bytes=64 * MiB),
        node=limits or NodeConfig(),
    )
    service = NodeService(config, path)
    thread = threading.Thread(target=service.serve, daemon=True)
    thread.start()
    try:
        yield path, service
    finally:
        service.stop()
        thread.join(10)
        service.close()
        assert not service.num_faults, "the node failed to serve somebody; see its log"


def check(service: NodeService) -> None:
    """Have the node's own thread check its books: in the middle of a step they do not add up."""
    checked: Future[None] = Future()
    step = service.step

    def check_and_step(timeout_seconds: float) -> None:
        service.step = step  # type: ignore[method-assign]
        try:
            checked.set_result(service.check())
        except BaseException as error:
            checked.set_exception(error)
        step(timeout_seconds)

    service.step = check_and_step  # type: ignore[method-assign]
    service.wake()
    checked.result(60)


def num_files() -> int:
    """Compare with <=: what earlier tests left behind may be freed meanwhile."""
    return len(os.listdir("/proc/self/fd"))
