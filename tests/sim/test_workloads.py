"""Generated workloads: the same every time, in order, each with the reuse that it stands for."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.errors import ConfigError
from penstock.sim.trace import Trace
from penstock.sim.workloads import WORKLOADS, generate, knobs_of
from penstock.sim.workloads.world import World, Zipf
from penstock.types import KEY_BYTES, BlockKey

NAMES = list(WORKLOADS)


def hit_rate(trace: Trace, *, with_answers: bool = True) -> float:
    """Of an unbounded cache."""
    seen: set[BlockKey] = set()
    num_hits = num_blocks = 0
    for request in trace.requests:
        num_blocks += len(request.prompt_blocks)
        hits = [block in seen for block in request.prompt_blocks]
        num_hits += hits.index(False) if False in hits else len(hits)
        seen.update(request.prompt_blocks)
        if with_answers:
            seen.update(request.output_blocks)
    return num_hits / num_blocks


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_give_equal_traces(name: str) -> None:
    trace = generate(name, num_requests=300, seed=7)
    assert generate(name, num_requests=300, seed=7) == trace
    assert generate(name, num_requests=100, seed=7).requests == trace.requests[:100]
    other = generate(name, num_requests=300, seed=8)
    keys = [{key for each in t.requests for key in each.prompt_blocks} for t in (trace, other)]
    assert not keys[0] & keys[1]


@pytest.mark.parametrize("block_tokens", [16, 100])
@pytest.mark.parametrize("name", NAMES)
def test_traces_are_sound(name: str, block_tokens: int) -> None:
    trace = generate(name, num_requests=400, seed=1, block_tokens=block_tokens)
    assert (trace.name, trace.block_tokens, len(trace.requests)) == (name, block_tokens, 400)
    arrivals = [request.arrival_seconds for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    parents: dict[BlockKey, BlockKey | None] = {}
    for request in trace.requests:
        num_all = request.num_input_tokens + request.num_output_tokens
        num_prompt = request.num_input_tokens // block_tokens
        assert request.num_output_tokens > 0
        assert len(request.prompt_blocks) == num_prompt
        assert len(request.output_blocks) == (num_all - 1) // block_tokens - num_prompt
        keys = (*request.prompt_blocks, *request.output_blocks)
        for parent, key in zip((None, *keys), keys, strict=False):
            assert len(key) == KEY_BYTES
            assert parents.setdefault(key, parent) == parent  # equal names are equal prefixes


def test_chat_turns_go_on_from_each_other() -> None:
    trace = generate("chat", num_requests=500, seed=2, mean_turns=5.0)
    sessions: dict[str, list[BlockKey]] = {}
    gaps = []
    latest: dict[str, float] = {}
    for request in trace.requests:
        before = sessions.get(request.session, [])
        assert list(request.prompt_blocks[: len(before)]) == before
        sessions[request.session] = [*request.prompt_blocks, *request.output_blocks]
        if request.session in latest:
            gaps.append(request.arrival_seconds - latest[request.session])
        latest[request.session] = request.arrival_seconds
    assert min(gaps) > 0
    turns = Counter(request.session for request in trace.requests)
    assert max(turns.values()) > 3
    assert len({keys[0] for keys in sessions.values()}) == 4  # system prompts
    assert hit_rate(trace) > hit_rate(trace, with_answers=False) > 0.4


def test_chat_contexts_stay_within_their_limit() -> None:
    trace = generate("chat", num_requests=300, seed=2, mean_turns=50, max_context_tokens=3000)
    later = [each for each in trace.requests if each.num_input_tokens > 3000]
    first_turns = {request.session for request in later}
    assert len(later) == len(first_turns)  # only what was too long from the start


def test_rag_is_skewed_as_its_source_says() -> None:
    popularity = Zipf(1000, 1.1)
    chance = World("t", 1, 16).chance("draws")
    drawn = Counter(popularity.draw(chance) for _ in range(20000))
    share = sum(drawn[rank] for rank in range(30)) / 20000
    assert share == pytest.approx(0.62, abs=0.02)
    flat = generate("rag", num_requests=800, seed=1, popularity_exponent=0.1)
    assert hit_rate(generate("rag", num_requests=800, seed=1)) > hit_rate(flat) + 0.2


def test_edits_of_code_spoil_what_follows_them() -> None:
    still = generate("code", num_requests=400, seed=1, edit_share=0.0)
    edited = generate("code", num_requests=400, seed=1, edit_share=1.0)
    assert 0.5 < hit_rate(edited) < hit_rate(still) - 0.05
    assert len({request.prompt_blocks[0] for request in edited.requests}) <= 8  # repositories


def test_agents_only_grow_and_subagents_share() -> None:
    alone = generate("agents", num_requests=400, seed=1, subagent_share=0.0)
    contexts: dict[str, int] = {}
    for request in alone.requests:
        assert request.num_input_tokens > contexts.get(request.session, 0)
        contexts[request.session] = request.num_input_tokens
    assert len({request.prompt_blocks[0] for request in alone.requests}) == 1
    # A tenth of a second and two minutes are both usual.
    assert hit_rate(alone) > 0.8
    many = generate("agents", num_requests=400, seed=1, subagent_share=1.0, num_subagents=5)
    moments = Counter((each.session, each.arrival_seconds) for each in many.requests)
    assert max(moments.values()) == 5


def test_batch_shares_its_instruction_alone() -> None:
    trace = generate("batch", num_requests=200, seed=1, instruction_tokens=640)
    assert {request.arrival_seconds for request in trace.requests} == {0.0}
    shared = set(trace.requests[0].prompt_blocks) & set(trace.requests[1].prompt_blocks)
    assert len(shared) == 10
    spread = generate("batch", num_requests=3, seconds_between=2.0)
    assert [request.arrival_seconds for request in spread.requests] == [0, 2, 4]


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_can_be_turned(name: str) -> None:
    for knob, value in knobs_of(name).items():
        other = value / 2 if value else 1.0
        given = {knob: int(other) if isinstance(value, int) else other}
        assert len(generate(name, num_requests=5, **given).requests) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("talk", {}, "no workload 'talk': expected chat, rag, code, agents, batch"),
        ("chat", {"mean_turn": 2}, "has no parameter 'mean_turn': did you mean mean_turns?"),
        ("chat", {"xyz": 2}, "has no parameter 'xyz': expected sessions_per_second"),
        ("chat", {"mean_turns": -1}, "mean_turns is -1"),
        ("chat", {"think_seconds": float("nan")}, "think_seconds is nan"),
        ("rag", {"num_documents": 1.5}, "num_documents is 1.5: expected an integer"),
        ("rag", {"num_documents": 0}, "num_documents is 0"),
        ("code", {"edit_share": 1.1}, "edit_share is 1.1: expected a number from 0 to 1"),
        ("batch", {"num_requests": 0}, "num_requests is 0"),
        ("batch", {"block_tokens": 0}, "block_tokens is 0"),
    ],
)
def test_what_cannot_be_is_refused(name: str, given: dict[str, float], words: str) -> None:
    arguments = {"num_requests": 5, **given}
    with pytest.raises(ConfigError) as raised:
        generate(name, **arguments)  # type: ignore[arg-type]
    assert words in str(raised.value)
