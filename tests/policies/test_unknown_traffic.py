"""The default policy on traffic that nobody had in mind: never much worse than prefix-LRU."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tools import key_of

from penstock.sim.replay import new_ledger, replay
from penstock.sim.trace import TraceRequest
from penstock.sim.workloads import generate
from penstock.types import BlockKey

_MAX_LOSS = 0.005
_SHARES = (0.01, 0.05, 0.2, 0.6)  # of all different blocks
Label = tuple[object, ...]


class Prompts:
    """Requests by labels: equal labels from the start on are equal blocks."""

    def __init__(self) -> None:
        self.requests: list[TraceRequest] = []
        self._keys: dict[tuple[BlockKey | None, Label], BlockKey] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def ask(self, prompt: list[Label], num_output: int = 1) -> list[Label]:
        """Returns the prompt with its answer, for the next turn."""
        answer = piece(("answer", len(self)), num_output)
        keys: list[BlockKey] = []
        for label in (*prompt, *answer):
            place = (keys[-1] if keys else None, label)
            keys.append(self._keys.setdefault(place, key_of((len(self._keys), "block"))))
        end = len(prompt)
        self.requests.append(
            TraceRequest(0.0, 16 * end, 16 * num_output, tuple(keys[:end]), tuple(keys[end:]))
        )
        return [*prompt, *answer]


def piece(name: object, num_blocks: int) -> list[Label]:
    return [(name, place) for place in range(num_blocks)]


def loop(chance: random.Random, prompts: Prompts) -> None:
    """The same documents in the same order, over and over."""
    documents = [piece(number, chance.randint(3, 20)) for number in range(80)]
    while len(prompts) < 700:
        prompts.ask(documents[len(prompts) % 80])


def shared_system_prompts(chance: random.Random, prompts: Prompts) -> None:
    while len(prompts) < 1500:
        system = min(int(chance.paretovariate(0.7)), 300)
        own = piece(("own", len(prompts)), chance.randint(1, 6))
        prompts.ask([*piece(("system", system), 4 + system % 20), *own])


def _sessions(
    chance: random.Random, prompts: Prompts, num: int, open_at_once: int, mean_turns: int
) -> None:
    """Contexts that grow, each at a pace of its own."""
    sessions: list[tuple[list[Label], float]] = []
    for number in range(num):
        while len(sessions) < open_at_once:
            context = [*piece("tools", 10), *piece(("task", number, len(sessions)), 12)]
            sessions.append((context, chance.lognormvariate(0, 1.2)))
        at = chance.choices(range(len(sessions)), [pace for _, pace in sessions])[0]
        context, pace = sessions.pop(at)
        context = [*prompts.ask(context), *piece(("result", number), chance.randint(1, 4))]
        if chance.random() > 1 / mean_turns:
            sessions.append((context, pace))


def agents_with_pauses(chance: random.Random, prompts: Prompts) -> None:
    _sessions(chance, prompts, 900, open_at_once=40, mean_turns=15)


def long_sessions(chance: random.Random, prompts: Prompts) -> None:
    """Of coding agents: few at a time, of hundreds of blocks, on tiers that hold less than one."""
    _sessions(chance, prompts, 500, open_at_once=8, mean_turns=80)


def random_documents(chance: random.Random, prompts: Prompts) -> None:
    while len(prompts) < 1500:
        found = [piece(("document", chance.randrange(200)), 8) for _ in range(2)]
        prompts.ask([*piece("system", 3), *found[0], *found[1]])


def prompts_that_seldom_return(chance: random.Random, prompts: Prompts) -> None:
    coming: list[tuple[int, list[Label]]] = []
    while len(prompts) < 1800:
        number = len(prompts)
        if coming and coming[0][0] <= number:
            context = [*coming.pop(0)[1], *piece(("more", number), 4)]
        else:
            context = piece(("once", number), chance.randint(3, 25))
        context = prompts.ask(context)
        if chance.random() < 0.12:
            coming.append((number + chance.randint(20, 200), context))
            coming.sort(key=lambda each: each[0])


def phases(chance: random.Random, prompts: Prompts) -> None:
    """What was learnt in one is wrong in the next."""
    for _ in range(2):
        _sessions(chance, prompts, 400, open_at_once=25, mean_turns=10)
        for _ in range(300):
            popular = chance.random() < 0.5
            name = ("hot", int(100 * chance.random() ** 3)) if popular else ("scan", len(prompts))
            prompts.ask(piece(name, 12))


def tools_and_turns(chance: random.Random, prompts: Prompts) -> None:
    """Many short tasks behind few long descriptions of tools; some go on, soon or late."""
    open_ones: list[list[Label]] = []
    while len(prompts) < 1800:
        if open_ones and chance.random() < 0.35:
            context = open_ones.pop(int(len(open_ones) * (1 - chance.random() ** 2) * 0.999))
        else:
            tool = min(int(chance.paretovariate(1.0)), 40)
            context = [*piece(("tool", tool), 12), *piece(("task", len(prompts)), 4)]
        context = prompts.ask([*context, *piece(("more", len(prompts)), chance.randint(1, 3))])
        if chance.random() < 0.5:
            open_ones = [*open_ones[-80:], context]


def bursts(chance: random.Random, prompts: Prompts) -> None:
    sessions = [piece(("session", number), chance.randint(4, 15)) for number in range(60)]
    while len(prompts) < 1500:
        at = int(60 * chance.random() ** 1.5)
        for _ in range(chance.randint(1, 12)):
            sessions[at] = [*prompts.ask(sessions[at]), *piece(("asked", len(prompts)), 1)]
        if len(sessions[at]) > 80:
            sessions[at] = piece(("session", at, len(prompts)), 8)


MADE = [
    loop,
    shared_system_prompts,
    agents_with_pauses,
    long_sessions,
    random_documents,
    prompts_that_seldom_return,
    phases,
    tools_and_turns,
    bursts,
]
LEARNABLE = [loop, shared_system_prompts, random_documents]


def compare(requests: list[TraceRequest]) -> list[tuple[float, float]]:
    """Hit rates of prefix-LRU and of the default, by size."""
    blocks = {key for each in requests for key in (*each.prompt_blocks, *each.output_blocks)}
    sizes = [max(8, int(share * len(blocks))) for share in _SHARES]
    return [
        (
            replay(requests, new_ledger("prefix-lru", size)).hit_rate,
            replay(requests, new_ledger("reuse", size)).hit_rate,
        )
        for size in sizes
    ]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_it_never_loses_much(make: Callable[[random.Random, Prompts], None]) -> None:
    prompts = Prompts()
    make(random.Random(1), prompts)
    found = compare(prompts.requests)
    assert min(rate - recency for recency, rate in found) >= -_MAX_LOSS
    if make in LEARNABLE:
        assert max(rate - recency for recency, rate in found) > 0.03


@pytest.mark.parametrize("name", ["chat", "rag", "code", "agents", "batch"])
def test_nor_on_generated_workloads(name: str) -> None:
    found = compare(list(generate(name, num_requests=500, seed=3).requests))
    assert min(rate - recency for recency, rate in found) >= -_MAX_LOSS
