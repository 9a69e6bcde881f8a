"""Both sides of the connector under a small vLLM (see `vllm_model`), with real copies and a disk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connectors.vllm_model import BLOCK_TOKENS, VOCABULARY, Request, Vandal, Vllm

Models = Callable[..., Vllm]


@pytest.fixture
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Models]:
    """Makes models; each is closed at the end, and must close cleanly."""
    made: list[Vllm] = []

    def make(*, disk: bool = False, **options: Any) -> Vllm:
        made.append(Vllm(tmp_path / f"kv {len(made)}" if disk else None, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
        if request.node.get_closest_marker("xfail") is None:
            model.audit()


class Users:
    """Ask at random, often for what was asked before or goes on from an answer."""

    max_prompt = 40

    def __init__(self, vllm: Vllm, seed: int) -> None:
        self._vllm = vllm
        self._rng = random.Random(seed)
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
        return self._vllm.add(prompt[: self.max_prompt], rng.randint(1, 9), cache_salt=salt)

    def _tokens(self, num: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(num)]


def live(vllm: Vllm, seed: int, num_steps: int, *, harm: bool = True, reset: bool = True) -> None:
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
        if reset and rng.random() < 0.01:
            vllm.reset(with_connector=rng.random() < 0.5)
        vllm.step()
        vllm.side.check()
    vllm.run()
    for mover in vllm.movers:
        mover.max_seconds = mover.failing = 0.0
    vllm.clock.advance(31.0)
    # Whatever is kept by now is right: all talks once more.
    for request in vllm.ended[-40:]:
        vllm.add(request.all_token_ids, 1, cache_salt=request.cache_salt)
        vllm.run()
    assert not vllm.side.has_pending_work
    vllm.side.check()
    assert not vllm.requests
    assert vllm.engine.num_flying == 0


SEEN = (
    "blocks checked",
    "blocks from disk",
    "blocks saved",
    "fences",
    "loads",
    "preempted",
    "aborted while loading",
)
HARMED = ("bad blocks", "resumed with part of a load", "lost: failed", "lost: corrupt")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_workers": 2}, id="two workers"),
        pytest.param({"overlaps": True}, id="steps overlap"),
        pytest.param({"overlaps": True, "num_workers": 2}, id="steps of two workers overlap"),
        pytest.param({"is_caching": False}, id="no prefix cache on the device"),
        pytest.param({"num_host": 4}, id="hardly any DRAM"),
        pytest.param({"always_load": False}, id="load or compute"),
    ],
)
def test_whatever_happens_no_wrong_block_is_saved_loaded_or_computed_from(
    models: Models, options: dict[str, Any], seed: int
) -> None:
    vllm = models(disk=True, seed=seed, **options)
    live(vllm, seed, 300)
    print(sorted(vllm.seen.items()))
