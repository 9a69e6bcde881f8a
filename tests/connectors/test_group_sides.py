"""Both sides of the connector under a small vLLM with several KV cache groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connectors.group_memory_model import GROUP_PART_BYTES
from connectors.group_model import GroupVllm
from connectors.memory_model import Silent
from connectors.users_model import live

from penstock.connectors.vllm import lookups
from penstock.connectors.vllm.checkpoints import RequestCheckpoints
from penstock.connectors.vllm.dispatch import Dispatch
from penstock.connectors.vllm.loads import RequestLoads
from penstock.groups.kinds import Group, Groups, Kind
from penstock.types import Slot

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
    made: list[tuple[GroupVllm, bool]] = []

    def make(mix: str, *, disk: bool = False, is_sound: bool = True, **options: Any) -> GroupVllm:
        directory = tmp_path / f"kv {len(made)}" if disk else None
        model = GroupVllm(directory, MIXES[mix], **{"num_host": 40, **options})
        made.append((model, is_sound))
        return model

    yield make
    for model, is_sound in made:
        model.close()
        if is_sound:
            model.audit()


EXPECTED = ("blocks saved", "preempted", "aborted", "loads", "blocks checked")
HARD = ("fences", "failed loads", "aborted while loading", "blocks from disk")


@pytest.mark.parametrize(
    ("options", "num_seeds", "expected"),
    [
        pytest.param({}, 2, HARD, id="plain"),
        pytest.param({"overlaps": True, "num_workers": 2, "is_dense": True}, 1, (), id="overlap"),
        pytest.param({"overlaps": True, "num_host": 14}, 1, (), id="hardly any DRAM"),
        pytest.param({"writes_early": True, "is_dense": True}, 1, (), id="early writes"),
    ],
)
@pytest.mark.parametrize("mix", MIXES)
def test_whatever_happens_no_wrong_block_is_kept_loaded_or_computed_from(
    models: Models, mix: str, options: dict[str, Any], num_seeds: int, expected: tuple[str, ...]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(num_seeds):
        vllm = models(mix, disk=True, seed=seed, **options)
        live(vllm, seed, 200)
        assert vllm.scheduler.side is not None, "an error has ended offloading"
        seen += vllm.seen
    missing = [name for name in (*EXPECTED, *expected) if not seen[name]]
    assert not missing, f"the test hardly tests: {sorted(seen.items())}"


# Hits do happen.

PARTIAL = [mix for mix, groups in MIXES.items() if not groups.all_full]
WITH_FULL = [mix for mix in PARTIAL if MIXES[mix].full]


def num_loaded(vllm: GroupVllm, request: Any) -> int:
    answer = vllm.answers[request.request_id] or {"penstock": {"loaded_tokens": {}}}
    return sum(answer["penstock"]["loaded_tokens"].values())


def forget_device(vllm: GroupVllm) -> None:
    vllm.flush()
    assert vllm.reset(with_connector=False)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_a_second_turn_hits_what_the_first_has_generated(
    models: Models, mix: str, overlaps: bool
) -> None:
    vllm = models(mix, overlaps=overlaps, num_host=80)
    align = vllm.groups.align_tokens
    first = vllm.add(range(10), 2 * align + 5)
    forget_device(vllm)
    second = vllm.add([*first.all_token_ids, 1, 2, 3], 4)
    vllm.run()
    # The KV of the last token was never computed.
    assert num_loaded(vllm, second) == (first.num_tokens - 1) // align * align
    assert num_loaded(vllm, second) > 10


@pytest.mark.parametrize("mix", WITH_FULL)
def test_the_third_prompt_with_a_shared_prefix_hits_all_of_it(models: Models, mix: str) -> None:
    vllm = models(mix, num_host=80)
    shared = range(24)
    vllm.add([*shared, *range(30, 43)], 1)
    # The device keeps the first prompt, or vLLM would not know where the second one's state is
    # worth keeping.
    vllm.flush()
    vllm.add([*shared, *range(50, 63)], 1)
    forget_device(vllm)
    third = vllm.add([*shared, *range(70, 83)], 1)
    vllm.run()
    assert num_loaded(vllm, third) == 24


@pytest.mark.parametrize("mix", MIXES)
def test_a_preempted_request_loads_what_it_had_computed(models: Models, mix: str) -> None:
    vllm = models(mix, num_host=80, is_caching=False)
    align = vllm.groups.align_tokens
    request = vllm.add(range(10), 3 * align)
    while request.num_output < 2 * align + 2:
        vllm.step()
    for copier in vllm.copiers:
        copier.fence(list(vllm.engine._sent))  # they are reported by the next step
    vllm.preempts_next = True
    vllm.run()
    assert vllm.seen["loads after a preemption"] == 1
    assert num_loaded(vllm, request) > 10


@pytest.mark.parametrize("mix", ["full and window", "full and chunk", "window"])
def test_a_preempted_request_keeps_no_boundary_of_its_answer_but_the_last(
    models: Models, monkeypatch: pytest.MonkeyPatch, mix: str
) -> None:
    vllm = models(mix, num_host=80, is_caching=False, may_load=False, budget=64)
    request = vllm.add(range(10), 23)
    while request.num_output < 20:
        vllm.step()
    tried: list[int] = []
    save = RequestCheckpoints._save

    def noted(self: Any, tracked: Any, boundary: int, *args: Any) -> bool:
        if saved := save(self, tracked, boundary, *args):
            tried.append(boundary)
        return saved

    monkeypatch.setattr(RequestCheckpoints, "_save", noted)
    vllm.preempts_next = True
    vllm.run()
    assert tried == [8, 28, 32]  # the prompt's, the answer's so far, the answer's


# The model notices what it is meant to notice.


def use_stale_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are saved from the tables that a request had before it was preempted."""
    kept: dict[str, list[list[int]]] = {}
    save = RequestCheckpoints.save_computed

    def save_computed(self: Any, tracked: Any, before: int, tables: Any, states: Any) -> None:
        def stale(request_id: str) -> list[list[int]]:
            old = kept.setdefault(request_id, [[] for _ in self.requests.groups])
            for mine, now in zip(old, tables(request_id), strict=True):
                mine += now[len(mine) :]
            return old

        save(self, tracked, before, stale, {})

    monkeypatch.setattr(RequestCheckpoints, "save_computed", save_computed)


