"""What an engine is made of: device pool, tiers, runner and scheduler, built from its settings.

After a fault the parts can be rebuilt. A rebuilt engine computes one token before it is trusted.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.audits.auditor import AuditLimits, Auditor, advice
from penstock.audits.findings import AuditSubject
from penstock.audits.quarantine import Quarantine
from penstock.audits.sample import AuditSample
from penstock.audits.tolerance import Tolerance
from penstock.books.sessions import Sessions
from penstock.build import build_offloader, tier_codecs
from penstock.codecs.blocks import BlockValues, PartValues, TierCodecs
from penstock.codecs.layout import KvLayout
from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import LosslessFormat
from penstock.codecs.names import loss_of
from penstock.config import Config
from penstock.config.options import (
    COLD_DEVICE,
    KV_FP8,
    EngineOptions,
    check_cold_attention,
    check_kv_cache_dtype,
)
from penstock.costs.choose import LoadChoice, LoadOrCompute
from penstock.engine import fp8
from penstock.engine.admission import Admission
from penstock.engine.announcer import Announcer
from penstock.engine.auditing import EngineAudits
from penstock.engine.blocks import BlockPool
from penstock.engine.calibration import computed_twice, engine_layout
from penstock.engine.faults import TierHangs
from penstock.engine.lossy import LossyBlocks
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.engine.residency import ColdReadBudget, ResidencyConfig, ResidencyPolicy
from penstock.engine.rotation import Rotation
from penstock.engine.runner import Runner, TorchRunner
from penstock.engine.sampler import SamplerRow, begin_sampling
from penstock.engine.scheduler import Scheduler
from penstock.errors import ConfigError
from penstock.events import Observer, Quarantined, tell
from penstock.keys import KeyChain, Namespace
from penstock.node.attach import NodeOpening
from penstock.shapes.sizing import suggest_block_tokens
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.tiers import Tiers
from penstock.transfer.cuda import CudaMover
from penstock.transfer.pinning import has_same_addresses
from penstock.types import Match, Tier
from penstock.units import MiB, format_bytes

if TYPE_CHECKING:
    from penstock.kv_events.publisher import KvEventPublisher

log = logging.getLogger("penstock.engine.engine")

LAYOUT = "blocks of [layers, 2, tokens, kv_heads, head_dim]"
_DEFAULTS = EngineOptions()
_QUIET_SECONDS = 10.0  # how long copies between device and DRAM may take to end after a fault
_GPU_COLD_BYTES = 256 * MiB  # about 5 ms on a PCIe Gen5 link


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's own settings. Those of the tiers are in `penstock.config.Config`."""

    device_kv_bytes: int = 1 << 30
    block_tokens: int | None = None  # None: chosen so that a block has 1 to 2 MiB
    max_num_batched_tokens: int = _DEFAULTS.max_num_batched_tokens
    max_num_seqs: int = _DEFAULTS.max_num_seqs
    max_waiting: int = _DEFAULTS.max_waiting  # requests not started; more raise Busy
    residency: ResidencyConfig = field(default_factory=ResidencyConfig)
    audit_share: float = 0.0  # of requests that would be loaded: computed instead, and compared
    kv_cache_dtype: str = _DEFAULTS.kv_cache_dtype
    launch_ahead: bool | None = None  # see `ahead`; None: on a GPU
    cold_attention: str = _DEFAULTS.cold_attention
    # A prompt that is found in DRAM, if nothing else runs: see `bringing`. None: on a GPU.
    load_in_step: bool | None = None

    def __post_init__(self) -> None:
        check_kv_cache_dtype(self.kv_cache_dtype)
        check_cold_attention(self.cold_attention)


def has_triton() -> bool:
    """Whether there are kernels for a GPU. Without them nothing is packed there."""
    return importlib.util.find_spec("triton") is not None


