"""A small vLLM in plain Python, to drive both sides of the connector with real memory.

It does what vLLM's scheduler does with blocks: a prefix cache on the device, preemption, aborts,
loads that a request waits for, steps that overlap, drafts that are rejected. Blocks of requests
that end or are preempted are free at once, and written to by whoever gets them next right after
`begin`.

Computing a token writes bytes that follow from all tokens before it, and reads the device: where
what is there is wrong, what it writes is wrong too. Nothing wrong may stay unnoticed:

- what DRAM offers must be what its key says;
- what is loaded must be there when a request is ready, but for the blocks reported bad;
- no step may compute from wrong bytes. Telling vLLM of it is too late: where steps overlap, its
  AsyncScheduler throws away the token of the step that told it, and delivers the next one, which
  was computed from the same blocks. So no block may be bad that belongs to a running request.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3
from connectors.memory_model import (
    BLOCK_TOKENS,
    BYTES,
    NAMESPACE,
    VOCABULARY,
    AdvancedClock,
    Device,
    Past,
    Shape,
    Silent,
    SlowMover,
    Truth,
    audit_layout,
)
from connectors.pool_model import Pool, Request
from tools import TIMEOUT_SECONDS, folder_cap_for

from penstock.audits.auditor import Auditor
from penstock.build import build_delegated, tier_codecs
from penstock.codecs.blocks import BlockValues, PartValues
from penstock.config import Config, DiskConfig, HostConfig, TransferConfig
from penstock.config.settings import NodeConfig
from penstock.connectors.vllm.auditing import open_auditor
from penstock.connectors.vllm.orders import Orders, Reports
from penstock.connectors.vllm.scheduler import Scheduled, SchedulerSide, StepPlan
from penstock.connectors.vllm.scheduler_guard import GuardedScheduler
from penstock.connectors.vllm.worker_guard import GuardedWorker
from penstock.events import (
    Audited,
    AuditFailed,
    Event,
    Lost,
    Moved,
    Observer,
    Quarantined,
    Stored,
)
from penstock.keys import KeyChain
from penstock.node.attach import NodeOpening
from penstock.node.delegated import join
from penstock.stores import folder, slab
from penstock.stores.host import HostArena
from penstock.transfer.copiers import ThreadCopier
from penstock.transfer.paged import Part, PartPlace, equal_parts
from penstock.transfer.seals import Seals
from penstock.types import BlockSpec, Slot, Tier


@dataclass
class Work:
    """What one step computes of a request."""

    request: Request
    block_ids: list[int]
    start: int
    count: int
    drafts: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    is_wrong: bool = False


@dataclass
class Step:
    orders: Orders
    works: list[Work]
    fresh: list[int]  # blocks that were given out for this step
    ready: list[set[str]] = field(default_factory=list)  # of each worker
    bad_blocks: set[int] = field(default_factory=set)
    reports: Reports = field(default_factory=Reports)


def overwritten(
    fresh: Sequence[int], scheduled: Sequence[Scheduled], side: SchedulerSide
) -> list[int]:
    """Of the blocks given out for a step, those whose content is lost by then.

    Those of a request that waits for a load are not written to before the load: until then a save
    may read what they held.
    """
    computed = {block for one in scheduled for table in one.tables for block in table}
    saved = side._dispatch._saving_from
    return [block for block in fresh if block in computed or block not in saved]


class Vllm:
    """Scheduler, workers and both sides of the connector, in one thread."""

    # What `group_model` has otherwise.
    seals_are_here = True  # after the slots, and not with a node
    plain_tokens: int | None = BLOCK_TOKENS  # of a block, if there is one group of full attention
    namespace = NAMESPACE

    def __init__(
        self,
        directory: Path | None,
        *,
        seed: int = 0,
        num_workers: int = 1,
        num_blocks: int = 28,
        num_host: int = 12,
        num_disk: int = 60,
        overlaps: bool = False,
        is_caching: bool = True,
        num_drafts: int = 0,
        budget: int = 24,
        max_running: int = 6,
        copy_threads: int = 2,
        observers: Sequence[Observer] = (),
        truth: Truth | None = None,
        audit_share: float = 0.0,
        shape: Shape = BYTES,
        codec: str = "auto",
        disk_codec: str = "auto",
        node: Path | None = None,
        **side: Any,
    ) -> None:
        """`node`: the socket of a node, to use its tiers."""
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.clock = AdvancedClock()
        self.shape = shape
        self.truth = Truth(shape) if truth is None else truth
        self.physical = self.namespace.physical().digest()
        self._epoch = 0
        self._overlaps = overlaps
        self._num_drafts = num_drafts
        self._budget = budget
        self._max_running = max_running
        self.directory = directory
        self.devices = [self._make_device(num_blocks, rank) for rank in range(num_workers)]
        part_bytes = self._part_bytes()
        block_bytes = num_workers * part_bytes
        spec = BlockSpec(self.physical, block_bytes, self.namespace.block_tokens)
        stretches = tuple(one.num_bytes for one in self.devices[0].paged.stretches)
        part = PartValues(part_bytes, "bfloat16" if shape.is_bf16 else "", stretches)
        disk = DiskConfig()
        if directory is not None:
            disk = DiskConfig(str(directory), codec=disk_codec, threads=2)
        config = Config(
            host=HostConfig(huge_pages=False, codec=codec),
            disk=disk,
            transfer=TransferConfig(batch_bytes=4 * block_bytes),
        )
        codecs = tier_codecs(config, BlockValues((part,) * num_workers))
        size = num_host * codecs.spec(Tier.HOST, spec).stride_bytes
        self.disk_spec = codecs.spec(Tier.DISK, spec)
        config = replace(
            config,
            host=replace(config.host, size_bytes=size),
            disk=replace(config.disk, size_bytes=folder_cap_for(self.disk_spec, num_disk)),
        )
        all_observers = [self._observe, *observers]
        self.auditor: Auditor | None = None
        self.seals: Seals
        if node is None:
            built = build_delegated(
                config,
                spec,
                num_workers,
                codecs=codecs,
                clock=self.clock,
                observers=all_observers,
            )
            self.host = HostArena.open(built.arena)
            self.seals = Seals(self.host, memory=self.host.seals)
        else:
            self.seals_are_here = False
            config = replace(config, node=NodeConfig(url=f"unix://{node}"))
            opening = NodeOpening(config)
            values = BlockValues((part,) * num_workers)
            codecs = opening.codecs(values)
            built = opening.attach_delegated(spec, num_workers, values, observers=all_observers)
            joined = join(built.arena)
            self.host, self.seals = joined.host, joined.seals
        self.truth.read = lambda _, slot: bytes(self.offloader.read_host(slot)[:block_bytes])
        self.offloader, self.engine = built.offloader, built.engine
        assert built.offloader.recover(TIMEOUT_SECONDS)
        self.auditor = open_auditor(
            self.offloader,
            config,
            NAMESPACE,
            [audit_layout(num_workers, shape)],
            share=audit_share,
            block_bytes=block_bytes,
            observers=all_observers,
        )
        self.side = SchedulerSide(
            built,
            self.namespace,
            self.clock,
            block_bytes=self.offloader.host_block_bytes,
            observers=all_observers,
            auditor=self.auditor,
            **{"always_load": True, **side},
        )
        self.scheduler = GuardedScheduler(self.side, self.plain_tokens)
        parts = equal_parts(codecs.host.parts[0].packed_bytes, num_workers)
        packing = codecs.host.parts[0] if codecs.host.version else None
        self.movers = [
            SlowMover(Part(device.paged, self.host, place, packing), self.seals, seed + rank)
            for rank, (device, place) in enumerate(zip(self.devices, parts, strict=True))
        ]
        self.copiers = [ThreadCopier(mover, copy_threads) for mover in self.movers]
        self._copy_threads, self._packing = copy_threads, packing
        self.workers = [
            GuardedWorker(lambda orders, rank=rank, place=place: self._open(orders, rank, place))
            for rank, place in enumerate(parts)
        ]
        self.pool = self._make_pool(num_blocks, is_caching=is_caching)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.answers: dict[str, dict[str, Any] | None] = {}
        self.preempts_next = False
        self.guesses: list[int] = []  # instead of some that may be right
        self._preempted: list[str] = []
        self._arrived: set[str] = set()  # loads that vLLM has seen end
        self._failed: set[str] = set()  # of these, with bad blocks
        self._num_ready: Counter[str] = Counter()
        self._under_way: deque[Step] = deque()

    def _open(self, orders: Orders, rank: int, place: PartPlace) -> ThreadCopier:
        assert orders.arena is not None
        if not orders.arena.token:
            return self.copiers[rank]
        self.seen["joined"] += 1
        joined = join(orders.arena)
        part = Part(self.devices[rank].paged, joined.host, place, self._packing)
        mover = SlowMover(part, joined.seals, self.seen["joined"])
        mover.max_seconds = self.movers[rank].max_seconds
        self.movers[rank] = mover
        self.copiers[rank].close()
        self.copiers[rank] = ThreadCopier(mover, self._copy_threads)
        return self.copiers[rank]

    def _make_device(self, num_blocks: int, rank: int) -> Any:
        return Device(num_blocks, rank, self.shape)

    def _part_bytes(self) -> int:
        """Of a block in one worker."""
        return self.shape.part_bytes

    def _make_pool(self, num_blocks: int, *, is_caching: bool) -> Any:
        return Pool(num_blocks, self.rng, is_caching=is_caching)

    def _make_request(self, *args: Any, **fields: Any) -> Any:
        return Request(*args, **fields)

    def _observe(self, event: Event) -> None:
        match event:
            case Stored(Tier.HOST, keys) if self.seals_are_here:
                # The copies for audits have keys of their own.
                audits = [] if self.auditor is None else self.auditor._audits
                copies = {key for audit in audits for key in audit.saved}
                known = [key for key in keys if key not in copies]
                self.truth.check(known, self.host, len(self.devices))
            case Audited(check):
                self.seen[f"audits: {check}"] += 1
            case AuditFailed(check):
                self.seen[f"failed audits: {check}"] += 1
            case Quarantined():
                self.seen["quarantined"] += 1
            case Moved(Tier.HOST, Tier.DEVICE, num_blocks=num_blocks):
                self.seen["blocks loaded"] += num_blocks
            case Moved(Tier.DISK, num_blocks=num_blocks):
                self.seen["blocks from disk"] += num_blocks
            case Moved(Tier.DEVICE, num_blocks=num_blocks):
                self.seen["blocks saved"] += num_blocks
            case Lost(verdict=verdict, num_blocks=num_blocks):
                self.seen[f"lost: {verdict.label}"] += num_blocks

    # What users do.

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> Any:
        request = self._make_request(f"request {len(self.answers)}", prompt, max_tokens, **fields)
        self.answers[request.request_id] = None
        self.requests[request.request_id] = request
        self._begin(request)
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        self.seen["aborted"] += 1
        if request.status == "loading" and request.request_id not in self._arrived:
            self.seen["aborted while loading"] += 1
            self.waiting.remove(request)
            request.status = "ended"
            self._tell_finished(request)
            return  # its blocks are freed when the load has ended
        if request.status == "running":
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._arrived.discard(request.request_id)
        self._failed.discard(request.request_id)
        self._end(request)

    def reset(self, *, with_connector: bool = True) -> bool:
        """As `reset_prefix_cache(reset_running_requests=True)`: False where vLLM refuses."""
        self.catch_up()
        others = (one for one in self.requests.values() if one.status != "running")
        if any(self._holds_blocks(request) for request in others):
            return False
        self.seen["resets"] += 1
        while self.running:
            self._preempt(self.running.pop())
        self.pool.forget_all()
        if with_connector:
            self.scheduler.reset()
            self.namespace = self.side._requests.namespace
            self._epoch += 1
            for request in self.requests.values():
                self._begin(request)
        return True

    def _begin(self, request: Request) -> None:
        lora = "" if request.lora_request is None else request.lora_request.lora_name
        request.past = Past(f"{request.cache_salt} {lora} {self._epoch}")
        namespace = self.side._requests.naming.namespace(self.namespace, request)
        request.chain = None if namespace is None else KeyChain(namespace)
        request.num_chained = 0

    # Steps.

    def step(self) -> Step:
        step = self._schedule()
        self._execute(step)
        self._under_way.append(step)
        while len(self._under_way) > self._overlaps:
            self._update(self._under_way.popleft())
        if not step.works:
            time.sleep(0.0005)  # nothing to compute: let copies go on
        return step

    def side_step(self) -> Orders:
        """The orders of a step that is never executed."""
        return self._schedule().orders

    def run(self, max_steps: int = 5000) -> None:
        """Until all requests have ended, and the workers have told all there is to tell."""
        for _ in range(max_steps):
            if not self.requests:
                self.catch_up()
            if not (self.requests or self.scheduler.has_pending_work):
                return
            self.step()
        left = {request.request_id: request.status for request in self.requests.values()}
        raise AssertionError(f"this never ends: {left}, {self.engine.num_flying} flying")

    def catch_up(self) -> None:
        """Take in the outputs of all steps that were executed."""
        while self._under_way:
            self._update(self._under_way.popleft())

    def flush(self) -> None:
        """Wait until the tiers are at rest, so that the next lookup finds all there is."""
        self.run()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.offloader.is_moving:
            assert time.monotonic() < deadline, "the tiers never come to rest"
            time.sleep(0.001)

    def close(self) -> None:
        for mover in self.movers:
            mover.gate.set()
            mover.saves_gate.set()
        has_ended = self.scheduler.side is None or self.side.failure is not None
        assert self.scheduler.close()
        if has_ended:
            # Its threads, which vLLM's process would end. Nothing may be settled any more: after an
            # error the books cannot be trusted.
            self.side._ticker.stop(wait=True)
            assert self.offloader.abandon(TIMEOUT_SECONDS)
        for worker in self.workers:
            worker.close()

    def check(self) -> None:
        """Audit the books, unless an error of ours has ended them."""
        if self.scheduler.side is not None and self.side.failure is None:
            self.side.check()
            assert self.engine.num_flying == 0 or self.requests or self.scheduler.has_pending_work

    def audit(self) -> None:
        if self.truth.wrong:
            raise Silent("; ".join(self.truth.wrong[:3]))

    def await_saves(self, orders: Orders) -> None:
        """Wait until the workers have done the saves of a step that was executed."""
        for copier in self.copiers:
            copier.fence([transfer.id for transfer in orders.saves_after])

    def _schedule(self) -> Step:
        budget = self._budget
        works: list[Work] = []
        scheduled: list[Scheduled] = []
        fresh: list[int] = []
        preempted_now = False
        if self.preempts_next and self.running:  # as for a more urgent request
            preempted_now = True
            victim = self.rng.choice(self.running)
            self.running.remove(victim)
            self._preempt(victim)
        self.preempts_next = False
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            wanted = request.num_tokens + request.num_placeholders - request.num_computed_tokens
            drafts = self._drafts(request) if wanted == 1 else []
            count = min(wanted + len(drafts), budget)
            drafts = drafts[: max(0, count - wanted)]
            if count < 1:
                continue
            while (added := self._grow(request, request.num_computed_tokens + count)) is None:
                preempted_now = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            if added is None:
                break
            fresh += added
            budget -= count
            computed = request.num_computed_tokens
            scheduled.append(Scheduled(request.request_id, [added], computed, has_all=False))
            works.append(Work(request, request.block_ids, computed, count, drafts))
        if not preempted_now:
            self._admit(budget, works, scheduled, fresh)
        counts = {work.request.request_id: work.count for work in works}
        preempted, self._preempted = self._preempted, []
        for request in self.requests.values():
            self._learn(request)
        orders = self.scheduler.orders(lambda: StepPlan(scheduled, counts, preempted))
        self.seen["fences"] += bool(orders.fence)
        for work in works:
            request = work.request
            work.block_ids = list(request.block_ids)
            request.num_computed_tokens += work.count
            request.num_in_flight += 1
            if request.num_computed_tokens >= request.num_tokens + request.num_placeholders:
                request.num_placeholders += 1
            self._name(request)
        return Step(orders, works, overwritten(fresh, scheduled, self.side))

    def _admit(
        self, budget: int, works: list[Work], scheduled: list[Scheduled], fresh: list[int]
    ) -> None:
        # Those that hold blocks come first, or they would be held for ever.
        for request in sorted(self.waiting, key=lambda request: not self._holds_blocks(request)):
            if len(self.running) >= self._max_running:
                break
            if request.status == "loading":
                if request.request_id not in self._arrived:
                    continue
                self._promote(request)
            if request.num_stale:
                continue  # what it sampled before its preemption has not come back yet
            local: list[int] = []
            num_external, waits = 0, False
            if request.num_computed_tokens == 0:
                assert not request.block_ids
                digests = request.past.of(request.all_token_ids)
                local = self.pool.find(digests[: request.num_tokens - 1])
                num_local = len(local) * BLOCK_TOKENS
                found = self.scheduler.lookup(request, num_local)
                if found is None:
                    self.seen["asked again"] += 1
                    continue
                num_external = found
                computed = num_local + num_external
                assert num_local <= computed <= request.num_tokens
                waits = num_external > 0
                assert num_external % BLOCK_TOKENS == 0
            else:
                computed = request.num_computed_tokens
            count = 0 if waits else min(request.num_tokens - computed, budget)
            if not waits and count < 1:
                break
            num_have = len(local) or len(request.block_ids)
            num_new = -(-(computed + count) // BLOCK_TOKENS) - num_have
            num_room = self.pool.num_free - self.pool.num_idle(local)
            # Whoever waits for a load holds its blocks, and must be able to go on afterwards.
            if num_new > num_room - (self._num_promised() if waits else 0):
                break
            self.pool.use(local)
            request.num_local = len(local)
            added = self.pool.take(max(0, num_new))
            request.block_ids = (local or request.block_ids) + added
            fresh += added
            self.scheduler.allocated(request, [request.block_ids], num_external)
            if num_external:
                self.seen["hits"] += 1
                end = -(-computed // BLOCK_TOKENS)
                request.loading = request.block_ids[len(local) : end]
            request.num_computed_tokens = computed
            if waits:
                self.seen["loads"] += 1
                request.status = "loading"
                continue
            self.waiting.remove(request)
            request.status = "running"
            self.running.append(request)
            budget -= count
            scheduled.append(
                Scheduled(request.request_id, [list(request.block_ids)], computed, has_all=True)
            )
            works.append(Work(request, request.block_ids, computed, count))
            self._name(request, computed + count)
            if budget < 1:
                break

    def _num_promised(self) -> int:
        """Blocks that requests which wait with blocks of theirs will need to go on."""
        return sum(
            -(-(request.num_tokens + 1) // BLOCK_TOKENS) - len(request.block_ids)
            for request in self.waiting
            if request.block_ids
        )

    def _drafts(self, request: Request) -> list[int]:
        if not self._num_drafts or self._overlaps:
            return []
        if self.guesses:
            return self.guesses[: self._num_drafts]
        guesses: list[int] = []
        known = list(request.known)
        for _ in range(self.rng.randint(0, self._num_drafts)):
            right = self._next_token(request, known)
            guesses.append(right if self.rng.random() < 0.5 else self.rng.randrange(VOCABULARY))
            known.append(guesses[-1])
        return guesses

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        num_new = -(-num_tokens // BLOCK_TOKENS) - len(request.block_ids)
        if num_new > self.pool.num_free:
            return None
        added = self.pool.take(max(0, num_new))
        request.block_ids += added
        return added

    def _preempt(self, request: Request) -> None:
        self.seen["preempted"] += 1
        self._release(request)
        request.status = "waiting"
        request.num_computed_tokens = 0
        request.num_stale = request.num_in_flight
        request.num_placeholders = 0
        self.waiting.appendleft(request)
        self._preempted.append(request.request_id)

    def _promote(self, request: Request) -> None:
        self._arrived.remove(request.request_id)
        request.status = "waiting"
        request.loading = []
        if request.request_id in self._failed:
            self._failed.remove(request.request_id)
            if request.num_computed_tokens == 0:
                self._release(request)
                return
            self.seen["resumed with part of a load"] += 1
            self._name(request, request.num_computed_tokens)
            return
        self._name(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # the last token is computed once more
            self.seen["whole prompts loaded"] += 1

    def _name(self, request: Request, num_tokens: int | None = None) -> None:
        """Full blocks of known tokens can be found by others from now on."""
        num_computed = request.num_computed_tokens if num_tokens is None else num_tokens
        num_known = min(num_computed, request.num_tokens)
        digests = request.past.of(request.all_token_ids)
        self.pool.name(request.block_ids, digests[:num_known])

    def _learn(self, request: Request) -> None:
        if request.chain is None or request.num_chained == request.num_tokens:
            return
        request.chain.extend(request.all_token_ids[request.num_chained :])
        request.num_chained = request.num_tokens
        self.truth.learn(request.chain.keys, request.past.of(request.all_token_ids))

    # Workers.

    def _execute(self, step: Step) -> None:
        for worker, device in zip(self.workers, self.devices, strict=True):
            worker.begin(step.orders)
            for block in step.fresh:
                device.scribble(block)  # what the fence held back is over now
        # vLLM 0.32 starts loads after the forward pass, older ones before it.
        is_new = self.rng.random() < 0.5
        for worker in () if is_new else self.workers:
            worker.load(step.orders)
        for work in step.works:
            self._compute(work)
        for worker in self.workers:
            if is_new:
                worker.load(step.orders)
            worker.save(step.orders)
            results = worker.results(step.orders)
            step.ready.append(results.ready)
            step.bad_blocks |= results.bad_blocks
            step.reports.join(worker.take_reports())
        for work in step.works:
            if work.is_wrong:
                raise Silent(f"{work.request.request_id} computed with wrong KV")
        self.audit()

    def _compute(self, work: Work) -> None:
        request = work.request
        tokens = (request.known + work.drafts)[: work.start + work.count]
        digests = list(request.past.of(request.known)[: work.start + work.count])
        for token in tokens[len(digests) :]:
            digests.append(request.past.after(digests, token))
        while len(digests) < work.start + work.count:  # nothing was sampled from wrong KV
            work.is_wrong = True
            digests.append(b"no token")
        for device in self.devices:
            for index, block in enumerate(work.block_ids):
                before = digests[index * BLOCK_TOKENS : min((index + 1) * BLOCK_TOKENS, work.start)]
                if not device.holds(block, before):
                    work.is_wrong = True
        for device in self.devices:
            for position in range(work.start, work.start + work.count):
                digest = digests[position]
                if work.is_wrong:
                    digest = blake3(b"computed from wrong KV" + digest).digest()
                block = work.block_ids[position // BLOCK_TOKENS]
                device.write(block, position % BLOCK_TOKENS, digest)
        if work.start + work.count >= len(request.known) and not work.is_wrong:
            self._sample(work)

    def _sample(self, work: Work) -> None:
        request = work.request
        for draft in work.drafts:
            right = self._next_token(request, request.known)
            work.sampled.append(right)
            request.known.append(right)
            if draft != right:
                self.seen["drafts rejected"] += 1
                return
        right = self._next_token(request, request.known)
        work.sampled.append(right)
        request.known.append(right)

    def _next_token(self, request: Request, tokens: Sequence[int]) -> int:
        past = Past("tokens")  # the same whatever the KV is called
        return past.of(tokens[-8:])[-1][0] % VOCABULARY

    # What vLLM makes of a step.

    def _update(self, step: Step) -> None:
        self._invalidate(step)
        for work in step.works:
            work.request.num_in_flight -= 1
        for work in step.works:
            request = work.request
            is_stale = request.num_stale > 0
            request.num_stale -= is_stale
            if request.status == "ended":
                continue
            if not is_stale:
                if work.drafts:
                    request.num_computed_tokens -= len(work.drafts) + 1 - len(work.sampled)
                request.num_placeholders -= bool(work.sampled)
            for token in work.sampled[: request.max_tokens - request.num_output]:
                request.all_token_ids.append(token)
            if request.num_output >= request.max_tokens:
                (self.running.remove if request in self.running else self.waiting.remove)(request)
                self._end(request)
        self._arrive(step)

    def _invalidate(self, step: Step) -> None:
        if not step.bad_blocks:
            return
        self.seen["bad blocks"] += len(step.bad_blocks)
        owned: set[int] = set()
        for request in self.requests.values():
            owned.update(request.block_ids)
            if request.status == "running" and not step.bad_blocks.isdisjoint(request.block_ids):
                raise Silent(f"{request.request_id} runs on blocks that were not loaded")
            if request.status != "loading":
                continue
            num_blocks = -(-request.num_computed_tokens // BLOCK_TOKENS)
            for index, block in enumerate(request.block_ids[:num_blocks]):
                if block in step.bad_blocks:
                    request.num_computed_tokens = index * BLOCK_TOKENS
                    self._failed.add(request.request_id)
                    break
        assert self._overlaps or step.bad_blocks <= owned, "a block is bad that nobody waits for"

    def _arrive(self, step: Step) -> None:
        ready: set[str] = set()
        for mine in step.ready:
            for request_id in mine:
                self._num_ready[request_id] += 1
                if self._num_ready[request_id] == len(self.workers):
                    del self._num_ready[request_id]
                    ready.add(request_id)
        self.scheduler.report(step.reports, ready)
        for request_id in ready:
            request = self.requests.get(request_id)
            assert request is not None, "vLLM is told of a load that it does not know"
            if request.status == "loading":
                assert request_id not in self._arrived, "vLLM is told twice"
                self._check_loaded(request)
                self._arrived.add(request_id)
            else:
                assert request.status == "ended", "vLLM is told of a load that nobody waits for"
                self._free(request)

    def _check_loaded(self, request: Request) -> None:
        """After a load: byte for byte what computing would have written."""
        digests = request.past.of(request.all_token_ids)
        num_good = request.num_computed_tokens // BLOCK_TOKENS
        for index, block in enumerate(request.block_ids[:num_good]):
            wanted = digests[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            for device in self.devices:
                if not device.holds(block, wanted):
                    raise Silent(f"block {index} of {request.request_id} was loaded wrong")
            self.seen["blocks checked"] += block in request.loading

    def _end(self, request: Request) -> None:
        request.status = "ended"
        self._learn(request)
        self._tell_finished(request)
        self._free(request)

    def _tell_finished(self, request: Any) -> None:
        self.answers[request.request_id] = self.scheduler.finished(request)

    def _holds_blocks(self, request: Any) -> bool:
        return bool(request.block_ids)

    def _release(self, request: Any) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []

    def _free(self, request: Any) -> None:
        self._release(request)
        del self.requests[request.request_id]
        self.ended.append(request)


class Vandal:
    """Harms what lies below."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm
        self._rng = vllm.rng

    def harm(self) -> None:
        self._rng.choice([self.flip, self.delete, self.break_seal])()

    def flip(self) -> None:
        """Some blocks in the slab change."""
        path = self._slab()
        stride = self._vllm.disk_spec.stride_bytes
        num_slots = path.stat().st_size // stride if path.exists() else 0
        if not num_slots:
            return
        with path.open("r+b") as file:
            for slot in self._rng.sample(range(num_slots), max(1, num_slots // 4)):
                file.seek(slot * stride + self._rng.randrange(self._vllm.disk_spec.block_bytes))
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
        self._vllm.seen["blocks flipped"] += 1

    def delete(self) -> None:
        """Some records in the index are emptied."""
        path = self._store() / "index"
        num_slots = path.stat().st_size // slab.RECORD_BYTES
        with path.open("r+b") as file:
            for slot in self._rng.sample(range(num_slots), num_slots // 8):
                file.seek(slot * slab.RECORD_BYTES)
                file.write(slab.empty_record(1))
        self._vllm.seen["blocks deleted"] += 1

    def break_seal(self) -> None:
        """A slot of DRAM is not what the books say."""
        self._vllm.seals.open([Slot(self._rng.randrange(self._vllm.host.num_slots))])
        self._vllm.seen["seals broken"] += 1

    def _slab(self) -> Path:
        return slab.slab_path(self._store(), 0)

    def _store(self) -> Path:
        assert self._vllm.directory is not None
        return folder.store_path(self._vllm.directory, self._vllm.disk_spec.namespace)
