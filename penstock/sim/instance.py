"""A simulated instance: its sizes, links and rates, and the books built from them.

A fleet has several instances. Those on one node share its books (`build_books`), and all nodes may
share a remote store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.clock import Clock
from penstock.config import Config, TransferConfig
from penstock.config.options import EngineOptions
from penstock.costs.rates import LinkRate
from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.offload import Offloader
from penstock.sim.compute import ComputeRates
from penstock.sim.links import LinkSpec, SimulatedLinks
from penstock.sim.replay import new_ledger
from penstock.sim.shared_store import SharedStore
from penstock.types import TicketId, Tier

_GB = 1e9
# Measured on one H200 (PCIe Gen5 x16) and a local NVMe drive. A copy's latency is its submission.
HOST_LINK = LinkSpec(LinkRate(54 * _GB, 30e-6), LinkRate(54 * _GB, 30e-6))
DISK_LINK = LinkSpec(
    LinkRate(2.8 * _GB, 100e-6), LinkRate(1.9 * _GB, 100e-6), num_streams=4, is_duplex=False
)
# A network card of 100 Gb/s, most of which a client of a store in memory reaches.
REMOTE_LINK = LinkSpec(LinkRate(10 * _GB, 500e-6), LinkRate(10 * _GB, 500e-6), num_streams=4)
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
    # Bytes that cross each link for each byte of KV: below 1 if a codec packs it.
    host_ratio: float = 1.0
    disk_ratio: float = 1.0
    # A store that all nodes of a fleet share.
    num_remote_blocks: int = 0
    remote_link: LinkSpec = REMOTE_LINK
    remote_ratio: float = 1.0

    def __post_init__(self) -> None:
        self._check(0, "num_host_blocks", "num_disk_blocks", "num_remote_blocks")
        self._check(1, "block_tokens", "block_bytes", "num_device_blocks")
        self._check(1, "max_num_batched_tokens", "max_num_seqs", "max_waiting")
        if self.num_disk_blocks and not self.num_host_blocks:
            raise ConfigError(
                "there is a disk tier and no host tier: every block for the disk passes through "
                "DRAM; give the host tier a size too"
            )
        if self.num_remote_blocks and not self.num_host_blocks:
            raise ConfigError(
                "there is a remote store and no host tier: every block for the store passes "
                "through DRAM; give the host tier a size too"
            )

    def _check(self, least: int, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}: expected {least} or more")


class Books(NamedTuple):
    """The real books, with simulated links."""

    stack: TierStack
    links: SimulatedLinks
    offloader: Offloader


def build_books(
    config: InstanceConfig,
    clock: Clock,
    observers: Iterable[Observer] = (),
    *,
    store: SharedStore | None = None,
    num_devices: int = 1,
    device_of: Callable[[TicketId | None], int] = lambda ticket: 0,
) -> Books | None:
    """The books and links of a node with `num_devices` engines; None if nothing is offloaded."""
    if not config.num_host_blocks:
        return None
    specs = {Tier.HOST: config.host_link}
    lower: dict[Tier, Ledger] = {}
    if config.num_disk_blocks:
        specs[Tier.DISK] = config.disk_link
        lower[Tier.DISK] = new_ledger(config.policy, config.num_disk_blocks)
    if store is not None:
        specs[Tier.REMOTE] = config.remote_link
        # As in `build`: what this node knows of the store.
        num_known = min(Config().remote.max_known_blocks, config.num_remote_blocks)
        lower[Tier.REMOTE] = new_ledger("lru", num_known)
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
        ratios={
            Tier.HOST: config.host_ratio,
            Tier.DISK: config.disk_ratio,
            Tier.REMOTE: config.remote_ratio,
        },
        store=store,
        num_devices=num_devices,
        device_of=device_of,
    )
    offloader = Offloader(
        stack,
        links,
        clock,
        block_bytes=config.block_bytes,
        load_deadline_seconds=config.transfer.load_deadline_seconds,
        observers=observers,
    )
    return Books(stack, links, offloader)


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
