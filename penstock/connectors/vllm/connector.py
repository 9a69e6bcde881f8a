"""PenstockConnector: vLLM's interface, hook by hook, over the two sides.

Nothing that goes wrong in here may reach vLLM. On the scheduler's side an error that nobody
foresaw ends offloading for this process: loads that were promised are given up, and vLLM computes.
On a worker's side it costs the blocks it concerns.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

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

from penstock.build import build_delegated
from penstock.clock import SystemClock
from penstock.config import Config
from penstock.connectors.vllm.device import WorkerDevice
from penstock.connectors.vllm.identity import model_namespace
from penstock.connectors.vllm.kv_events import BlockNews
from penstock.connectors.vllm.orders import Orders, Reports, Shard
from penstock.connectors.vllm.prometheus import PenstockPromMetrics, PenstockStats
from penstock.connectors.vllm.published import published
from penstock.connectors.vllm.scheduler import Scheduled, SchedulerSide
from penstock.connectors.vllm.settings import VllmSettings
from penstock.connectors.vllm.stats import EventLog
from penstock.connectors.vllm.support import check_config, check_groups, check_version
from penstock.connectors.vllm.worker import Results, WorkerSide
from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.types import Tier
from penstock.units import format_bytes

log = init_logger("vllm.penstock")

Method = TypeVar("Method", bound=Callable[..., Any])


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
    """vLLM gives handlers to its own loggers alone; what Penstock says belongs beside."""
    ours, theirs = logging.getLogger("penstock"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = not theirs.handlers


def _guarded(otherwise: Any) -> Callable[[Method], Method]:
    """On the scheduler's side: after an error offloading ends, and `otherwise` is the answer."""

    def guard(method: Method) -> Method:
        @wraps(method)
        def run(self: PenstockConnector, *args: Any, **kwargs: Any) -> Any:
            if self._side is None:
                return otherwise
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._end_offloading()
                return otherwise

        return run  # type: ignore[return-value]

    return guard


