"""`PenstockTier`: what vLLM's `TieringOffloadingManager` calls, in the scheduler's process.

vLLM's DRAM takes the place of the device. vLLM keeps a chunk where it is until its job has ended,
and a job ends when no copy touches its chunks. A chunk that cannot be loaded is reported as failed,
and vLLM computes it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import vllm
from blake3 import blake3
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from penstock.connectors.borrowed import BorrowedPool, open_below, serve_metrics
from penstock.connectors.vllm.ticker import Ticker
from penstock.connectors.vllm_tier.identity import tier_namespace
from penstock.connectors.vllm_tier.settings import VllmTierSettings
from penstock.metrics import Metrics
from penstock.types import NO_PARENTS, BlockKey, Done, LookupId, Slot, TicketId, Verdict
from penstock.units import format_bytes

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 30.0
_POLL_SECONDS = 0.001


class _Job(NamedTuple):
    id: int
    keys: list[bytes]
    started: float


class PenstockTier(SecondaryTierManager):  # type: ignore[misc]
    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Open the tiers. Raises ConfigError, and vLLM does not start."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = VllmTierSettings.read(settings)
        config, metrics = self._settings.tiers(), Metrics()
        offloading = offloading_spec.config
        num_bytes = self.block_size_bytes
        namespace = tier_namespace(offloading, vllm.__version__, num_bytes)
        pool = BorrowedPool(primary_kv_view, block_bytes=num_bytes, stride_bytes=num_bytes)
        # The scheduler calls on one thread; another one writes to lower tiers while it is idle.
        self._lock = threading.RLock()
        self._jobs: dict[TicketId, _Job] = {}
        self._finished: list[JobResult] = []
        self._salt = b""
        self._is_chain = len(offloading.groups) == 1
        self._asking: dict[LookupId, dict[BlockKey, None]] = {}
        self._to_ask: dict[BlockKey, None] = {}
        self._asked: dict[str, set[BlockKey]] = {}  # what a shared store was asked, by request
        self._promised: dict[str, set[BlockKey]] = {}  # what was said to be there, by request
        self._failed = False
        port = self._settings.metrics_port
        self._endpoint = None if port is None else serve_metrics(metrics, port)
        spec = namespace.block_spec(num_bytes)
        name = f"vLLM, process {os.getpid()}"
        try:
            self._tiers = open_below(config, spec, pool, observers=[metrics], name=name)
        except BaseException:
            if self._endpoint is not None:
                self._endpoint.close()
            raise
        self._has_remote = config.remote.url is not None or config.node.url is not None
        with self._lock:  # its first call waits until it can be asked for its error
            self._ticker = Ticker(self._tick)
        log.info("Penstock keeps vLLM's chunks of %s below its DRAM", format_bytes(num_bytes))

    # vLLM's calls for requests.

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        with self._lock:
            if self._is_stopped:
                return LookupResult.MISS
            name, request = self._key(key), str(req_context.req_id)
            try:
                is_there = self._tiers.where([name])[0] is not None
            except Exception as error:
                self._stop(error)
                return LookupResult.MISS
            if is_there:
                # A chunk is promised to a request once. While a tier hangs, it would wait for every
                # deadline; and if vLLM's DRAM is too small for its prompt, forever, because each
                # chunk that comes evicts one that came before.
                promised = self._promised.setdefault(request, set())
                if name in promised:
                    return LookupResult.MISS
                promised.add(name)
                return LookupResult.HIT
            if not self._has_remote:
                return LookupResult.MISS
            asked = self._asked.setdefault(request, set())
            is_open = name in self._to_ask or any(name in each for each in self._asking.values())
            if name in asked and not is_open:
                return LookupResult.MISS
            # A request asks once, or others that end meanwhile could make it wait forever.
            asked.add(name)
            if not is_open:
                self._to_ask[name] = None
            return LookupResult.RETRY

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        with self._lock:
            if self._is_stopped:
                return
            try:
                self._tiers.used([self._key(key) for key in keys])
            except Exception as error:
                self._stop(error)

    def on_request_finished(self, req_context: Any) -> None:
        """What a shared store did not have may be there for the next request."""
        with self._lock:
            self._asked.pop(str(req_context.req_id), None)
            self._promised.pop(str(req_context.req_id), None)

    # Jobs.

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=True)

    def _submit(self, job: Any, *, is_load: bool) -> None:
        keys = list(job.keys)
        with self._lock:
            if self._is_stopped:
                self._finished.append(JobResult(job_id=job.job_id, success=False))
                return
            names = [self._key(key) for key in keys]
            slots = [Slot(int(chunk)) for chunk in job.chunk_ids]
            parents = NO_PARENTS if self._is_chain else dict.fromkeys(range(len(keys)))
            start = self._tiers.load if is_load else self._tiers.save
            try:
                ticket = start(names, slots, parents=parents)
            except Exception as error:
                self._stop(error)
                self._finished.append(JobResult(job_id=job.job_id, success=False))
                return
            self._jobs[ticket] = _Job(job.job_id, keys, time.monotonic())
            self._ticker.wake()

    def get_finished_jobs(self) -> Iterable[Any]:
        with self._lock:
            self._settle()
            finished, self._finished = self._finished, []
            return finished

    def has_pending_work(self) -> bool:
        with self._lock:
            return bool(self._jobs or self._finished or self._asking or self._to_ask)

    def on_schedule_end(self, context: Any) -> None:
        """Ask a shared store for all chunks of this step at once."""
        with self._lock:
            if self._is_stopped or not self._to_ask:
                return
            keys, self._to_ask = self._to_ask, {}
            try:
                lookup = self._tiers.lookup(list(keys))
            except Exception as error:
                self._stop(error)
                return
            if lookup is not None:
                self._asking[lookup] = keys
            self._ticker.wake()

    def drain_jobs(self) -> None:
        """Wait for all jobs. vLLM then resets its cache, maybe because weights were replaced."""
        while True:
            with self._lock:
                self._settle()
                if not self._jobs:
                    break
            time.sleep(_POLL_SECONDS)
        if self._settings.weights_stay:
            return
        with self._lock:
            self._salt = secrets.token_bytes(16)
        log.warning(
            "vLLM has reset its cache, maybe because its weights were replaced: KV stored before "
            "is not used until vLLM is restarted, and KV stored from now on is for this run only"
        )

    def shutdown(self) -> None:
        """Finish the writes. Raises TimeoutError if a copy hangs: vLLM then keeps its memory."""
        self._ticker.stop(wait=True)
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        with self._lock:
            if self._failed:
                is_closed = self._tiers.abandon(_CLOSE_SECONDS)
            else:
                is_let_go = self._tiers.let_go(_CLOSE_SECONDS)
                is_closed = self._tiers.close(_CLOSE_SECONDS) and is_let_go
        if not is_closed:
            raise TimeoutError("a tier did not answer in time; what was not written to it is lost")

    def recover(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until the index of the disk has been read. Serving does not need it."""
        with self._lock:
            return self._tiers.recover(timeout_seconds)

    def check(self) -> None:
        """Raise BookError if the books do not add up."""
        with self._lock:
            self._tiers.check()

    def _key(self, key: bytes) -> BlockKey:
        """The name of a chunk: vLLM's hash and its group. The namespace names the rest."""
        stem = len(self._salt).to_bytes(1, "little") + self._salt
        return BlockKey(blake3(b"penstock vllm chunk 1" + stem + key).digest())

    @property
    def _is_stopped(self) -> bool:
        if self._ticker.error is not None and not self._failed:
            self._stop(self._ticker.error)
        return self._failed

    def _settle(self) -> None:
        if self._is_stopped:
            return
        try:
            dones = self._tiers.step()
            ended = [lookup for lookup in self._asking if not self._tiers.is_looking_up(lookup)]
        except Exception as error:
            self._stop(error)
            return
        for lookup in ended:
            del self._asking[lookup]
        for done in dones:
            if (job := self._jobs.pop(done.ticket, None)) is not None:
                self._finished.append(self._result(job, done))

    def _result(self, job: _Job, done: Done) -> Any:
        pairs = zip(job.keys, done.verdicts, strict=True)
        sound = [key for key, verdict in pairs if verdict is Verdict.OK]
        return JobResult(
            job_id=job.id,
            success=done.ok,
            successful_keys=sound,
            transfer_time=time.monotonic() - job.started,
            transfer_bytes=len(sound) * self.block_size_bytes,
        )

    def _tick(self) -> bool:
        with self._lock:
            if self._failed:
                return False
            self._settle()
            return bool(self._tiers.is_moving)

    def _stop(self, error: Exception) -> None:
        """After an error in our own code the books cannot be trusted: end all jobs, use no tier."""
        self._failed = True
        log.error("Penstock stops: vLLM goes on without it until it is restarted", exc_info=error)
        # A job may only end once no copy touches its chunks. If one hangs, vLLM keeps them.
        if self._tiers.abandon(_CLOSE_SECONDS):
            jobs, self._jobs = self._jobs, {}
            self._finished += [JobResult(job_id=job.id, success=False) for job in jobs.values()]
        self._asking.clear()
        self._to_ask.clear()
