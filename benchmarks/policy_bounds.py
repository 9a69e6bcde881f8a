"""How close to the optimum a policy could get if it knew more than any policy can.

    python -m benchmarks.policy_bounds TRACE [--blocks 1000,4000,16000]

The default policy is given in advance what it otherwise learns: a kind for each request and, from
the whole trace including the future, how often requests of that kind return, and after how long.
From row to row the kinds carry more information; the last two need knowledge of the future. These
are not policies but bounds on what better features could gain.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.books.ledger import Ledger
from penstock.policies import reuse, reuse_rates
from penstock.policies.reuse import Reuse
from penstock.sim.formats import read_trace
from penstock.sim.optimum import optimum
from penstock.sim.replay import new_ledger, replay
from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey

_PASSES = 3  # what is reused depends on what is kept; this many passes are enough to settle


@dataclass(slots=True)
class Turn:
    """A request as part of its conversation."""

    number: int  # 0: the first turn
    pause_seconds: float
    num_blocks: int
    blocks_until_next: int | None = None  # of other requests; None: the last turn


def turns_of(requests: Sequence[TraceRequest]) -> list[Turn]:
    """The turn of each request. A request continues another if it repeats all of that one's
    blocks except the last two."""
    last_user: dict[BlockKey, int] = {}
    turns: list[Turn] = []
    num_blocks = [0]
    for place, request in enumerate(requests):
        keys = (*request.prompt_blocks, *request.output_blocks)
        num_known = 0
        parent = None
        for key in request.prompt_blocks:
            if key not in last_user:
                break
            num_known += 1
            parent = last_user[key]
        number, pause = 0, 0.0
        if parent is not None and num_known >= max(1, turns[parent].num_blocks - 2):
            number = turns[parent].number + 1
            pause = request.arrival_seconds - requests[parent].arrival_seconds
            turns[parent].blocks_until_next = num_blocks[place] - num_blocks[parent]
        turns.append(Turn(number, pause, len(keys)))
        num_blocks.append(num_blocks[-1] + len(keys))
        for key in keys:
            last_user[key] = place
    return turns


class GivenReuse(Reuse):
    """The default policy with given kinds of requests and given reuse rates."""

    def __init__(self, capacity: int, given: tuple[list[float], list[list[float]]] | None) -> None:
        self.kind = 0
        self._given = given
        super().__init__(capacity)
        self._max_ghosts = 1 << 30
        self._trial.prefers_worth = True  # this measures worth alone, so there is no trial

    def insert_all(self, keys: Sequence[BlockKey], before: Sequence[BlockKey | None]) -> None:
        for key, previous in zip(keys, before, strict=True):
            self.insert(key, previous)  # one by one, each with the given kind

    def touch(self, key: BlockKey) -> None:
        run, before, taken = self._runs.take(key)
        count = len(taken)
        if run.is_empty:
            count += run.num_evicted
            self._unshelve(run)
        self._rates.reused(run.uses, self._now - run.tick, count)
        self._join(taken, before, self.kind + 1, self._now)

    def counts(self) -> tuple[list[float], list[list[float]]]:
        return self._rates._num_begun, self._rates._num_reused

    def _uses_of(self, key: BlockKey, before: BlockKey | None) -> int:
        super()._uses_of(key, before)  # records the reuse
        return self.kind + 1

    def _learn(self) -> None:
        """Use the given rates once; afterwards only count."""
        if self._worst_first:
            return
        mine = self.counts()
        if self._given is not None:
            self._rates._num_begun, self._rates._num_reused = self._given
        super()._learn()
        self._rates._num_begun, self._rates._num_reused = mine


def bound(requests: Sequence[TraceRequest], kinds: Sequence[int], capacity: int) -> float:
    num_kinds = max(kinds) + 1
    reuse.NUM_KINDS = reuse_rates.NUM_KINDS = num_kinds
    given = None
    best = 0.0
    for _ in range(_PASSES):
        policy = GivenReuse(capacity, given)

        def tagged(policy: GivenReuse = policy) -> Iterator[TraceRequest]:
            for request, kind in zip(requests, kinds, strict=True):
                policy.kind = kind
                yield request

        best = max(best, replay(tagged(), Ledger(capacity, policy)).hit_rate)
        given = policy.counts()
    return best


def numbered(labels: Iterable[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]


def octave(value: float, base: float = 2.0) -> int:
    return int(math.log(1 + value, base))


INFORMED: dict[str, Callable[[Turn], object]] = {
    "by turn": lambda turn: min(turn.number, 15),
    "by turn, pause and length": lambda turn: (
        min(turn.number, 5),
        octave(turn.pause_seconds, 4),
        octave(turn.num_blocks, 4),
    ),
    "whether it goes on, by turn": lambda turn: (
        min(turn.number, 7),
        turn.blocks_until_next is None,
    ),
    "when it goes on, to a factor of four": lambda turn: (
        None if turn.blocks_until_next is None else octave(turn.blocks_until_next, 4)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy_bounds", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", default="1000,4000,16000")
    options = parser.parse_args()
    sizes = [int(number) for number in options.blocks.split(",")]
    requests = read_trace(options.trace).requests
    turns = turns_of(requests)
    low = [replay(requests, new_ledger("lru", n), tails_first=True).hit_rate for n in sizes]
    high = [optimum(requests, size).hit_rate for size in sizes]
    print("| what is known | " + " | ".join(f"{size:,}" for size in sizes) + " | of the way |")
    print("|---" * (len(sizes) + 2) + "|")

    def show(name: str, rates: Sequence[float]) -> None:
        gaps = [(r - a) / (b - a) for r, a, b in zip(rates, low, high, strict=True)]
        cells = " | ".join(f"{rate:.3f}" for rate in rates)
        print(f"| {name} | {cells} | {sum(gaps) / len(gaps):.0%} |", flush=True)

    show("LRU", low)
    show("the default policy", [replay(requests, new_ledger("reuse", n)).hit_rate for n in sizes])
    for name, label in INFORMED.items():
        kinds = numbered(map(label, turns))
        show(f"{name} ({max(kinds) + 1} kinds)", [bound(requests, kinds, size) for size in sizes])
    show("optimum", high)


if __name__ == "__main__":
    main()
