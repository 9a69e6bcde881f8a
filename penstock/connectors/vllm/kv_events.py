"""Records which tier holds which of vLLM's blocks, for routers that route prompts by KV."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.events import Event, Removed, Stored
from penstock.groups.kinds import Group
from penstock.types import BlockKey, Tier


@dataclass(slots=True)
class _Named:
    """A block as routers identify it."""

    hash: Any
    parent: Any
    tokens: array[int]
    lora: Any
    group: Group
    extra_keys: Any = None
    tiers: set[Tier] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class TierEvent:
    """A block was stored in a tier or removed from it."""

    tier: Tier
    hash: Any
    is_stored: bool
    parent: Any = None
    tokens: Sequence[int] = ()
    lora: Any = None
    group: Group | None = None
    extra_keys: Any = None


class BlockNews:
    """An observer. It knows the blocks given to `name`, from their save to their removal."""

    def __init__(
        self,
        hash_tokens: int | None = None,
        extra_keys: Callable[[Any, int, int], Any] = lambda request, start, end: None,
    ) -> None:
        """`hash_tokens`: of vLLM's own hashes, if its blocks may have more tokens than those."""
        self._hash_tokens = hash_tokens
        self._extra_keys = extra_keys
        self._named: dict[BlockKey, _Named] = {}
        self._news: list[TierEvent] = []

    def name(self, keys: Sequence[BlockKey], start: int, request: Any, group: Group) -> None:
        """Remember that `keys` are those of the request's blocks, starting at block `start`."""
        hashes = request.block_hashes
        size = group.block_tokens
        per_block = size // (self._hash_tokens or size)
        for index, key in enumerate(keys, start):
            last = (index + 1) * per_block - 1
            if key in self._named or last >= len(hashes):
                continue
            begin, end = index * size, (index + 1) * size
            self._named[key] = _Named(
                hashes[last],
                hashes[last - per_block] if index else None,
                array("I", request.all_token_ids[begin:end]),
                request.lora_request,
                group,
                self._extra_keys(request, begin, end),
            )

    def __call__(self, event: Event) -> None:
        match event:
            case Stored(tier, keys):
                for key in keys:
                    self._stored(tier, key)
            case Removed(tier, keys):
                for key in keys:
                    self._removed(tier, key)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks whose save failed, unless a tier has them."""
        for key in keys:
            named = self._named.get(key)
            if named is not None and not named.tiers:
                del self._named[key]

    def lose_all(self) -> None:
        """The tiers are gone. Blocks that come back are named again when they are saved."""
        for named in self._named.values():
            for tier in sorted(named.tiers):
                self._news.append(TierEvent(tier, named.hash, False, group=named.group))
        self._named.clear()

    def take(self) -> list[TierEvent]:
        news, self._news = self._news, []
        return news

    def _stored(self, tier: Tier, key: BlockKey) -> None:
        named = self._named.get(key)
        if named is not None and tier not in named.tiers:
            named.tiers.add(tier)
            tokens = named.tokens.tolist()
            self._news.append(
                TierEvent(
                    tier,
                    named.hash,
                    True,
                    named.parent,
                    tokens,
                    named.lora,
                    named.group,
                    named.extra_keys,
                )
            )

    def _removed(self, tier: Tier, key: BlockKey) -> None:
        named = self._named.get(key)
        if named is None or tier not in named.tiers:
            return
        named.tiers.discard(tier)
        self._news.append(TierEvent(tier, named.hash, False, group=named.group))
        if not named.tiers:
            del self._named[key]
