"""NodeBooks: what a client asks a node's books, tells them, and knows of them.

Without a node, or while it hangs, nothing is found and nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.codecs.base import BlockCodec
from penstock.codecs.blocks import TierCodecs
from penstock.costs.rates import LinkRate
from penstock.events import (
    CodecsChosen,
    Event,
    LookedUp,
    Observer,
    Removed,
    Stored,
    TierCodec,
    tell,
)
from penstock.node.line import Line
from penstock.node.wire import Frame, pack_keys, pack_parents, pack_text, unpack_tiers
from penstock.types import NO_PARENTS, BlockKey, LookupId, Match, Run, Tier


class NodeBooks:
    """The part of `Tiers` that moves nothing of this client's. See `Offloader`."""

    def __init__(
        self, line: Line, codecs: TierCodecs, block_tokens: int, observers: Iterable[Observer]
    ) -> None:
        self._line = line
        self._codecs = codecs
        self._codecs_chosen = CodecsChosen(
            tuple(
                TierCodec(tier, codec, codecs.of(tier).packed_bytes)
                for tier, codec in codecs.names.items()
            ),
            codecs.host.raw_bytes,
            block_tokens,
        )
        self._observers = list(observers)
        self._rates: dict[Tier, LinkRate] = {}
        self._num_blocks = self._num_retained = 0
        self._is_prefetching = self._is_quarantined = False
        self._must_tell_quarantine = False  # found by this client, and no node has said it knows
        self._lookups: set[LookupId] = set()  # that are open
        self._in_host: set[BlockKey] = set()  # blocks that are known to be in HOST

    # What is there.

    def match(self, keys: Sequence[BlockKey]) -> Match:
        def read(reply: Frame) -> Match:
            fields = reply.fields
            runs = tuple(Run(Tier(tier), num) for tier, num in fields["runs"])
            return Match(len(keys), runs, fields["pending"], fields["seconds"])

        if self._is_quarantined or not keys:
            return Match(len(keys))
        return self._line.call("match", {}, pack_keys(keys), read=read) or Match(len(keys))

    def where(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        found = None
        if not self._is_quarantined:
            found = self._line.call(
                "where", {}, pack_keys(keys), read=lambda reply: unpack_tiers(reply.parts[0])
            )
        return [None] * len(keys) if found is None else list(found)

    def is_in_host(self, key: BlockKey) -> bool:
        """As the node said last, or asked if it has not said anything: `pin` finds out."""

        def read(reply: Frame) -> bool:
            is_there = reply.parts[0] == b"\1"
            if is_there:
                self._in_host.add(key)
            return is_there

        if not self._line.is_answering:
            return False
        if key in self._in_host:
            return True
        return bool(self._line.call("in_host", {}, pack_keys([key]), read=read))

    def lookup(self, keys: Sequence[BlockKey]) -> LookupId | None:
        def read(reply: Frame) -> LookupId | None:
            if reply.fields["lookup"] is None:
                return None
            lookup_id = LookupId(int(reply.fields["lookup"]))
            self._lookups.add(lookup_id)
            return lookup_id

        if not self._line.settings.has_remote or self._is_quarantined:
            return None
        return self._line.call("lookup", {}, pack_keys(keys), read=read)

    def is_looking_up(self, lookup_id: LookupId) -> bool:
        return lookup_id in self._lookups

    @property
    def codecs(self) -> Mapping[Tier, str]:
        return self._codecs.names

    @property
    def host_codec(self) -> BlockCodec:
        return self._codecs.host

    @property
    def host_block_bytes(self) -> int:
        return self._codecs.host.packed_bytes

    @property
    def rates(self) -> dict[Tier, LinkRate]:
        return self._rates

    @property
    def num_retained(self) -> int:
        return self._num_retained

    @property
    def is_prefetching(self) -> bool:
        return self._is_prefetching

    @property
    def is_quarantined(self) -> bool:
        return self._is_quarantined

    # What observers are told.

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)
        tell([observer], [self._codecs_chosen])

    def note(self, match: Match) -> None:
        hits = {run.tier: match.num_from(run.tier) for run in match.runs}
        self._tell([LookedUp(match.num_asked, tuple(hits.items()))])

    def _tell(self, events: Iterable[Event]) -> None:
        tell(self._observers, events)

    # What should happen.

    def used(self, keys: Sequence[BlockKey], *, tenant: str = "") -> None:
        if keys:
            self._line.send("used", {"tenant": pack_text(tenant)}, pack_keys(keys))

    def offer(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> None:
        fields = {"tenant": pack_text(tenant), "parents": pack_parents(parents)}
        self._line.send("offer", fields, pack_keys(keys))

    def retain(self, keys: Sequence[BlockKey], seconds: float, name: str) -> int:
        return self._count("retain", {"seconds": seconds, "name": pack_text(name)}, keys)

    def release(self, name: str) -> int:
        return self._count("release", {"name": pack_text(name)})

    def demote(self, keys: Sequence[BlockKey]) -> int:
        return self._count("demote", {}, keys)

    def discard(self, keys: Sequence[BlockKey]) -> int:
        return self._count("discard", {}, keys)

    def prefetch(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        retain_seconds: float | None = None,
        name: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> int:
        fields = {
            "tenant": pack_text(tenant),
            "parents": pack_parents(parents),
            "retain_seconds": retain_seconds,
            "name": pack_text(name),
        }

        def read(reply: Frame) -> int:
            num_blocks = int(reply.fields["num"])
            self._is_prefetching |= bool(num_blocks)
            return num_blocks

        return self._line.call("prefetch", fields, pack_keys(keys), read=read) or 0

    def keep_together(self, keys: Sequence[BlockKey]) -> None:
        self._line.send("keep_together", {}, pack_keys(keys))

    def supersede(self, keys: Sequence[BlockKey]) -> None:
        self._line.send("supersede", {}, pack_keys(keys))

    def quarantine(self) -> None:
        """Stop using stored KV, on this node and for all of its clients with this model."""
        self._is_quarantined = self._must_tell_quarantine = True
        self._tell_quarantine()

    def _tell_quarantine(self) -> None:
        """Also to a node that hangs or comes next: wrong KV may be in its lower tiers."""
        if self._must_tell_quarantine:
            self._line.queue("quarantine", {})
            self._line.flush()

    def empty_host(self) -> int:
        return self._count("empty_host", {})

    def _count(
        self, kind: str, fields: Mapping[str, Any], keys: Sequence[BlockKey] | None = None
    ) -> int:
        parts = () if keys is None else (pack_keys(keys),)
        return self._line.call(kind, fields, *parts, read=lambda r: int(r.fields["num"])) or 0

    # What the node says.

    def _hear_state(self, fields: Mapping[str, Any]) -> None:
        self._num_blocks = int(fields["num_blocks"])
        self._num_retained = int(fields["num_retained"])
        self._is_prefetching = bool(fields["is_prefetching"])
        if fields["is_quarantined"]:
            self._is_quarantined, self._must_tell_quarantine = True, False
        self._rates = {
            Tier(int(tier)): LinkRate(rate, latency, math.inf if most is None else most)
            for tier, (rate, latency, most) in fields["rates"].items()
        }

    def _hear_event(self, event: Event) -> None:
        if isinstance(event, Stored) and event.tier is Tier.HOST:
            self._in_host.update(event.keys)
        elif isinstance(event, Removed) and event.tier is Tier.HOST:
            self._in_host.difference_update(event.keys)

    def _hear_looked_up(self, fields: Mapping[str, Any]) -> None:
        self._lookups.discard(LookupId(int(fields["lookup"])))

    def _forget_books(self) -> None:
        """The node is gone. A quarantine stays: this process has seen wrong KV, or heard of it."""
        self._lookups.clear()
        self._in_host.clear()
        self._rates = {}
        self._num_blocks = self._num_retained = 0
        self._is_prefetching = False
