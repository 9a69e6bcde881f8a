"""The same requests through the real engine and through the simulator: the same hits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tiny import tiny_model

from benchmarks.sim_agreement import Sizes, mirror, open_engine, play
from penstock.config import Config
from penstock.costs.choose import LoadChoice, LoadOrCompute
from penstock.costs.rates import LinkRate, PrefillRate
from penstock.engine.models import LoadedModel, load_model
from penstock.sim.compute import ComputeRates, DecodeRate
from penstock.sim.links import LinkSpec
from penstock.sim.simulator import simulate
from penstock.types import Match, Tier

RATES = ComputeRates(PrefillRate(500.0), DecodeRate(0.04))
DEFAULT = Config().host.policy
FAST = LinkSpec(LinkRate(20e9), LinkRate(20e9), num_streams=1)


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> Iterator[LoadedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield load_model("smollm2-135m", dtype="float32")


@pytest.fixture(autouse=True)
def _always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine's rates would make of a match is not what is compared."""

    def choose(
        self: LoadOrCompute,
        match: Match,
        num_past_tokens: int,
        rates: Mapping[Tier, LinkRate],
        *,
        can_load_two_ended: bool = False,
    ) -> LoadChoice:
        return LoadChoice(match.num_blocks)

    monkeypatch.setattr(LoadOrCompute, "choose", choose)


def test_hits_are_those_of_the_engine_block_for_block(smollm2: LoadedModel, tmp_path: Path) -> None:
    _agree(smollm2, tmp_path, 2, "lru")


@pytest.mark.parametrize(
    ("num_at_once", "policy"), [(1, "lru"), (3, "lru"), (3, "s3fifo"), (1, DEFAULT), (3, DEFAULT)]
)
def test_a_small_model_agrees_as_well(
    smollm2: LoadedModel, tmp_path: Path, num_at_once: int, policy: str
) -> None:
    _agree(tiny_model(smollm2.tokenizer), tmp_path, num_at_once, policy)


def _agree(loaded: LoadedModel, folder: Path, num_at_once: int, policy: str) -> None:
    sizes = Sizes(num_host_blocks=24, num_turns=3, answer_tokens=5, policy=policy)
    engine = open_engine(loaded, folder, sizes)
    try:
        trace, played = play(engine, sizes, num_at_once=num_at_once, in_step=True)
        config = mirror(engine, sizes, RATES, FAST, FAST)
        engine.check()
    finally:
        engine.close()
    real = [(p.num_device_blocks, p.num_loaded_blocks, p.num_computed_blocks) for p in played]
    # The tiers matter: there is something of each kind.
    assert all(sum(kind) for kind in zip(*real, strict=True))
    found = simulate(trace, config)
    simulated = [
        (told.num_device_blocks, told.num_loaded_blocks, told.num_computed_blocks)
        for told in found.requests
    ]
    assert simulated == real
    assert found.hits.get(Tier.DISK, 0) > 0
