"""Which instance gets a request: the rules of the routers that people put before servers. Pure.

    round-robin   in turn
    sticky        by a consistent hash of the session
    cache-aware   to the instance that was sent most of the prompt before, unless load is uneven

`cache-aware` follows `cache_aware` of vllm-router 0.1.16 with the defaults of its command line,
for requests whose prompt is text (/v1/completions). It knows no caches: only what it has sent.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from penstock.errors import ConfigError
from penstock.sim.prefix_tree import PrefixTree
from penstock.sim.trace import Trace, TraceRequest
from penstock.types import BlockKey

ROUTERS = ("round-robin", "sticky", "cache-aware")

_NUM_VIRTUAL = 160  # points of each instance on the ring, as in vllm-router
_CHARACTERS_PER_TOKEN = 4
_COMMON_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What a router reads of a request."""

    keys: tuple[BlockKey, ...]  # all blocks that the trace names, perhaps with a partial one
    sizes: tuple[int, ...]  # their tokens
    num_tokens: int
    session: bytes


class Router(Protocol):
    def route(self, prompt: RoutedPrompt, loads: Sequence[int], now: float) -> int:
        """Choose an instance. `loads` counts the requests that each has not yet answered."""
        ...


@dataclass(frozen=True, slots=True)
class CacheAwareRules:
    """The options of vllm-router, with their defaults. Sizes are in tokens."""

    cache_threshold: float = 0.3  # `--cache-threshold`: the share of a prompt that must be known
    balance_abs_threshold: int = 64  # loads are uneven if they differ by more than this ...
    balance_rel_threshold: float = 1.5  # ... and by more than this factor
    eviction_seconds: float = 120.0
    max_tree_tokens: int = 2**26 // _CHARACTERS_PER_TOKEN  # per instance

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ConfigError(
                f"the cache threshold is {self.cache_threshold}: expected a share from 0 to 1"
            )
        if self.balance_abs_threshold < 0:
            raise ConfigError(
                f"the absolute balance threshold is {self.balance_abs_threshold}: expected 0 or "
                "more requests"
            )
        if not 1 <= self.balance_rel_threshold < math.inf:
            raise ConfigError(
                f"the relative balance threshold is {self.balance_rel_threshold}: expected a "
                "factor of 1 or more"
            )


def check_router(name: str) -> None:
    """Raise ConfigError unless there is a router of this name."""
    if name not in ROUTERS:
        raise ConfigError(f"there is no router {name!r}: expected one of {', '.join(ROUTERS)}")


def new_router(name: str, num_instances: int, rules: CacheAwareRules | None = None) -> Router:
    check_router(name)
    if name == "round-robin":
        return RoundRobin(num_instances)
    if name == "sticky":
        return Sticky(num_instances)
    return CacheAware(num_instances, rules or CacheAwareRules())


class RoundRobin:
    def __init__(self, num_instances: int) -> None:
        self._num_instances = num_instances
        self._next = 0

    def route(self, prompt: RoutedPrompt, loads: Sequence[int], now: float) -> int:
        chosen = self._next % self._num_instances
        self._next += 1
        return chosen


class LeastLoaded:
    """The instance with the fewest unanswered requests; the first of several."""

    def route(self, prompt: RoutedPrompt, loads: Sequence[int], now: float) -> int:
        return loads.index(min(loads))


class Sticky:
    """A ring of hashes: if an instance leaves, only its own sessions move."""

    def __init__(self, num_instances: int) -> None:
        points = sorted(
            (_hash(b"%d:%d" % (instance, number)), instance)
            for instance in range(num_instances)
            for number in range(_NUM_VIRTUAL)
        )
        self._hashes = [point for point, _ in points]
        self._instances = [instance for _, instance in points]

    def route(self, prompt: RoutedPrompt, loads: Sequence[int], now: float) -> int:
        place = bisect_left(self._hashes, _hash(prompt.session))
        return self._instances[place % len(self._instances)]


class CacheAware:
    def __init__(self, num_instances: int, rules: CacheAwareRules) -> None:
        self._rules = rules
        self._tree = PrefixTree(num_instances)
        self._next_eviction = rules.eviction_seconds

    def route(self, prompt: RoutedPrompt, loads: Sequence[int], now: float) -> int:
        rules = self._rules
        if now >= self._next_eviction:
            self._tree.evict(rules.max_tree_tokens)
            self._next_eviction = now - now % rules.eviction_seconds + rules.eviction_seconds
        lowest, highest = min(loads), max(loads)
        chosen = loads.index(lowest)
        is_uneven = (
            highest - lowest > rules.balance_abs_threshold
            and highest > lowest * rules.balance_rel_threshold
        )
        if not is_uneven:
            size, instance = self._tree.match(prompt.keys)
            if size > rules.cache_threshold * prompt.num_tokens:
                chosen = instance
        self._tree.insert(prompt.keys, prompt.sizes, chosen)
        return chosen


def routed_prompts(trace: Trace) -> list[RoutedPrompt]:
    """What a router reads of each request."""
    sessions = session_keys(trace.requests)
    prompts = []
    for request, session in zip(trace.requests, sessions, strict=True):
        keys, num_tokens = request.prompt_blocks, request.num_input_tokens
        sizes = [trace.block_tokens] * len(keys)
        if sizes:
            sizes[-1] = min(trace.block_tokens, num_tokens - trace.block_tokens * (len(keys) - 1))
        prompts.append(RoutedPrompt(keys, tuple(sizes), num_tokens, session))
    return prompts


def session_keys(requests: Sequence[TraceRequest]) -> list[bytes]:
    """The session of each request, or what stands for it.

    If the trace does not name a request's session, it is the first block of its prompt that no more
    than half of all requests begin with: what follows a common system prompt. A prompt without such
    a block is a session of its own.
    """
    counts = Counter(key for request in requests for key in request.prompt_blocks)
    most = _COMMON_SHARE * len(requests)
    found = []
    for number, request in enumerate(requests):
        if request.session:
            found.append(request.session.encode())
            continue
        own = (key for key in request.prompt_blocks if counts[key] <= most)
        found.append(next(own, BlockKey(b"request %d" % number)))
    return found


def _hash(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest())
