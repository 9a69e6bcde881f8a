"""Hit rates without time: replay each request's blocks through a real ledger and policy.

Published cache results are of this kind: one tier of a fixed number of blocks, requests in order,
each finished before the next arrives. A block is a hit if it and all blocks before it are held. No
time passes, so a trace of hundreds of thousands of blocks takes seconds, and memory use does not
depend on its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.books.ledger import Ledger
from penstock.errors import BookError, ConfigError
from penstock.policies import POLICIES
from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey

_TICK_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay through a tier of `capacity` blocks."""

    capacity: int | None  # None: unbounded
    num_requests: int
    num_blocks: int  # of all prompts
    num_hits: int  # leading blocks of prompts that were held
    num_written: int = 0  # blocks that entered the tier
    num_refused: int = 0  # blocks that the policy did not admit, or that had no room

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


def check_policy(name: str) -> None:
    """Raise ConfigError unless there is a policy of this name."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}: expected one of {', '.join(POLICIES)}")


def new_ledger(policy: str, capacity: int) -> Ledger:
    """An empty ledger of `capacity` slots under the named policy."""
    check_policy(policy)
    if capacity < 1:
        raise ConfigError(f"the capacity is {capacity} blocks: expected 1 or more")
    return Ledger(capacity, POLICIES[policy](capacity))


def replay(
    requests: Iterable[TraceRequest],
    ledger: Ledger,
    tick: Callable[[int], None] = lambda num_requests: None,
    *,
    tails_first: bool = False,
) -> Replayed:
    """Replay requests through `ledger`. `tick` is called from time to time with the number done.

    A request uses its blocks from first to last, as in the tiers. `tails_first` reverses that: then
    a policy that does not know parents evicts a prompt from its end, as the device pool does, and
    as in published figures for LRU.
    """
    num_requests = num_blocks = num_hits = num_written = num_refused = 0
    for request in requests:
        prompt = request.prompt_blocks
        num_requests += 1
        num_blocks += len(prompt)
        num_hits += num_leading(ledger, prompt)
        written, refused = _use(ledger, (*prompt, *request.output_blocks), tails_first)
        num_written += written
        num_refused += refused
        if not num_requests % _TICK_REQUESTS:
            tick(num_requests)
    tick(num_requests)
    return Replayed(ledger.capacity, num_requests, num_blocks, num_hits, num_written, num_refused)


def num_leading(ledger: Ledger, keys: Iterable[BlockKey]) -> int:
    """The number of leading blocks that are held."""
    held, count = ledger.held, 0
    for key in keys:
        if key not in held:
            break
        count += 1
    return count


def _use(ledger: Ledger, keys: tuple[BlockKey, ...], tails_first: bool) -> tuple[int, int]:
    """Record that a request used all these blocks. Returns how many were written and refused."""
    held = ledger.held
    there = [key for key in keys if key in held]
    new: dict[BlockKey, BlockKey | None] = {}  # the parent of each new block
    if len(there) < len(keys):
        previous = None
        for key in keys:
            if key not in held:
                new.setdefault(key, previous)
            previous = key
    # Lease before claim: blocks that this request reads must not be evicted for those it writes.
    leased = ledger.use_ready(there[::-1] if tails_first else there)
    wanted = [key for key in new if ledger.admits(key)][: ledger.num_claimable]
    if wanted:
        if tails_first:
            wanted.reverse()
        if ledger.claim(wanted, [new[key] for key in wanted]) is None:
            raise BookError(f"the ledger refused {len(wanted)} blocks that it had room for")
        ledger.commit(wanted)
    ledger.release([slot for slot in leased if slot is not None])
    return len(wanted), len(new) - len(wanted)
