"""Builds an Offloader from settings: opens the tiers and puts books and transfers together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from penstock.books.ledger import Ledger
from penstock.books.stack import Limits, TierStack
from penstock.books.write_gate import DAY_SECONDS, WriteGate
from penstock.clock import Clock, SystemClock
from penstock.codecs.base import BlockCodec
from penstock.codecs.blocks import BlockValues, TierCodecs
from penstock.codecs.names import RAW
from penstock.config import Config, as_typed
from penstock.errors import PenstockError
from penstock.events import Observer
from penstock.offload import Offloader
from penstock.policies import POLICIES
from penstock.stores.base import Arena, Incident
from penstock.stores.disk_folder import DiskFolder
from penstock.stores.folder import look_into, store_path
from penstock.stores.host import ArenaHandle, HostArena
from penstock.stores.preflight import (
    check_block,
    check_delegated,
    check_tiers,
    remote_secret,
    warnings,
)
from penstock.stores.remotes import batch_bytes, headroom_bytes, open_remote, threads_for
from penstock.stores.shared_cap import DividedFolder
from penstock.tiers import Tiers
from penstock.transfer.base import Transfers
from penstock.transfer.delegate import DelegatingEngine
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import CopyMover, Mover, StoreMover
from penstock.transfer.lanes import LaneSpec
from penstock.transfer.recovery import Recovery
from penstock.transfer.repacking import Repacker
from penstock.transfer.seals import Seals
from penstock.types import BlockSpec, Tier

log = logging.getLogger(__name__)


def build_offloader(
    config: Config,
    spec: BlockSpec,
    device: Arena,
    *,
    codecs: TierCodecs | None = None,
    clock: Clock | None = None,
    observers: Iterable[Observer] = (),
    device_mover: Callable[[HostArena, Seals, BlockCodec], Mover] | None = None,
) -> Offloader:
    """Build all tiers in `config`, for blocks of `spec`, below the client's own `device`.

    `codecs` say how the tiers pack blocks (see `tier_codecs`); by default they hold them as they
    are. `device_mover` copies between HOST and a device whose memory the CPU cannot address.
    Raises ConfigError, Locked, Foreign or Full if a tier cannot be opened, and then leaves nothing
    open.
    """
    codecs = codecs or _all_raw(spec)
    _check(config, spec, codecs)
    clock = clock or SystemClock()
    host = _host(config, codecs.spec(Tier.HOST, spec))
    seals = Seals(host, checksums=config.host.verify)
    mover: Mover
    if device_mover is None:
        mover = CopyMover(device, host, seals, codecs.host)
    else:
        mover = device_mover(host, seals, codecs.host)
    limits = _limits(config, spec)
    if mover.max_ahead is not None:
        limits = _for_gpu(limits)
    with _open_tiers(config, spec, codecs, host, seals, limits) as tiers:
        device_lane = LaneSpec(mover, config.transfer.copy_threads)
        tiers.lanes = {Tier.HOST: device_lane, **tiers.lanes}
        return _offloader(tiers, _engine(tiers, clock), clock, observers)


@dataclass(frozen=True, slots=True)
class Delegated:
    """Tiers for a device that belongs to other processes, which carry out `engine`'s copies."""

    offloader: Tiers
    engine: DelegatingEngine
    arena: ArenaHandle
    node: DelegatedNode | None = None  # if the tiers are a node's


class DelegatedNode(Protocol):
    """What is different if the tiers are those of a node."""

    @property
    def handle(self) -> ArenaHandle:
        """That of the node's memory. It changes if the node is restarted."""

    @property
    def has_session(self) -> bool:
        """False once the node is gone, until another one is attached to."""

    def sync(self) -> None:
        """Wait until the copies of all saves are known, or the saves have ended."""


def build_delegated(
    config: Config,
    spec: BlockSpec,
    num_workers: int,
    *,
    codecs: TierCodecs | None = None,
    shared: bool = True,
    clock: Clock | None = None,
    observers: Iterable[Observer] = (),
) -> Delegated:
    """Build all tiers as `build_offloader` does, with DRAM shared by `num_workers` processes.

    A block holds one part per worker. Pass `shared=False` if they run in this process.
    """
    codecs = codecs or _all_raw(spec)
    check_delegated(config)
    _check(config, spec, codecs)
    clock = clock or SystemClock()
    host = _host(config, codecs.spec(Tier.HOST, spec), shared=shared)
    seals = Seals(host, memory=host.seals)
    with _open_tiers(config, spec, codecs, host, seals, _in_one(_limits(config, spec))) as tiers:
        engine = DelegatingEngine(_engine(tiers, clock), seals, num_workers)
        return Delegated(_offloader(tiers, engine, clock, observers), engine, host.handle)


