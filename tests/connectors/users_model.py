"""Users of a small vLLM, and everything else that can happen to a server."""

from __future__ import annotations

import random
import time
from typing import Any

from connectors.memory_model import VOCABULARY
from connectors.vllm_model import Vandal, Vllm

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


class Users:
    """Ask at random, often for what was asked before or goes on from an answer."""

    max_prompt = 40

    def __init__(self, vllm: Vllm, seed: int) -> None:
        self._vllm = vllm
        self._rng = random.Random(seed)
        self._hint_rng = random.Random(seed + 1000)
        self._systems = [self._tokens(length) for length in (3, 8, 13, 20)]

    def ask(self) -> Any:
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
        mover.failing = 0.01 if harm else 0.0
    step_seconds = 0.0
    for _ in range(num_steps):
        for mover in vllm.movers:  # as slow as steps are here, or no save outlives its step
            mover.max_seconds = max(0.002, step_seconds)
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
        began = time.perf_counter()
        vllm.step()
        step_seconds += 0.1 * (time.perf_counter() - began - step_seconds)
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
