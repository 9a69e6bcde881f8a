"""What vLLM's scheduler keeps of requests and of the device's blocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from connectors.memory_model import BLOCK_TOKENS, Digest, Past

from penstock.keys import KeyChain


class Request:
    """What the connector sees of vLLM's request, and what only the model knows."""

    def __init__(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, **fields: Any
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids: list[int] | None = list(prompt)
        self.all_token_ids = list(prompt)
        self.lora_request: Any = None
        self.cache_salt: str | None = None
        self.mm_features: list[Any] = []
        self.block_hashes: list[str] = []
        self.num_computed_tokens = 0
        self.__dict__.update(fields)
        # The model's own.
        self.max_tokens = max_tokens
        self.status = "waiting"  # loading, running, ended
        self.block_ids: list[int] = []
        self.num_placeholders = 0  # tokens that steps under way sample
        self.num_in_flight = 0  # steps
        self.num_stale = 0  # of these, from before a preemption
        self.known = list(prompt)  # to the workers, which sampled them
        self.loading: list[int] = []  # block ids
        self.num_local = 0  # blocks found on the device
        self.past = Past("")
        self.chain: KeyChain | None = None
        self.num_chained = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.all_token_ids) - len(self.prompt_token_ids or ())


class Pool:
    """The device's blocks and its prefix cache."""

    def __init__(self, num_blocks: int, rng: random.Random, *, is_caching: bool) -> None:
        self._rng = rng
        self._is_caching = is_caching
        self._free = list(range(num_blocks))
        self._uses: Counter[int] = Counter()
        self._block_of: dict[Digest, int] = {}
        self._digest_in: dict[int, Digest] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, digests: Sequence[Digest]) -> list[int]:
        """Leading blocks that are here."""
        found = []
        for end in range(BLOCK_TOKENS - 1, len(digests), BLOCK_TOKENS):
            block = self._block_of.get(digests[end])
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        return sum(not self._uses[block] for block in blocks)

    def use(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._uses[block]:
                self._free.remove(block)
            self._uses[block] += 1

    def take(self, num: int) -> list[int]:
        blocks = []
        for _ in range(num):
            # The newest as often as the oldest: copies from it are the likelier under way.
            block = self._free.pop(-1 if self._rng.random() < 0.5 else 0)
            self._uses[block] += 1
            self.forget([block])
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        for block in reversed(list(blocks)):
            self._uses[block] -= 1
            assert self._uses[block] >= 0, "freed twice"
            if not self._uses[block]:
                self._free.append(block)

    def name(self, blocks: Sequence[int], digests: Sequence[Digest]) -> None:
        """These blocks hold the tokens with these pasts, as far as they are full."""
        if not self._is_caching:
            return
        for index, block in enumerate(blocks[: len(digests) // BLOCK_TOKENS]):
            digest = digests[(index + 1) * BLOCK_TOKENS - 1]
            if digest not in self._block_of and block not in self._digest_in:
                self._block_of[digest] = block
                self._digest_in[block] = digest

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if (digest := self._digest_in.pop(block, None)) is not None:
                del self._block_of[digest]

    def forget_all(self) -> None:
        self._block_of.clear()
        self._digest_in.clear()
