"""The composition root: settings in, a running Offloader out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.books.write_gate import DAY_SECONDS, WriteGate
from penstock.clock import Clock, SystemClock
from penstock.config import Config, RemoteConfig, TransferConfig
from penstock.events import Observer
from penstock.offload import Offloader
from penstock.policies import POLICIES
from penstock.stores.base import Arena, Incident
from penstock.stores.disk_folder import DiskFolder
from penstock.stores.host import ArenaHandle, HostArena
from penstock.stores.preflight import (
    check_block,
    check_delegated,
    check_tiers,
    remote_secret,
    warnings,
)
from penstock.stores.remotes import batch_bytes, headroom_bytes, open_remote, threads_for
from penstock.transfer.base import Transfers
from penstock.transfer.delegate import DelegatingEngine
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import CopyMover, Mover, StoreMover
from penstock.transfer.lanes import LaneSpec
from penstock.transfer.recovery import Recovery
from penstock.transfer.seals import Seals
from penstock.types import BlockSpec, Tier

log = logging.getLogger(__name__)


def build_offloader(
    config: Config,
    spec: BlockSpec,
    device: Arena,
    *,
    clock: Clock | None = None,
    observers: Iterable[Observer] = (),
    device_mover: Callable[[HostArena, Seals], Mover] | None = None,
) -> Offloader:
    """Build all tiers that `config` names, for blocks of `spec`, below the host's own `device`.

    `device_mover` copies between HOST and a device whose memory the processor cannot address.
    Raises ConfigError, Locked, Foreign or Full if a tier cannot be had; then nothing is left open.
    """
    check_tiers(config)
    check_block(config, spec)
    host = _host(config, spec)
    seals = Seals(host, checksums=config.host.verify)
    mover = CopyMover(device, host, seals) if device_mover is None else device_mover(host, seals)
    lanes = {Tier.HOST: LaneSpec(mover, config.transfer.copy_threads)}
    limits = _limits(config.transfer, config.remote, spec)
    if mover.max_ahead is not None:
        limits = _for_gpu(limits)
    return _assemble(
        config, spec, host, seals, lanes, lambda engine: engine, limits, clock, observers
    )


@dataclass(frozen=True, slots=True)
class Delegated:
    """Tiers whose device belongs to other processes: they copy what `engine` has them told."""

    offloader: Offloader
    engine: DelegatingEngine
    arena: ArenaHandle


def build_delegated(
    config: Config,
    spec: BlockSpec,
    num_workers: int,
    *,
    shared: bool = True,
    clock: Clock | None = None,
    observers: Iterable[Observer] = (),
) -> Delegated:
    """As `build_offloader`, with DRAM that `num_workers` other processes share.

    A block holds one part from each of them. Not `shared`, they live in this process.
    """
    check_delegated(config)
    check_tiers(config)
    check_block(config, spec)
    host = _host(config, spec, shared=shared)
    seals = Seals(host, memory=host.seals)
    delegates: list[DelegatingEngine] = []

    def delegate(below: TransferEngine) -> DelegatingEngine:
        delegates.append(DelegatingEngine(below, seals, num_workers))
        return delegates[0]

    limits = _in_one(_limits(config.transfer, config.remote, spec))
    offloader = _assemble(config, spec, host, seals, {}, delegate, limits, clock, observers)
    return Delegated(offloader, delegates[0], host.handle)


def _host(config: Config, spec: BlockSpec, *, shared: bool = False) -> HostArena:
    return HostArena(
        spec,
        config.host.size_bytes,
        huge_pages=config.host.huge_pages,
        numa_node=config.host.numa_node,
        shared=shared,
        headroom_bytes=headroom_bytes(config.remote.url),
    )


def _assemble(
    config: Config,
    spec: BlockSpec,
    host: HostArena,
    seals: Seals,
    lanes: dict[Tier, LaneSpec],
    wrap: Callable[[TransferEngine], Transfers],
    limits: Limits,
    clock: Clock | None,
    observers: Iterable[Observer],
) -> Offloader:
    clock = clock or SystemClock()
    lower: dict[Tier, Ledger] = {}
    gates: dict[Tier, WriteGate] = {}
    recoveries = []
    incidents: dict[Tier, Callable[[], list[Incident]]] = {}
    with ExitStack() as opened:
        if config.disk.path is not None:
            disk = DiskFolder(
                Path(config.disk.path),
                spec,
                config.disk.size_bytes,
                read_only=config.disk.read_only,
                direct=config.disk.direct,
            )
            opened.callback(disk.close)
            policy = POLICIES[config.disk.policy](disk.num_slots)
            lower[Tier.DISK] = Ledger(disk.num_slots, policy, recovering=True)
            lanes[Tier.DISK] = LaneSpec(StoreMover(host, disk, seals), config.disk.threads)
            recoveries.append(Recovery(Tier.DISK, disk, disk.num_slots))
            incidents[Tier.DISK] = disk.take_incidents
            gates[Tier.DISK] = WriteGate(
                spec.block_bytes,
                from_second_use=config.disk.admit == "second-use",
                max_bytes_per_day=config.disk.write_per_day_bytes,
            )
        if config.remote.url is not None:
            for sentence in warnings(config):
                log.warning("%s", sentence)
            remote = open_remote(config.remote, spec, secret=remote_secret())
            opened.callback(remote.close)
            remote.client.register(host)
            known = config.remote.max_known_blocks
            lower[Tier.REMOTE] = Ledger(known, POLICIES["lru"](known))
            lanes[Tier.REMOTE] = LaneSpec(
                StoreMover(host, remote, seals), threads_for(config.remote), remote.exists
            )
            gates[Tier.REMOTE] = _remote_gate(config.remote, spec)
        read_only = {Tier.DISK: config.disk.read_only, Tier.REMOTE: config.remote.read_only}
        stack = TierStack(
            spec.block_bytes,
            Ledger(host.num_slots, POLICIES[config.host.policy](host.num_slots)),
            lower,
            replace(
                limits,
                lookup_deadline_seconds=config.remote.lookup_deadline_seconds,
                retain_share=config.host.retain_share,
            ),
            read_only=frozenset(tier for tier, is_so in read_only.items() if is_so),
            gates=gates,
        )
        return Offloader(
            stack,
            wrap(TransferEngine(lanes, clock, max_queued=config.transfer.queue_transfers)),
            clock,
            block_bytes=spec.block_bytes,
            load_deadline_seconds=config.transfer.load_deadline_seconds,
            seals=seals,
            host=host,
            recoveries=recoveries,
            incidents=incidents,
            observers=observers,
            close_stores=opened.pop_all().close,
        )


def _remote_gate(remote: RemoteConfig, spec: BlockSpec) -> WriteGate:
    return WriteGate(
        spec.block_bytes,
        from_second_use=remote.admit == "second-use",
        max_bytes_per_day=remote.write_per_day_bytes,
        max_bytes_per_tenant=remote.tenant_size_bytes,
        tenant_seconds=remote.ttl_seconds or DAY_SECONDS,
    )


def _remote_blocks(remote: RemoteConfig, spec: BlockSpec) -> int | None:
    size = None if remote.url is None else batch_bytes(remote.url)
    return None if size is None else max(1, size // spec.block_bytes)


def _limits(transfer: TransferConfig, remote: RemoteConfig, spec: BlockSpec) -> Limits:
    return Limits(
        max_host_blocks=max(1, transfer.batch_bytes // spec.block_bytes),
        max_lower_blocks=max(1, transfer.batch_bytes // 2 // spec.block_bytes),
        max_remote_blocks=_remote_blocks(remote, spec),
        max_pending_loads=transfer.max_pending_loads,
        max_pending_saves=max(1, transfer.max_pending_save_bytes // spec.block_bytes),
    )


def _for_gpu(limits: Limits) -> Limits:
    """Its link is so fast that ending a transfer and beginning the next would be felt."""
    most = 4 * limits.max_host_blocks
    planned = max(limits.max_planned_blocks, most)
    return replace(limits, max_host_blocks=most, max_planned_blocks=planned, spread_host=False)


def _in_one(limits: Limits) -> Limits:
    """Workers take what they are told in one go: nothing is gained by parts.

    What they save is reported some steps later, when gigabytes more have been computed; HOST's
    own size is the bound.
    """
    whole = 1 << 30
    return replace(
        limits,
        max_host_blocks=whole,
        max_planned_blocks=whole,
        max_pending_saves=whole,
        spread_host=False,
    )
