"""Small helpers: specs, keys, contents that follow from a key, and a whole Offloader to break."""

from __future__ import annotations

import hashlib
import os
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.build import build_offloader
from penstock.clock import ManualClock
from penstock.config import Config, DiskConfig, HostConfig, TransferConfig
from penstock.events import Observer
from penstock.metrics import Metrics
from penstock.stores import folder, slab
from penstock.stores.base import Block
from penstock.stores.host import HostArena
from penstock.types import PAGE_BYTES, BlockKey, BlockSpec, Done, Slot, TicketId, Tier, Verdict

BLOCK_BYTES = 8192
ODD_BLOCK_BYTES = 9001  # not a multiple of a page, nor of a word
TIMEOUT_SECONDS = 20.0  # of everything that should end by itself, and soon


def spec(block_bytes: int = BLOCK_BYTES, namespace: str = "test", tokens: int = 16) -> BlockSpec:
    return BlockSpec(hashlib.sha256(namespace.encode()).digest(), block_bytes, tokens)


def key_of(name: object) -> BlockKey:
    return BlockKey(hashlib.sha256(repr(name).encode()).digest())


def keys_of(num: int, name: str = "") -> list[BlockKey]:
    return [key_of((name, index)) for index in range(num)]


def content(key: BlockKey, num_bytes: int = BLOCK_BYTES) -> bytes:
    """What the block of this name holds, always."""
    return random.Random(key).randbytes(num_bytes)


def slots(*numbers: int) -> list[Slot]:
    return [Slot(number) for number in numbers]


def cap_for(spec: BlockSpec, num_slots: int, slab_bytes: int = slab.SLAB_BYTES) -> int:
    """The smallest cap under which a disk store has this many slots."""
    geometry = slab.Geometry.of(spec, slab_bytes)
    most = num_slots * (spec.stride_bytes + 2 * PAGE_BYTES) + 16 * PAGE_BYTES
    return bisect_left(range(most), num_slots, key=geometry.num_slots)


def folder_cap_for(spec: BlockSpec, num_slots: int) -> int:
    """The smallest `disk.size` under which a namespace alone in its folder has this many slots."""
    return cap_for(spec, num_slots) + folder.FOLDER_BYTES


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        os.fsync(file.fileno())


def file_sizes(directory: Path) -> tuple[int, int]:
    """Bytes that the files say they have, and bytes of disk that they take."""
    stats = [path.stat() for path in directory.rglob("*")]
    return sum(s.st_size for s in stats), sum(s.st_blocks * 512 for s in stats)


class Desk:
    """Blocks in memory, to put into a store and get out of it."""

    def __init__(self, spec: BlockSpec, num: int) -> None:
        self.spec = spec
        self.arena = HostArena(spec, num * spec.stride_bytes)

    def write(self, keys: Sequence[BlockKey], places: Sequence[int]) -> list[Block]:
        """Blocks that hold what their keys say."""
        blocks = self.blank(keys, places)
        for block in blocks:
            block.memory[: self.spec.block_bytes] = content(block.key, self.spec.block_bytes)
        return blocks

    def blank(self, keys: Sequence[BlockKey], places: Sequence[int]) -> list[Block]:
        """Blocks whose memory certainly does not hold what their keys say."""
        blocks = []
        for index, (key, place) in enumerate(zip(keys, places, strict=True)):
            memory = self.arena.view(Slot(index))
            memory[:] = b"\xee" * len(memory)
            blocks.append(Block(key, Slot(place), memory))
        return blocks

    def right(self, block: Block) -> bool:
        return block.memory[: self.spec.block_bytes] == content(block.key, self.spec.block_bytes)


