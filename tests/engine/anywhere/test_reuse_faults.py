"""Segments under pressure: small pools, aborts, preemption, damage, faults."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine.anywhere.prompts import (
    BLEND_SHARE,
    LINK_TOKENS,
    MODES,
    Oracle,
    Prompt,
    ask,
    ask_all,
    document,
    forget,
    make,
    text,
)
from tiny import BLOCK_TOKENS, idle

from penstock.engine.anywhere.segments import Segment
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig
from penstock.errors import ConfigError

PROMPTS = [
    Prompt([text(n, 9 + n), document(n % 3, 110), document(n % 5, 90), text(70 + n, 12)])
    for n in range(10)
]


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> list[list[int]]:
    """What each prompt is answered without segments, alone."""
    answers = []
    for prompt in PROMPTS:
        engine = make(loaded)
        answers.append(ask(engine, prompt, "plain").tokens)
        engine.close()
    return answers


@pytest.fixture(scope="module")
def reused(loaded: LoadedModel) -> dict[str, list[list[int]]]:
    """What each prompt is answered if its segments are reused."""
    oracle = Oracle(loaded)
    return {mode: [oracle.answer(prompt, mode)[0] for prompt in PROMPTS] for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", [30, 36, 50])
def test_preempted_requests_are_answered_as_others(
    loaded: LoadedModel, reused: dict[str, list[list[int]]], num_blocks: int, mode: str
) -> None:
    """A prompt has 14 or 15 blocks, and its segments 12 more."""
    engine = make(loaded, num_blocks=num_blocks, dram=2048, max_num_seqs=4)
    answers = ask_all(engine, PROMPTS, mode)
    assert [answer.tokens for answer in answers] == reused[mode]
    assert all(answer.request.num_reused_tokens for answer in answers)
    idle(engine)
    engine.close()


def until_chosen(engine: Engine, prompt: Prompt, share: float) -> Request:
    """A request that has chosen what to mend, and has mended nothing."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        kv_mending={"mode": "blend", "blend_share": share},
    )
    request = engine.add("blends", prompt.ids, params, segments=prompt.segments)
    while request.mended is None:
        engine.step()
    return request


def test_what_is_mended_is_counted_once(loaded: LoadedModel) -> None:
    """Also if nothing is left that is not mended."""
    engine = make(loaded)
    request = until_chosen(engine, PROMPTS[0], 1.0)
    num_mended = 110 // BLOCK_TOKENS * BLOCK_TOKENS + 90 // BLOCK_TOKENS * BLOCK_TOKENS
    assert (request.num_reused_tokens, request.num_mended_tokens) == (0, num_mended)
    engine.scheduler._preempt(request)
    while engine.has_work:
        engine.step()
    assert (request.num_reused_tokens, request.num_mended_tokens) == (0, num_mended)
    idle(engine)
    engine.close()


