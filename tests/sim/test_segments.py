"""Prompts with segments in the simulator: exact counts, and those of the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import always_load, tiny_model

from benchmarks.sim_agreement import Sizes, mirror, open_engine
from penstock.costs.rates import LinkRate, PrefillRate
from penstock.engine.models import LoadedModel, load_model
from penstock.engine.params import SamplingParams
from penstock.engine.story import served_segments
from penstock.errors import TraceError
from penstock.keys import KeyChain
from penstock.sim.compute import ComputeRates, DecodeRate
from penstock.sim.formats import read_trace, write_trace
from penstock.sim.instance import InstanceConfig
from penstock.sim.links import LinkSpec
from penstock.sim.simulator import simulate
from penstock.sim.trace import Trace, TraceRequest, TraceSegment
from penstock.types import BlockKey

RATES = ComputeRates(PrefillRate(10_000.0), DecodeRate(0.01, 0.0001, 1e-7))
LINK = LinkSpec(LinkRate(20e9), LinkRate(20e9), num_streams=1)
CONFIG = InstanceConfig(64, 1_000_000, RATES, 256, 512, 2048, "lru", LINK, LINK, 512, 16, 1000)


def names(*name: object, num: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(f"{name} {n}".encode().ljust(32, b".")[:32]) for n in range(num))


def ask(number: int, documents: str, *, first: int = 32, share: float = 0.0) -> TraceRequest:
    """100 tokens of text, documents of 256 and 10 more tokens each, and a question of 20."""
    segments = tuple(
        TraceSegment(100 + 266 * n, names(name, num=4), first, share)
        for n, name in enumerate(documents)
    )
    num_tokens = 100 + 266 * len(documents) + 20
    own = names("own", number, num=num_tokens // 64)
    plain = names("plain", documents, num=num_tokens // 64)
    return TraceRequest(100.0 * number, num_tokens, 4, own, segments=segments, plain_blocks=plain)


def test_a_document_is_reused_wherever_it_stands() -> None:
    trace = Trace("made", 64, (ask(0, "ab"), ask(1, "ba"), ask(2, "bc")))
    found = simulate(trace, CONFIG)
    assert [each.num_reused_tokens for each in found.requests] == [2 * (256 - 32)] * 3
    assert [each.num_mended_tokens for each in found.requests] == [2 * 32] * 3
    assert found.num_reused_tokens == 6 * 224
    assert found.num_mended_tokens == 6 * 32
    assert found.hit_rate == 0  # nothing is a prefix
    # The first request computes both documents before, the third one of them.
    first, second, third = (each.first_token_seconds for each in found.requests)
    assert first is not None
    assert second is not None
    assert third is not None
    assert first > third > second

    plain = simulate(trace.without_marks(), CONFIG)
    assert plain.num_reused_tokens == plain.num_mended_tokens == 0
    computed = plain.requests[1].first_token_seconds
    assert computed is not None
    assert first > computed > second


def test_blended_tokens_are_a_share_of_each_segment() -> None:
    trace = Trace("made", 64, (ask(0, "ab", first=0, share=0.1),))
    found = simulate(trace, CONFIG)
    assert found.num_mended_tokens == 2 * round(0.1 * 256)
    assert found.num_reused_tokens == 2 * 256 - found.num_mended_tokens


def test_a_pool_without_room_for_both_computes() -> None:
    # The prompt has 11 blocks, each document 4.
    trace = Trace("made", 64, (ask(0, "ab"),))
    counts = [
        simulate(trace, replace(CONFIG, num_device_blocks=num)).num_reused_tokens
        for num in (14, 15, 19)
    ]
    assert counts == [0, 224, 448]


def test_crowded_pools_and_tiers_end_with_sound_books() -> None:
    asked = tuple(
        replace(ask(n, "abcdefgh"[n % 5 :][:3], share=0.1 * (n % 2)), arrival_seconds=0.02 * n)
        for n in range(60)
    )
    small = replace(CONFIG, num_device_blocks=40, num_host_blocks=48, num_disk_blocks=200)
    found = simulate(Trace("made", 64, asked), small)  # checks its books at the end
    assert found.num_served == 60
    assert found.num_reused_tokens > 0


def test_traces_with_segments_are_written_and_read(tmp_path: Path) -> None:
    trace = Trace("made", 64, (ask(0, "ab"), ask(1, "b", first=0, share=0.15)))
    write_trace(trace, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl").requests == trace.requests


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"segments": 3}, "expected a list"),
        ({"segments": [{"start": 0, "blocks": []}]}, "after the prompt's first token"),
        ({"segments": [{"start": 10, "blocks": ["00" * 32] * 9}]}, "before its last"),
        ({"segments": [{"start": 1, "blocks": ["00" * 32], "link_tokens": 64}]}, "expected fewer"),
        ({"segments": [{"start": 1, "blocks": [], "blend_share": 2}]}, "from 0 to 1"),
        ({"segments": [{"start": 1, "blocks": ["00" * 32]}]}, "`plain_blocks`"),
    ],
)
def test_wrong_segments_are_refused(
    tmp_path: Path, wrong: dict[str, object], sentence: str
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(Trace("made", 64, (replace(ask(0, "b"), segments=(), plain_blocks=()),)), path)
    heading, line = path.read_text().splitlines()
    path.write_text(f"{heading}\n{json.dumps(json.loads(line) | wrong)}\n")
    with pytest.raises(TraceError, match=sentence):
        read_trace(path)


@pytest.fixture(scope="module")
def loaded(cache: Path) -> Iterator[LoadedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield tiny_model(load_model("smollm2-135m", dtype="float32").tokenizer)


@pytest.mark.parametrize("mode", ["link", "blend", "none"])
def test_counts_are_those_of_the_engine(loaded: LoadedModel, tmp_path: Path, mode: str) -> None:
    sizes = Sizes(num_device_blocks=64, num_host_blocks=40)
    engine = open_engine(loaded, tmp_path, sizes)
    always_load(engine)
    params = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, kv_mending={"mode": mode}
    )
    told, requests = [], []
    try:
        for number, documents in enumerate(((1, 2), (2, 1), (3, 1), (2, 3), (2, 3), (1, 3))):
            ids, segments = list(range(50, 50 + 20)), []
            for document in documents:
                segments.append((len(ids), len(ids) + 150))
                ids += range(1000 * document, 1000 * document + 150)
            ids += range(200, 210 + number % 2)
            request = engine.add(str(number), ids, params, segments=segments)
            while engine.has_work:
                engine.step()
                assert engine.offloader is not None
                assert engine.offloader.drain(60)
            engine.step()
            told.append(
                (
                    request.num_cached_tokens // 16,
                    request.num_reused_tokens,
                    request.num_mended_tokens,
                )
            )
            num_full = len(ids) // 16
            plain = KeyChain(request.segments[0].namespace, ids).keys
            requests.append(
                TraceRequest(
                    1000.0 * number,
                    len(ids),
                    4,
                    tuple(request.chain.keys[:num_full]),
                    segments=tuple(
                        TraceSegment(each.start, each.keys, each.num_first_tokens, each.blend_share)
                        for each in served_segments(request)
                    ),
                    plain_blocks=tuple(plain),
                )
            )
        config = mirror(engine, sizes, RATES, LINK, LINK)
        engine.check()
    finally:
        engine.close()
    found = simulate(Trace("recorded", 16, tuple(requests)), config)
    simulated = [
        (
            each.num_device_blocks + each.num_loaded_blocks,
            each.num_reused_tokens,
            each.num_mended_tokens,
        )
        for each in found.requests
    ]
    assert simulated == told
    assert [bool(reused) for _, reused, _ in told] == [True] * 4 + [False, True]
    assert any(cached > 2 for cached, _, _ in told)