def build_shared(
    config: Config,
    spec: BlockSpec,
    codecs: TierCodecs,
    host: HostArena,
    seals: Seals,
    link: Callable[[Transfers], Transfers],
    *,
    in_one: bool,
    divided: DividedFolder | None = None,
    observers: Iterable[Observer] = (),
    notify: Callable[[], None] | None = None,
) -> Offloader:
    """Build the tiers of one model over part of a node's DRAM. All slots of HOST begin closed.

    `link` adds the link to the devices, which belong to other processes, to the transfers below
    DRAM. If `in_one`, copies between DRAM and devices are not cut into parts. `divided` is the
    disk's folder, if the node has a disk for this model. `notify` is called on any thread when
    there is something to settle.
    """
    without_disk = replace(config, disk=replace(config.disk, path=None))
    if divided is None:
        config = without_disk
    # Once the folder is open, others may find it locked: by this process.
    is_open = divided is not None and divided.is_open
    check_tiers(without_disk if is_open else config)
    check_block(config, codecs.spec(Tier.HOST, spec), codecs.spec(Tier.DISK, spec))
    clock = SystemClock()
    limits = _limits(config, spec)
    with _open_tiers(
        config, spec, codecs, host, seals, _in_one(limits) if in_one else limits, divided
    ) as tiers:
        below = TransferEngine(
            tiers.lanes, clock, max_queued=config.transfer.queue_transfers, notify=notify
        )
        return _offloader(tiers, link(below), clock, observers, closed=True)


def tier_codecs(config: Config, values: BlockValues) -> TierCodecs:
    """The codecs that the settings choose for blocks of these values.

    Raises ConfigError if one that is set does not apply to them.
    """
    with as_typed(config):
        return TierCodecs.choose(codec_settings(config), values)


def codec_settings(config: Config) -> dict[Tier, str]:
    """The setting of each tier that is in use."""
    settings = {Tier.HOST: config.host.codec}
    if config.disk.path is not None:
        settings[Tier.DISK] = config.disk.codec
    if config.remote.url is not None:
        settings[Tier.REMOTE] = config.remote.codec
    return settings


def _all_raw(spec: BlockSpec) -> TierCodecs:
    return TierCodecs(BlockCodec.raw(spec.block_bytes))


def _check(config: Config, spec: BlockSpec, codecs: TierCodecs) -> None:
    check_tiers(config)
    check_block(config, codecs.spec(Tier.HOST, spec), codecs.spec(Tier.DISK, spec))


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
    spec: BlockSpec  # of raw blocks
    codecs: TierCodecs
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
    config: Config,
    spec: BlockSpec,
    codecs: TierCodecs,
    host: HostArena,
    seals: Seals,
    limits: Limits,
    divided: DividedFolder | None = None,
) -> Iterator[_Tiers]:
    """Open the stores below HOST. Closes them at exit, unless `_offloader` has taken them over."""
    with ExitStack() as opened:
        tiers = _Tiers(config, spec, codecs, host, seals, limits, opened)
        if config.disk.path is not None:
            _open_disk(tiers, Path(config.disk.path), divided)
        if config.remote.url is not None:
            _open_remote(tiers)
        yield tiers


def _open_disk(tiers: _Tiers, directory: Path, divided: DividedFolder | None) -> None:
    settings, spec = tiers.config.disk, tiers.codecs.spec(Tier.DISK, tiers.spec)
    _tell_of_other_codecs(directory, spec)
    disk = DiskFolder(
        directory,
        spec,
        settings.size_bytes,
        read_only=settings.read_only,
        direct=settings.direct,
        divided=divided,
    )
    tiers.opened.callback(disk.close)
    policy = POLICIES[settings.policy](disk.num_slots)
    tiers.ledgers[Tier.DISK] = Ledger(disk.num_slots, policy, recovering=True)
    repacker = _repacker(tiers, Tier.DISK, tiers.limits.max_lower_blocks, settings.threads)
    mover = StoreMover(tiers.host, disk, tiers.seals, repacker=repacker)
    tiers.lanes[Tier.DISK] = LaneSpec(mover, settings.threads)
    tiers.incidents[Tier.DISK] = disk.take_incidents
    tiers.gates[Tier.DISK] = WriteGate(
        spec.block_bytes,
        from_second_use=settings.admit == "second-use",
        max_bytes_per_day=settings.write_per_day_bytes,
    )
    tiers.recovery = Recovery(Tier.DISK, disk, disk.num_slots)


