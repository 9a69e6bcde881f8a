"""Hints for prompts with segments reach the segments' own blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.anywhere.prompts import LINK_TOKENS, Prompt, document, make, text, tokens
from tiny import BLOCK_TOKENS, idle

from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.errors import ConfigError
from penstock.hints import Hint
from penstock.keys import KeyChain
from penstock.types import Tier

PROMPT = Prompt([text(1, 40), document(1, 160), document(2, 100), text(2)])
OTHER = Prompt([text(3, 9), document(2, 100), document(1, 160), text(4)])
NUM_SEGMENTS = 160 // BLOCK_TOKENS + 100 // BLOCK_TOKENS
NUM_PLAIN = 40 // BLOCK_TOKENS


@pytest.fixture
def engine(loaded: LoadedModel, tmp_path: Path) -> Iterator[Engine]:
    """With DRAM for 80 blocks, of which 20 may be retained."""
    made = make(loaded, tmp_path, num_blocks=64, dram=80)
    yield made
    made.close()


def params(**hints: Any) -> SamplingParams:
    mending = {"link_tokens": LINK_TOKENS}
    return SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, kv_mending=mending, kv_hints=hints or None
    )


def ask(engine: Engine, prompt: Prompt, tenant: str = "", **hints: Any) -> Any:
    request = engine.add(
        "asked", prompt.ids, params(**hints), segments=prompt.segments, tenant=tenant
    )
    while engine.has_work:
        engine.step()
    assert engine.offloader is not None
    assert engine.offloader.drain(60)
    engine.step()
    return request


def hint(engine: Engine, action: str, prompt: Prompt = PROMPT, **options: Any) -> int:
    seconds = 600.0 if action == "retain" else None
    segments = prompt.segments
    return engine.hint(Hint(action, None, seconds), prompt.ids, segments=segments, **options)


def flood(engine: Engine, seed: int = 0) -> None:
    """More than DRAM and the device hold, all of it new."""
    for number in range(6):
        engine.add(str(number), tokens(330, 5000 + 10 * seed + number), params())
        while engine.has_work:
            engine.step()
    assert engine.offloader is not None
    assert engine.offloader.drain(60)
    engine.step()


def num_in(engine: Engine, tier: Tier, prompt: Prompt = PROMPT, tenant: str = "") -> int:
    """How many blocks of its segments are there."""
    assert engine.offloader is not None
    namespace = replace(engine.namespace, tenant=tenant)
    found = 0
    for start, end in prompt.segments:
        keys = KeyChain(namespace, prompt.ids[start:end]).keys
        found += engine.offloader.match(keys).num_from(tier)
    return found


def test_retained_segments_stay_and_released_ones_go(engine: Engine) -> None:
    ask(engine, PROMPT)
    assert hint(engine, "retain") == NUM_PLAIN + NUM_SEGMENTS
    flood(engine)
    assert num_in(engine, Tier.HOST) == NUM_SEGMENTS
    request = ask(engine, OTHER)
    assert request.num_reused_tokens > 0
    assert request.found[Tier.DISK] == 0
    assert hint(engine, "release") == NUM_PLAIN + NUM_SEGMENTS
    flood(engine, 1)
    assert num_in(engine, Tier.HOST) == 0
    idle(engine)


def test_prefetched_segments_are_in_dram(engine: Engine) -> None:
    ask(engine, PROMPT)
    flood(engine)
    assert num_in(engine, Tier.DISK) == NUM_SEGMENTS
    assert hint(engine, "prefetch") == NUM_PLAIN + NUM_SEGMENTS
    assert engine.offloader is not None
    assert engine.offloader.drain(60)
    engine.step()
    assert num_in(engine, Tier.HOST) == NUM_SEGMENTS
    engine.pool.forget()
    request = ask(engine, OTHER)
    assert request.found[Tier.HOST] == NUM_SEGMENTS
    idle(engine)


def test_a_request_retains_its_segments_with_its_session(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    for dram, max_retained in ((160, 40), (80, 20)):
        engine = make(loaded, tmp_path / str(dram), num_blocks=64, dram=dram)
        request = ask(engine, PROMPT, session="agent", retain_seconds=600)
        num_blocks = request.max_computed // BLOCK_TOKENS + NUM_SEGMENTS
        num_retained = min(num_blocks, max_retained)  # its own blocks come first
        assert engine.offloader is not None
        assert engine.offloader.num_retained == num_retained
        assert engine.hint(Hint("release", "agent"), tenant="another") == 0
        assert engine.hint(Hint("release", "agent")) == num_retained
        for seed in range(dram // 80):
            flood(engine, seed)
        assert num_in(engine, Tier.HOST) == 0
        assert engine.hint(Hint("prefetch", "agent")) == num_retained
        idle(engine)
        engine.close()


def test_segments_that_a_request_brought_are_demoted_with_it(engine: Engine) -> None:
    ask(engine, Prompt([text(8), document(2, 100), text(9)]))
    request = ask(engine, PROMPT, on_end="demote")
    first, second = request.segments
    assert request.num_new_blocks == {first.keys[-1]: 160 // BLOCK_TOKENS}
    assert engine._chains(request)[1:] == [(first.keys, 0), (second.keys, len(second.keys))]
    assert hint(engine, "demote") == NUM_PLAIN + NUM_SEGMENTS
    idle(engine)


def test_tenants_do_not_reach_each_others_segments(engine: Engine) -> None:
    ask(engine, PROMPT, "one")
    for action in ("retain", "prefetch", "demote", "release"):
        assert hint(engine, action) == 0
        assert hint(engine, action, tenant="two") == 0
    assert hint(engine, "retain", tenant="one") == NUM_PLAIN + NUM_SEGMENTS
    assert hint(engine, "release", tenant="two") == 0
    flood(engine)
    assert num_in(engine, Tier.HOST, tenant="one") == NUM_SEGMENTS
    assert num_in(engine, Tier.HOST, tenant="two") == 0
    idle(engine)


def test_a_document_alone_is_the_same_prompt(engine: Engine) -> None:
    """So it can be retained without knowing where it will stand."""
    ask(engine, PROMPT)
    alone = Prompt([document(1, 160)])
    assert hint(engine, "retain", alone) == 160 // BLOCK_TOKENS
    documents = Prompt([document(1, 160), document(2, 100)])
    assert hint(engine, "retain", documents) == NUM_SEGMENTS


def test_many_segments(engine: Engine) -> None:
    """1,024 of 64 tokens, most of them beyond the longest prompt, and one too many."""
    ids, bounds = tokens(65_537, 3), [(1 + 64 * n, 65 + 64 * n) for n in range(1024)]
    for action in ("retain", "prefetch", "demote", "release"):
        seconds = 9.0 if action == "retain" else None
        assert engine.hint(Hint(action, None, seconds), ids, segments=bounds) == 0
    with pytest.raises(ConfigError, match="1025 segments"):
        engine.hint(Hint("demote"), ids, segments=[*bounds, (65_537, 65_537)])
    with pytest.raises(ConfigError, match="in order"):
        engine.hint(Hint("demote"), ids, segments=[(5, 90), (80, 100)])
    idle(engine)
