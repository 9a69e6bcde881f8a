"""Builds an Offloader from settings: opens the tiers and puts books and transfers together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.books.write_gate import DAY_SECONDS, WriteGate
from penstock.clock import Clock, SystemClock
from penstock.config import Config
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
    """Build all tiers in `config`, for blocks of `spec`, below the client's own `device`.

    `device_mover` copies between HOST and a device whose memory the CPU cannot address.
    Raises ConfigError, Locked, Foreign or Full if a tier cannot be opened, and then leaves nothing
    open.
    """
    _check(config, spec)
    clock = clock or SystemClock()
    host = _host(config, spec)
    seals = Seals(host, checksums=config.host.verify)
    mover = CopyMover(device, host, seals) if device_mover is None else device_mover(host, seals)
    limits = _limits(config, spec)
    if mover.max_ahead is not None:
        limits = _for_gpu(limits)
    with _open_tiers(config, spec, host, seals, limits) as tiers:
        device_lane = LaneSpec(mover, config.transfer.copy_threads)
        tiers.lanes = {Tier.HOST: device_lane, **tiers.lanes}
        return _offloader(tiers, _engine(tiers, clock), clock, observers)


@dataclass(frozen=True, slots=True)
class Delegated:
    """Tiers for a device that belongs to other processes, which carry out `engine`'s copies."""

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
    """Build all tiers as `build_offloader` does, with DRAM shared by `num_workers` processes.

    A block holds one part per worker. Pass `shared=False` if they run in this process.
    """
    check_delegated(config)
    _check(config, spec)
    clock = clock or SystemClock()
    host = _host(config, spec, shared=shared)
    seals = Seals(host, memory=host.seals)
    with _open_tiers(config, spec, host, seals, _in_one(_limits(config, spec))) as tiers:
        engine = DelegatingEngine(_engine(tiers, clock), seals, num_workers)
        return Delegated(_offloader(tiers, engine, clock, observers), engine, host.handle)


def _check(config: Config, spec: BlockSpec) -> None:
    check_tiers(config)
    check_block(config, spec)


def _host(config: Config, spec: BlockSpec, *, shared: bool = False) -> HostArena:
    return HostArena(
        spec,
        config.host.size_bytes,
        huge_pages=config.host.huge_pages,
        numa_node=config.host.numa_node,
        shared=shared,
        headroom_bytes=headroom_bytes(config.remote.url),
    )


@dataclass(slots=True)
class _Tiers:
    """The tiers below the device while an Offloader is being built from them."""

    config: Config
    spec: BlockSpec
    host: HostArena
    seals: Seals
    limits: Limits
    opened: ExitStack  # closes the stores
    ledgers: dict[Tier, Ledger] = field(default_factory=dict)  # of the tiers below HOST
    gates: dict[Tier, WriteGate] = field(default_factory=dict)
    lanes: dict[Tier, LaneSpec] = field(default_factory=dict)
    incidents: dict[Tier, Callable[[], list[Incident]]] = field(default_factory=dict)
    recovery: Recovery | None = None


@contextmanager
def _open_tiers(
    config: Config, spec: BlockSpec, host: HostArena, seals: Seals, limits: Limits
) -> Iterator[_Tiers]:
    """Open the stores below HOST. Closes them at exit, unless `_offloader` has taken them over."""
    with ExitStack() as opened:
        tiers = _Tiers(config, spec, host, seals, limits, opened)
        if config.disk.path is not None:
            _open_disk(tiers, Path(config.disk.path))
        if config.remote.url is not None:
            _open_remote(tiers)
        yield tiers


def _open_disk(tiers: _Tiers, directory: Path) -> None:
    settings, spec = tiers.config.disk, tiers.spec
    disk = DiskFolder(
        directory,
        spec,
        settings.size_bytes,
        read_only=settings.read_only,
        direct=settings.direct,
    )
    tiers.opened.callback(disk.close)
    policy = POLICIES[settings.policy](disk.num_slots)
    tiers.ledgers[Tier.DISK] = Ledger(disk.num_slots, policy, recovering=True)
    tiers.lanes[Tier.DISK] = LaneSpec(StoreMover(tiers.host, disk, tiers.seals), settings.threads)
    tiers.incidents[Tier.DISK] = disk.take_incidents
    tiers.gates[Tier.DISK] = WriteGate(
        spec.block_bytes,
        from_second_use=settings.admit == "second-use",
        max_bytes_per_day=settings.write_per_day_bytes,
    )
    tiers.recovery = Recovery(Tier.DISK, disk, disk.num_slots)


