"""The scheduler of a simulated instance. Tokens are only counted.

It follows the same rules as `penstock.engine.scheduler`, with the same pool, admission and
Offloader, because hits must agree block for block. There are two differences: every sequence that
decodes gets its token before prompts share the rest of a step, and KV is never cold, so if the pool
is full the least urgent sequence is preempted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.engine.admission import Admission, Busy, TooLong
from penstock.engine.admit import AdmissionPlan, Choose, DeviceRoom, plan_admission
from penstock.engine.blocks import BlockPool, CompletedBlocks
from penstock.engine.lossy import LossyBlocks
from penstock.engine.tiers import EngineTiers
from penstock.errors import PenstockError
from penstock.sim.decoders import Decoders
from penstock.sim.sequences import Sequence, SequencePhase
from penstock.sim.trace import TraceRequest
from penstock.types import Done, Slot, TicketId

if TYPE_CHECKING:
    from penstock.engine.anywhere.fills import Fills
    from penstock.engine.anywhere.loads import SegmentLoads
    from penstock.engine.anywhere.segmented import AnySegment

_MAX_STALLS = 200  # steps


@dataclass(frozen=True, slots=True)
class SimulatedChunk:
    """Compute `num_tokens` of a prompt from `start` on.

    They are consecutive, unless tokens between them were placed (see `engine.anywhere`).
    """

    sequence: Sequence
    start: int
    num_tokens: int
    end: int  # the position after the last one


class SimulatedScheduler:
    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        admission: Admission,
        tiers: EngineTiers | None,
        choose: Choose,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self._pool = pool
        self._room: DeviceRoom[Sequence] = DeviceRoom(pool)
        self._block_tokens = block_tokens
        self._admission = admission
        self._tiers = tiers
        self._choose = choose
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._waiting: list[Sequence] = []  # in order of arrival
        self._prefilling: list[Sequence] = []
        self._stalled: list[Sequence] = []
        self._loading: dict[TicketId, Sequence] = {}
        self._saving: dict[TicketId, list[Slot]] = {}
        # All that hold blocks, except those that load, by order.
        self._running: dict[tuple[int, int], Sequence] = {}
        self._has_segments = False  # whether any prompt had some: if not, numpy is not needed
        self.has_begun = False  # whether a sequence began in the last step without a chunk
        self._is_blocked = False  # the first in the queue found no room, and none was freed since
        self.decoders = Decoders()
        self.num_preemptions = 0
        self.ended: list[Sequence] = []  # finished or refused since the owner last emptied it

    @cached_property
    def _segments(self) -> SegmentLoads[Sequence]:
        from penstock.engine.anywhere.loads import SegmentLoads

        return SegmentLoads(
            self._pool,
            self._tiers,
            self._block_tokens,
            self._room.take,
            self._choose,
            LossyBlocks(self._block_tokens),
            looks_per_token=1 << 40,  # they take no time
        )

    @cached_property
    def _fills(self) -> Fills[Sequence]:
        from penstock.engine.anywhere.fills import Fills

        return Fills(self._segments.num_missing, _make_fill)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._loading)

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return sum(not (each.num_preemptions or each.fill) for each in self._waiting)

    @property
    def is_any_waiting(self) -> bool:
        """Whether the end of a transfer may let a sequence continue."""
        return bool(self._waiting or self._stalled or self.is_loading)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading or (self._has_segments and len(self._segments)))

    def add(self, sequence: Sequence) -> bool:
        """Queue a request. If False, it was refused and `refusal` says why."""
        num_new = sequence.num_output_tokens
        self._has_segments |= bool(sequence.segments)
        try:
            self._admission.check(sequence.request.num_input_tokens, num_new, self.num_waiting)
        except TooLong:
            sequence.refusal = "too_long"
        except Busy:
            sequence.refusal = "busy"
        else:
            if self._tiers is not None:
                keys = [sequence.keys(0, sequence.num_prompt_blocks)]
                keys += [list(segment.keys) for segment in sequence.segments]
                begun = [self._tiers.lookup(each) for each in keys]
                sequence.lookups = [lookup for lookup in begun if lookup is not None]
            self._waiting.append(sequence)
            return True
        self.ended.append(sequence)
        return False

    def schedule(self) -> list[SimulatedChunk]:
        """The next step's chunks of prompts. Sequences that decode are in `decoders`."""
        if self._has_segments:
            self._segments.release_read()
        self.has_begun = False
        preempted = self._resume_stalled()
        budget = self._max_num_batched_tokens - len(self.decoders)
        chunks: list[SimulatedChunk] = []
        for sequence in list(self._prefilling):
            if budget <= 0:
                break
            if sequence.phase is not SequencePhase.PREFILLING:
                continue  # preempted for an older one
            if sequence.segments:
                chunk, more = self._segmented_chunk(sequence, budget)
            else:
                chunk, more = self._next_chunk(sequence, budget)
            preempted |= more
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.num_tokens
        while budget > 0 and self._waiting and not preempted and not self._is_blocked:
            if len(self._running) + len(self._loading) >= self._max_num_seqs:
                break
            if (waiting := self._next_waiting()) is None:
                break
            if not self._admit(waiting, budget):
                self._is_blocked = True
                break
            if waiting.phase is SequencePhase.PREFILLING:
                if waiting.segments:
                    self.has_begun = True
                    continue
                num_tokens = min(waiting.num_uncomputed, budget)
                start = waiting.num_computed
                chunks.append(SimulatedChunk(waiting, start, num_tokens, start + num_tokens))
                budget -= num_tokens
        return chunks

    def _next_chunk(self, sequence: Sequence, budget: int) -> tuple[SimulatedChunk | None, bool]:
        """The next piece of a prompt, if there is room; and whether others were preempted."""
        num_tokens, start = min(sequence.num_uncomputed, budget), sequence.num_computed
        room, preempted = self._make_room(sequence, start + num_tokens)
        chunk = SimulatedChunk(sequence, start, num_tokens, start + num_tokens)
        return chunk if room else None, preempted

    def _segmented_chunk(
        self, sequence: Sequence, budget: int
    ) -> tuple[SimulatedChunk | None, bool]:
        """The same for a prompt with segments. None also if it waits for them."""
        num_tokens, preempted = min(sequence.num_uncomputed, budget), False
        while (work := self._segments.next_work(sequence, num_tokens)) is not None:
            room, more = self._make_room(sequence, work.end)
            preempted |= more
            if not room:
                break
            if work.places:
                self._segments.place(sequence)
            if work.num_looked:
                self._segments.look(sequence, work.num_looked)
            for part in self._segments.take_placings()[1]:
                part.look.request.blend(part.look.reused)
            if len(work.positions):
                first, last = int(work.positions[0]), int(work.positions[-1])
                count = len(work.positions)
                return SimulatedChunk(sequence, first, count, last + 1), preempted
        return None, preempted

    def computed(self, chunks: Iterable[SimulatedChunk], due: Iterable[Sequence]) -> None:
        """Name and save the blocks that a step has completed, of chunks and of `due` decoders."""
        blocks = CompletedBlocks(self._pool)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.end
            if sequence.segments:
                sequence.num_computed = self._segments.skip(sequence)
            sequence.num_present = sequence.num_computed
            again = min(sequence.num_computed, sequence.max_computed) - chunk.start
            sequence.num_recomputed_tokens += max(0, again)
            self._name(sequence, blocks)
        for sequence in due:
            self._name(sequence, blocks)
        self._save(blocks)
        for chunk in chunks:
            if chunk.sequence.fill and not chunk.sequence.num_uncomputed:
                self._end_fill(chunk.sequence)

    def sampled(
        self, chunks: Iterable[SimulatedChunk], due: Iterable[Sequence], now: float
    ) -> None:
        """The step has sampled a token for each: they continue or end."""
        for chunk in chunks:
            if not (chunk.sequence.num_uncomputed or chunk.sequence.fill):
                self._sample(chunk.sequence, now)
        for sequence in due:
            self._continue(sequence, now)

    def settle(self, done: Done) -> None:
        """A load or save has ended."""
        self._is_blocked = False
        if (saved := self._saving.pop(done.ticket, None)) is not None:
            self._pool.release(saved)
            return
        if self._has_segments and self._segments.settle(done):
            return
        sequence = self._loading.pop(done.ticket)
        into, sequence.into = sequence.into, []
        num_arrived = done.num_leading_ok
        for key, slot in zip(done.keys[:num_arrived], into, strict=False):
            self._pool.name(slot, key)
        sequence.slots += into[:num_arrived]
        self._pool.release(into[num_arrived:])
        sequence.num_named = len(sequence.slots)
        self._set_present(sequence, len(sequence.slots))
        sequence.max_computed = max(sequence.max_computed, sequence.num_computed)
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed
            for tier in done.sources[:num_arrived]:
                assert tier is not None
                sequence.loaded_blocks[tier] = sequence.loaded_blocks.get(tier, 0) + 1
        self._run(sequence)

    def check(self) -> None:
        self._pool.check()
        if any(sequence.slots for sequence in self._waiting):
            raise PenstockError("a sequence holds blocks while it waits")
        is_at_rest = not (self.has_work or self._saving)
        if is_at_rest and self._pool.num_available != self._pool.num_blocks:
            raise PenstockError("a device block is held, and no sequence is left")

    def _next_waiting(self) -> Sequence | None:
        """The most urgent waiting sequence whose lookups in the remote tier have ended, or a fill
        that it needs."""
        for sequence in list(self._waiting):
            if sequence.lookups and self._tiers is not None:
                if any(map(self._tiers.is_looking_up, sequence.lookups)):
                    continue
                sequence.lookups = []
            if not (sequence.segments and self._waits_for_fills(sequence)):
                return sequence
            if (fill := self._fills.next_for(sequence)) is not None:
                return fill
        return None

    def _waits_for_fills(self, sequence: Sequence) -> bool:
        """Whether segments of a waiting sequence are computed first."""
        if not sequence.has_filled:
            wanted = self._segments.wanted(sequence)
            for fill in self._fills.start(sequence, wanted, sequence.arrival):
                insort(self._waiting, fill, key=lambda s: s.order)
        return bool(sequence.fills)

    def _end_fill(self, fill: Sequence) -> None:
        self._fills.ended(fill)
        self._prefilling.remove(fill)
        self._drop(fill)
        self._admission.end(fill.name, fill.arrival)
        fill.phase = SequencePhase.FINISHED

    # Room on the device.

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Start a waiting sequence. If False, it has to wait and nothing has changed."""
        plan = self._plan(sequence, budget)
        if plan is not None:
            self._start(sequence, plan)
        return plan is not None

    def _plan(self, sequence: Sequence, budget: int) -> AdmissionPlan | None:
        if not sequence.num_preemptions and not self._admission.fits(sequence.max_total_tokens):
            return None
        keys = sequence.keys(0, sequence.num_tokens // self._block_tokens)
        sequence.slots = self._pool.share(keys)
        if sequence.segments and not self._segments.has_room(sequence):
            self._pool.release(sequence.slots)
            sequence.slots = []
            return None
        plan = plan_admission(
            sequence,
            keys,
            len(sequence.slots),
            sequence.num_tokens,
            budget=budget,
            block_tokens=self._block_tokens,
            room=self._room,
            tiers=self._tiers,
            choose=self._choose,
        )
        if plan is None:
            self._pool.release(sequence.slots)
            sequence.slots = []
        return plan

    def _start(self, sequence: Sequence, plan: AdmissionPlan) -> None:
        self._waiting.remove(sequence)
        self._admission.start(sequence.name, sequence.max_total_tokens)
        sequence.num_named = plan.num_shared
        self._set_present(sequence, plan.num_shared)
        if not sequence.num_preemptions:
            if self._tiers is not None:
                plan.count_hits(self._tiers, tenant="")
            sequence.num_device_blocks = plan.num_shared
            sequence.num_cached_tokens = sequence.num_computed
        if sequence.segments:
            num_there = (plan.num_shared + len(plan.into)) * self._block_tokens
            self._segments.begin(sequence, num_there)
        if plan.into:
            assert self._tiers is not None
            sequence.phase = SequencePhase.LOADING
            sequence.into = [slot for slot in plan.into if slot is not None]
            parent = sequence.key_before(plan.num_shared)
            self._loading[plan.load(self._tiers, parent, tenant="")] = sequence
        else:
            # If the whole prompt was found, its last token is computed in the blocks it has.
            if sequence.segments:  # it computes nothing before the next step
                self._pool.release(plan.first_slots)
            else:
                sequence.slots += plan.first_slots
            self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.phase = SequencePhase.PREFILLING
        self._running[sequence.order] = sequence
        insort(self._prefilling, sequence, key=lambda s: s.order)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> tuple[bool, bool]:
        """Take blocks for `num_tokens`. Returns whether it has them and whether it preempted."""
        need = max(0, -(-num_tokens // self._block_tokens) - len(sequence.slots))
        preempted = False
        while (slots := self._pool.take(need)) is None:
            sequence.num_stalls += 1
            if self._saving and sequence.num_stalls < _MAX_STALLS:
                return False, preempted  # a save that ends will free some
            victim = self._running[max(self._running)]
            self._preempt(victim)
            preempted = True
            if victim is sequence:
                return False, preempted
        sequence.slots += slots
        sequence.num_stalls = 0
        return True, preempted

    def _resume_stalled(self) -> bool:
        preempted = False
        for sequence in list(self._stalled):
            if sequence.phase is not SequencePhase.STALLED:
                continue
            room, more = self._make_room(sequence, sequence.num_computed + 1)
            preempted |= more
            if room:
                self._stalled.remove(sequence)
                self.decoders.add(sequence)
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.phase is SequencePhase.DECODING:
            self.decoders.remove(sequence)
        elif sequence.phase is SequencePhase.STALLED:
            self._stalled.remove(sequence)
        else:
            self._prefilling.remove(sequence)
        sequence.max_computed = max(sequence.max_computed, sequence.num_computed)
        self._drop(sequence)
        sequence.num_stalls = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.phase = SequencePhase.WAITING
        insort(self._waiting, sequence, key=lambda s: s.order)

    def _drop(self, sequence: Sequence) -> None:
        del self._running[sequence.order]
        self._is_blocked = False
        if self._has_segments:
            self._segments.leave(sequence)
        self._pool.release(sequence.slots)
        sequence.slots = []
        sequence.num_computed = sequence.num_named = sequence.num_present = 0

    # After a step.

    def _name(self, sequence: Sequence, blocks: CompletedBlocks) -> None:
        """Name the blocks that it has completed and add them to `blocks`."""
        sequence.max_computed = max(sequence.max_computed, sequence.num_computed)
        start, end = sequence.num_named, sequence.num_computed // self._block_tokens
        blocks.add(sequence.key_before(start), sequence.keys(start, end), sequence.slots[start:end])
        sequence.num_named = end

    def _save(self, blocks: CompletedBlocks) -> None:
        slots = blocks.slots
        if self._tiers is None or not slots:
            return
        self._pool.hold(slots)
        self._saving[self._tiers.save(blocks.keys, slots, tenant="", parents=blocks.parents)] = (
            slots
        )

    def _sample(self, sequence: Sequence, now: float) -> None:
        """A sequence has computed its last token, so the next one is sampled."""
        self._prefilling.remove(sequence)
        sequence.num_tokens += 1
        if sequence.first_token is None:
            sequence.first_token = now
        self._continue(sequence, now)

    def _continue(self, sequence: Sequence, now: float) -> None:
        """Decode, end, or wait for a block to decode into."""
        if sequence.num_tokens >= sequence.max_total_tokens:
            sequence.phase, sequence.finished = SequencePhase.FINISHED, now
            self._drop(sequence)
            self._admission.end(sequence.name, now)
            self.ended.append(sequence)
        elif sequence.num_computed < len(sequence.slots) * self._block_tokens:
            self.decoders.add(sequence)
        else:
            sequence.phase = SequencePhase.STALLED
            insort(self._stalled, sequence, key=lambda s: s.order)

    def _set_present(self, sequence: Sequence, num_blocks: int) -> None:
        """The first `num_blocks` blocks are there. The last token is always computed."""
        sequence.num_present = num_blocks * self._block_tokens
        sequence.num_computed = min(sequence.num_present, sequence.num_tokens - 1)


def _make_fill(sequence: Sequence, segment: AnySegment, now: float) -> Sequence:
    """A sequence that computes a segment for another one."""
    num_tokens = len(segment.keys) * sequence.block_tokens
    request = TraceRequest(now, num_tokens, 0, tuple(segment.keys))
    fill = 1 + len(sequence.fills)
    return Sequence(sequence.number, request, sequence.block_tokens, now, fill)
