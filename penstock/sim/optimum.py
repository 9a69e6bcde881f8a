"""What no policy can beat: Belady's MIN, which knows the future, and a cache without bounds.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
    Journal 5 (2), 1966.

MIN evicts the block whose next use is furthest away, and lets a block pass by that is never used
again. In a cache of prefixes a block counts only if all before it are held. Of a chain's blocks
many have the same next use. Evicting heads first among these gives the figures that are published
for traces; evicting tails first keeps every chain whole, so each block held is also a hit, and
that is the true optimum: no policy has more.
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
    """A tier that keeps everything: what is left are the blocks nobody had before."""
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


def belady(
    requests: Sequence[TraceRequest], capacity: int, *, tails_first: bool = False
) -> Replayed:
    """MIN for a tier of `capacity` blocks; `tails_first` among blocks of equal next use."""
    if capacity < 1:
        raise ConfigError(f"a tier of {capacity} blocks holds nothing: expected 1 or more")
    next_uses = _next_uses(requests)
    held: dict[BlockKey, int] = {}  # its next use, as a number of a request
    order: list[tuple[int, int, BlockKey]] = []  # furthest next use first; may be out of date
    sign = -1 if tails_first else 1
    num_blocks = num_hits = num_written = 0
    position = 0  # in `next_uses`
    for request in requests:
        prompt = request.prompt_blocks
        num_blocks += len(prompt)
        for key in prompt:
            if key not in held:
                break
            num_hits += 1
        for place, key in enumerate((*prompt, *request.output_blocks)):
            next_use = next_uses[position]
            position += 1
            if key not in held:
                if next_use == _NEVER:
                    continue
                num_written += 1
            held[key] = next_use
            heappush(order, (-next_use, sign * place, key))
            while len(held) > capacity:
                use, _, furthest = heappop(order)
                if held.get(furthest) == -use:
                    del held[furthest]
        if len(order) > 4 * capacity + 1024:  # what was used again has left its old place behind
            order = [entry for entry in order if held.get(entry[2]) == -entry[0]]
            heapify(order)
    return Replayed(capacity, len(requests), num_blocks, num_hits, num_written)


def _next_uses(requests: Sequence[TraceRequest]) -> array[int]:
    """For every block of every request in turn, which request uses it next."""
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
        # An answer's block is written, and only a prompt reads it.
        for key in request.output_blocks:
            seen.pop(key, None)
        for key in request.prompt_blocks:
            seen[key] = number
    return found
