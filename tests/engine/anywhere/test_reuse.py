"""Segments in the engine: what is reused, mended and computed, against plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.anywhere.prompts import (
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

from penstock.costs.choose import LoadChoice
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.events import FirstToken
from penstock.types import Match, Tier

PROMPT = Prompt([text(1), document(1), document(2, 100), text(2, 5), document(3, 131), text(3)])


OTHER = Prompt([text(7, 3), document(3, 131), document(1), text(8), document(2, 100), text(9)])
THIRD = Prompt([text(6, 30), document(2, 100), document(3, 131), document(1), text(4, 40)])
FOURTH = Prompt([text(5, 9), document(3, 131), document(2, 100), document(1), text(12, 17)])
NUM_REUSED = {
    "link": 144 + 96 + 128 - 3 * LINK_TOKENS,
    "blend": 144 + 96 + 128 - 29 - 19 - 26,
    "none": 144 + 96 + 128,
}


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_transformers(loaded: LoadedModel, mode: str) -> None:
    engine = make(loaded)
    expected, logprobs = Oracle(loaded).answer(PROMPT, mode)
    answer = ask(engine, PROMPT, mode)
    assert answer.tokens == expected
    assert [float.fromhex(each) for each in answer.logprobs] == pytest.approx(logprobs, abs=1e-4)
    plain = ask(engine, PROMPT, "plain")
    assert plain.request.num_reused_tokens == 0
    assert [float.fromhex(each) for each in plain.logprobs] != pytest.approx(logprobs, abs=1e-3)
    idle(engine)
    engine.close()


def test_everything_mended_is_plain(loaded: LoadedModel) -> None:
    engine = make(loaded)
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=0, kv_mending={"mode": "blend", "blend_share": 1.0}
    )
    request = engine.add("all", PROMPT.ids, params, segments=PROMPT.segments)
    logprobs = []
    while engine.has_work:
        logprobs += [progress.sampled.logprob for progress in engine.step()]
    assert request.num_mended_tokens == 144 + 96 + 128
    plain = ask(engine, PROMPT, "plain")
    assert logprobs == pytest.approx([float.fromhex(plain.logprobs[0])], abs=1e-4)
    engine.close()


def test_tokens_are_counted_once(loaded: LoadedModel) -> None:
    """The same beginning before another question: part of the segment is found as a prefix."""
    engine = make(loaded)
    ask(engine, Prompt([text(1), document(1), text(2, 40)]))
    request = ask(engine, Prompt([text(1), document(1), text(3, 40)])).request
    num_cached = (21 + 150) // BLOCK_TOKENS * BLOCK_TOKENS
    assert request.num_cached_tokens == num_cached
    assert request.num_reused_tokens == 21 + 150 // BLOCK_TOKENS * BLOCK_TOKENS - num_cached
    assert request.num_mended_tokens == 0
    idle(engine)
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_it_does_not_matter_where_segments_come_from(
    loaded: LoadedModel, tmp_path: Path, mode: str
) -> None:
    fresh = []
    for prompt in (OTHER, THIRD, FOURTH):
        engine = make(loaded)
        fresh.append(ask(engine, prompt, mode))  # segments are computed
        assert fresh[-1].request.num_reused_tokens == NUM_REUSED[mode]
        assert fresh[-1].request.num_mended_tokens == 368 - NUM_REUSED[mode]
        assert fresh[-1].request.num_loaded_tokens == 0
        engine.close()

    engine = make(loaded, tmp_path)
    ask(engine, PROMPT, mode)
    on_device = ask(engine, OTHER, mode)
    assert on_device.request.num_loaded_tokens == 0
    forget(engine)
    again = ask(engine, OTHER, mode)  # its own blocks
    assert again.request.num_cached_tokens >= len(OTHER.ids) - BLOCK_TOKENS
    assert again.request.num_reused_tokens == 0
    assert again.tokens == on_device.tokens
    forget(engine)
    from_dram = ask(engine, THIRD, mode)
    assert from_dram.request.num_loaded_tokens == 368
    idle(engine)
    engine.close()

    engine = make(loaded, tmp_path)
    assert engine.offloader is not None
    assert engine.offloader.recover(60)
    from_disk = ask(engine, FOURTH, mode)
    assert from_disk.request.num_loaded_tokens == 368
    assert from_disk.request.found[Tier.DISK] == 368 // BLOCK_TOKENS
    idle(engine)
    engine.close()
    for found, expected in zip((on_device, from_dram, from_disk), fresh, strict=True):
        assert found.request.num_reused_tokens == NUM_REUSED[mode]
        assert found.logprobs == expected.logprobs


@pytest.mark.parametrize("is_faster", [False, True])
def test_segments_are_not_loaded_from_both_ends(loaded: LoadedModel, is_faster: bool) -> None:
    """So they are loaded only if that alone is faster than to compute them."""
    engine = make(loaded)
    ask(engine, PROMPT)
    forget(engine)

    def choose(match: Match, num_past: int) -> LoadChoice:
        plain = LoadChoice(match.num_blocks if is_faster else 0)
        return LoadChoice(0, num_two_ended=match.num_blocks, plain=plain)

    engine.scheduler._choose = choose
    for prompt in (OTHER, PROMPT):  # the latter is found whole
        answer = ask(engine, prompt).request
        assert bool(answer.num_loaded_tokens) == is_faster
        assert bool(answer.num_reused_tokens) == (is_faster and prompt is OTHER)
    idle(engine)
    engine.close()


@pytest.mark.parametrize(
    ("mode", "seconds", "is_loaded"),
    [("none", 0.9, True), ("link", 0.9, True), ("blend", 0.9, False), ("blend", 1.1, True)],
)
def test_a_segment_is_loaded_if_that_beats_what_it_saves(
    loaded: LoadedModel, mode: str, seconds: float, is_loaded: bool
) -> None:
    """Blending computes a fifth of it. A link that seems slower than computing is measured."""
    engine = make(loaded)
    ask(engine, Prompt([document(1)]), "plain")
    forget(engine)
    engine.scheduler._choose = lambda match, num_past: LoadChoice(match.num_blocks, seconds, 1.0)
    request = ask(engine, Prompt([text(1), document(1), text(2)]), mode).request
    assert bool(request.num_reused_tokens) == bool(request.num_loaded_tokens) == is_loaded
    idle(engine)
    engine.close()


def test_what_is_loaded_for_segments_is_not_told_as_a_prefix(loaded: LoadedModel) -> None:
    told: list[FirstToken] = []
    engine = make(loaded)
    first = Prompt([text(1, 64), document(1), text(2)])
    ask(engine, first)
    ask(engine, Prompt([document(2)]), "plain")
    forget(engine)
    ask(engine, Prompt([text(1, 64)]), "plain")  # on the device again
    engine._story._observers += (
        lambda event: told.append(event) if isinstance(event, FirstToken) else None,
    )
    request = ask(engine, Prompt([text(1, 64), document(2), text(2)])).request
    assert request.num_loaded_tokens == 144
    assert (told[0].num_on_device, told[0].num_loaded) == (64, 0)
    engine.close()


def test_a_segment_at_the_start_is_an_ordinary_prefix(loaded: LoadedModel) -> None:
    """Bit for bit, and it is not kept twice."""
    prompt = Prompt([document(1), text(2)])
    engine = make(loaded)
    ask(engine, prompt, "plain")
    forget(engine)
    plain = ask(engine, prompt, "plain")
    assert plain.request.num_loaded_tokens > 0
    forget(engine)
    for mode in MODES:
        answer = ask(engine, prompt, mode)
        assert answer.logprobs == plain.logprobs
        assert answer.request.num_cached_tokens == plain.request.num_cached_tokens
        assert answer.request.chain.keys == plain.request.chain.keys
        assert (answer.request.num_reused_tokens, answer.request.num_mended_tokens) == (0, 0)
        forget(engine)
    engine.close()


def test_segments_are_kept_as_plain_prompts_are(loaded: LoadedModel) -> None:
    """Both ways: what was computed for one is a hit of the other."""
    engine = make(loaded)
    ask(engine, PROMPT, "none")
    forget(engine)
    alone = ask(engine, Prompt([document(2, 100), text(1)]), "plain")
    assert alone.request.num_cached_tokens == 96
    ask(engine, Prompt([document(9), text(1)]), "plain")
    forget(engine)
    found = ask(engine, Prompt([text(2), document(9), text(3)]), "none")
    assert found.request.num_loaded_tokens == 144
    assert found.request.num_reused_tokens == 144
    idle(engine)
    engine.close()


def test_plain_prompts_never_find_what_was_reused(loaded: LoadedModel) -> None:
    alone = make(loaded)
    expected = ask(alone, PROMPT, "plain")
    alone.close()
    engine = make(loaded)
    for mode in MODES:
        ask(engine, PROMPT, mode)
        forget(engine)
    plain = ask(engine, PROMPT, "plain")
    assert plain.request.num_cached_tokens == 16  # before the first segment
    assert plain.tokens == expected.tokens
    together = [float.fromhex(each) for each in plain.logprobs]
    assert together == pytest.approx([float.fromhex(e) for e in expected.logprobs], abs=1e-5)
    engine.close()


def test_prompts_that_are_divided_or_mended_differently_share_nothing(loaded: LoadedModel) -> None:
    engine = make(loaded)
    parts = [text(1), document(1), text(2, 80), text(3, 9)]
    shorter = (document(1)[0][:-1], True)
    ways = [
        (Prompt(parts), "link"),
        (Prompt(parts), "blend"),
        (Prompt(parts), "none"),
        (Prompt([parts[0], shorter, (document(1)[0][-1:], False), *parts[2:]]), "none"),
        (Prompt(parts), "plain"),
    ]
    chains = [ask(engine, *way).request.chain.keys for way in ways]
    for one, keys in enumerate(chains):
        for other in chains[:one]:
            assert keys[0] == other[0]  # before the first segment
            assert not set(keys[1:]) & set(other[1:])
    engine.close()


def test_short_segments_are_computed(loaded: LoadedModel) -> None:
    engine = make(loaded)
    prompt = Prompt([text(1), document(1, 60), text(2)])
    answer = ask(engine, prompt, "none")
    assert answer.request.segments == ()
    assert answer.logprobs == ask(make(loaded), prompt, "plain").logprobs
    engine.close()


def test_the_last_token_is_computed_even_if_a_segment_ends_the_prompt(loaded: LoadedModel) -> None:
    engine = make(loaded)
    for mode in MODES:
        answer = ask(engine, Prompt([text(1), document(1, 160)]), mode)
        assert answer.tokens == Oracle(loaded).answer(Prompt([text(1), document(1, 160)]), mode)[0]
    idle(engine)
    engine.close()


def test_a_block_that_is_reused_is_not_taken_for_one_that_was_computed(loaded: LoadedModel) -> None:
    """If a segment ends the prompt, its last block is computed where it stands."""
    parts = [text(1), document(1, 160)]
    for mode in MODES:
        engine = make(loaded)
        short = ask(engine, Prompt(parts), mode).request
        longer = ask(engine, Prompt([*parts, text(2)]), mode)
        assert short.chain.keys[1] != longer.request.chain.keys[1]
        assert longer.tokens == Oracle(loaded).answer(Prompt([*parts, text(2)]), mode)[0]
        engine.close()


def test_the_same_segment_twice(loaded: LoadedModel) -> None:
    prompt = Prompt([text(1), document(1), text(2), document(1), text(3)])
    for mode in MODES:
        engine = make(loaded)
        answer = ask(engine, prompt, mode)
        assert answer.tokens == Oracle(loaded).answer(prompt, mode)[0]
        forget(engine)
        again = Prompt([text(5), document(1), document(1), text(3)])
        assert ask(engine, again, mode).tokens == Oracle(loaded).answer(again, mode)[0]
        idle(engine)
        engine.close()


def test_many_at_once_that_miss_the_same_segments(loaded: LoadedModel) -> None:
    prompts = [
        Prompt([text(n), document(n % 2, 110), document(n % 3, 90), text(50 + n)]) for n in range(6)
    ]
    engine = make(loaded)
    alone = [ask(make(loaded), prompt) for prompt in prompts]
    together = ask_all(engine, prompts)
    for one, other in zip(alone, together, strict=True):
        assert other.tokens == one.tokens
        assert other.request.num_reused_tokens == one.request.num_reused_tokens
    idle(engine)
    engine.close()


def test_tenants_do_not_see_each_others_segments(loaded: LoadedModel) -> None:
    engine = make(loaded)
    first = ask(engine, PROMPT, tenant="one")
    forget(engine)
    second = ask(engine, PROMPT, tenant="two")
    assert second.request.num_loaded_tokens == 0
    assert second.logprobs == first.logprobs
    ours = {key for segment in first.request.segments for key in segment.keys}
    theirs = {key for segment in second.request.segments for key in segment.keys}
    assert not ours & theirs
    idle(engine)
    engine.close()


def test_without_tiers_the_device_has_them(loaded: LoadedModel) -> None:
    engine = make(loaded, offloads=False)
    for mode in MODES:
        answer = ask(engine, PROMPT, mode)
        assert answer.tokens == Oracle(loaded).answer(PROMPT, mode)[0]
    idle(engine)
    engine.close()
