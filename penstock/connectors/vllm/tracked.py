"""The requests that the scheduler's side follows, and the keys that name their KV."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.books.sessions import Chain, Sessions
from penstock.connectors.vllm.awaiting import Awaiting
from penstock.connectors.vllm.identity import Naming, RequestKeys, tenant_of
from penstock.connectors.vllm.request_hints import TransferParamHints
from penstock.costs.choose import LoadChoice
from penstock.groups.kinds import Group, Groups, Kind
from penstock.hints import NO_HINTS, Hints
from penstock.keys import Namespace
from penstock.types import BlockKey, LookupId, Match, Slot, TicketId, Tier

NULL_BLOCK = 0
"""In vLLM's block tables, where a group needs no block."""

Tables = Sequence[Sequence[int]]
"""A request's blocks: one table per group that is kept."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The last lookup's answer: `num_tokens` can be loaded after the first `start`."""

    start: int
    match: Match
    num_tokens: int
    choice: LoadChoice
    at: float
    num_found: int  # tokens that the tiers hold after `start`, worth loading or not

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Piece(NamedTuple):
    """Blocks of one group, by their index in its table."""

    place: int  # of the group, among those that are kept
    group: Group
    blocks: range


@dataclass(slots=True)
class Loading:
    """A load under way, and how many of its blocks have not been ordered from the workers yet."""

    request_id: str
    ticket: TicketId
    start: int  # tokens before it
    end: int  # tokens with it
    slots: tuple[Slot, ...]
    num_unordered: int
    slowest: Tier
    num_bytes: int
    started: float


@dataclass(slots=True)
class Tracked:
    request: Any
    keys: RequestKeys | None  # None if its KV cannot be named: it is neither loaded nor saved
    tables: list[list[int]]  # of the full groups; the others' change, see `checkpoints`
    num_saved: list[int]  # leading blocks of each full group that need no further save
    hints: Hints = NO_HINTS
    num_computed: int = 0  # tokens whose KV is computed by the steps so far
    num_checked: int = 0  # tokens up to which all checkpoints worth keeping are saved
    boundaries: Mapping[int, Any] | None = None  # checkpoints to keep of its prompt, and why
    junction: int | None = None  # where the full groups' hit ended without a checkpoint
    last_checkpoint: tuple[BlockKey, ...] = ()  # of its answer, replaced by the next one
    has_finished: bool = False
    offer: Offer | None = None
    loading: Loading | None = None  # the load that the request waits for
    num_found: int | None = None  # leading tokens in the cache when it was first admitted
    has_looked_up: bool = False
    lookup: LookupId | None = None  # a question to the remote tier, not answered yet
    awaiting: Awaiting | None = None  # set while another vLLM computes its prompt
    barred_until: float = 0.0  # after a failed load: compute, which cannot fail the same way
    tokens_from: dict[Tier, int] = field(default_factory=dict)
    is_audited: bool | None = None  # None: not decided yet
    audited_tokens: int | None = None  # where the hit would have ended

    @property
    def tenant(self) -> str:
        return "" if self.keys is None else tenant_of(self.request)

    @property
    def num_known(self) -> int:
        """Its tokens so far. If steps overlap, the last sampled token is not known yet."""
        return len(self.request.all_token_ids)

    def prompt_keys(self) -> list[BlockKey]:
        """The keys of all full blocks of the tokens known so far."""
        assert self.keys is not None
        return self.keys.first(self.request.num_tokens)

    def keys_of(self, group: Group, blocks: range) -> list[BlockKey]:
        assert self.keys is not None
        keys = self.keys.of_group(group, blocks.stop * group.block_tokens)
        return keys[blocks.start : blocks.stop]

    def parent_key(self, group: Group, index: int) -> BlockKey | None:
        """The key of the block before the one at `index`. Checkpoints begin anywhere: none."""
        if self.keys is None or not index or group.kind is not Kind.FULL:
            return None
        return self.keys.of_group(group, index * group.block_tokens)[-1]

    def forget_blocks(self) -> None:
        """vLLM has taken its blocks back."""
        self.tables = [[] for _ in self.tables]
        self.num_saved = [0] * len(self.num_saved)
        self.num_computed = self.num_checked = 0


class TrackedRequests(dict[str, Tracked]):
    """The requests by id, from vLLM's first lookup of one until it has finished."""

    def __init__(
        self,
        namespace: Namespace,
        naming: Naming,
        sessions: Sessions,
        groups: Groups,
        block_bytes: int,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.block_bytes = block_bytes
        self.namespace = namespace
        self.naming = naming
        self._hints = TransferParamHints()
        self._sessions = sessions

    def track(self, request: Any) -> Tracked:
        tracked = self.get(request.request_id)
        if tracked is None:
            keys = self.naming.keys(self.namespace, request, self.groups)
            hints = self._hints.of(request)
            num = len(self.groups)
            tracked = Tracked(request, keys, [[] for _ in range(num)], [0] * num, hints)
            self[request.request_id] = tracked
            self._sessions.began(hints, tracked.tenant)
        return tracked

    def pieces(self, num_tokens: int, start: int) -> list[Piece]:
        """The blocks that a hit of `num_tokens` needs, of which `start` are on the device."""
        return [
            Piece(place, group, needed)
            for place, group in enumerate(self.groups)
            if (needed := group.needed(num_tokens, start))
        ]

    def full(self) -> Iterator[tuple[int, Group]]:
        return ((place, group) for place, group in enumerate(self.groups) if group.is_full)

    def apply_hints(self, tracked: Tracked) -> None:
        """Do what a finished request's hints ask for its blocks."""
        if tracked.keys is None or tracked.hints is NO_HINTS:
            return
        keys: list[BlockKey] = []
        num_found = 0
        for place, group in self.full():
            saved = tracked.keys_of(group, range(tracked.num_saved[place]))
            found = min((tracked.num_found or 0) // group.block_tokens, len(saved))
            # First what was found, of all groups: `ended` treats it in another way.
            keys[num_found:num_found] = saved[:found]
            keys += saved[found:]
            num_found += found
        keys += tracked.last_checkpoint
        self._sessions.ended(tracked.hints, [Chain(keys, num_found)], tracked.tenant)

    def is_named(self, tracked: Tracked) -> bool:
        """Whether its keys still name its KV. An adapter's files may change while it runs."""
        if tracked.keys is not None and not self.naming.holds(tracked.keys):
            tracked.keys = tracked.offer = None
        return tracked.keys is not None

    def rename_all(self) -> None:
        """Use a new namespace for this run only; requests under way are not saved any more."""
        self.namespace = replace(self.namespace, tenant=f"reset {time.time_ns()}")
        self._sessions.clear()
        for tracked in self.values():
            tracked.keys = tracked.offer = None
