"""Every model of the catalogue on every GPU, alone and in numbers: no plan may be nonsense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest

from penstock.plan.fit import Demand, Hardware, default_active
from penstock.plan.planner import Plan, PlannedModel, make_plan
from penstock.plan.ways import ServingEngine, Way, target_of
from penstock.shapes.catalog import GPUS, MODELS
from penstock.units import GiB

COUNTS = (1, 2, 3, 4, 8)
DEMANDS = (
    Demand(512, 1, 1),
    Demand(4096, 200, default_active(200), shared_tokens=1000, reuse_share=0.5),
    Demand(32_768, 64, 64, max_token_seconds=0.03),
    Demand(131_072, 6, 2),
)
HOST_BYTES = {512: None, 4096: 64 * GiB, 32_768: None, 131_072: 64 * GiB}


def plans(name: str, demand: Demand) -> Iterator[list[Plan]]:
    """On each GPU, with more and more of them."""
    known = MODELS[name]
    assert known.weight_bytes is not None
    model = PlannedModel(name, known.repo, known.shape, known.weight_bytes)
    host_bytes = HOST_BYTES[demand.context_tokens]
    for gpu in GPUS.values():
        yield [
            make_plan(model, Hardware(gpu, num_gpus, host_bytes=host_bytes), demand)
            for num_gpus in COUNTS
        ]


def worth(plan: Plan) -> tuple[float | bool, ...]:
    """The rule that the output states."""
    if not plan.verdict.kind.runs:
        return (False,)
    best = plan.ways[0]
    if best.keeps_target:
        return (True, True, best.tokens_per_second)
    return (True, False, -best.token_seconds)


def dominates(one: Way, other: Way) -> bool:
    faster = one.tokens_per_second >= other.tokens_per_second
    sooner = one.token_seconds <= other.token_seconds
    same = one.tokens_per_second == other.tokens_per_second
    return faster and sooner and not (same and one.token_seconds == other.token_seconds)


def check_headline(plan: Plan) -> None:
    best = plan.ways[0]
    assert best.can_run
    assert best.num_running >= 1
    assert best.layout.num_gpus <= plan.hardware.num_gpus
    settings = {ServingEngine.VLLM: plan.settings.vllm, ServingEngine.SERVE: plan.settings.serve}
    assert all(settings[host] is not None for host in best.engines)
    split_alike = [
        way
        for way in plan.ways
        if way.can_run and way.layout.gpus_each <= max(8, best.layout.gpus_each)
    ]
    assert not any(dominates(way, best) for way in split_alike)
    if any(way.keeps_target for way in split_alike):
        assert best.token_seconds <= target_of(plan.demand)


def check_numbers(plan: Plan) -> None:
    for way in plan.ways:
        for value in (way.token_seconds, way.tokens_per_second, way.session_tokens_per_second):
            assert math.isfinite(value)
            assert value > 0
        assert 1 <= way.num_running <= plan.demand.num_active
    found = plan.fit
    assert found.session_bytes > 0
    assert found.least_host_bytes <= found.recommended_host_bytes
    assert found.sessions_on_device <= found.sessions_with_host <= found.sessions_with_disk
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in plan.load_seconds.values())
    assert plan.compute_seconds is not None
    assert plan.compute_seconds > 0
    assert plan.verdict.reasons


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("demand", DEMANDS, ids=lambda demand: str(demand.context_tokens))
def test_every_plan_makes_sense(name: str, demand: Demand) -> None:
    for several in plans(name, demand):
        for plan in several:
            check_numbers(plan)
            if plan.verdict.kind.runs:
                check_headline(plan)
            else:
                assert plan.settings.serve is plan.settings.vllm is None
        for fewer, more in pairwise(several):
            assert worth(more) >= worth(fewer), (more.hardware, worth(fewer), worth(more))


def test_every_model_says_how_long_a_context_it_takes() -> None:
    assert all(model.shape.max_context_tokens for model in MODELS.values())
