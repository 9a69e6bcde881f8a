"""Hit rates without time, for a model whose layers form several groups (windows, chunks, states).

Like `replay`, but with the real books of checkpoints: full groups keep every block, the others keep
the checkpoints that `Boundaries` chooses, whole and evicted as a unit. A hit ends where every group
has the blocks it needs. All groups have blocks of the trace's size, and one slot for each.

A trace does not show where turns begin, so the reasons FIRST_TURN and TURN are not simulated. An
answer's end is kept only if the trace names the blocks of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from penstock.books.stack import Limits, TierStack
from penstock.errors import ConfigError
from penstock.groups.boundaries import Boundaries, Reason
from penstock.groups.kinds import Group, Groups, Kind
from penstock.groups.match import longest_hit
from penstock.sim.replay import new_ledger
from penstock.sim.trace import TraceRequest
from penstock.types import KEY_BYTES, BlockKey, Outcome, Slot, Tier, Verdict

_TICK_REQUESTS = 256
_MANY = 1 << 30
_LIMITS = Limits(_MANY, _MANY, None, _MANY, spread_host=False, max_pending_saves=_MANY)


@dataclass(frozen=True, slots=True)
class GroupsReplayed:
    """The result of a replay through a tier of `capacity` blocks of all groups."""

    capacity: int
    block_tokens: int
    block_bytes: int
    num_requests: int
    num_tokens: int  # of all prompts
    num_hit_tokens: int
    num_full_blocks: int  # written for full groups
    num_checkpoint_blocks: int  # written for the others
    num_full_groups: int
    checkpoints: Mapping[Reason, int]  # saved, by reason
    hits: Mapping[Reason, int]  # of these

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_tokens if self.num_tokens else 0.0

    @property
    def num_bytes(self) -> int:
        return (self.num_full_blocks + self.num_checkpoint_blocks) * self.block_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes written for each token whose full blocks were written."""
        num_tokens = self.num_full_blocks * self.block_tokens / max(1, self.num_full_groups)
        return self.num_bytes / num_tokens if num_tokens else 0.0


def groups_of(
    block_tokens: int,
    *,
    window: int | None = None,
    num_windows: int = 5,
    chunk: int | None = None,
    num_chunks: int = 3,
    num_states: int = 0,
) -> Groups:
    """One group of full attention, and the others that are asked for."""
    groups = [Group(0, Kind.FULL, block_tokens)]
    for kind, span, count in (
        (Kind.WINDOW, window, num_windows),
        (Kind.CHUNK, chunk, num_chunks),
        (Kind.STATE, 0, num_states),
    ):
        if span is not None:
            groups += [Group(len(groups) + n, kind, block_tokens, span) for n in range(count)]
    return Groups(tuple(groups))


def replay_groups(
    requests: Iterable[TraceRequest],
    groups: Groups,
    *,
    block_bytes: int,
    capacity: int,
    policy: str,
    budget_bytes: int,
    every_tokens: int | None = None,
    tick: Callable[[int], None] = lambda num_requests: None,
) -> GroupsReplayed:
    """Replay requests in order. For `budget_bytes` and `every_tokens` see `Boundaries`."""
    cache = _Cache(groups, block_bytes, capacity, policy, budget_bytes, every_tokens)
    for request in requests:
        cache.serve(request)
        if not cache.num_requests % _TICK_REQUESTS:
            tick(cache.num_requests)
    tick(cache.num_requests)
    return cache.result()