def block_values(
    dtype: str,
    num_layers: int,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    *,
    on_gpu: bool,
) -> BlockValues:
    """What codecs must know about the engine's blocks (see `LAYOUT`)."""
    layout = KvLayout.of_engine(dtype, num_layers, block_tokens, kv_heads, head_dim)
    stretches = (layout.num_bytes // (2 * num_layers),) * (2 * num_layers)  # keys, values
    part = PartValues(layout.num_bytes, dtype, stretches, head_dim, layout)
    return BlockValues((part,), on_gpu)


class EngineParts:
    """The parts of one engine that all of its requests share."""

    offloader: Tiers | None
    sessions: Sessions | None
    runner: Runner
    pool: BlockPool
    admission: Admission
    scheduler: Scheduler
    audits: EngineAudits | None  # None if nothing is audited

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        tiers: Config | None,
        observers: tuple[Observer, ...],
        kv_events: KvEventPublisher | None,
    ) -> None:
        self.loaded = loaded
        self.kv_dtype = fp8.DTYPE if config.kv_cache_dtype == KV_FP8 else loaded.dtype
        token_values = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim
        token_bytes = token_values * self.kv_dtype.itemsize
        self.block_tokens = config.block_tokens or suggest_block_tokens(token_bytes)
        self._block_bytes = block_bytes = token_bytes * self.block_tokens
        num_blocks = config.device_kv_bytes // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"the device pool of {format_bytes(config.device_kv_bytes)} is smaller than one "
                f"block of {format_bytes(block_bytes)}; enlarge it, or choose smaller blocks."
            )
        self._readable: tuple[int, bool] | None = None  # an arena's address, and the answer
        self._codecs: TierCodecs | None = None
        self._node: NodeOpening | None = None
        loss = ""
        if tiers is not None:
            self._values = values = block_values(
                str(self.kv_dtype).removeprefix("torch."),
                loaded.num_layers,
                self.block_tokens,
                loaded.num_kv_heads,
                loaded.head_dim,
                on_gpu=loaded.device != "cpu" and has_triton(),
            )
            if tiers.node.url is None:
                self._codecs = tier_codecs(tiers, values)
            else:  # the node's settings decide
                self._node = NodeOpening(tiers)
                self._codecs = self._node.codecs(values)
            loss = loss_of(self._codecs.names.values())
        self.namespace = Namespace(
            loaded.name,
            loaded.weights_fingerprint,
            self._dtype_words(),
            LAYOUT,
            self.block_tokens,
            rope=loaded.rope,
            settings=loaded.attention,
            loss=loss,
        )
        self.device = DevicePool(
            num_blocks,
            loaded.num_layers,
            self.block_tokens,
            loaded.num_kv_heads,
            loaded.head_dim,
            self.kv_dtype,
            loaded.device,
        )
        if loss and config.audit_share > 0:
            # What is computed differs from what is stored, and nobody knows by how much it may.
            log.warning('nothing is audited: the codec "%s" does not keep KV bit for bit', loss)
            config = replace(config, audit_share=0.0)
        self._config, self._tiers, self._observers = config, tiers, observers
        self._kv_events = kv_events
        self._announcer: Announcer | None = None
        if kv_events is not None:
            self._announcer = Announcer(kv_events.held, self.block_tokens)
        self._num_blocks = num_blocks
        self._quarantine = self._make_quarantine()
        self._is_quarantined = self._quarantine is not None and self._quarantine.find() is not None
        self.audits = None
        self._open_tiers()
        try:
            self.runner, self._residency_config = self._make_runner(config)
        except BaseException:  # for example, no memory left beside the pool
            if self.offloader is not None:
                self.offloader.close()
            raise
        # What crosses the link to the device.
        self._link_bytes = block_bytes if self._codecs is None else self._codecs.host.packed_bytes
        self._costs = LoadOrCompute(self._link_bytes, self.block_tokens)
        self._layout = engine_layout(loaded, self.block_tokens, self.kv_dtype)
        self._tolerance = Tolerance(self._layout)
        try:
            self._calibrate()
        except BaseException:
            EngineParts.close(self)
            raise
        self._make_books()

    def check(self) -> None:
        self.scheduler.check()
        if self.offloader is not None:
            self.offloader.check()
        if self.sessions is not None:
            self.sessions.check()
        if self._kv_events is not None:
            self._kv_events.held.check()

    def close(self) -> None:
        if self.audits is not None:
            self.audits.reset()
        try:
            if "runner" in self.__dict__:
                self.runner.close()
        finally:
            try:
                if self.offloader is not None:
                    self.offloader.close()
            finally:
                if self._kv_events is not None:
                    self._kv_events.close()

    # Building.

    @property
    def _reads_host_codec(self) -> bool:
        """Whether attention can read blocks in HOST."""
        if self._codecs is None or not self._codecs.host.version:
            return True
        form = self._host_form
        return form is not None and form.row_values == self.loaded.head_dim

    @property
    def _host_form(self) -> LosslessFormat | None:
        """How HOST packs blocks; None if it holds them as they are."""
        codec = None if self._codecs is None else self._codecs.host.parts[0]
        return codec.form if isinstance(codec, LosslessCodec) else None

    def _dtype_words(self) -> str:
        """The type of the KV. Rounded KV also depends on the type in which it was computed."""
        computed = str(self.loaded.dtype).removeprefix("torch.")
        if self.kv_dtype is self.loaded.dtype:
            return computed
        return f"{str(self.kv_dtype).removeprefix('torch.')} from {computed}"

    def _open_tiers(self) -> None:
        self.offloader = None
        if self._tiers is not None:
            spec = self.namespace.block_spec(self._block_bytes)
            mover = partial(CudaMover, self.device) if self.device.on_gpu else None
            if self._node is not None:
                self.offloader = self._node.attach(
                    spec,
                    self.device,
                    self._values,
                    observers=self._observers,
                    device_mover=mover,
                )
            else:
                self.offloader = build_offloader(
                    self._tiers,
                    spec,
                    self.device,
                    codecs=self._codecs,
                    observers=self._observers,
                    device_mover=mover,
                )
        self.sessions = None if self.offloader is None else Sessions(self.offloader)
        if self.offloader is not None and self._is_quarantined:
            self._keep_quarantine(self.offloader)

    def _make_quarantine(self) -> Quarantine | None:
        if self._tiers is None:
            return None
        spec, disk = self.namespace.block_spec(self._block_bytes), self._tiers.disk.path
        if self._node is not None:
            # The node keeps the quarantine, for all of its clients. Here is only the report.
            return Quarantine(spec.namespace, None, persists=False)
        folder = None if disk is None else Path(disk)
        has_remote = self._tiers.remote.url is not None
        persists = folder is not None or has_remote
        return Quarantine(spec.namespace, folder, persists=persists)

    def _keep_quarantine(self, offloader: Tiers) -> None:
        """Load nothing, because an audit of this process or an earlier one has failed."""
        path = None if self._quarantine is None else self._quarantine.find()
        if path is not None:
            log.error(
                "stored KV of %s is in quarantine, because an audit found wrong KV: nothing is "
                "loaded or stored, and all requests are computed. %s",
                self.loaded.name,
                advice(path),
            )
        offloader.quarantine()
        tell(self._observers, [Quarantined("" if path is None else str(path))])

    def _calibrate(self) -> None:
        """Find out how much KV differs if it is computed in another batch shape."""
        if not self._is_auditing:
            return
        differences = computed_twice(
            self.runner,
            self.device,
            self.loaded,
            self._layout,
            self.namespace,
            self._config.max_num_batched_tokens,
        )
        if differences:
            self._tolerance.calibrate(differences)
            log.info("audits: the tolerance is %.2g to %.2g", *self._tolerance.span)

    @property
    def _is_auditing(self) -> bool:
        has_tiers = self.offloader is not None
        return has_tiers and self._config.audit_share > 0 and not self._is_quarantined

    def _make_audits(self) -> EngineAudits | None:
        if self.audits is not None:
            self.audits.reset()
        offloader, quarantine = self.offloader, self._quarantine
        if not self._is_auditing or offloader is None or quarantine is None:
            return None
        assert offloader.host is not None
        auditor = Auditor(
            offloader,
            offloader.read_host,
            [self._layout],
            [self._tolerance],
            sample=AuditSample(self._config.audit_share, os.urandom(16)),
            limits=AuditLimits.within(offloader.num_pinnable_blocks, self._link_bytes),
            subject=AuditSubject(
                self.loaded.name, self.namespace.physical().digest().hex(), self.block_tokens
            ),
            quarantine=quarantine,
            observers=self._observers,
            on_failure=self._distrust,
        )
        return EngineAudits(auditor, self.pool)

    def _follow_quarantine(self) -> None:
        """Another client of the node may have found wrong KV: some of it may be in use here."""
        if self.offloader is None or self._is_quarantined:
            return
        if self.offloader.is_quarantined:
            log.error(
                "stored KV of %s is in quarantine on the node, because an audit found wrong KV: "
                "nothing is loaded or stored, and all requests are computed. The node's log and "
                "the file quarantine-*.json in its disk folder say more.",
                self.loaded.name,
            )
            tell(self._observers, [Quarantined("")])
            self._distrust()

    def _distrust(self) -> None:
        """An audit has failed: compute all running requests again, and load nothing."""
        self._is_quarantined = True
        self.scheduler.distrust()

    def _make_books(self) -> None:
        """Make the device's books: every block is free, and no request is known."""
        config, residency = self._config, self._residency_config
        num_blocks, num_cold = self._num_blocks, 0  # cold: blocks that may be in HOST
        if self.offloader is not None and residency.cold:
            num_cold = self.offloader.num_pinnable_blocks
        if self._announcer is not None:
            self._announcer.emptied(Tier.DEVICE)
        self.pool = BlockPool(num_blocks, self._announcer)
        self.audits = self._make_audits()
        self.admission = Admission(
            self.block_tokens,
            num_blocks,
            None if self.offloader is None else self.offloader.num_blocks,
            config.max_waiting,
            num_cold_blocks=num_cold,
        )
        # A chunk needs device blocks beside those that cannot leave. With sequences larger than
        # the pool, a chunk as large as the pool would wait forever.
        max_chunk_tokens = max(1, num_blocks // 2) * self.block_tokens
        num_batched = config.max_num_batched_tokens
        if num_cold:
            num_batched = min(num_batched, max_chunk_tokens)
        self.scheduler = Scheduler(
            self.pool,
            self.block_tokens,
            admission=self.admission,
            tiers=self.offloader,
            choose=self._choose,
            # A look runs the first layer, and what the second one needs for its keys.
            looks_per_token=max(1, self.loaded.num_layers // 2),
            max_brought=self._max_brought,
            takes_apart=lambda num_tokens, end: self.runner.takes_apart(num_tokens, end),
            compute_seconds=self._compute_seconds,
            max_num_batched_tokens=num_batched,
            max_num_seqs=config.max_num_seqs,
            residency=ResidencyPolicy(residency, self.block_tokens, self._link_bytes, num_blocks),
            cold_reads=ColdReadBudget(residency.max_cold_bytes_per_step, self._link_bytes),
            rotation=Rotation(residency.turn_seconds, self.block_tokens, self.offloader),
            audits=self.audits,
            lossy=LossyBlocks(
                self.block_tokens, {} if self.offloader is None else self.offloader.codecs
            ),
            announcer=self._announcer,
        )

    def _max_brought(self) -> int:
        """How many blocks a step may bring from HOST now."""
        offloader = self.offloader
        host = None if offloader is None else offloader.host
        if offloader is None or host is None or not self._loads_in_step:
            return 0
        if host.num_for_device < host.num_slots:
            return 0  # copies wait until a slot is pinned for the GPU, pins do not
        if self._tiers is not None and self._tiers.host.verify:
            return 0  # the threads that copy also verify
        if self.device.on_gpu and not self._has_same_addresses(host):
            return 0
        num_pinnable = offloader.num_pinnable_blocks - offloader.num_pinned
        return min(self.runner.max_brought, num_pinnable)

    @property
    def _loads_in_step(self) -> bool:
        wished = self._config.load_in_step
        return self.device.on_gpu if wished is None else wished

    def _has_same_addresses(self, host: HostArena) -> bool:
        """Whether kernels can read HOST. Asked once: a request waits for the answer."""
        if self._readable is None or self._readable[0] != host.address:
            self._readable = (host.address, has_same_addresses(host))
        return self._readable[1]

    def _make_runner(self, config: EngineConfig) -> tuple[Runner, ResidencyConfig]:
        """Make the runner. Also returns the residency that it supports."""
        host = None if self.offloader is None else self.offloader.host
        residency, loaded, device = config.residency, self.loaded, self.device
        if not self._reads_host_codec:
            log.info("no sequence is kept partly in DRAM, because attention cannot read its codec")
            residency = replace(residency, cold=False)
            host = None
        if device.on_gpu and residency.max_cold_bytes_per_step is None:
            residency = replace(residency, max_cold_bytes_per_step=_GPU_COLD_BYTES)
        if device.on_gpu and has_triton():
            from penstock.engine.triton_runner import TritonRunner

            runner = TritonRunner(
                loaded,
                device,
                self.block_tokens,
                host,
                max_num_seqs=config.max_num_seqs,
                host_form=self._host_form,
                cold_attention=config.cold_attention if residency.cold else COLD_DEVICE,
                brings=self._loads_in_step,
            )
            if residency.cold and host is not None and not runner.reads_host:
                log.warning(
                    "no sequence is kept partly in DRAM, because blocks of %d tokens would need "
                    "fetch buffers of more than 1/32 of the device pool; set block_tokens to a "
                    "power of two, or enlarge the pool",
                    self.block_tokens,
                )
            reads_host = host is None or (runner.reads_host and self._has_same_addresses(host))
            return runner, replace(residency, cold=residency.cold and reads_host)
        plain = TorchRunner(
            loaded.model,
            device,
            self.block_tokens,
            loaded.num_heads,
            host,
            host_form=self._host_form,
        )
        return plain, replace(residency, cold=residency.cold and not device.on_gpu)

    def _choose(self, match: Match, num_past: int) -> LoadChoice:
        assert self.offloader is not None
        return self._costs.choose(match, num_past, self.offloader.rates, can_load_two_ended=True)

    def _compute_seconds(self, num_tokens: int, num_past: int) -> float | None:
        prefill = self._costs.prefill
        return None if prefill is None else prefill.seconds(num_tokens, num_past)

    # Rebuilding.

    def _rebuild(self, *, must_reopen: bool) -> bool:
        """Make new books, and new tiers and a new runner if needed. True if tiers were reopened.

        Raises if the engine cannot compute a token afterwards.
        """
        for reopen, is_last in ((must_reopen, False), (True, True)):
            try:
                return self._try_to_rebuild(must_reopen=reopen)
            except Exception as error:
                log.error("the engine did not recover", exc_info=error)
                # A copy that hangs may still write to the device: its blocks must not be reused.
                if is_last or isinstance(error, TierHangs):
                    raise
        raise AssertionError("unreachable")

    def _try_to_rebuild(self, *, must_reopen: bool) -> bool:
        if self.device.on_gpu:
            torch.cuda.synchronize(self.device.tensor.device)
        reopen = must_reopen or not self._is_quiet()
        if reopen:
            self._reopen()
        self._make_books()
        self._prove()
        return reopen and self._tiers is not None

    def _is_quiet(self) -> bool:
        """Whether no copy touches the device and the books of the tiers add up."""
        if self.audits is not None:
            self.audits.reset()
        if self.offloader is None:
            return True
        try:
            if not self.offloader.let_go(_QUIET_SECONDS):
                return False
            self.offloader.check()
        except Exception:
            log.exception("the tiers' books do not add up: the tiers are reopened")
            return False
        return True

    def _reopen(self) -> None:
        """Close tiers and runner, and open new ones. Blocks on disk are found again."""
        if self.audits is not None:
            self.audits.reset()
        runner = self.__dict__.pop("runner", None)
        if runner is not None:
            runner.close()
        old, self.offloader, self.sessions = self.offloader, None, None
        if old is not None and not old.abandon(_QUIET_SECONDS):
            raise TierHangs("a tier below the device hangs and cannot be reopened")
        old = runner = None
        if self._announcer is not None:
            self._announcer.emptied(Tier.HOST, Tier.DISK, Tier.REMOTE)
        self._make_books()  # drops references to DRAM, which may not have room for two
        gc.collect()
        try:
            self._open_tiers()
        except ConfigError as error:
            if self._node is None:
                raise
            log.error("nothing is offloaded until this process is restarted: %s", error)
        self.runner, self._residency_config = self._make_runner(self._config)

    def _prove(self) -> None:
        """Compute one token: if that fails, every request would fail."""
        params = SamplingParams(temperature=0.0, max_tokens=1)
        chain = KeyChain(self.namespace)
        probe = Request("probe", (0,), params, chain, max_total_tokens=2, sequence=-1)
        self.scheduler.add(probe)
        chunks = self.scheduler.schedule()
        logits = self.runner.run(chunks)
        finish = begin_sampling(logits, [SamplerRow(params)], self.runner.post)
        self.scheduler.computed(chunks)
        self.runner.wait()
        finish()
        self.scheduler.remove(probe)
        self.admission.end(probe.id, time.monotonic())
        self.scheduler.take_events()
        self.scheduler.take_entered()
        self.check()
