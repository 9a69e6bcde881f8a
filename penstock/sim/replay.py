"""Hit rates without time: every request's blocks through a real ledger and policy, one by one.

The published cache results are of this kind: one tier of so many blocks, requests in their order,
each done before the next one comes. A block is a hit if it and all before it are held. Nothing is
waited for, so a trace of hundreds of thousands of blocks takes seconds, and memory stays flat
however long it is.
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
    """What a tier of so many blocks would have given. Shares are of the prompts' blocks."""

    capacity: int | None  # None: unbounded
    num_requests: int
    num_blocks: int  # of all prompts
    num_hits: int  # of these, leading ones that were held
    num_written: int = 0  # blocks that entered the tier
    num_refused: int = 0  # blocks that the policy did not want, or that found no room

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
        raise ConfigError(f"a tier of {capacity} blocks holds nothing: expected 1 or more")
    return Ledger(capacity, POLICIES[policy](capacity))


def replay(
    requests: Iterable[TraceRequest],
    ledger: Ledger,
    tick: Callable[[int], None] = lambda num_requests: None,
    *,
    tails_first: bool = False,
) -> Replayed:
    """Play requests through `ledger`. `tick` is told now and then how many are done.

    A request uses its blocks from the first to the last, as the tiers see it. `tails_first` turns
    that round: a policy that knows nothing of chains then evicts a chain from its end, as the
    device pool does, and as LRU's published figures have it.
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
    """How many leading blocks are held."""
    held, count = ledger.held, 0
    for key in keys:
        if key not in held:
            break
        count += 1
    return count


def _use(ledger: Ledger, keys: tuple[BlockKey, ...], tails_first: bool) -> tuple[int, int]:
    """A request has used and computed all these; returns how many were written, and refused."""
    held = ledger.held
    there = [key for key in keys if key in held]
    new: dict[BlockKey, BlockKey | None] = {}  # and what each follows
    if len(there) < len(keys):
        previous = None
        for key in keys:
            if key not in held:
                new.setdefault(key, previous)
            previous = key
    # Lease before claim: what this request reads must not make room for what it writes.
    leased = ledger.use_ready(there[::-1] if tails_first else there)
    wanted = [key for key in new if ledger.admits(key)][: ledger.num_claimable]
    if wanted:
        if tails_first:
            wanted.reverse()
        if ledger.claim(wanted, [new[key] for key in wanted]) is None:
            raise BookError(f"the ledger had room for {len(wanted)} blocks and has none")
        ledger.commit(wanted)
    ledger.release([slot for slot in leased if slot is not None])
    return len(wanted), len(new) - len(wanted)