def ignore_nulls(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(
        self: Any, group: Group, boundary: int, needed: range, table: Any, *_: Any
    ) -> list[Slot]:
        return [Slot(block) for block in table[needed.start : needed.stop]]

    monkeypatch.setattr(RequestCheckpoints, "_blocks", blocks)


def save_the_running_state(monkeypatch: pytest.MonkeyPatch) -> None:
    find = RequestCheckpoints._blocks

    def blocks(self: Any, group: Group, *args: Any) -> list[Slot] | None:
        found = find(self, group, *args)
        table = args[2]
        return [Slot(table[-1])] if found and group.kind is STATE else found

    monkeypatch.setattr(RequestCheckpoints, "_blocks", blocks)


def save_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves start before the step that computes their blocks."""
    gather = Dispatch.gather
    monkeypatch.setattr(Dispatch, "gather", lambda self, before: gather(self, before=True))


def never_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatch, "fence", lambda self, blocks: None)


def load_into_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads go to the blocks of another group."""
    start = RequestLoads.start

    def turned(self: Any, tracked: Any, offer: Any, num_tokens: int, tables: Any) -> None:
        start(self, tracked, offer, num_tokens, [tables[-1], *tables[:-1]])

    monkeypatch.setattr(RequestLoads, "start", turned)


@pytest.mark.parametrize(
    ("plant", "mix"),
    [
        (use_stale_tables, "full and window"),
        (use_stale_tables, "full and state"),
        (ignore_nulls, "full and state"),
        (ignore_nulls, "full and wide state"),
        (save_the_running_state, "full and state"),
        (save_too_early, "full and window"),
        (save_too_early, "full and state"),
        (never_fence, "full and window"),
        (load_into_neighbours, "full and chunk"),
    ],
)
def test_the_model_notices_a_planted_fault(
    models: Models, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None], mix: str
) -> None:
    plant(monkeypatch)

    def run() -> None:
        for seed in range(8):
            vllm = models(mix, disk=True, seed=seed, is_sound=False, overlaps=True)
            live(vllm, seed, 200)
            vllm.audit()

    with pytest.raises(Silent):
        run()
