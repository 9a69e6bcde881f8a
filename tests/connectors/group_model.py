"""A small vLLM for models with several KV cache groups; see `vllm_model`.

Blocks of windows, chunks and states leave their request in the middle of it, and others write to
them at once. Prefills end at borders of states; a state is changed in place while tokens are
decoded. If a load fails, its request starts again with other blocks.

Computing reads what vLLM reads: all tokens of full groups, the window, the chunk, the last state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3
from connectors.group_memory_model import NULL, GroupDevice, GroupTruth
from connectors.group_pool_model import GroupPool, GroupRequest, Tables
from connectors.memory_model import BYTES, NAMESPACE, Shape, Silent
from connectors.vllm_model import Step, Vllm, Work, overwritten

from penstock.connectors.vllm.scheduler import Scheduled, StepPlan, Ways
from penstock.groups.kinds import Group, Groups, Kind


@dataclass
class GroupWork(Work):
    tables: list[list[int]] = field(default_factory=list)


@dataclass
class GroupStep(Step):
    failed: set[str] = field(default_factory=set)


class GroupVllm(Vllm):
    plain_tokens = None

    def __init__(
        self,
        directory: Path | None,
        groups: Groups,
        *,
        is_dense: bool = False,
        writes_early: bool = False,
        num_blocks: int | None = None,
        shape: Shape = BYTES,
        **options: Any,
    ) -> None:
        """`writes_early`: reused blocks are written to before the connector is told of a step."""
        self.groups = groups
        self.namespace = replace(NAMESPACE, block_tokens=groups.unit_tokens)
        self._writes_early = writes_early
        super().__init__(
            directory,
            num_blocks=num_blocks or 26 * len(groups),
            truth=GroupTruth(shape),
            shape=shape,
            groups=groups,
            ways=Ways(writes_reused_blocks_early=writes_early),
            **options,
        )
        self._tables = Tables(groups, self.pool, is_dense=is_dense)
        states = [group.block_tokens for group in groups if group.kind is Kind.STATE]
        self._state_tokens = states[0] if states else None

    def _make_device(self, num_blocks: int, rank: int) -> Any:
        return GroupDevice(num_blocks, rank, self.shape)

    def _part_bytes(self) -> int:
        return sum(self.shape.page_bytes)

    def _make_pool(self, num_blocks: int, *, is_caching: bool) -> Any:
        return GroupPool(num_blocks, self.rng, is_caching=is_caching)

    def _make_request(self, *args: Any, **fields: Any) -> Any:
        return GroupRequest(self.groups, *args, **fields)

    def _begin(self, request: Any) -> None:
        super()._begin(request)
        request.chain = self.side._requests.naming.keys(self.namespace, request, self.groups)

    def _learn(self, request: Any) -> None:
        if request.chain is None or request.num_chained == request.num_tokens:
            return
        digests = request.past.of(request.all_token_ids)
        assert isinstance(self.truth, GroupTruth)
        for group in self.groups:
            start = request.num_chained // group.block_tokens
            keys = request.chain.of_group(group, request.num_tokens)
            self.truth.learn_group(group, keys[start:], digests, start)
        request.num_chained = request.num_tokens

    # Scheduling.

    def _schedule(self) -> Step:
        self._tables.step_starts()
        budget = self._budget
        works: list[Work] = []
        scheduled: list[Scheduled] = []
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
            computed = request.num_computed_tokens
            wanted = request.num_tokens + request.num_placeholders - computed
            count = self._split(request, computed, min(wanted, budget))
            if count < 1:
                continue
            while (added := self._tables.allocate(request, count)) is None:
                preempted_now = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            if added is None:
                break
            budget -= count
            self._name_tokens(request, computed + count)
            scheduled.append(Scheduled(request.request_id, added, computed, has_all=False))
            works.append(GroupWork(request, [], computed, count))
        if not preempted_now:
            self._admit_groups(budget, works, scheduled)
        counts = {work.request.request_id: work.count for work in works}
        preempted, self._preempted = self._preempted, []
        for request in self.requests.values():
            self._learn(request)

        def tables(request_id: str) -> list[list[int]] | None:
            return self.requests[request_id].tables if request_id in counts else None

        fresh, offers = self.pool.taken, self._tables.offers
        # With states vLLM zeroes all of them, and says so.
        zeroed = fresh if self._state_tokens is not None else []
        orders = self.scheduler.orders(
            lambda: StepPlan(scheduled, counts, preempted, tables, offers, zeroed)
        )
        if not zeroed:
            fresh = overwritten(fresh, scheduled, self.side)
        self.seen["fences"] += bool(orders.fence)
        self.seen["states offered"] += sum(map(len, offers.values()))
        for work in works:
            request = work.request
            work.tables = [list(table) for table in request.tables]
            request.num_computed_tokens += work.count
            request.num_in_flight += 1
            request.num_in_flight_tokens += work.count
            if request.num_computed_tokens >= request.num_tokens + request.num_placeholders:
                request.num_placeholders += 1
        return GroupStep(orders, works, fresh)

    def _split(self, request: Any, start: int, count: int) -> int:
        """Cut a chunk of a prefill where a state is kept."""
        size = self._state_tokens
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if size is None or start >= prefill_end or count < 1:
            return count
        end = start + count
        if end < prefill_end:
            end = end // size * size
        stops = [
            (start // size + 1) * size if start % size else 0,
            (request.num_tokens - 1) // size * size,
            start + (request.junction - start) // size * size,
        ]
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)

    def _admit_groups(self, budget: int, works: list[Work], scheduled: list[Scheduled]) -> None:
        # Those that hold blocks come first, or they would be held for ever.
        for request in sorted(self.waiting, key=lambda request: not self._holds_blocks(request)):
            if len(self.running) >= self._max_running or budget < 1:
                break
            if request.status == "loading":
                if request.request_id not in self._arrived:
                    continue
                self._promote(request)
            if request.num_stale:
                continue  # what it sampled before its preemption has not come back yet
            local: list[list[int]] = []
            num_local = num_external = 0
            if request.num_computed_tokens == 0:
                assert not request.is_known
                digests = request.past.of(request.all_token_ids)
                num_local, local = self._tables.find(request, digests)
                found = self.scheduler.lookup(request, num_local)
                if found is None:
                    self.seen["asked again"] += 1
                    continue
                num_external = found
            computed = request.num_computed_tokens + num_local + num_external
            assert computed < request.num_tokens + self.groups.all_full
            assert num_external % self.groups.align_tokens == 0
            waits = num_external > 0
            count = 0
            if not waits:
                count = self._split(request, computed, min(request.num_tokens - computed, budget))
                if count < 1:
                    break
            if any(table and table[-1] in self._tables.named_now for table in local):
                break  # a state that another request computes in this very step
            num_reserved = self._num_promised() if waits else 0
            added = self._tables.allocate(
                request, count, local, num_local, num_external, num_reserved=num_reserved
            )
            if added is None:
                break
            self.seen["hits on the device"] += num_local > 0
            tables = [list(table) for table in request.tables]
            self.scheduler.allocated(request, tables, num_external)
            request.num_computed_tokens = computed
            if waits:
                self.seen["loads"] += 1
                self.seen["loads after a preemption"] += request.num_output > 0
                self.seen["loaded tokens"] += num_external
                request.status = "loading"
                request.load_start = num_local
                continue
            self.waiting.remove(request)
            request.status = "running"
            self.running.append(request)
            budget -= count
            self._name_tokens(request, computed + count)
            scheduled.append(Scheduled(request.request_id, tables, computed, has_all=True))
            works.append(GroupWork(request, [], computed, count))

    def _name_tokens(self, request: Any, num_computed: int) -> None:
        num_known = min(num_computed, request.num_tokens)
        self._tables.name(request, num_known, request.past.of(request.all_token_ids))

    def _num_promised(self) -> int:
        return sum(self._tables.num_left(one) for one in self.waiting if one.is_known)

    def _promote(self, request: Any) -> None:
        self._arrived.remove(request.request_id)
        request.status = "waiting"
        if request.request_id in self._failed:
            self._failed.remove(request.request_id)
            self.seen["started again after a failed load"] += 1
            self._release(request)
            return
        self._name_tokens(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # the last token is computed once more

    def _holds_blocks(self, request: Any) -> bool:
        return bool(request.is_known)

    def _release(self, request: Any) -> None:
        self._tables.release(request)

    def _tell_finished(self, request: Any) -> None:
        tables = self._tables.ids_at_end(request)
        self.answers[request.request_id] = self.scheduler.finished(request, tables)

    # Workers.

    def _execute(self, step: Step) -> None:
        assert isinstance(step, GroupStep)
        for worker, device in zip(self.workers, self.devices, strict=True):
            if self._writes_early:
                for block in step.fresh:
                    device.scribble(block)
            worker.begin(step.orders)
            if not self._writes_early:
                for block in step.fresh:
                    device.scribble(block)  # what the fence held back is over now
        for work in step.works:
            self._compute(work)
        for worker in self.workers:
            worker.load(step.orders)
            worker.save(step.orders)
            results = worker.results(step.orders)
            step.ready.append(results.ready)
            step.failed |= results.failed
            step.reports.join(worker.take_reports())
        for work in step.works:
            if work.is_wrong:
                raise Silent(f"{work.request.request_id} computed with wrong KV")
        self.audit()

    def _compute(self, work: Work) -> None:
        assert isinstance(work, GroupWork)
        request, start, end = work.request, work.start, work.start + work.count
        digests = list(request.past.of(request.known)[:end])
        assert len(digests) == end, "a token is computed that nobody has sampled"
        for group, table in zip(self.groups, work.tables, strict=True):
            work.is_wrong |= not self._holds(
                group, table, digests, _first_read(group, start), start
            )
        if work.is_wrong:
            digests = [blake3(b"computed from wrong KV" + digest).digest() for digest in digests]
        for group, table in zip(self.groups, work.tables, strict=True):
            size = group.block_tokens
            first = (end - 1) // size if group.kind is Kind.STATE else start // size
            for index in range(first, (end - 1) // size + 1):
                begin = max(start, index * size)
                tokens = digests[begin : min(end, (index + 1) * size)]
                for device in self.devices:
                    device.write(group, table[index], tokens, begin % size)
        if end >= len(request.known) and not work.is_wrong:
            self._sample(work)

    def _holds(
        self, group: Group, table: list[int], digests: list[bytes], start: int, end: int
    ) -> bool:
        """Whether the KV of the tokens from `start` to `end` is there, or the state at `end`."""
        size = group.block_tokens
        for index in range(start // size, -(-end // size)):
            if index >= len(table):
                return False
            begin = max(start, index * size)
            tokens = digests[begin : min(end, (index + 1) * size)]
            if not all(
                device.holds(group, table[index], tokens, begin % size) for device in self.devices
            ):
                return False
        return True

    # What vLLM makes of a step.

    def _update(self, step: Step) -> None:
        for work in step.works:
            work.request.num_in_flight_tokens -= work.count
        super()._update(step)

    def _invalidate(self, step: Step) -> None:
        assert isinstance(step, GroupStep)
        for request_id in step.failed:
            request = self.requests.get(request_id)
            if request is not None and request.status == "loading":
                self.seen["failed loads"] += 1
                request.num_computed_tokens = 0
                self._failed.add(request_id)

    def _check_loaded(self, request: Any) -> None:
        if request.request_id in self._failed:
            return
        end = request.num_computed_tokens
        digests = request.past.of(request.all_token_ids)
        for place, group in enumerate(self.groups):
            table, needed = request.tables[place], group.needed(end)
            start = needed.start * group.block_tokens
            if NULL in table[needed.start : needed.stop]:
                raise Silent(f"{request.request_id} has no block where it needs one")
            if not self._holds(group, table, digests, start, end):
                raise Silent(f"group {group.index} of {request.request_id} was loaded wrong")
            loaded = group.needed(end, request.load_start)
            self.seen["blocks checked"] += len(loaded)


def _first_read(group: Group, start: int) -> int:
    """The first token that computing the token at `start` reads."""
    match group.kind:
        case Kind.FULL:
            return 0
        case Kind.WINDOW:
            return max(0, start - group.span + 1)
        case Kind.CHUNK:
            return start // group.span * group.span
        case Kind.STATE:
            return max(0, start - 1)
