"""A simulated instance: its sizes, links and rates, and the books built from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.clock import ManualClock
from penstock.config import Config, TransferConfig
from penstock.config.options import EngineOptions
from penstock.costs.rates import LinkRate
from penstock.engine.blocks import BlockPool
from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.offload import Offloader
from penstock.sim.compute import ComputeRates
from penstock.sim.links import LinkSpec, SimulatedLinks
from penstock.sim.replay import new_ledger
from penstock.types import Tier

_GB = 1e9
# Measured on one H200 (PCIe Gen5 x16) and a local NVMe drive. A copy's latency is its submission.
HOST_LINK = LinkSpec(LinkRate(54 * _GB, 30e-6), LinkRate(54 * _GB, 30e-6))
DISK_LINK = LinkSpec(
    LinkRate(2.8 * _GB, 100e-6), LinkRate(1.9 * _GB, 100e-6), num_streams=4, is_duplex=False
)
# Whole batches are copied at once: a simulation does not resolve the gain of smaller parts.
_MIN_TRANSFER_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """One engine with its tiers. Sizes are in blocks; 0 means that there is no such tier."""

    block_tokens: int
    block_bytes: int
    rates: ComputeRates
    num_device_blocks: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    policy: str = Config().host.policy
    host_link: LinkSpec = HOST_LINK
    disk_link: LinkSpec = DISK_LINK
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = EngineOptions().max_num_seqs
    max_waiting: int = EngineOptions().max_waiting
    transfer: TransferConfig = field(default_factory=TransferConfig)
    limits: Limits | None = None  # None: derived from `transfer`
    load_block_bytes: int | None = None  # that a load moves for each block; None: `block_bytes`

    def __post_init__(self) -> None:
        self._check(0, "num_host_blocks", "num_disk_blocks")
        self._check(1, "block_tokens", "block_bytes", "num_device_blocks")
        self._check(1, "max_num_batched_tokens", "max_num_seqs", "max_waiting")
        if self.num_disk_blocks and not self.num_host_blocks:
            raise ConfigError(
                "there is a disk tier and no host tier: every block for the disk passes through "
                "DRAM; give the host tier a size too"
            )

    def _check(self, least: int, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}: expected {least} or more")


@dataclass(frozen=True, slots=True)
class Instance:
    """The real books, with simulated links and a clock that is advanced by hand."""

    config: InstanceConfig
    clock: ManualClock
    pool: BlockPool
    links: SimulatedLinks | None = None
    offloader: Offloader | None = None

    def check(self) -> None:
        self.pool.check()
        if self.offloader is not None:
            self.offloader.check()


def build_instance(config: InstanceConfig, observers: Iterable[Observer] = ()) -> Instance:
    clock, pool = ManualClock(), BlockPool(config.num_device_blocks)
    if not config.num_host_blocks:
        return Instance(config, clock, pool)
    specs = {Tier.HOST: config.host_link}
    lower: dict[Tier, Ledger] = {}
    if config.num_disk_blocks:
        specs[Tier.DISK] = config.disk_link
        lower[Tier.DISK] = new_ledger(config.policy, config.num_disk_blocks)
    stack = TierStack(
        config.block_bytes,
        new_ledger(config.policy, config.num_host_blocks),
        lower,
        config.limits or _limits(config),
    )
    links = SimulatedLinks(
        specs,
        clock,
        config.block_bytes,
        max_queued=config.transfer.queue_transfers,
        load_block_bytes=config.load_block_bytes,
    )
    offloader = Offloader(
        stack,
        links,
        clock,
        block_bytes=config.block_bytes,
        load_deadline_seconds=config.transfer.load_deadline_seconds,
        observers=observers,
    )
    return Instance(config, clock, pool, links, offloader)


def _limits(config: InstanceConfig) -> Limits:
    transfer, block_bytes = config.transfer, config.block_bytes
    batch = max(_MIN_TRANSFER_BLOCKS, transfer.batch_bytes // block_bytes)
    return replace(
        Limits(),
        max_host_blocks=batch,
        max_lower_blocks=batch,
        max_planned_blocks=1 << 30,
        spread_host=False,
        max_pending_loads=transfer.max_pending_loads,
        max_pending_saves=max(1, transfer.max_pending_save_bytes // block_bytes),
    )
