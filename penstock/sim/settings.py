"""A user's settings for a simulation: tier sizes in GiB or blocks, and hardware by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from penstock.codecs.names import AUTO
from penstock.costs.rates import LinkRate
from penstock.errors import ConfigError
from penstock.shapes.packing import Packing, pack_tiers
from penstock.shapes.sizing import ModelShape, find_shape
from penstock.sim.block_sizes import BlockSizes, block_sizes, plain_sizes
from penstock.sim.compute import ComputeRates, rates_of
from penstock.sim.instance import DISK_LINK, HOST_LINK, InstanceConfig
from penstock.sim.links import LinkSpec
from penstock.sim.replay import check_policy
from penstock.sim.sweep import Point
from penstock.sim.trace import Trace
from penstock.types import Tier
from penstock.units import GiB, format_bytes

_SOME_TOKENS = 16  # of a block, to check codecs before a trace is read
_SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0)
_MAX_SIZE = 1e12
_GB = 1e9

Sizes = dict[str, float]
"""Sizes by tier, in the user's unit. 0 means that there is no such tier."""


@dataclass(frozen=True, slots=True)
class Room:
    """The sizes to try for each tier, all in GiB or all in blocks."""

    unit: str  # "GiB" or "blocks"
    device: tuple[float, ...]
    host: tuple[float, ...]
    disk: tuple[float, ...]

    @property
    def is_timed(self) -> bool:
        return any(self.device)

    @classmethod
    def read(
        cls,
        in_gib: Mapping[str, str | None],
        in_blocks: Mapping[str, str | None],
        *,
        with_sweep: bool = False,
    ) -> Room:
        """Parse comma-separated lists, as given in options. Raises ConfigError."""
        gib = [f"--{tier}-gib" for tier, text in in_gib.items() if text is not None]
        blocks = [f"--{tier}-blocks" for tier, text in in_blocks.items() if text is not None]
        if gib and blocks:
            raise ConfigError(
                f"both {gib[0]} and {blocks[0]} are given: give all sizes in GiB, or all in blocks"
            )
        unit = "blocks" if blocks else "GiB"
        given = {
            tier: _numbers(f"--{tier}-{unit.lower()}", text, whole=unit == "blocks")
            for tier, text in (in_blocks if blocks else in_gib).items()
        }
        room = cls(unit, given["device"], given["host"], given["disk"])
        if not (any(room.host) or any(room.device)):
            raise ConfigError("no size is given: give --host-gib, --host-blocks or --device-gib")
        if any(room.disk) and not room.is_timed:
            raise ConfigError(
                "a disk tier is given, but no --device-gib: without a device pool only the hit "
                "rate of a single tier is replayed; give the disk's size as --host-gib, or add a "
                "device pool"
            )
        if any(room.disk) and not all(room.host):
            raise ConfigError(
                "a disk tier is given, but no host tier: KV on its way to the disk passes through "
                "DRAM; give --host-gib too"
            )
        if not with_sweep:
            return room
        if len(room.host) != 1 or not room.host[0]:
            raise ConfigError("--sweep widens one size of the host tier: give exactly one")
        host = room.host[0]
        widened = tuple(dict.fromkeys(_part(host, factor, unit) for factor in _SWEEP))
        return replace(room, host=widened)

    def all_sizes(self) -> list[Sizes]:
        return [
            {"device": device, "host": host, "disk": disk}
            for device, disk, host in product(self.device, self.disk, self.host)
        ]


