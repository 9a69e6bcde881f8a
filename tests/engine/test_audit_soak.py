"""Ten thousand clean requests under audit, in all batch shapes: nothing may be found.

Requests share prefixes, come in bursts of any size, are preempted, aborted and evicted to a disk.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load, idle

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.events import Audited, AuditFailed, Event


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("dtype", "num_requests"),
    [
        pytest.param(torch.float32, 1_500, id="short-float32"),
        pytest.param(torch.bfloat16, 500, id="short-bfloat16"),
        pytest.param(torch.float32, 8_000, id="long-float32"),
        pytest.param(torch.bfloat16, 2_000, id="long-bfloat16"),
    ],
)
def test_nothing_is_found_in_clean_requests(
    loaded: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_requests: int,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = loaded
    if dtype is not torch.float32:
        model = replace(loaded, model=copy.deepcopy(loaded.model).to(dtype), dtype=dtype)
    block_bytes = BLOCK_BYTES * dtype.itemsize // 4
    counts: Counter[str] = Counter()

    def count(event: Event) -> None:
        if isinstance(event, Audited):
            counts[event.check] += 1
        counts["failed"] += isinstance(event, AuditFailed)

    rng = random.Random(4)
    heads = [[rng.randrange(1, 40_000) for _ in range(rng.randint(20, 60))] for _ in range(12)]
    num_left, round_number = num_requests, 0
    while num_left:
        round_number += 1  # each with another size of batches, over the same disk
        tiers = Config(
            HostConfig(size_bytes=96 * block_bytes, huge_pages=False),
            DiskConfig(path=str(tmp_path / "kv"), size_bytes=256 * (BLOCK_BYTES + 512) + 65536),
        )
        config = EngineConfig(
            48 * block_bytes,
            BLOCK_TOKENS,
            rng.choice((33, 64, 200, 512)),
            max_num_seqs=24,
            residency=ResidencyConfig(cold=bool(round_number % 2)),
            audit_share=0.5,
        )
        engine = Engine(model, config, tiers, (count,))
        always_load(engine)
        for _ in range(min(20, -(-num_left // 32))):
            burst = min(num_left, rng.randint(1, 64))
            num_left -= burst
            for number in range(burst):
                tail = [rng.randrange(1, 200) for _ in range(rng.randint(1, 24))]
                params = SamplingParams(
                    temperature=0.0, max_tokens=rng.choice((1, 1, 2, 12)), ignore_eos=True
                )
                engine.add(str(number), rng.choice(heads) + tail, params)
            if rng.random() < 0.2:
                engine.abort(str(rng.randrange(burst)))
            while engine.has_work or (engine.audits is not None and engine.audits.is_busy):
                engine.step()
            if rng.random() < 0.7:
                engine.pool.forget()
        idle(engine)
        engine.close()
    assert counts["failed"] == 0
    assert counts["computed"] > num_requests / 50
    assert counts["read_back"] > num_requests / 200