def _open_remote(tiers: _Tiers) -> None:
    settings, spec = tiers.config.remote, tiers.spec
    for sentence in warnings(tiers.config):
        log.warning("%s", sentence)
    remote = open_remote(settings, spec, secret=remote_secret())
    tiers.opened.callback(remote.close)
    remote.client.register(tiers.host)
    known = settings.max_known_blocks
    tiers.ledgers[Tier.REMOTE] = Ledger(known, POLICIES["lru"](known))
    tiers.lanes[Tier.REMOTE] = LaneSpec(
        StoreMover(tiers.host, remote, tiers.seals), threads_for(settings), remote.exists
    )
    tiers.gates[Tier.REMOTE] = WriteGate(
        spec.block_bytes,
        from_second_use=settings.admit == "second-use",
        max_bytes_per_day=settings.write_per_day_bytes,
        max_bytes_per_tenant=settings.tenant_size_bytes,
        tenant_seconds=settings.ttl_seconds or DAY_SECONDS,
    )


def _engine(tiers: _Tiers, clock: Clock) -> TransferEngine:
    return TransferEngine(tiers.lanes, clock, max_queued=tiers.config.transfer.queue_transfers)


def _offloader(
    tiers: _Tiers, engine: Transfers, clock: Clock, observers: Iterable[Observer]
) -> Offloader:
    config, host, block_bytes = tiers.config, tiers.host, tiers.spec.block_bytes
    read_only = {Tier.DISK: config.disk.read_only, Tier.REMOTE: config.remote.read_only}
    stack = TierStack(
        block_bytes,
        Ledger(host.num_slots, POLICIES[config.host.policy](host.num_slots)),
        tiers.ledgers,
        tiers.limits,
        read_only=frozenset(tier for tier, is_so in read_only.items() if is_so),
        gates=tiers.gates,
    )
    return Offloader(
        stack,
        engine,
        clock,
        block_bytes=block_bytes,
        load_deadline_seconds=config.transfer.load_deadline_seconds,
        seals=tiers.seals,
        host=host,
        recovery=tiers.recovery,
        incidents=tiers.incidents,
        observers=observers,
        close_stores=tiers.opened.pop_all().close,
    )


def _limits(config: Config, spec: BlockSpec) -> Limits:
    transfer, remote = config.transfer, config.remote
    remote_bytes = None if remote.url is None else batch_bytes(remote.url)
    return Limits(
        max_host_blocks=max(1, transfer.batch_bytes // spec.block_bytes),
        max_lower_blocks=max(1, transfer.batch_bytes // 2 // spec.block_bytes),
        max_remote_blocks=remote_bytes and max(1, remote_bytes // spec.block_bytes),
        max_pending_loads=transfer.max_pending_loads,
        max_pending_saves=max(1, transfer.max_pending_save_bytes // spec.block_bytes),
        lookup_deadline_seconds=remote.lookup_deadline_seconds,
        retain_share=config.host.retain_share,
    )


def _for_gpu(limits: Limits) -> Limits:
    """Use larger transfers: a GPU's link is so fast that the gaps between small ones matter."""
    most = 4 * limits.max_host_blocks
    planned = max(limits.max_planned_blocks, most)
    return replace(limits, max_host_blocks=most, max_planned_blocks=planned, spread_host=False)


def _in_one(limits: Limits) -> Limits:
    """Do not cut copies into parts: a worker receives all copies of a step at once.

    Saves are bounded by HOST's size only. Workers report them some steps later, and by then
    gigabytes more may have been computed.
    """
    whole = 1 << 30
    return replace(
        limits,
        max_host_blocks=whole,
        max_planned_blocks=whole,
        max_pending_saves=whole,
        spread_host=False,
    )