def _tell_of_other_codecs(directory: Path, spec: BlockSpec) -> None:
    """Say why nothing is found if the folder has this KV in another codec only."""
    try:
        shelves = look_into(directory) or []
    except (PenstockError, OSError):  # the folder itself says what is wrong
        return
    if store_path(directory, spec.namespace) in [shelf.path for shelf in shelves]:
        return
    wanted = dict(spec.description)
    mine = wanted.pop("codec", RAW)
    for shelf in shelves:
        found = {} if shelf.geometry is None else dict(shelf.geometry.description)
        codec = found.pop("codec", RAW)
        if found and found == wanted and codec != mine:
            log.warning(
                '%s holds KV of this model in the codec "%s", which is not used: the disk\'s codec '
                'is now "%s". To use it again, set disk.codec to "%s"; otherwise it is deleted '
                "when its room is needed.",
                directory,
                codec,
                mine,
                codec,
            )


def _open_remote(tiers: _Tiers) -> None:
    settings, spec = tiers.config.remote, tiers.codecs.spec(Tier.REMOTE, tiers.spec)
    for sentence in warnings(tiers.config):
        log.warning("%s", sentence)
    remote = open_remote(settings, spec, secret=remote_secret())
    tiers.opened.callback(remote.close)
    num_threads = threads_for(settings)
    most = tiers.limits.max_remote_blocks or tiers.limits.max_lower_blocks
    repacker = _repacker(tiers, Tier.REMOTE, most, num_threads)
    remote.client.register(tiers.host if repacker is None else repacker.arena)
    known = settings.max_known_blocks
    tiers.ledgers[Tier.REMOTE] = Ledger(known, POLICIES["lru"](known))
    mover = StoreMover(tiers.host, remote, tiers.seals, repacker=repacker)
    tiers.lanes[Tier.REMOTE] = LaneSpec(mover, num_threads, remote.exists)
    tiers.gates[Tier.REMOTE] = WriteGate(
        spec.block_bytes,
        from_second_use=settings.admit == "second-use",
        max_bytes_per_day=settings.write_per_day_bytes,
        max_bytes_per_tenant=settings.tenant_size_bytes,
        tenant_seconds=settings.ttl_seconds or DAY_SECONDS,
    )


def _repacker(tiers: _Tiers, tier: Tier, max_blocks: int, num_threads: int) -> Repacker | None:
    """None if the tier packs blocks like HOST."""
    host, store = tiers.codecs.host, tiers.codecs.of(tier)
    if host.version == store.version:
        return None
    spec = tiers.codecs.spec(tier, tiers.spec)
    headroom = headroom_bytes(tiers.config.remote.url) if tier is Tier.REMOTE else 0
    # One transfer for each thread, and some that are being verified.
    size = (num_threads + 2) * max_blocks * (spec.stride_bytes + headroom)
    return Repacker(HostArena(spec, size, headroom_bytes=headroom), host, store)


def _engine(tiers: _Tiers, clock: Clock) -> TransferEngine:
    return TransferEngine(tiers.lanes, clock, max_queued=tiers.config.transfer.queue_transfers)


def _offloader(
    tiers: _Tiers,
    engine: Transfers,
    clock: Clock,
    observers: Iterable[Observer],
    *,
    closed: bool = False,
) -> Offloader:
    config, host, block_bytes = tiers.config, tiers.host, tiers.host.block_bytes
    sizes = {tier: tiers.codecs.of(tier).packed_bytes for tier in tiers.ledgers}
    read_only = {Tier.DISK: config.disk.read_only, Tier.REMOTE: config.remote.read_only}
    stack = TierStack(
        block_bytes,
        Ledger(host.num_slots, POLICIES[config.host.policy](host.num_slots), closed=closed),
        tiers.ledgers,
        tiers.limits,
        read_only=frozenset(tier for tier, is_so in read_only.items() if is_so),
        gates=tiers.gates,
        lower_bytes=sizes,
    )
    return Offloader(
        stack,
        engine,
        clock,
        block_bytes=block_bytes,
        block_tokens=tiers.spec.block_tokens,
        load_deadline_seconds=config.transfer.load_deadline_seconds,
        seals=tiers.seals,
        host=host,
        codecs=tiers.codecs,
        recovery=tiers.recovery,
        incidents=tiers.incidents,
        observers=observers,
        close_stores=tiers.opened.pop_all().close,
        copies_here=Tier.HOST in tiers.lanes,
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
