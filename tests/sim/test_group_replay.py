"""Traces replayed for models with windows and states: real books, whole checkpoints."""

from __future__ import annotations

import pytest

from benchmarks.checkpoints import AIM, num_needed
from penstock.errors import ConfigError
from penstock.groups.boundaries import Reason
from penstock.groups.kinds import Group, Groups, Kind
from penstock.sim.group_replay import GroupsReplayed, groups_of, replay_groups
from penstock.sim.replay import new_ledger, replay
from penstock.sim.trace import Trace
from penstock.sim.workloads import generate

PLENTY = 100_000


def replayed(
    trace: Trace, groups: Groups, capacity: int = PLENTY, policy: str = "lru"
) -> GroupsReplayed:
    return replay_groups(
        trace.requests,
        groups,
        block_bytes=100,
        capacity=capacity,
        policy=policy,
        budget_bytes=capacity * 10,
        every_tokens=4096,
    )


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", num_requests=120, block_tokens=64, seed=1)


@pytest.mark.parametrize("policy", ["lru", "reuse"])
@pytest.mark.parametrize("capacity", [100, 1000, PLENTY])
def test_with_full_attention_alone_it_is_the_plain_replay(
    chat: Trace, policy: str, capacity: int
) -> None:
    found = replayed(chat, groups_of(64), capacity, policy)
    plain = replay(chat.requests, new_ledger(policy, capacity))
    assert found.num_hit_tokens == plain.num_hits * 64
    assert found.num_full_blocks == plain.num_written
    assert found.num_checkpoint_blocks == 0
    assert found.checkpoints == {}
    assert found.bytes_per_token == 100 / 64


@pytest.mark.parametrize(
    "groups",
    [
        groups_of(64, window=1024),
        groups_of(64, num_states=3),
        groups_of(64, chunk=2048),
        groups_of(64, window=512, num_windows=2, num_states=1),
    ],
)
def test_checkpoints_serve_nearly_all_that_full_attention_would(
    chat: Trace, groups: Groups
) -> None:
    found, plain = replayed(chat, groups), replayed(chat, groups_of(64))
    assert found.num_full_blocks == plain.num_full_blocks
    assert 0.97 * plain.num_hit_tokens < found.num_hit_tokens <= plain.num_hit_tokens
    assert found.hits[Reason.ANSWER_END] > 30, "second turns continue after the answer"


def test_a_small_tier_loses_hits_and_nothing_else(chat: Trace) -> None:
    groups = groups_of(64, window=1024)
    rates = [replayed(chat, groups, capacity).hit_rate for capacity in (200, 1000, PLENTY)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


@pytest.mark.parametrize("workload", ["chat", "agents", "batch"])
def test_bytes_kept_by_a_5_to_1_model(workload: str) -> None:
    trace = generate(workload, num_requests=120, block_tokens=32, seed=2)
    groups = groups_of(32, window=1024)
    found = replayed(trace, groups)
    assert found.num_bytes <= AIM * 100 * num_needed(trace, groups)


def test_groups_of_different_block_sizes_are_refused(chat: Trace) -> None:
    groups = Groups((Group(0, Kind.FULL, 64), Group(1, Kind.STATE, 128)))
    with pytest.raises(ConfigError, match="blocks of different sizes"):
        replayed(chat, groups)
