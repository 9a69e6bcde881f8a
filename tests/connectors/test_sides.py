"""Both sides of the connector under a small vLLM (see `vllm_model`): real copies, a real disk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connectors.memory_model import BLOCK_TOKENS, PART_BYTES, VOCABULARY
from connectors.pool_model import Request
from connectors.vllm_model import Vandal, Vllm

from penstock.connectors.vllm import lookups
from penstock.events import Event, Stored
from penstock.types import Tier

Models = Callable[..., Vllm]

HINTS: list[Any] = [
    None,
    None,
    {"session": "a", "retain_seconds": 40},
    {"retain_seconds": 20},
    {"session": "b", "prefetch": ["a", "b"]},
    {"session": "a", "on_end": "demote"},
    {"session": "b", "on_end": "release"},
    {"wrong": 1},
]


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


class Users:
    """Ask at random, often for what was asked before or goes on from an answer."""

    max_prompt = 40

    def __init__(self, vllm: Vllm, seed: int) -> None:
        self._vllm = vllm
        self._rng = random.Random(seed)
        self._hint_rng = random.Random(seed + 1000)
        self._systems = [self._tokens(length) for length in (3, 8, 13, 20)]

    def ask(self) -> Request:
        rng, ended = self._rng, self._vllm.ended
        if ended and rng.random() < 0.6:
            prompt = list(rng.choice(ended[-30:]).all_token_ids)
            if rng.random() < 0.3:  # another branch of the same talk
                prompt = prompt[: rng.randint(1, len(prompt))]
        else:
            prompt = list(rng.choice(self._systems))
        if rng.random() < 0.7:
            prompt += self._tokens(rng.randint(1, 9))
        salt = "salt" if rng.random() < 0.1 else None
        params = {"penstock": self._hint_rng.choice(HINTS)}
        return self._vllm.add(
            prompt[: self.max_prompt],
            rng.randint(1, 9),
            cache_salt=salt,
            kv_transfer_params=params,
        )

    def _tokens(self, num: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(num)]


def live(
    vllm: Vllm, seed: int, num_steps: int, *, harm: bool = True, failing: float = 0.01
) -> None:
    """Some hundred steps of everything that can happen to a server."""
    rng = random.Random(seed)
    users, vandal = Users(vllm, seed), Vandal(vllm)
    for mover in vllm.movers:
        mover.max_seconds = 0.002
        mover.failing = 0.01 if harm else 0.0
    for _ in range(num_steps):
        if len(vllm.requests) < 9 and rng.random() < 0.5:
            users.ask()
        if rng.random() < 0.08:
            vllm.preempts_next = True
        alive = [one for one in vllm.requests.values() if one.status != "ended"]
        if alive and rng.random() < 0.05:
            loading = [one for one in alive if one.status == "loading"]
            vllm.abort(rng.choice(loading or alive))
        if harm and rng.random() < 0.03:
            vandal.harm()
        if rng.random() < 0.02:
            vllm.clock.advance(31.0)  # past the deadline of every load, and of what is barred
        if rng.random() < 0.01:
            vllm.reset(with_connector=rng.random() < 0.5)
        vllm.step()
        vllm.check()
    vllm.run()
    # Whatever is kept by now is right: the last talks once more.
    for mover in vllm.movers:
        mover.max_seconds = mover.failing = 0.0
    vllm.clock.advance(31.0)
    for request in vllm.ended[-40:]:
        vllm.add(request.all_token_ids, 1, cache_salt=request.cache_salt)
        vllm.run()
    assert not vllm.scheduler.has_pending_work
    assert not vllm.requests
    vllm.check()


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
