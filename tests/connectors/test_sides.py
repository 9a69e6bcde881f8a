"""Both sides of the connector under a small vLLM (see `vllm_model`): real copies, a real disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connectors.memory_model import BLOCK_TOKENS, PART_BYTES
from connectors.users_model import live
from connectors.vllm_model import Vllm

from penstock.connectors.vllm import lookups
from penstock.events import Event, Stored
from penstock.types import Tier

Models = Callable[..., Vllm]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """Makes models; each is closed at the end, and must close cleanly."""
    monkeypatch.setattr(lookups, "_ENOUGH_BYTES", 4 * PART_BYTES)
    made: list[Vllm] = []

    def make(*, disk: bool = False, **options: Any) -> Vllm:
        made.append(Vllm(tmp_path / f"kv {len(made)}" if disk else None, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
        model.audit()


ALWAYS = ("blocks saved", "fences", "preempted", "aborted")
LOADING = (
    "blocks checked",
    "blocks from disk",
    "loads",
    "aborted while loading",
    "bad blocks",
    "resumed with part of a load",
)
OVERLAP = {"overlaps": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, LOADING, id="plain"),
        pytest.param({"num_workers": 2}, LOADING, id="two workers"),
        pytest.param(OVERLAP, LOADING, id="steps overlap"),
        pytest.param({**OVERLAP, "num_workers": 2}, LOADING, id="steps of two workers overlap"),
        pytest.param({"is_caching": False}, LOADING, id="no prefix cache on the device"),
        pytest.param({"num_host": 4}, LOADING, id="hardly any DRAM"),
        pytest.param({"num_drafts": 2}, (*LOADING, "drafts rejected"), id="drafts"),
        pytest.param({"always_load": False}, (), id="load or compute"),
    ],
)
def test_whatever_happens_no_wrong_block_is_kept_loaded_or_computed_from(
    models: Models, options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(2):
        vllm = models(disk=True, seed=seed, **options)
        live(vllm, seed, 300)
        seen += vllm.seen
    missing = [name for name in (*ALWAYS, *expected) if not seen[name]]
    assert not missing, f"the test hardly tests: {sorted(seen.items())}"


def test_closing_loads_nothing_into_room_that_a_worker_still_writes_to(models: Models) -> None:
    """A save that is given up frees its slot in DRAM, though the worker may go on copying."""
    stored: list[Stored] = []

    def observe(event: Event) -> None:
        if isinstance(event, Stored) and event.tier is Tier.HOST:
            stored.append(event)

    vllm = models(disk=True, num_host=4, observers=[observe])
    first = vllm.add(range(4 * BLOCK_TOKENS), 1)
    vllm.flush()  # its blocks are on disk
    keys = stored[0].keys
    (mover,) = vllm.movers
    mover.saves_gate.clear()
    vllm.add(range(100, 100 + 4 * BLOCK_TOKENS), 1)
    while vllm.requests:
        vllm.step()
    assert vllm.engine.num_flying
    assert vllm.offloader.prefetch(keys)  # it waits for room
    stored.clear()
    assert vllm.scheduler.close()
    assert stored == []
    mover.saves_gate.set()
    assert first.num_output == 1