class Rig:
    """An Offloader with a disk below it and a small arena as its device."""

    def __init__(
        self,
        directory: Path,
        *,
        block_spec: BlockSpec | None = None,
        num_device: int = 32,
        num_host: int = 64,
        num_disk: int = 64,
        batch_blocks: int = 32,
        disk: dict[str, Any] | None = None,
        verify: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.spec = block_spec or spec()
        self.directory = directory
        self.num_disk = num_disk
        self.device = HostArena(self.spec, num_device * self.spec.stride_bytes)
        self.metrics = Metrics()
        self.clock = ManualClock()  # nothing expires and no rest ends unless a test says so
        config = Config(
            host=HostConfig(size_bytes=num_host * self.spec.stride_bytes, verify=verify),
            disk=DiskConfig(
                path=str(directory),
                **{"size_bytes": folder_cap_for(self.spec, num_disk), "threads": 2, **(disk or {})},
            ),
            transfer=TransferConfig(batch_bytes=batch_blocks * self.spec.block_bytes),
        )
        self.offloader = build_offloader(
            config, self.spec, self.device, clock=self.clock, observers=[self.metrics, *observers]
        )
        assert self.offloader.recover(TIMEOUT_SECONDS)

    def save(self, keys: Sequence[BlockKey]) -> list[Verdict]:
        """Save through the façade and wait until the copies below have ended too."""
        places = [Slot(index) for index in range(len(keys))]
        for key, place in zip(keys, places, strict=True):
            self.device.view(place)[: self.spec.block_bytes] = content(key, self.spec.block_bytes)
        done = self._done(self.offloader.save(keys, places))
        self.settle()
        return list(done.verdicts)

    def load(self, keys: Sequence[BlockKey]) -> list[Verdict]:
        """Load through the façade. Whatever is called OK must be the block, bit for bit."""
        return list(self.load_done(keys).verdicts)

    def load_done(self, keys: Sequence[BlockKey]) -> Done:
        places = [Slot(index) for index in range(len(keys))]
        for place in places:
            self.device.view(place)[:] = b"\xee" * self.spec.stride_bytes
        done = self._done(self.offloader.load(keys, places))
        self.settle()
        assert len(done.verdicts) == len(keys)
        for key, place, verdict in zip(keys, places, done.verdicts, strict=True):
            if verdict is Verdict.OK:
                held = self.device.view(place)[: self.spec.block_bytes]
                assert held == content(key, self.spec.block_bytes), "the cache lied"
        return done

    def load_cold(self, keys: Sequence[BlockKey]) -> list[Verdict]:
        """Load with nothing in HOST."""
        self.offloader.empty_host()
        return self.load(keys)

    def settle(self) -> None:
        assert self.offloader.drain(TIMEOUT_SECONDS), "something hangs"
        self.offloader.step()  # tells the observers what drain saw last
        self.offloader.check()
        assert self.gauge("penstock_leased_blocks", tier="host") == 0
        assert self.gauge("penstock_leased_blocks", tier="disk") == 0

    def prove_sound(self, keys: Sequence[BlockKey]) -> None:
        """After a fault: the keys can be saved again, lie on disk, and come back bit for bit."""
        self.offloader.empty_host()
        assert self.save(keys) == [Verdict.OK] * len(keys)
        self.offloader.empty_host()
        done = self.load_done(keys)
        assert done.verdicts == (Verdict.OK,) * len(keys)
        assert done.sources == (Tier.DISK,) * len(keys)

    def gauge(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def lost(self, verdict: Verdict, source: Tier, target: Tier) -> float:
        return self.gauge(
            "penstock_lost_blocks_total",
            source=source.label,
            target=target.label,
            direction="load" if target < source else "save",
            verdict=verdict.label,
        )

    @property
    def num_lost(self) -> float:
        """All blocks counted as lost, on whatever way and for whatever reason."""
        return sum(
            sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "penstock_lost_blocks_total"
        )

    @property
    def num_corrupt(self) -> float:
        return self.gauge("penstock_corrupt_blocks_total", tier="disk")

    @property
    def num_failed_saves(self) -> float:
        return self.lost(Verdict.FAILED, Tier.HOST, Tier.DISK)

    @property
    def num_never_written(self) -> float:
        """Blocks that HOST gave up without the disk having them: refused by it, or left alone."""
        return self.num_failed_saves + self.lost(Verdict.DROPPED, Tier.HOST, Tier.DISK)

    @property
    def slab(self) -> Path:
        return slab.slab_path(self.store, 0)

    @property
    def index(self) -> Path:
        return self.store / "index"

    @property
    def store(self) -> Path:
        """Where its namespace lies in the folder."""
        return folder.store_path(self.directory, self.spec.namespace)

    def place_of(self, key: BlockKey) -> int:
        """The slot of the index whose record names this key."""
        data = self.index.read_bytes()
        for start in range(0, len(data), slab.RECORD_BYTES):
            record = slab.unpack_record(data[start : start + slab.RECORD_BYTES])
            if record is not None and record.held and record.key == key:
                return start // slab.RECORD_BYTES
        raise AssertionError("no record names the key")

    def close(self) -> None:
        assert self.offloader.close(TIMEOUT_SECONDS)

    def _done(self, ticket: TicketId) -> Done:
        for done in self.offloader.wait([ticket], TIMEOUT_SECONDS):
            if done.ticket == ticket:
                return done
        raise AssertionError("the ticket never ended")


class Faulty:
    """Stands in for a call of `os` on a descriptor; goes wrong for some files, while `on`."""

    def __init__(self, call: Callable[..., Any], fault: Callable[..., Any], name: str) -> None:
        self.on = True
        self.num_faults = 0
        self._call = call
        self._fault = fault
        self._name = name

    def __call__(self, descriptor: int, *args: Any) -> Any:
        if self.on and Path(_path_of(descriptor)).name.startswith(self._name):
            self.num_faults += 1
            return self._fault(self._call, descriptor, *args)
        return self._call(descriptor, *args)


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
    except OSError:
        return ""
