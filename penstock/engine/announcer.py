"""Enters the engine's blocks into what is published as KV events (see `penstock.kv_events`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.engine.request import Request
from penstock.kv_events.held import HeldBlocks, NamedSequence
from penstock.types import BlockKey, Tier


class Announcer:
    """An observer of the device's pool. It also learns the tokens of blocks from requests."""

    def __init__(self, held: HeldBlocks, block_tokens: int) -> None:
        self._held = held
        self._block_tokens = block_tokens

    def completes(self, request: Request, indices: Iterable[int]) -> None:
        """These blocks of a request are about to be named in the pool."""
        sequence = self._sequence(request)
        self._held.name(sequence, [index for index in indices if index < len(sequence.keys)])

    def arrived(self, request: Request) -> None:
        """Its blocks may be in a tier since before a restart, when their tokens were forgotten."""
        self._held.recognize(self._sequence(request))
        for segment in request.segments:
            self.hinted(segment.keys, segment.tokens, request.tenant)

    def hinted(self, keys: Sequence[BlockKey], tokens: Sequence[int], tenant: str) -> None:
        self._held.recognize(NamedSequence(keys, tokens, self._block_tokens, tenant))

    def named(self, key: BlockKey) -> None:
        self._held.stored(Tier.DEVICE, (key,))

    def dropped(self, keys: Sequence[BlockKey]) -> None:
        self._held.removed(Tier.DEVICE, keys)

    def emptied(self, *tiers: Tier) -> None:
        for tier in tiers:
            self._held.emptied(tier)

    def _sequence(self, request: Request) -> NamedSequence:
        keys = request.chain.keys
        if request.segments:  # later blocks are not those of the same tokens in a plain prompt
            keys = keys[: request.segments[0].start // self._block_tokens]
        return NamedSequence(keys, request.tokens, self._block_tokens, request.tenant)