def test_a_segment_that_comes_after_a_preemption_is_mended(
    loaded: LoadedModel, reused: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(loaded)
    loads = engine.scheduler._segments
    bring = loads._bring

    def bring_first(request: Request, segment: Segment) -> Any:
        return bring(request, segment) if segment is request.segments[0] else None

    with monkeypatch.context() as patched:
        patched.setattr(loads, "_bring", bring_first)
        request = until_chosen(engine, PROMPTS[0], BLEND_SHARE)
    assert len(request.seen) == 1
    engine.scheduler._preempt(request)
    while engine.has_work:
        engine.step()
    assert len(request.seen) == 2
    assert request.output_ids == reused["blend"][0]
    idle(engine)
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_that_cannot_hold_them_twice_computes_them(
    loaded: LoadedModel, plain: list[list[int]], mode: str
) -> None:
    engine = make(loaded, num_blocks=17, max_num_seqs=2)
    answers = ask_all(engine, PROMPTS[:4], mode)
    for answer, prompt in zip(answers, PROMPTS, strict=False):
        assert answer.request.num_reused_tokens < 13 * BLOCK_TOKENS
        assert len(answer.tokens) == 6
        assert ask(engine, prompt, "plain").tokens == plain[PROMPTS.index(prompt)]
    idle(engine)
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_cold_sequences(loaded: LoadedModel, reused: dict[str, list[list[int]]], mode: str) -> None:
    residency = ResidencyConfig(cold=True, prefix_tokens=16, tail_tokens=16)
    engine = make(loaded, num_blocks=34, dram=2048, max_num_seqs=6, residency=residency)
    answers = ask_all(engine, PROMPTS, mode)
    assert [answer.tokens for answer in answers] == reused[mode]
    idle(engine)
    engine.close()


@pytest.mark.parametrize("mode", ["link", "blend"])
def test_steps_that_are_launched_ahead(
    loaded: LoadedModel, reused: dict[str, list[list[int]]], mode: str
) -> None:
    """Segments are placed, and looked at, while the last tokens of others are not read."""
    engine = make(loaded, num_blocks=40, dram=2048, max_num_seqs=4, launch_ahead=True)
    engine.runner.only_queues = True
    assert [answer.tokens for answer in ask_all(engine, PROMPTS, mode)] == reused[mode]
    assert engine.ahead.num_ahead > 0
    idle(engine)
    engine.close()


def test_aborts_at_every_step(loaded: LoadedModel, plain: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for mode in MODES:
        engine = make(loaded, num_blocks=40)
        mending = {"mode": mode, "link_tokens": LINK_TOKENS}
        mended = SamplingParams(temperature=0.0, max_tokens=4, kv_mending=mending)
        for number in range(14):
            prompt = PROMPTS[number % len(PROMPTS)]
            if number == 7:
                forget(engine)  # from now on they are loaded
            engine.add(str(number), prompt.ids, mended, segments=prompt.segments)
            for _ in range(number % 7):
                engine.step()
            engine.abort(str(number))
            engine.check()
        assert len(engine.scheduler._fills) == 0
        assert ask(engine, PROMPTS[0], "plain").tokens == plain[0]
        idle(engine)
        engine.close()
    assert params.mending.mode == "link"


def test_a_request_that_ends_leaves_the_fill_that_others_wait_for(loaded: LoadedModel) -> None:
    engine = make(loaded)
    mending = {"link_tokens": LINK_TOKENS}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, kv_mending=mending)
    prompt = PROMPTS[0]
    other = engine.add("one", prompt.ids, params, segments=prompt.segments)
    kept = engine.add("two", prompt.ids, params, segments=prompt.segments)
    engine.step()
    assert other.fills == kept.fills
    engine.abort("one")
    while engine.has_work:
        engine.step()
    assert kept.num_reused_tokens > 0
    idle(engine)
    engine.close()


def test_a_fill_is_as_urgent_as_the_most_urgent_that_waits_for_it(loaded: LoadedModel) -> None:
    engine = make(loaded, max_num_seqs=1, max_num_batched_tokens=32)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    texts = [Prompt([text(n, 60)]) for n in range(4)]
    one, other = (Prompt([text(n), document(1), text(9)]) for n in (1, 2))
    late = engine.add("late", one.ids, params, priority=9, segments=one.segments)
    engine.step()
    (fill,) = (request for request in engine.scheduler if request.is_fill)
    engine.scheduler._preempt(fill)
    between = [engine.add(str(n), texts[n].ids, params, priority=5) for n in (1, 2, 3)]
    urgent = engine.add("urgent", other.ids, params, segments=other.segments)
    while urgent.finish_reason is None:
        engine.step()
    assert urgent.num_reused_tokens
    assert not any(request.finish_reason for request in between)
    while engine.has_work:
        engine.step()
    assert late.num_reused_tokens
    idle(engine)
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_damaged_segments_are_computed(loaded: LoadedModel, tmp_path: Path, mode: str) -> None:
    engine = make(loaded, tmp_path, dram=64)
    prompt = Prompt([text(1), document(1), text(2)])
    expected = ask(engine, prompt, mode).tokens
    assert engine.offloader is not None
    assert engine.offloader.drain(60)
    engine.close()
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            data = bytearray(path.read_bytes())
            for at in range(0, len(data), 2048):
                data[at] ^= 0x10
            path.write_bytes(data)
    engine = make(loaded, tmp_path, dram=64)
    again = Prompt([text(3), document(1), text(4)])
    answer = ask(engine, again, mode)
    assert len(answer.tokens) == 6
    assert answer.request.lost or not answer.request.num_loaded_tokens
    assert ask(engine, prompt, mode).tokens == expected or mode != "none"
    alone = make(loaded)
    assert ask(engine, again, "plain").tokens == ask(alone, again, "plain").tokens
    alone.close()
    idle(engine)
    engine.close()


def test_a_step_that_fails(
    loaded: LoadedModel, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of fills, of placing and of choosing: the rest goes on."""
    rng = random.Random(3)
    for mode in MODES:
        engine = make(loaded)
        for name in ("run", "key_changes"):
            monkeypatch.setattr(engine.runner, name, _failing(getattr(engine.runner, name), rng))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=3,
            ignore_eos=True,
            kv_mending={"mode": mode, "link_tokens": LINK_TOKENS},
        )
        for number, prompt in enumerate(PROMPTS):
            engine.add(str(number), prompt.ids, params, segments=prompt.segments)
        for _ in range(2000):
            if not engine.has_work:
                break
            engine.step()
        assert not engine.has_work
        engine.take_failed()
        monkeypatch.undo()
        assert ask(engine, PROMPTS[1], "plain").tokens == plain[1]
        idle(engine)
        engine.close()


def _failing(function: Any, rng: random.Random) -> Any:
    def sometimes(*args: Any, **options: Any) -> Any:
        if rng.random() < 0.1:
            raise RuntimeError("a test")
        return function(*args, **options)

    return sometimes


def test_random_requests_never_spoil_plain_ones(
    loaded: LoadedModel, plain: list[list[int]], tmp_path: Path
) -> None:
    rng = random.Random(24)
    engine = make(loaded, tmp_path, num_blocks=44, dram=60, max_num_seqs=5)
    live: dict[str, int | None] = {}
    requests: dict[str, Any] = {}
    left, num_reused = 150, 0
    while left or engine.has_work:
        if left and rng.random() < 0.3 and len(live) < 8:
            left -= 1
            number, name = rng.randrange(len(PROMPTS)), str(left)
            is_plain = rng.random() < 0.4
            params = SamplingParams(
                temperature=0.0,
                max_tokens=6,
                ignore_eos=True,
                kv_mending={
                    "mode": rng.choice(MODES),
                    "link_tokens": LINK_TOKENS,
                    "blend_share": rng.choice((0.05, 0.5)),
                },
            )
            segments = () if is_plain else PROMPTS[number].segments
            requests[name] = engine.add(name, PROMPTS[number].ids, params, segments=segments)
            live[name] = number if is_plain else None
        if live and rng.random() < 0.02:
            name = rng.choice(list(live))
            engine.abort(name)
            live.pop(name)
        if rng.random() < 0.02:
            engine.pool.forget()
        engine.step()
        for name in [name for name in live if requests[name].finish_reason]:
            number = live.pop(name)
            num_reused += requests[name].num_reused_tokens
            assert len(requests[name].output_ids) == 6
            if number is not None:
                assert requests[name].output_ids == plain[number]
    assert not engine.take_failed()
    assert num_reused > 1000
    idle(engine)
    engine.close()


def test_segments_that_are_being_loaded_when_an_audit_fails_are_not_used(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    engine = make(loaded, tmp_path)
    prompt = Prompt([text(1, 40), document(1), text(2)])
    ask(engine, prompt)
    forget(engine)
    mending = {"link_tokens": 2 * LINK_TOKENS}  # else the whole prompt would be found
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, kv_mending=mending)
    request = engine.add("loading", prompt.ids, params, segments=prompt.segments)
    engine.step()
    assert (engine.scheduler.num_loading, len(engine.scheduler._segments)) == (1, 1)
    assert engine.offloader is not None
    assert engine.offloader.drain(30)  # the loads have ended, and nobody knows yet
    engine.offloader.quarantine()
    engine._distrust()
    engine.step()
    (segment,) = request.segments
    assert engine.pool.num_leading(segment.keys) == 0
    while engine.has_work:
        engine.step()
    assert len(request.output_ids) == 4
    idle(engine)
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_is_larger_than_the_pool(loaded: LoadedModel, mode: str) -> None:
    """Part of it is in DRAM while it runs, so its segments are computed."""
    residency = ResidencyConfig(cold=True, prefix_tokens=16, tail_tokens=16)
    settings: dict[str, Any] = {"residency": residency, "max_num_batched_tokens": 64}
    engine = make(loaded, num_blocks=16, dram=2048, **settings)
    prompt = Prompt([text(1, 40), document(1, 300), text(2, 40)])
    answer = ask(engine, prompt, mode)
    assert answer.request.num_reused_tokens == 0
    assert engine.pool.num_leading(answer.request.segments[0].keys) == 0  # nor alone before
    assert answer.tokens == ask(engine, prompt, "plain").tokens
    idle(engine)
    engine.close()


def test_an_id_that_is_used_again_while_a_load_ends(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(loaded, tmp_path)
    prompt = Prompt([text(1, 40), document(1), text(2)])
    ask(engine, prompt)
    forget(engine)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add("name", prompt.ids, params, segments=prompt.segments)
    engine.step()
    assert engine.scheduler.num_loading == 1
    engine.abort("name")
    request = engine.add("name", prompt.ids, params, segments=prompt.segments)
    with monkeypatch.context() as patched:
        patched.setattr(engine.offloader, "step", list)  # both are loading
        engine.step()
    assert engine.scheduler.num_loading == 2
    while engine.has_work:
        engine.step()
    assert (len(request.output_ids), request.num_preemptions) == (4, 0)
    idle(engine)
    engine.close()


def test_bounds_that_make_no_sense(loaded: LoadedModel) -> None:
    engine = make(loaded)
    params = SamplingParams()
    for bounds in ([(5, 4)], [(0, 500)], [(-1, 4)], [(10, 90), (80, 100)], [(0, 1)] * 2000):
        with pytest.raises(ConfigError, match="segment"):
            engine.add("bad", list(range(1, 101)), params, segments=bounds)
    assert not engine.has_work
    _answers(engine)
    engine.close()


def _answers(engine: Engine) -> None:
    assert len(ask(engine, PROMPTS[0]).tokens) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "magic"}, "kv_mending.mode"),
        ({"link_tokens": 0}, "link_tokens"),
        ({"link_tokens": True}, "link_tokens"),
        ({"blend_share": 0}, "blend_share"),
        ({"blend_share": 1.5}, "blend_share"),
        ({"blend_share": float("nan")}, "blend_share"),
        ({"share": 0.1}, "kv_mending"),
        ("link", "kv_mending"),
    ],
)
def test_mending_that_makes_no_sense(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(kv_mending=given)