@dataclass(frozen=True, slots=True)
class SimulatedHardware:
    """The GPU and its links. Rates that are not given come from the GPU catalogue."""

    model: str
    gpu: str
    num_gpus: int = 1
    prefill_tokens_per_second: float | None = None
    host_gb_per_second: float | None = None
    disk_load_gb_per_second: float | None = None
    disk_save_gb_per_second: float | None = None
    max_batched_tokens: int = 8192
    max_num_seqs: int = 64
    max_waiting: int = 256
    host_codec: str = AUTO
    disk_codec: str = AUTO

    def check(self, policies: Sequence[str], speed: float) -> None:
        """Raise ConfigError if any setting is invalid."""
        self.packings(_SOME_TOKENS)
        for name in policies:
            check_policy(name)
        if not 0 < speed < math.inf:
            raise ConfigError(f"--speed is {speed}: expected a number above 0")
        self.rates()

    @property
    def shape(self) -> ModelShape:
        return find_shape(self.model)

    def packings(self, block_tokens: int) -> dict[Tier, Packing]:
        """How the tiers pack KV in blocks of that many tokens."""
        return pack_tiers(
            self.shape,
            {Tier.HOST: self.host_codec, Tier.DISK: self.disk_codec},
            block_tokens,
            num_gpus=self.num_gpus,
            setting="--{tier}-codec",
        )

    def rates(
        self, context_token_bytes: float | None = None
    ) -> tuple[ComputeRates, LinkSpec, LinkSpec]:
        """The rates of computing, of the link to DRAM, and of the link to the disk."""
        from penstock.shapes.catalog import find_gpu
        from penstock.shapes.gpu_rates import rates_from_table, with_prefill

        table = rates_from_table(find_gpu(self.gpu), self.num_gpus, self.shape)
        if self.prefill_tokens_per_second is not None:
            table = with_prefill(table, self.prefill_tokens_per_second)
        host = _rate("--host-link-gb-per-second", self.host_gb_per_second)
        host = host or table.links[Tier.HOST].rate.bytes_per_second
        load = _rate("--disk-load-gb-per-second", self.disk_load_gb_per_second)
        load = load or table.links[Tier.DISK].rate.bytes_per_second
        save = _rate("--disk-save-gb-per-second", self.disk_save_gb_per_second)
        save = save or DISK_LINK.save.bytes_per_second
        return (
            rates_of(self.shape, table, context_token_bytes),
            replace(HOST_LINK, load=_with(HOST_LINK.load, host), save=_with(HOST_LINK.save, host)),
            replace(DISK_LINK, load=_with(DISK_LINK.load, load), save=_with(DISK_LINK.save, save)),
        )

    def instance(
        self,
        block_tokens: int,
        policy: str,
        device: int,
        host: int,
        disk: int,
        sizes: BlockSizes | None = None,
    ) -> InstanceConfig:
        """Tiers of that many blocks. Without `sizes`, every layer counts every token."""
        sizes = sizes or plain_sizes(self.shape, block_tokens)
        packings = self.packings(block_tokens)
        rates, host_link, disk_link = self.rates(sizes.device_bytes / block_tokens)
        return InstanceConfig(
            block_tokens,
            sizes.tier_bytes,
            rates,
            device,
            host,
            disk,
            policy,
            host_link,
            disk_link,
            self.max_batched_tokens,
            self.max_num_seqs,
            self.max_waiting,
            load_block_bytes=sizes.load_bytes,
            host_ratio=packings[Tier.HOST].ratio,
            disk_ratio=packings[Tier.DISK].ratio,
        )

    def facts(self, *, is_timed: bool, block_tokens: int = _SOME_TOKENS) -> dict[str, Any]:
        common: dict[str, Any] = {
            "model": self.model,
            "kv_bytes_per_token": self.shape.bytes_per_token,
            "growing_bytes_per_token": self.shape.full_bytes_per_token,
            "checkpoint_bytes": self.shape.checkpoint_bytes(),
            "is_timed": is_timed,
            "codecs": {
                tier.label: {
                    "codec": packing.codec,
                    "ratio": packing.ratio,
                    "is_lossy": packing.is_lossy,
                    "why": packing.why,
                }
                for tier, packing in self.packings(block_tokens).items()
                if tier is not Tier.REMOTE  # not simulated
            },
        }
        if not is_timed:
            return common
        rates, host, disk = self.rates()
        return common | {
            "gpu": self.gpu,
            "num_gpus": self.num_gpus,
            "rates": {
                "prefill_tokens_per_second": rates.prefill.tokens_per_second,
                "prefill_quadratic_seconds_per_token2": rates.prefill.quadratic_seconds_per_token2,
                "prefill_fixed_seconds": rates.prefill.fixed_seconds,
                "decode_base_seconds": rates.decode.base_seconds,
                "decode_context_token_seconds": rates.decode.context_token_seconds,
                "host_bytes_per_second": host.load.bytes_per_second,
                "disk_load_bytes_per_second": disk.load.bytes_per_second,
                "disk_save_bytes_per_second": disk.save.bytes_per_second,
            },
        }


