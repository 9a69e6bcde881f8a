"""What sets each policy apart; what they have in common is in `test_contract`."""

from __future__ import annotations

from penstock.policies import LRU, S3FIFO
from penstock.types import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") * 8)


def always(_: BlockKey) -> bool:
    return True


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = LRU(3)
    for number in range(3):
        policy.insert(key(number))
    policy.touch(key(0))
    assert policy.pick(2, always) == [key(1), key(2)]


def test_s3fifo_lets_a_scan_pass_without_losing_what_returns() -> None:
    policy = S3FIFO(20)
    hot = [key(number) for number in range(10)]
    for name in hot:
        policy.insert(name)
        policy.touch(name)
        policy.touch(name)
    for number in range(100, 400):
        if len(policy) == 20:
            policy.pick(1, always)
        policy.insert(key(number))
    survivors = set(policy.pick(20, always))
    assert set(hot) <= survivors


def test_s3fifo_remembers_what_it_evicted_and_takes_it_back_to_main() -> None:
    policy = S3FIFO(20)
    for number in range(20):
        policy.insert(key(number))
    (victim,) = policy.pick(1, always)
    policy.insert(victim)
    for number in range(100, 118):  # a scan washes out the small queue, not the returned block
        policy.pick(1, always)
        policy.insert(key(number))
    assert victim in policy.pick(len(policy), always)


def test_s3fifo_forgets_its_ghosts_in_time() -> None:
    policy = S3FIFO(10)
    policy.insert(key(0))
    assert policy.pick(1, always) == [key(0)]
    for number in range(1, 100):
        policy.insert(key(number))
        policy.pick(1, always)
    assert key(0) not in policy._ghosts
