"""Three hundred requests over models with several groups, over a disk that misbehaves."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Faults, Start, Vllm
from group_models import VOCABULARY, options
from test_soak import NUM_REQUESTS, run, workload

pytestmark = pytest.mark.soak  # test_soak.py has the same requests for one group


@dataclass(frozen=True)
class Soak:
    model: str
    num_blocks: int  # so few that requests are preempted
    dram: float  # GiB, so little that blocks are evicted
    num_hits: int  # tokens loaded at least


@pytest.mark.parametrize(
    "soak",
    [Soak("gemma3", 54, 0.004, 1000), Soak("granite4", 16, 0.02, 1000)],
    ids=lambda soak: soak.model,
)
def test_three_hundred_requests_over_a_failing_disk(
    start: Start, faults: Faults, soak: Soak, models: Path, tmp_path: Path
) -> None:
    requests = workload(random.Random(1), VOCABULARY)
    given = options(soak.model, models) | {"max_model_len": 512}
    undisturbed = Vllm(**given)
    expected = run(undisturbed, requests, None)
    undisturbed.close()
    vllm = start(
        disk=tmp_path / "kv",
        given={**given, "num_gpu_blocks_override": soak.num_blocks},
        always_load=True,
        kv_offloading_size=soak.dram,
        set={"transfer.load_deadline_seconds": 0.2},
    )
    answers = run(vllm, requests, faults)
    assert len(answers) > NUM_REQUESTS * 0.8
    assert answers == {number: expected[number] for number in answers}
    assert vllm.metric("vllm:num_preemptions") > 0
    assert vllm.metric("vllm:external_prefix_cache_hits") > soak.num_hits
    faults.set()
    vllm.check_nothing_is_held()
    vllm.close()
