"""Upper limits for any policy: the offline optimum of a prefix cache, and an unbounded cache.

`optimum` knows the future. It keeps the blocks whose next use comes soonest, and does not admit a
block that is never used again (Belady, "A study of replacement algorithms for a virtual-storage
computer", IBM Systems Journal 5 (2), 1966). Why no policy has more hits:

Count every held block that a prompt names as a hit, even if blocks before it are not held. This can
only add hits. For that count, with blocks of one size, Belady's choice is optimal, whether or not
admission is mandatory. So it is an upper bound for every policy. It is also reached: a prompt that
uses a block uses its parent too, so no block has its next use before its parent's. Of blocks with
the same next use, the last ones of a prompt are evicted first. So the blocks of an arriving prompt
that are held are always its first ones, and each is a hit in the strict sense.

Breaking ties the other way, by evicting parents first, leaves prompts without their beginning.
Figures published as MIN for traces are often of that kind; LRU can be better than them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from penstock.errors import ConfigError
from penstock.sim.replay import Replayed
from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey

_NEVER = 1 << 40


def unbounded(requests: Iterable[TraceRequest]) -> Replayed:
    """Replay with a tier that keeps everything: only blocks that are new are misses."""
    seen: set[BlockKey] = set()
    num_requests = num_blocks = num_hits = 0
    for request in requests:
        num_requests += 1
        num_blocks += len(request.prompt_blocks)
        for key in request.prompt_blocks:
            if key not in seen:
                break
            num_hits += 1
        seen.update(request.prompt_blocks)
        seen.update(request.output_blocks)
    return Replayed(None, num_requests, num_blocks, num_hits, num_written=len(seen))


def optimum(requests: Sequence[TraceRequest], capacity: int) -> Replayed:
    """The most hits that a tier of `capacity` blocks can have if requests are served one by one.

    Exact if each key names a whole prefix, as all keys here do; otherwise an upper bound.
    """
    if capacity < 1:
        raise ConfigError(f"the capacity is {capacity} blocks: expected 1 or more")
    next_uses = _next_uses(requests)
    held: dict[BlockKey, int] = {}  # the number of the request that uses each block next
    order: list[tuple[int, int, BlockKey]] = []  # furthest next use first; may have stale entries
    num_blocks = num_hits = num_written = 0
    position = 0  # in `next_uses`
    for request in requests:
        prompt = request.prompt_blocks
        num_blocks += len(prompt)
        num_hits += sum(key in held for key in prompt)
        for place, key in enumerate((*prompt, *request.output_blocks)):
            next_use = next_uses[position]
            position += 1
            if key not in held:
                if next_use == _NEVER:
                    continue
                num_written += 1
            held[key] = next_use
            heappush(order, (-next_use, -place, key))
        # Evict only now: during the loop, some blocks still have this request as their next use.
        while len(held) > capacity:
            use, _, furthest = heappop(order)
            if held.get(furthest) == -use:
                del held[furthest]
        if len(order) > 4 * capacity + 1024:  # a block that is used again leaves a stale entry
            order = [entry for entry in order if held.get(entry[2]) == -entry[0]]
            heapify(order)
    return Replayed(capacity, len(requests), num_blocks, num_hits, num_written)


def _next_uses(requests: Sequence[TraceRequest]) -> array[int]:
    """For every block of every request, in order, the number of the request that uses it next."""
    total = sum(len(request.prompt_blocks) + len(request.output_blocks) for request in requests)
    found = array("q", bytes(8 * total))
    seen: dict[BlockKey, int] = {}
    position = total
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        keys = (*request.prompt_blocks, *request.output_blocks)
        position -= len(keys)
        for place, key in enumerate(keys):
            found[position + place] = seen.get(key, _NEVER)
        # A request writes its answer's blocks; only prompts read blocks.
        for key in request.output_blocks:
            seen.pop(key, None)
        for key in request.prompt_blocks:
            seen[key] = number
    return found