class _Cache:
    """One tier, in which a request's blocks are found and saved at once."""

    def __init__(
        self,
        groups: Groups,
        block_bytes: int,
        capacity: int,
        policy: str,
        budget_bytes: int,
        every_tokens: int | None,
    ) -> None:
        if groups.unit_tokens != groups.align_tokens:
            raise ConfigError(
                "the groups have blocks of different sizes: a trace can be replayed only if all "
                "have the trace's size"
            )
        self._groups = groups
        self._block_tokens = groups.unit_tokens
        self._block_bytes = block_bytes
        self._stack = TierStack(block_bytes, new_ledger(policy, capacity), limits=_LIMITS)
        self._host = self._stack.host
        self._boundaries = Boundaries(
            groups,
            checkpoint_bytes=self._checkpoint_bytes,
            budget_bytes=budget_bytes,
            every_tokens=every_tokens,
        )
        self._stack.ledgers.on_host_removed.append(self._removed)
        self._reason_of: dict[BlockKey, Reason] = {}  # by the checkpoint's name
        self._checkpoints: Counter[Reason] = Counter()
        self._hits: Counter[Reason] = Counter()
        self._num_full_blocks = self._num_checkpoint_blocks = 0
        self._num_tokens = self._num_hit_tokens = 0
        self.num_requests = 0

    def serve(self, request: TraceRequest) -> None:
        num_prompt = request.num_input_tokens
        chain = [*request.prompt_blocks[: num_prompt // self._block_tokens], *request.output_blocks]
        hit = self._hit(chain, num_prompt)
        self.num_requests += 1
        self._num_tokens += num_prompt
        self._num_hit_tokens += hit
        # What this request reads must not be evicted for what it writes.
        read = [key for group in self._groups for key in self._needed(group, chain, hit)]
        leased = [slot for slot in self._host.use_ready(read) if slot is not None]
        self._note_hit(chain, hit)
        plan = self._boundaries.plan(
            start=hit, num_prompt=num_prompt, junction=self._junction(chain, num_prompt, hit)
        )
        if request.output_blocks:
            end = self._boundaries.answer_end(
                start=max([hit, *plan]), num_computed=len(chain) * self._block_tokens
            )
            if end is not None:
                plan[end] = Reason.ANSWER_END
        for group in self._groups.full:
            keys = [_key(group, key) for key in chain]
            self._num_full_blocks += self._save(keys, whole=False)
        for at, reason in plan.items():
            self._keep(chain, at, reason)
        self._host.release(leased)
        self._stack.ledgers.take_events()

    def result(self) -> GroupsReplayed:
        self._stack.checkpoints.check()
        return GroupsReplayed(
            self._host.capacity,
            self._block_tokens,
            self._block_bytes,
            self.num_requests,
            self._num_tokens,
            self._num_hit_tokens,
            self._num_full_blocks,
            self._num_checkpoint_blocks,
            len(self._groups.full),
            self._checkpoints,
            self._hits,
        )

    def _hit(self, chain: Sequence[BlockKey], num_prompt: int) -> int:
        held = self._host.held

        def holds(group: Group, index: int) -> Tier | None:
            return Tier.HOST if _key(group, chain[index]) in held else None

        return longest_hit(self._groups, holds, 0, num_prompt)

    def _junction(self, chain: Sequence[BlockKey], num_prompt: int, hit: int) -> int | None:
        """How much the full groups hold, if that is more than the hit."""
        held, full = self._host.held, self._groups.full
        index, top = hit // self._block_tokens, self._groups.max_hit(num_prompt)
        while index * self._block_tokens < top and all(
            _key(group, chain[index]) in held for group in full
        ):
            index += 1
        shared = index * self._block_tokens
        return shared if full and shared > hit else None

    def _note_hit(self, chain: Sequence[BlockKey], hit: int) -> None:
        members = self._members(chain, hit)
        if members:
            name = members[-1]
            self._boundaries.hit(name)
            self._stack.checkpoints.keep(members)
            if name in self._reason_of:
                self._hits[self._reason_of[name]] += 1

    def _keep(self, chain: Sequence[BlockKey], at: int, reason: Reason) -> None:
        """Save a checkpoint, unless there is no room for all of it."""
        members = self._members(chain, at)
        if not members:
            return  # at the border of a chunk nothing is needed
        num_new = self._save(members, whole=True)
        self._num_checkpoint_blocks += num_new
        if all(map(self._host.is_ready, members)):
            self._stack.checkpoints.keep(members)
            self._boundaries.saved(members[-1], reason, num_new * self._block_bytes)
            if self._reason_of.setdefault(members[-1], reason) is reason and num_new:
                self._checkpoints[reason] += 1

    def _members(self, chain: Sequence[BlockKey], at: int) -> list[BlockKey]:
        """The blocks of a checkpoint. The last one is its name, and part of no earlier one."""
        return [key for group in self._groups.partial for key in self._needed(group, chain, at)]

    def _needed(self, group: Group, chain: Sequence[BlockKey], at: int) -> list[BlockKey]:
        return [_key(group, chain[index]) for index in group.needed(at)] if at else []

    def _save(self, keys: Sequence[BlockKey], *, whole: bool) -> int:
        """Save at once; returns how many blocks were written."""
        self._stack.save(keys, [Slot(n) for n in range(len(keys))], 0.0, whole=whole)
        num_written = 0
        for transfer in list(self._stack.next_transfers(lambda link, direction: True)):
            num_written += len(transfer.keys)
            self._stack.settle(Outcome(transfer.id, (Verdict.OK,) * len(transfer.keys)), 0.0)
        self._stack.tickets.take_dones()
        return num_written

    def _removed(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._boundaries.gone(key)
            self._reason_of.pop(key, None)

    def _checkpoint_bytes(self, at: int) -> int:
        return self._block_bytes * sum(len(group.needed(at)) for group in self._groups.partial)


def _key(group: Group, key: BlockKey) -> BlockKey:
    """The key of a group's block, from that of the prompt up to its end."""
    if group.index == 0:
        return key
    return BlockKey(blake2b(key, digest_size=KEY_BYTES, salt=b"%d" % group.index).digest())
