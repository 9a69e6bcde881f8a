from __future__ import annotations

import random
from collections import OrderedDict

from tools import key_of, keys_of

from penstock.policies import ARC, LRU, Policy
from penstock.types import BlockKey


def always(_: BlockKey) -> bool:
    return True


def use(policy: Policy, held: set[BlockKey], key: BlockKey, capacity: int) -> bool:
    """As a tier of `capacity` blocks would; whether it was a hit."""
    if key in held:
        policy.touch(key)
        return True
    if len(held) == capacity:
        held.difference_update(policy.pick(1, always))
    policy.insert(key)
    held.add(key)
    return False


class PaperARC:
    """The paper's figure 4, one page at a time.

    Different in one thing, as a tier must be: room is made before it is known for whom, so a
    ghost's return moves the border afterwards.
    """

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[BlockKey, None]() for _ in range(4))

    def request(self, x: BlockKey) -> bool:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).pop(x)
            t2[x] = None
            return True
        if x in b1:
            self.replace()
            self.p = min(self.c, self.p + max(1.0, len(b2) / len(b1)))
            del b1[x]
            t2[x] = None
            return False
        if x in b2:
            self.replace()
            self.p = max(0.0, self.p - max(1.0, len(b1) / len(b2)))
            del b2[x]
            t2[x] = None
            return False
        if len(t1) + len(b1) == self.c:
            if len(t1) < self.c:
                b1.popitem(last=False)
                self.replace()
            else:
                t1.popitem(last=False)
        elif len(t1) + len(t2) + len(b1) + len(b2) >= self.c:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * self.c:
                b2.popitem(last=False)
            self.replace()
        t1[x] = None
        return False

    def replace(self) -> None:
        if len(self.t1) + len(self.t2) < self.c:
            return
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None


def test_it_is_the_papers_algorithm() -> None:
    for seed, capacity in enumerate([1, 2, 5, 16, 40]):
        chance = random.Random(seed)
        policy, paper = ARC(capacity), PaperARC(capacity)
        held: set[BlockKey] = set()
        for number in range(6000):
            # A scan, a hot set and a loop that is a little too large, by turns.
            kind = number // 500 % 3
            page = [number, chance.randrange(capacity), number % (capacity + 3)][kind]
            key = key_of(page if chance.random() < 0.8 else chance.randrange(3 * capacity))
            assert use(policy, held, key, capacity) == paper.request(key)
            assert held == paper.t1.keys() | paper.t2.keys()
            assert policy._max_once == paper.p


def test_a_scan_passes_without_washing_out_what_returns() -> None:
    capacity = 20
    policy = ARC(capacity)
    held: set[BlockKey] = set()
    hot = keys_of(10, "hot")
    for key in (*hot, *hot):
        use(policy, held, key, capacity)
    for key in keys_of(500, "scan"):
        use(policy, held, key, capacity)
    assert held >= set(hot)


def test_it_learns_which_list_is_too_short() -> None:
    capacity = 20
    policy = ARC(capacity)
    held: set[BlockKey] = set()
    for key in keys_of(10, "hot") * 2:
        use(policy, held, key, capacity)
    for key in keys_of(12, "recent"):
        use(policy, held, key, capacity)
    assert policy._max_once == 0
    use(policy, held, keys_of(12, "recent")[0], capacity)  # had been evicted, and comes back
    assert policy._max_once == 1


def hits(policy: Policy, requests: list[BlockKey], capacity: int) -> int:
    held: set[BlockKey] = set()
    return sum(use(policy, held, key, capacity) for key in requests)


def test_it_beats_lru_where_scans_come_between_and_loses_little_where_lru_is_right() -> None:
    chance, capacity = random.Random(1), 50
    scanned = [
        key_of(number if chance.random() < 0.6 else -chance.randrange(40)) for number in range(8000)
    ]
    assert hits(ARC(capacity), scanned, capacity) > 1.3 * hits(LRU(capacity), scanned, capacity)
    drifting = [key_of(number // 20 + chance.randrange(45)) for number in range(8000)]
    assert hits(ARC(capacity), drifting, capacity) > 0.9 * hits(LRU(capacity), drifting, capacity)


def test_ghosts_are_bounded() -> None:
    capacity = 10
    policy, chance = ARC(capacity), random.Random(2)
    held: set[BlockKey] = set()
    for _ in range(5000):
        use(policy, held, key_of(chance.randrange(60)), capacity)
        num_ghosts = len(policy._ghosts_once) + len(policy._ghosts_often)
        assert len(policy._once) + len(policy._ghosts_once) <= capacity
        assert len(policy) + num_ghosts <= 2 * capacity


def test_a_pick_that_fails_leaves_the_order_as_it_was() -> None:
    policy, twin = ARC(10), ARC(10)
    keys = keys_of(8)
    for each in (policy, twin):
        for key in keys:
            each.insert(key)
        for key in keys[::2]:
            each.touch(key)
        each.demote(keys[3])
    assert policy.pick(7, lambda key: key not in keys[:2]) == []
    assert policy.pick(8, always) == twin.pick(8, always)


def test_leased_blocks_count_as_recent() -> None:
    policy = ARC(10)
    keys = keys_of(4)
    for key in keys:
        policy.insert(key)
    assert policy.pick(1, lambda key: key != keys[0]) == [keys[1]]
    assert policy.pick(3, always) == [keys[2], keys[3], keys[0]]


def test_a_demoted_block_leaves_no_ghost() -> None:
    policy = ARC(10)
    a, b = keys_of(2)
    policy.insert(a)
    policy.insert(b)
    policy.demote(b)
    assert policy.pick(1, always) == [b]
    policy.insert(b)
    assert policy.pick(2, always) == [a, b], "it came as a new one, used once"
