"""Both sides of the connector under a small vLLM with several KV cache groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connectors.group_memory_model import GROUP_PART_BYTES
from connectors.group_model import GroupVllm
from connectors.users_model import live

from penstock.connectors.vllm import lookups
from penstock.groups.kinds import Group, Groups, Kind

Models = Callable[..., GroupVllm]


def groups_of(*kinds: tuple[Kind, int] | tuple[Kind, int, int]) -> Groups:
    return Groups(tuple(Group(index, *kind) for index, kind in enumerate(kinds)))


FULL, WINDOW, CHUNK, STATE = Kind.FULL, Kind.WINDOW, Kind.CHUNK, Kind.STATE
MIXES = {
    "full and window": groups_of((FULL, 4), (WINDOW, 4, 9)),
    "full and two windows": groups_of((FULL, 4), (WINDOW, 4, 6), (WINDOW, 4, 13)),
    "window": groups_of((WINDOW, 4, 10)),
    "full and chunk": groups_of((FULL, 4), (CHUNK, 4, 12)),
    "full and state": groups_of((FULL, 4), (STATE, 4)),
    "full and wide state": groups_of((FULL, 2), (STATE, 8)),
    "full, window and state": groups_of((FULL, 4), (WINDOW, 4, 7), (STATE, 4)),
    "wide full and window": groups_of((FULL, 8), (WINDOW, 4, 10)),
    "uneven full and window": groups_of((FULL, 4), (WINDOW, 6, 9)),
    "two full": groups_of((FULL, 4), (FULL, 8)),
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """Makes models; each is closed at the end, and must close cleanly."""
    monkeypatch.setattr(lookups, "_ENOUGH_BYTES", 4 * GROUP_PART_BYTES)
    made: list[GroupVllm] = []

    def make(mix: str, *, disk: bool = False, **options: Any) -> GroupVllm:
        directory = tmp_path / f"kv {len(made)}" if disk else None
        made.append(GroupVllm(directory, MIXES[mix], **{"num_host": 40, **options}))
        return made[-1]

    yield make
    for model in made:
        model.close()
        model.audit()


EXPECTED = ("blocks saved", "fences", "preempted", "aborted", "loads", "blocks checked")
HARD = ("failed loads", "aborted while loading", "blocks from disk")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, HARD, id="plain"),
        pytest.param({"overlaps": True, "num_workers": 2, "is_dense": True}, HARD, id="overlap"),
        pytest.param({"num_host": 14, "overlaps": True}, (), id="hardly any DRAM"),
        pytest.param({"writes_early": True, "is_dense": True}, (), id="early writes"),
    ],
)
@pytest.mark.parametrize("mix", MIXES)
def test_whatever_happens_no_wrong_block_is_kept_loaded_or_computed_from(
    models: Models, mix: str, options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(2):
        vllm = models(mix, disk=True, seed=seed, **options)
        live(vllm, seed, 200)
        assert vllm.scheduler.side is not None, "an error has ended offloading"
        seen += vllm.seen
    missing = [name for name in (*EXPECTED, *expected) if not seen[name]]
    assert not missing, f"the test hardly tests: {sorted(seen.items())}"
