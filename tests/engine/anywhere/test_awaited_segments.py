"""Prompts with segments that another server computes: their KV comes, segments and all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine.anywhere.prompts import LINK_TOKENS, MODES, Prompt, document, text
from tiny import BLOCK_BYTES, BLOCK_TOKENS, idle

from penstock.config import Config, HostConfig, RemoteConfig
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import RequestPhase
from penstock.stores import memory

PROMPT = Prompt([text(1, 40), document(1), text(2, 40)])


@pytest.fixture
def engines(loaded: LoadedModel) -> Iterator[list[Engine]]:
    memory.forget_shared("awaited")
    tiers = Config(
        HostConfig(size_bytes=256 * BLOCK_BYTES, huge_pages=False),
        remote=RemoteConfig(url="memory://awaited"),
    )
    config = EngineConfig(128 * BLOCK_BYTES, BLOCK_TOKENS, max_num_batched_tokens=32)
    made = [Engine(loaded, config, tiers) for _ in range(2)]
    yield made
    for engine in made:
        engine.close()
    memory.forget_shared("awaited")


def test_segments_of_such_a_prompt_are_not_computed_first(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = engines[0]
    monkeypatch.setattr(decoder.scheduler._awaited, "_patience", lambda *_: 60.0)
    params = SamplingParams(temperature=0.0, max_tokens=4, awaits_prefill=True)
    request = decoder.add("awaited", PROMPT.ids, params, segments=PROMPT.segments)
    for _ in range(20):
        decoder.step()
    assert request.phase is RequestPhase.RUNNING
    assert not request.has_filled
    assert decoder.pool.num_leading(request.segments[0].keys) == 0
    decoder.abort("awaited")
    idle(decoder)


@pytest.mark.parametrize("mode", MODES)
def test_the_prompt_comes_while_it_waits(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    decoder, prefiller = engines
    monkeypatch.setattr(decoder.scheduler._awaited, "_patience", lambda *_: 60.0)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        ignore_eos=True,
        kv_mending={"mode": mode, "link_tokens": LINK_TOKENS},
    )
    segments = PROMPT.segments
    # The decoder has the segment already: it holds it until the prompt has come.
    decoder.add("segment", document(1)[0], replace(params, max_tokens=1))
    while decoder.has_work:
        decoder.step()
    awaits = replace(params, awaits_prefill=True)
    request = decoder.add("awaited", PROMPT.ids, awaits, segments=segments)
    for _ in range(20):
        decoder.step()
    computed = prefiller.add("computed", PROMPT.ids, params, segments=segments)
    while prefiller.has_work:
        prefiller.step()
    assert prefiller.offloader is not None
    assert prefiller.offloader.drain(60)
    end = time.monotonic() + 120
    while decoder.has_work and time.monotonic() < end:
        decoder.step()
    assert request.output_ids == computed.output_ids
    assert request.num_preemptions == 0  # no step has failed
    assert request.num_cached_tokens == len(PROMPT.ids) // BLOCK_TOKENS * BLOCK_TOKENS
    assert (request.num_reused_tokens, request.num_mended_tokens) == (0, 0)
    idle(decoder)
