"""What vLLM's scheduler does with the blocks of several KV cache groups, as of vLLM 0.32.

After `v1/core/single_type_kv_cache_manager.py` and `kv_cache_manager.allocate_slots`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from connectors.group_memory_model import NULL
from connectors.memory_model import Digest
from connectors.pool_model import Pool, Request

from penstock.groups.kinds import Group, Groups, Kind

Name = tuple[int, Digest]
"""Of a block in the prefix cache: its group, and the past of its last token."""


class GroupRequest(Request):
    def __init__(self, groups: Groups, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        num = len(groups)
        self.tables: list[list[int]] = [[] for _ in range(num)]
        self.num_cached = [0] * num  # leading blocks that were offered to the prefix cache
        self.last_state: list[int | None] = [None] * num  # index of a state that is not used again
        self.is_known = False  # vLLM has allocated blocks
        self.num_in_flight_tokens = 0
        self.junction = 0  # what others share, without a state
        self.load_start = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())


class GroupPool(Pool):
    """Blocks of all groups. Block 0 is the null block."""

    def __init__(self, num_blocks: int, rng: random.Random, *, is_caching: bool) -> None:
        super().__init__(num_blocks, rng, is_caching=is_caching)
        self._free.remove(NULL)
        self._blocks_of: dict[Name, dict[int, None]] = {}
        self._name_in: dict[int, Name] = {}
        self.taken: list[int] = []  # since they were last asked for

    def take(self, num: int) -> list[int]:
        blocks = super().take(num)
        self.taken += blocks
        return blocks

    def find_one(self, group: Group, digest: Digest) -> int | None:
        return next(iter(self._blocks_of.get((group.index, digest), ())), None)

    def name_one(self, block: int, group: Group, digest: Digest) -> bool:
        if not self._is_caching:
            return False
        if block not in self._name_in:
            name = group.index, digest
            self._name_in[block] = name
            self._blocks_of.setdefault(name, {})[block] = None
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if (name := self._name_in.pop(block, None)) is not None:
                del self._blocks_of[name][block]
                if not self._blocks_of[name]:
                    del self._blocks_of[name]

    def forget_all(self) -> None:
        self._blocks_of.clear()
        self._name_in.clear()


class Tables:
    """The block tables of all requests."""

    def __init__(self, groups: Groups, pool: GroupPool, *, is_dense: bool) -> None:
        """`is_dense`: the prefix cache keeps every window and state, by default a prompt's last."""
        self._groups = list(enumerate(groups))
        self._all = groups
        self._pool = pool
        self._is_dense = is_dense
        self.offers: dict[str, dict[tuple[int, int], int]] = {}  # of this step
        self.named_now: set[int] = set()  # states that this step completes

    def step_starts(self) -> None:
        self.offers, self.named_now, self._pool.taken = {}, set(), []

    def find(self, request: GroupRequest, digests: Sequence[Digest]) -> tuple[int, list[list[int]]]:
        """The longest legal hit on the device, and its blocks in each group."""
        align = self._all.align_tokens
        top = (request.num_tokens - 1) // align * align
        found, tables = 0, [[] for _ in self._groups]
        for num in range(top, 0, -align):
            blocks = [self._find_needed(group, digests, num) for _, group in self._groups]
            if all(table is not None for table in blocks):
                found, tables = num, [table for table in blocks if table is not None]
                break
        # Where the full groups have more, vLLM ends a chunk, to keep the state that others share.
        request.junction = 0
        for num in range(top, found, -align):
            if all(self._find_needed(group, digests, num) is not None for group in self._all.full):
                request.junction = num if self._all.full else 0
                break
        return found, tables

    def _find_needed(self, group: Group, digests: Sequence[Digest], num: int) -> list[int] | None:
        size, needed = group.block_tokens, group.needed(num)
        blocks = [self._pool.find_one(group, digests[(index + 1) * size - 1]) for index in needed]
        if None in blocks:
            return None
        return [NULL] * needed.start + [block for block in blocks if block is not None]

    def allocate(
        self,
        request: GroupRequest,
        num_new: int,
        local: Sequence[Sequence[int]] = (),
        num_local: int = 0,
        num_external: int = 0,
        *,
        num_reserved: int = 0,
    ) -> list[list[int]] | None:
        """The blocks added in each group. None: there is no room."""
        total = request.num_computed_tokens + num_local + num_external
        self.skip(request, max(0, total - request.num_in_flight_tokens))
        end = total + num_new
        is_first = not request.is_known
        local = local or [[] for _ in self._groups]
        num_needed = sum(
            self._num_needed(request, place, group, local[place], total, end)
            for place, group in self._groups
        )
        if num_needed > self._pool.num_free - num_reserved:
            return None
        if is_first:
            for place, group in self._groups:
                num_skipped = _num_skipped(group, total) // group.block_tokens
                blocks = list(local[place][num_skipped:])
                self._pool.use(block for block in blocks if block != NULL)
                request.tables[place] = [NULL] * num_skipped + blocks
                request.num_cached[place] = len(request.tables[place])
            for place, group in self._groups:
                if num_external and total > _num_skipped(group, total):
                    num = -(-total // group.block_tokens) - len(request.tables[place])
                    request.tables[place] += self._pool.take(max(0, num))
            request.is_known = True
        return [self._grow(request, place, group, end) for place, group in self._groups]

    def _num_needed(
        self,
        request: GroupRequest,
        place: int,
        group: Group,
        local: Sequence[int],
        total: int,
        end: int,
    ) -> int:
        num_required = -(-end // group.block_tokens)
        num_have = len(request.tables[place])
        if group.kind is Kind.STATE:
            num_new = max(0, min(1, num_required - len(local) - num_have))
            # A load and what follows it need one each.
            return num_new + self._pool.num_idle(block for block in local if block != NULL)
        if request.is_known:
            return max(0, num_required - num_have)
        num_skipped = _num_skipped(group, total) // group.block_tokens
        idle = self._pool.num_idle(block for block in local[num_skipped:] if block != NULL)
        return max(0, num_required - max(num_skipped, len(local))) + idle

    def _grow(self, request: GroupRequest, place: int, group: Group, end: int) -> list[int]:
        table = request.tables[place]
        num_before, num_required = len(table), -(-end // group.block_tokens)
        if num_required <= num_before:
            return []
        if group.kind is Kind.STATE:
            # The running state moves to the last block; the one it leaves is freed two steps later.
            if num_before:
                request.last_state[place] = num_before - 1
            table += [NULL] * (num_required - 1 - num_before)
        table += self._pool.take(num_required - len(table))
        return table[num_before:]

    def skip(self, request: GroupRequest, num_processed: int) -> None:
        """Free what no later step reads."""
        for place, group in self._groups:
            table = request.tables[place]
            num_skipped = _num_skipped(group, num_processed) // group.block_tokens
            freed = []
            for index in reversed(range(min(num_skipped, len(table)))):
                if table[index] != NULL:
                    freed.append(table[index])
                    table[index] = NULL
            last = request.last_state[place]
            num_used = -(-num_processed // group.block_tokens)
            if last is not None and last < num_used - 1 and table[last] != NULL:
                freed.append(table[last])
                table[last] = NULL
            self._pool.release(freed)

    def name(self, request: GroupRequest, num_tokens: int, digests: Sequence[Digest]) -> None:
        """Others may find the blocks of these tokens. States are offered to the connector."""
        if len(self._groups) > 1:
            num_tokens = num_tokens // self._all.align_tokens * self._all.align_tokens
        for place, group in self._groups:
            table, size = request.tables[place], group.block_tokens
            kept = self._kept(request, group)
            for index in range(request.num_cached[place], num_tokens // size):
                block, end = table[index], (index + 1) * size
                if block == NULL or (kept is not None and index not in kept):
                    continue
                named = self._pool.name_one(block, group, digests[end - 1])
                if named and group.kind is Kind.STATE:
                    self.named_now.add(block)
                    self.offers.setdefault(request.request_id, {})[group.index, end] = block
            request.num_cached[place] = max(request.num_cached[place], num_tokens // size)

    def _kept(self, request: GroupRequest, group: Group) -> set[int] | None:
        """The blocks that the prefix cache keeps. None: all of them."""
        if self._is_dense or group.kind in (Kind.FULL, Kind.CHUNK):
            return None
        align = self._all.align_tokens
        ends = [(request.num_prompt_tokens - 1) // align * align, request.junction]
        return {index for end in ends if end for index in group.needed(end)}

    def ids_at_end(self, request: GroupRequest) -> list[list[int]]:
        """The tables that a connector gets when a request ends."""
        num = request.num_computed_tokens
        self.skip(request, max(0, num - request.num_in_flight_tokens))
        return [
            list(table) if group.kind is Kind.STATE else table[: -(-num // group.block_tokens)]
            for table, (_, group) in zip(request.tables, self._groups, strict=True)
        ]

    def release(self, request: GroupRequest) -> None:
        for table in request.tables:
            self._pool.release(block for block in table if block != NULL)
        num = len(self._groups)
        request.tables = [[] for _ in range(num)]
        request.num_cached = [0] * num
        request.last_state = [None] * num
        request.is_known = False
        self.offers.pop(request.request_id, None)

    def num_left(self, request: GroupRequest) -> int:
        """Blocks that a request still needs for all tokens that it has."""
        return sum(
            1
            if group.kind is Kind.STATE
            else max(0, -(-(request.num_tokens + 1) // group.block_tokens) - len(table))
            for table, (_, group) in zip(request.tables, self._groups, strict=True)
        )


def _num_skipped(group: Group, num_computed: int) -> int:
    """The leading tokens that the next token does not read."""
    match group.kind:
        case Kind.FULL:
            return 0
        case Kind.WINDOW:
            return max(0, num_computed - group.span + 1 - group.extra_tokens)
        case Kind.CHUNK:
            return num_computed // group.span * group.span
        case Kind.STATE:
            return max(0, num_computed - 1)
