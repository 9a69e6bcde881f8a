"""PenstockConnector: implements vLLM's connector interface with the two sides.

No error of ours may reach vLLM: `scheduler_guard` and `worker_guard` handle it on either side.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from penstock.build import build_delegated, tier_codecs
from penstock.clock import SystemClock
from penstock.codecs.blocks import BlockValues, TierCodecs
from penstock.codecs.names import AUTO, LOSSLESS, RAW, loss_of
from penstock.config import Config
from penstock.connectors.vllm.audit_layout import audit_layouts
from penstock.connectors.vllm.auditing import open_auditor
from penstock.connectors.vllm.device import WorkerDevice
from penstock.connectors.vllm.groups import (
    describe_groups,
    is_latent,
    is_one_plain_spec,
    read_groups,
)
from penstock.connectors.vllm.identity import Naming, model_namespace
from penstock.connectors.vllm.kv_events import BlockNews
from penstock.connectors.vllm.orders import Orders, Reports, Shard, parts_bytes, place_parts
from penstock.connectors.vllm.places import find_files
from penstock.connectors.vllm.prometheus import PenstockPromMetrics, PenstockStats
from penstock.connectors.vllm.promises import Results
from penstock.connectors.vllm.published import extra_keys, published
from penstock.connectors.vllm.scheduler import Scheduled, SchedulerSide, StepPlan, Ways
from penstock.connectors.vllm.scheduler_guard import GuardedScheduler
from penstock.connectors.vllm.settings import VllmSettings
from penstock.connectors.vllm.stats import EventLog
from penstock.connectors.vllm.support import check_config, check_groups_version, check_version
from penstock.connectors.vllm.tracked import Tables
from penstock.connectors.vllm.turn_tokens import border_ids
from penstock.connectors.vllm.values import block_values
from penstock.connectors.vllm.worker_guard import GuardedWorker
from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.groups.kinds import Groups, Kind
from penstock.node.attach import NodeOpening, host_codec
from penstock.types import Tier
from penstock.units import format_bytes

log = init_logger("vllm.penstock")


class PenstockMetadata(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class PenstockWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    def __init__(self, reports: Reports) -> None:
        self.reports = reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        self.reports.join(other.reports)
        return self


class PenstockHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    def __init__(self, shard: Shard) -> None:
        self.shard = shard


def _log_as_vllm_does() -> None:
    """Use vLLM's log handlers, which it installs only for its own loggers."""
    ours, theirs = logging.getLogger("penstock"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = not theirs.handlers


def _log_codecs(config: Config, codecs: TierCodecs, values: BlockValues) -> None:
    for tier, name in codecs.names.items():
        if name != RAW:
            packed, raw = codecs.of(tier).packed_bytes, codecs.of(tier).raw_bytes
            log.info(
                "%s holds blocks packed (%s): %s instead of %s.",
                tier.name,
                name,
                format_bytes(packed),
                format_bytes(raw),
            )
    why = values.why_not(LOSSLESS)
    if config.host.codec == AUTO and values.on_gpu and why:
        log.info("HOST holds blocks unpacked: the codec %r cannot be used (%s).", LOSSLESS, why)


def _place(config: Config) -> str:
    if config.node.url is not None:
        return f"the node at {config.node.url}"
    dram = f"{format_bytes(config.host.size_bytes)} of DRAM"
    if not config.disk.path:
        return dram
    return f"{dram} and {format_bytes(config.disk.size_bytes)} in {config.disk.path}"


def _step_plan(scheduler_output: Any, groups: Groups) -> StepPlan:
    def kept(block_ids: Sequence[Sequence[int]] | None) -> Tables:
        return [block_ids[group.index] if block_ids else () for group in groups]

    scheduled = [
        Scheduled(new.req_id, kept(new.block_ids), new.num_computed_tokens, has_all=True)
        for new in scheduler_output.scheduled_new_reqs
    ]
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, block_ids, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        has_all = block_ids is not None and request_id in cached.resumed_req_ids
        scheduled.append(Scheduled(request_id, kept(block_ids), num_computed, has_all))
    preempted = scheduler_output.preempted_req_ids or ()
    plan = StepPlan(scheduled, scheduler_output.num_scheduled_tokens, preempted)
    if groups.is_plain:
        return plan
    state = scheduler_output.kv_connector_block_state

    def tables(request_id: str) -> Tables | None:
        block_ids = state.get_block_ids(request_id)
        return None if block_ids is None else kept(block_ids)

    offers = state.boundary_state_offloads or {}
    zeroed = scheduler_output.new_block_ids_to_zero or ()
    copies = getattr(scheduler_output, "kv_cache_block_copies", None) or ()
    return plan._replace(
        tables=tables,
        states={
            request_id: {(index, end): block for index, block, end in offered}
            for request_id, offered in offers.items()
        },
        written=[*zeroed, *(copy.dst_block_id for copy in copies)],
    )


class PenstockConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        self._settings = VllmSettings.read(self._kv_transfer_config.kv_connector_extra_config)
        self._config = self._settings.tiers()
        check_version(vllm.__version__, insist=self._settings.allow_untested_vllm)
        check_config(vllm_config)
        self._groups = read_groups(kv_cache_config, vllm_config)
        # With several groups, block ids do not tell vLLM which request failed. With MLA on a CPU
        # it computes wrongly if a part of a prompt is there and more than one token is not.
        self._is_latent = is_latent(kv_cache_config)
        on_cpu = vllm_config.device_config.device_type == "cpu"
        self._fails_whole = not self._groups.is_plain or (on_cpu and self._is_latent)
        check_groups_version(vllm.__version__, fails_whole=self._fails_whole)
        self._scheduler: GuardedScheduler | None = None
        self._worker: GuardedWorker | None = None
        self._device: WorkerDevice | None = None
        self._results = Results(set(), set(), set())
        self._events = EventLog()
        publishing = vllm_config.kv_events_config
        enabled = publishing is not None and publishing.enable_kv_cache_events
        hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
        self._news = BlockNews(hash_tokens, extra_keys) if enabled else None

    # Properties and factories.

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Ask vLLM up to 0.31 to store all layers of a block in one stretch of memory."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped save is only a later miss

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PenstockStats:
        return PenstockStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PenstockPromMetrics:
        return PenstockPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None and not self._scheduler.close():
            log.warning("A tier did not answer in time; the blocks not yet written to it are lost")
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()

    # The scheduler's side.

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the tiers, once all workers have registered their caches."""
        self._open([metadata[rank].shard for rank in sorted(metadata)])

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same for a pipeline: workers by stage and rank (vLLM 0.32)."""
        self._open([metadata[place].shard for place in sorted(metadata)])

    def _open(self, shards: Sequence[Shard]) -> None:
        expected = self._vllm_config.parallel_config.world_size
        if len(shards) != expected:
            raise ConfigError(
                f"{len(shards)} of {expected} workers reported their KV layout; expected all."
            )
        groups, kv_cache_config = self._groups, self._kv_cache_config
        config = self._own_disk(self._config)
        values = block_values(shards)
        node = None if config.node.url is None else NodeOpening(config)
        codecs = tier_codecs(config, values) if node is None else node.codecs(values)
        namespace = model_namespace(
            self._vllm_config,
            vllm.__version__,
            shards,
            block_tokens=groups.unit_tokens,
            groups=""
            if is_one_plain_spec(kv_cache_config)
            else describe_groups(kv_cache_config, self._vllm_config),
            loss=loss_of(codecs.names.values()),
        )
        on_device = place_parts(shards)
        block_bytes = parts_bytes(on_device)
        spec = namespace.block_spec(block_bytes)
        observers: list[Observer] = [self._events]
        if self._news is not None:
            observers.append(self._news)
        if node is not None:
            tiers = node.attach_delegated(
                spec, len(shards), values, observers=observers, name=f"vLLM, process {os.getpid()}"
            )
        else:
            tiers = build_delegated(
                config,
                spec,
                len(shards),
                codecs=codecs,
                shared=any(shard.process != os.getpid() for shard in shards),
                observers=observers,
            )
        side = SchedulerSide(
            tiers,
            namespace,
            SystemClock(),
            block_bytes=tiers.offloader.host_block_bytes,
            parts=place_parts(shards, [part.packed_bytes for part in codecs.host.parts]),
            groups=groups,
            ways=self._ways(shards),
            turn_tokens=self._turn_tokens(),
            may_load=self._kv_transfer_config.is_kv_consumer,
            may_save=self._kv_transfer_config.is_kv_producer,
            always_load=self._settings.always_load,
            observers=observers,
            news=self._news,
            naming=Naming.of(self._vllm_config),
            auditor=open_auditor(
                tiers.offloader,
                config,
                namespace,
                audit_layouts(shards, on_device, groups),
                share=self._settings.audit_share,
                block_bytes=block_bytes,
                observers=observers,
            ),
        )
        block_tokens = None if self._fails_whole else groups.align_tokens
        self._scheduler = GuardedScheduler(side, block_tokens)
        log.info(
            "Penstock stores KV in %s. A block has %s tokens and %s.",
            _place(config),
            " or ".join(map(str, sorted({group.block_tokens for group in groups}))),
            format_bytes(block_bytes),
        )
        _log_codecs(config, codecs, values)

    def _turn_tokens(self) -> frozenset[int]:
        model = self._vllm_config.model_config
        name = str(getattr(model, "tokenizer", None) or model.model)
        folder = find_files(name, None, "tokenizer_config.json", None)
        return frozenset() if folder is None or self._groups.all_full else border_ids(folder)

    def _ways(self, shards: Sequence[Shard]) -> Ways:
        config, groups = self._vllm_config, self._groups
        is_newer = bool(getattr(config, "use_v2_model_runner", False))
        moves = getattr(self._kv_cache_config, "needs_kv_cache_zeroing", False)
        moves = moves or any(group.kind is Kind.STATE for group in groups)
        on_cpu = all(shard.device == "cpu" for shard in shards)
        return Ways(
            has_drafts=config.speculative_config is not None,
            has_stages=config.parallel_config.pipeline_parallel_size > 1,
            writes_reused_blocks_early=is_newer and moves,
            hits_whole_prompts_only=on_cpu and self._is_latent,
            fails_whole=self._fails_whole,
        )

    def _own_disk(self, config: Config) -> Config:
        """Give each engine of a data-parallel group its own folder: a store has one owner."""
        parallel = self._vllm_config.parallel_config
        if config.disk.path is None or parallel.data_parallel_size == 1:
            return config
        folder = Path(config.disk.path) / f"dp{parallel.data_parallel_rank}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        return replace(config, disk=replace(config.disk, path=str(folder)))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        num_tokens = self._scheduler.lookup(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            tables = self._kept(blocks.get_block_ids())
            self._scheduler.allocated(request, tables, num_external_tokens)

    def _kept(self, block_ids: Sequence[Sequence[int]]) -> Tables:
        return [block_ids[group.index] for group in self._groups]

    def build_connector_meta(self, scheduler_output: Any) -> PenstockMetadata:
        if self._scheduler is None:
            return PenstockMetadata(Orders(0))
        orders = self._scheduler.orders(lambda: _step_plan(scheduler_output, self._groups))
        return PenstockMetadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            worker_meta = connector_output.kv_connector_worker_meta
            reports = Reports() if worker_meta is None else worker_meta.reports
            self._scheduler.report(reports, connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # False: vLLM may reuse the blocks. A step that writes to them is fenced.
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.finished(request, self._kept(block_ids))

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # vLLM 0.32

        if self._scheduler is None:
            return {}
        names = {Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}
        unknown = CacheHitSource.EXTERNAL_UNSPECIFIED
        found = self._scheduler.sources(request.request_id)
        return {names.get(tier, unknown): count for tier, count in found.items()}

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_work

    def reset_cache(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        news = self._news
        if news is None or self._scheduler is None:
            return ()
        nothing: list[Any] = []
        return self._scheduler.ask(nothing, lambda _: self._published(news))

    def _published(self, news: BlockNews) -> list[Any]:
        return published(news.take(), is_latent=self._is_latent)

    def get_kv_connector_stats(self) -> PenstockStats | None:
        if self._scheduler is None:
            return None
        nothing: list[Any] = []
        events = self._scheduler.ask(nothing, lambda _: self._events.take())
        return PenstockStats({"events": events}) if events else None

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._register(WorkerDevice.of_layers(kv_caches, self._kv_cache_config))

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        self._register(WorkerDevice.of_blocks(kv_cache, self._kv_cache_config))

    def _register(self, device: WorkerDevice) -> None:
        device = device.described(self._vllm_config).prepared(host_codec(self._config))
        self._device = device
        num_threads = self._config.transfer.copy_threads
        self._worker = GuardedWorker(
            lambda orders: device.open(orders, num_threads),
            saves_late=self._vllm_config.speculative_config is not None,
        )

    def get_handshake_metadata(self) -> PenstockHandshake | None:
        return None if self._device is None else PenstockHandshake(self._device.shard)

    def handle_preemptions(self, kv_connector_metadata: PenstockMetadata) -> None:
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: a request is scheduled only after all of its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: blocks are saved with all layers, after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._get_connector_metadata().orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is not None:
            has_orders = self.has_connector_metadata()
            orders = self._get_connector_metadata().orders if has_orders else None
            self._results = self._worker.results(orders)
        return None, self._results.ready or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)  # from vLLM 0.30 on
        if self._fails_whole:
            results.failed_recving = self._results.failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._results = self._results.bad_blocks, Results(set(), set(), set())
        return set() if self._fails_whole else bad

    def build_connector_worker_meta(self) -> PenstockWorkerMetadata | None:
        if self._worker is None:
            return None
        reports = self._worker.take_reports()
        return PenstockWorkerMetadata(reports) if reports else None