Hardware = SimulatedHardware  # the name before 0.1; kept for one release


def plan_points(
    traces: Sequence[Trace],
    room: Room,
    policies: Sequence[str],
    hardware: SimulatedHardware,
    speed: float = 1.0,
) -> tuple[list[Point], list[Sizes]]:
    """A point for every trace, policy and set of sizes, and those sizes in the user's unit."""
    points: list[Point] = []
    asked: list[Sizes] = []
    blocks = [block_sizes(hardware.shape, trace) for trace in traces]
    packings = [hardware.packings(trace.block_tokens) for trace in traces]
    for (number, trace), policy, sizes in product(enumerate(traces), policies, room.all_sizes()):
        block, packed = blocks[number], packings[number]
        device, host, disk = (
            num_blocks_of(f"--{tier}-{room.unit.lower()}", sizes[tier], room.unit, block_bytes)
            for tier, block_bytes in (
                ("device", block.device_bytes),
                ("host", packed[Tier.HOST].slot_bytes(block.tier_bytes)),
                ("disk", packed[Tier.DISK].slot_bytes(block.tier_bytes)),
            )
        )
        instance = None
        if room.is_timed:
            instance = hardware.instance(trace.block_tokens, policy, device, host, disk, block)
        points.append(
            Point(number, policy, device if room.is_timed else None, host, disk, instance, speed)
        )
        asked.append(sizes)
    return points, asked


def _numbers(option: str, text: str | None, *, whole: bool) -> tuple[float, ...]:
    if text is None:
        return (0.0,)
    kind = "integer numbers of blocks" if whole else "numbers of GiB"
    found: list[float] = []
    for part in text.split(","):
        try:
            number = float(int(part) if whole else float(part))
        except (ValueError, OverflowError):
            number = math.nan
        if not 0 <= number <= _MAX_SIZE:
            raise ConfigError(f"{option} is {text[:80]!r}: expected comma-separated {kind}")
        found.append(number)
    return tuple(dict.fromkeys(found))


def num_blocks_of(option: str, size: float, unit: str, block_bytes: int) -> int:
    """How many blocks a size in `unit` is. Raises ConfigError if it is less than one."""
    if unit == "blocks" or not size:
        return int(size)
    if not (num_blocks := int(size * GiB // block_bytes)):
        raise ConfigError(
            f"{option} is {size:g}: expected room for at least one block, which has "
            f"{format_bytes(block_bytes)} for this trace and model; raise it, or lower "
            "--block-tokens"
        )
    return num_blocks


def _part(size: float, factor: float, unit: str) -> float:
    return max(1.0, float(round(size * factor))) if unit == "blocks" else size * factor


def _rate(option: str, gb_per_second: float | None) -> float | None:
    if gb_per_second is None:
        return None
    if not 0 < gb_per_second < math.inf:
        raise ConfigError(f"{option} is {gb_per_second}: expected a number above 0")
    return gb_per_second * _GB


def _with(rate: LinkRate, bytes_per_second: float) -> LinkRate:
    return LinkRate(bytes_per_second, rate.latency_seconds)
