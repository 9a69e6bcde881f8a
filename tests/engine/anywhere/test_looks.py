"""Choosing which tokens are mended, over several steps: the choice is that of one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine.anywhere.prompts import Oracle, Prompt, ask, document, make, text
from tiny import idle

from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request

PROMPT = Prompt([text(1), document(1), text(2, 5), document(2, 100), text(3)])
NUM_LOOKED = 21 + 150 + 5 + 96 - 16  # without the block before the first segment, which is found
BLEND = SamplingParams(
    temperature=0.0,
    max_tokens=6,
    ignore_eos=True,
    kv_mending={"mode": "blend", "blend_share": 0.2},
)


def small(loaded: LoadedModel) -> Engine:
    """32 tokens a step. The model has two layers, so a token costs as much if it is looked at."""
    engine = make(loaded, max_num_batched_tokens=32)
    ask(engine, PROMPT, "none")  # the segments are there
    return engine


def until_looking(engine: Engine, num_steps: int = 2) -> Request:
    """A request that has looked at some of its tokens."""
    request = engine.add("looks", PROMPT.ids, BLEND, segments=PROMPT.segments)
    while num_steps:
        engine.step()
        assert request.mended is None
        num_steps -= look_of(engine, request) is not None
    return request


def look_of(engine: Engine, request: Request) -> Any:
    reuse = engine.scheduler._segments._reuses.get(request)
    return None if reuse is None else reuse.look


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert not engine.take_failed()
    idle(engine)
    engine.close()


def test_a_small_budget_chooses_the_same(loaded: LoadedModel) -> None:
    large = make(loaded, max_num_batched_tokens=1024)
    ask(large, PROMPT, "none")
    expected = ask(large, PROMPT, "blend")
    large.close()
    engine = small(loaded)
    answer = ask(engine, PROMPT, "blend")
    assert answer.request.mended is not None
    assert expected.request.mended is not None
    assert answer.request.mended.tolist() == expected.request.mended.tolist()
    assert answer.tokens == expected.tokens == Oracle(loaded).answer(PROMPT, "blend")[0]
    wanted = [float.fromhex(each) for each in expected.logprobs]
    assert [float.fromhex(each) for each in answer.logprobs] == pytest.approx(wanted, abs=1e-5)
    finish(engine)


def test_others_go_on_meanwhile_and_the_steps_are_within_the_budget(loaded: LoadedModel) -> None:
    engine = small(loaded)
    other = engine.add("other", text(9)[0], replace(BLEND, max_tokens=40))
    while not other.output_ids:
        engine.step()
    request = until_looking(engine, 1)
    num_steps, before = 1, len(other.output_ids)
    while look_of(engine, request) is not None:
        position = look_of(engine, request).position
        engine.step()
        num_steps += 1
        if (look := look_of(engine, request)) is not None:
            assert look.position - position == 31  # and one token of the other
    assert request.mended is not None
    assert num_steps == -(-NUM_LOOKED // 31)
    assert len(other.output_ids) - before == num_steps - 1
    finish(engine)


def test_what_is_learned_of_the_speed_leaves_looks_out(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small(loaded)
    other = engine.add("other", text(9)[0], replace(BLEND, max_tokens=60))
    while not other.output_ids:
        engine.step()
    seen: list[Any] = []
    monkeypatch.setattr(engine._costs, "observe", lambda chunks, seconds: seen.append(chunks))
    request = until_looking(engine, 1)
    seen.clear()
    while look_of(engine, request) is not None:
        engine.step()
    assert not seen
    engine.step()
    engine.step()
    assert seen
    finish(engine)


def test_an_abort_in_the_middle(loaded: LoadedModel) -> None:
    engine = small(loaded)
    until_looking(engine)
    engine.abort("looks")
    engine.check()
    assert ask(engine, PROMPT, "blend").tokens == Oracle(loaded).answer(PROMPT, "blend")[0]
    finish(engine)


def test_a_preemption_in_the_middle(loaded: LoadedModel) -> None:
    engine = small(loaded)
    request = until_looking(engine)
    engine.scheduler._preempt(request)
    engine.check()
    finish(engine)
    assert request.output_ids == Oracle(loaded).answer(PROMPT, "blend")[0]
    assert request.num_mended_tokens == 29 + 19
    assert request.num_reused_tokens == 144 + 96 - 29 - 19