def _sheltered(method: Method) -> Method:
    """On a worker's side: after an error nothing is copied any more, and what was is lost."""

    @wraps(method)
    def run(self: PenstockConnector, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            log.exception(
                "Penstock met an error that it does not understand: this worker copies nothing "
                "any more, and vLLM computes instead. Please report this."
            )
            if self._worker is not None:
                self._worker.give_up()

    return run  # type: ignore[return-value]


class PenstockConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        self._settings = VllmSettings.read(self._kv_transfer_config.kv_connector_extra_config)
        self._config = self._settings.tiers()
        check_version(vllm.__version__, insist=self._settings.allow_untested_vllm)
        check_config(vllm_config)
        self._spec = check_groups(kv_cache_config)
        self._side: SchedulerSide | None = None
        self._abandoned: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._device: WorkerDevice | None = None
        self._results = Results(set(), set())
        self._awaited: dict[str, tuple[int, ...]] = {}  # loads that vLLM has not seen end
        self._events = EventLog()
        publishing = vllm_config.kv_events_config
        enabled = publishing is not None and publishing.enable_kv_cache_events
        self._news = BlockNews() if enabled else None

    # What vLLM asks of the class.

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """vLLM up to 0.31: one stretch of memory for all layers of a block."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is dropped is a later miss

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
        if self._side is not None:
            side, self._side = self._side, None
            if not side.close():
                log.warning("a tier did not answer in time; what it had not taken yet is lost")
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()

    # The scheduler's side.

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have registered their caches: the tiers can be opened."""
        shards = [metadata[rank].shard for rank in sorted(metadata)]
        expected = self._vllm_config.parallel_config.world_size
        if len(shards) != expected:
            raise ConfigError(
                f"{len(shards)} of {expected} workers told how they keep KV; Penstock needs all."
            )
        namespace = model_namespace(self._vllm_config, vllm.__version__, shards)
        block_bytes = sum(shard.block_bytes for shard in shards)
        spec = namespace.block_spec(block_bytes)
        observers: list[Observer] = [self._events]
        if self._news is not None:
            observers.append(self._news)
        config = self._own_disk(self._config)
        self._side = SchedulerSide(
            build_delegated(
                config,
                spec,
                len(shards),
                shared=any(shard.process != os.getpid() for shard in shards),
                observers=observers,
            ),
            namespace,
            SystemClock(),
            block_bytes=block_bytes,
            may_load=self._kv_transfer_config.is_kv_consumer,
            may_save=self._kv_transfer_config.is_kv_producer,
            always_load=self._settings.always_load,
            may_load_now=True,
            observers=observers,
            news=self._news,
        )
        log.info(
            "Penstock keeps KV in %s of DRAM%s; a block has %d tokens and %s.",
            format_bytes(config.host.size_bytes),
            f" and {format_bytes(config.disk.size_bytes)} in {config.disk.path}"
            if config.disk.path
            else "",
            namespace.block_tokens,
            format_bytes(block_bytes),
        )

    def _own_disk(self, config: Config) -> Config:
        """Engines of one data-parallel group have a folder each: a store has one owner."""
        parallel = self._vllm_config.parallel_config
        if config.disk.path is None or parallel.data_parallel_size == 1:
            return config
        folder = Path(config.disk.path) / f"dp{parallel.data_parallel_rank}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        return replace(config, disk=replace(config.disk, path=str(folder)))

    @_guarded((0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._side is not None
        num_tokens = self._side.lookup(request, num_computed_tokens)
        if num_tokens is None:
            return None, False
        waits = num_tokens > 0 and not self._side.offers_now(request.request_id)
        return num_tokens, waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids()[0]
        num_blocks = -(-num_external_tokens // self._spec.block_size)
        if num_blocks:  # from here on vLLM counts on them, whatever happens to us
            self._awaited[request.request_id] = tuple(block_ids[-num_blocks:])
        if self._allocated(request, block_ids, num_external_tokens):
            self._awaited.pop(request.request_id, None)

    @_guarded(False)
    def _allocated(self, request: Any, block_ids: list[int], num_external_tokens: int) -> bool:
        assert self._side is not None
        is_now = self._side.offers_now(request.request_id)
        self._side.allocated(request, block_ids, num_external_tokens)
        return is_now

    def build_connector_meta(self, scheduler_output: Any) -> PenstockMetadata:
        orders = self._orders(scheduler_output)
        if orders is None:
            orders = Orders(-1, complete=dict(self._awaited), is_last_resort=True)
        return PenstockMetadata(orders)

    @_guarded(None)
    def _orders(self, scheduler_output: Any) -> Orders:
        assert self._side is not None
        scheduled = [
            Scheduled(new.req_id, new.block_ids[0], new.num_computed_tokens, has_all=True)
            for new in scheduler_output.scheduled_new_reqs
        ]
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            has_all = block_ids is not None and request_id in cached.resumed_req_ids
            added = block_ids[0] if block_ids else ()
            scheduled.append(Scheduled(request_id, added, num_computed, has_all))
        return self._side.orders(
            scheduled,
            scheduler_output.num_scheduled_tokens,
            scheduler_output.preempted_req_ids or (),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        ready = connector_output.finished_recving or ()
        for request_id in ready:
            self._awaited.pop(request_id, None)
        worker_meta = connector_output.kv_connector_worker_meta
        reports = Reports() if worker_meta is None else worker_meta.reports
        self._report(reports, ready)

    @_guarded(None)
    def _report(self, reports: Reports, ready: Iterable[str]) -> None:
        assert self._side is not None
        self._side.report(reports, ready)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded((False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._side is not None
        # Never hold blocks back: whoever writes to them next is fenced.
        return False, self._side.finished(request)

    @_guarded({})
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # vLLM 0.32

        assert self._side is not None
        names = {Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}
        unknown = CacheHitSource.EXTERNAL_UNSPECIFIED
        found = self._side.sources(request.request_id)
        return {names.get(tier, unknown): count for tier, count in found.items()}

    @_guarded(False)
    def has_pending_push_work(self) -> bool:
        assert self._side is not None
        return self._side.has_pending_work

    @_guarded(False)
    def reset_cache(self) -> bool:
        assert self._side is not None
        self._side.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        if self._news is None:
            return ()
        block_tokens = self._vllm_config.cache_config.block_size
        return published(self._news.take(), block_tokens)

    def get_kv_connector_stats(self) -> PenstockStats | None:
        events = self._events.take()
        return PenstockStats({"events": events}) if events else None

    def _end_offloading(self) -> None:
        log.exception(
            "Penstock met an error that it does not understand, and offloads nothing any more; "
            "vLLM goes on without it. Please report this."
        )
        # Kept, and with it the DRAM: workers may be copying from or to it.
        self._abandoned, self._side = self._side, None
        if self._abandoned is not None:
            self._abandoned.abandon()

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._register(WorkerDevice.of_layers(kv_caches, self._kv_cache_config, self._spec))

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        self._register(WorkerDevice.of_blocks(kv_cache, self._kv_cache_config, self._spec))

    def _register(self, device: WorkerDevice) -> None:
        self._device = device.described(self._vllm_config)

    def get_handshake_metadata(self) -> PenstockHandshake | None:
        return None if self._device is None else PenstockHandshake(self._device.shard)

    @_sheltered
    def handle_preemptions(self, kv_connector_metadata: PenstockMetadata) -> None:
        orders = kv_connector_metadata.orders
        if self._worker is None and orders.arena is not None and self._device is not None:
            self._worker = self._device.open(orders.arena, self._config.transfer.copy_threads)
        if self._worker is not None:
            self._worker.begin(orders)

    @_sheltered
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are of whole requests, before they are scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves are of whole blocks, after the step."""

    @_sheltered
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._get_connector_metadata().orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._take_results()
        return None, self._results.ready or None

    @_sheltered
    def _take_results(self) -> None:
        if self._worker is None:
            return
        is_idle = False
        if self.has_connector_metadata():
            orders = self._get_connector_metadata().orders
            is_idle = orders.is_idle
            self._worker.save(orders)  # vLLM up to 0.31 does not ask for it in an empty step
        self._results = self._worker.results(is_idle=is_idle)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._results = self._results.bad_blocks, Results(set(), set())
        return bad

    def build_connector_worker_meta(self) -> PenstockWorkerMetadata | None:
        if self._worker is None:
            return None
        reports = self._worker.take_reports()
        return PenstockWorkerMetadata(reports) if reports else None
