"""More sessions are under way than the device holds: they take turns, and answers are the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load, idle

from penstock.config import Config, HostConfig
from penstock.costs.choose import LoadChoice
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import KvResidency, SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request, RequestPhase
from penstock.engine.residency import ResidencyConfig
from penstock.engine.rotation import Rotation
from penstock.errors import ConfigError
from penstock.events import Event, TurnEnded
from penstock.keys import KeyChain, Namespace
from penstock.types import Match

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
AT_ONCE = 1e-6  # a turn that is over as soon as it can be
TURNS = {
    "hot": ResidencyConfig(cold=False, turn_seconds=AT_ONCE),
    "a little cold": ResidencyConfig(
        prefix_tokens=16,
        tail_tokens=16,
        max_cold_bytes_per_step=4 * BLOCK_BYTES,
        turn_seconds=AT_ONCE,
    ),
}
every_kind = pytest.mark.parametrize("residency", TURNS.values(), ids=TURNS)

Engines = Callable[..., Engine]


@pytest.fixture
def engines(loaded: LoadedModel) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(
        num_blocks: int, residency: ResidencyConfig, num_host: int = 256, **options: Any
    ) -> Engine:
        config = EngineConfig(num_blocks * BLOCK_BYTES, BLOCK_TOKENS, 64, residency=residency)
        tiers = Config(HostConfig(size_bytes=num_host * BLOCK_BYTES)) if num_host else None
        made.append(Engine(loaded, config, tiers, **options))
        always_load(made[-1])
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompts(num: int = 8) -> list[list[int]]:
    rng = random.Random(3)
    head = [rng.randrange(1, 40_000) for _ in range(40)]
    return [head + [rng.randrange(1, 40_000) for _ in range(60 + 10 * n)] for n in range(num)]


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel) -> list[list[int]]:
    """With room for everything, one prompt at a time."""
    engine = Engine(loaded, EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS))
    found = []
    for number, prompt in enumerate(prompts()):
        request = engine.add(str(number), prompt, GREEDY)
        while engine.has_work:
            engine.step()
        found.append(request.output_ids)
    engine.close()
    return found


def under_way(requests: list[Request]) -> int:
    return sum(r.first_token_time is not None and r.finish_reason is None for r in requests)


def step(engine: Engine) -> None:
    """A step after all copies have ended: how many turns end does not depend on their speed."""
    if engine.offloader is not None:
        assert engine.offloader.drain(30)
    engine.step()


def serve(engine: Engine, requests: list[Request], step: Callable[[Engine], Any] = step) -> int:
    """To the end; returns how many had begun to answer at once, at most."""
    most = 0
    for _ in range(100_000):
        if not engine.has_work:
            break
        step(engine)
        most = max(most, under_way(requests))
    assert all(request.finish_reason is not None for request in requests), "one never ended"
    idle(engine)
    return most


def add_all(engine: Engine) -> list[Request]:
    return [engine.add(str(n), prompt, GREEDY) for n, prompt in enumerate(prompts())]


@every_kind
def test_all_of_them_answer_in_turns(
    engines: Engines, answers: list[list[int]], residency: ResidencyConfig
) -> None:
    events: list[Event] = []
    engine = engines(24, residency, observers=(events.append,))
    requests = add_all(engine)
    most = serve(engine, requests)
    assert [request.output_ids for request in requests] == answers
    stays = engines(24, replace(residency, turn_seconds=None))
    waiting = add_all(stays)
    assert most == len(requests) > serve(stays, waiting)
    assert [request.output_ids for request in waiting] == answers
    assert stays.scheduler.num_turns == 0
    num_turns = engine.scheduler.num_turns
    assert num_turns > len(requests)
    assert sum(isinstance(event, TurnEnded) for event in events) == num_turns


@pytest.mark.parametrize("copies", ["have ended", "run beside"])
@every_kind
def test_what_rests_is_kept_where_others_need_room(
    engines: Engines, answers: list[list[int]], residency: ResidencyConfig, copies: str
) -> None:
    """DRAM has room for them and for nothing else, and nobody computes anything twice."""
    needed = sum((len(prompt) + 40) // BLOCK_TOKENS + 1 for prompt in prompts())
    engine = engines(24, residency, num_host=needed)
    requests = add_all(engine)
    serve(engine, requests, step if copies == "have ended" else Engine.step)
    assert [request.output_ids for request in requests] == answers
    if copies == "have ended":  # a turn does not end before what it computed is saved
        assert engine.scheduler.num_turns > 0
    for request in requests:  # but for the block that was not complete
        bound = request.num_preemptions * BLOCK_TOKENS
        assert request.num_recomputed_tokens <= bound


@every_kind
def test_who_returns_may_load_or_compute(
    engines: Engines, answers: list[list[int]], residency: ResidencyConfig
) -> None:
    """The engine chooses by what it has measured: after a stall, computing seems faster."""
    rng = random.Random(7)

    def choose(match: Match, num_past: int) -> LoadChoice:
        num_lead, end = sorted(rng.choices([0, match.num_blocks // 2, match.num_blocks], k=2))
        return LoadChoice(num_lead, num_two_ended=end - num_lead)

    engine = engines(24, residency)
    engine.scheduler._choose = choose
    requests = add_all(engine)
    serve(engine, requests, Engine.step)
    assert [request.output_ids for request in requests] == answers


@pytest.mark.parametrize("num_host", [0, 4, 20])
def test_where_nothing_can_be_kept_nobody_rests_in_vain(
    engines: Engines, answers: list[list[int]], num_host: int
) -> None:
    engine = engines(24, TURNS["hot"], num_host)
    requests = add_all(engine)
    serve(engine, requests, Engine.step)
    assert [request.output_ids for request in requests] == answers
    if not num_host:
        assert engine.scheduler.num_turns == 0


@every_kind
def test_who_rests_may_be_given_up(
    engines: Engines, answers: list[list[int]], residency: ResidencyConfig
) -> None:
    engine = engines(24, residency)
    requests = add_all(engine)
    given_up: list[str] = []
    while engine.has_work:
        step(engine)
        resting = [request for request in requests if request.resting]
        if resting and len(given_up) < 4:
            given_up.append(resting[0].id)
            engine.abort(resting[0].id)
    serve(engine, requests)
    assert len(given_up) == 4
    for request, answer in zip(requests, answers, strict=True):
        assert request.output_ids == answer[: len(request.output_ids)]
        assert (request.finish_reason == "abort") == (request.id in given_up)


def test_who_must_not_be_cold_keeps_its_place(engines: Engines, answers: list[list[int]]) -> None:
    engine = engines(24, TURNS["a little cold"])
    never = replace(GREEDY, kv_residency={"never_cold": True})
    urgent = engine.add("urgent", prompts()[0], never)
    others = [engine.add(str(n), prompt, GREEDY) for n, prompt in enumerate(prompts()[1:])]
    serve(engine, [urgent, *others])
    assert urgent.num_preemptions == 0
    assert [request.output_ids for request in (urgent, *others)] == answers
    assert engine.scheduler.num_turns > 0


# The rule itself.


def turns_of(seconds: float | None) -> Rotation:
    some_tiers: Any = object()
    return Rotation(seconds, tiers=some_tiers)


def running(name: str, began: float, num_tokens: int = 10, **given: Any) -> Request:
    namespace = Namespace("m", "w", "d", "l", 4)
    params = SamplingParams(kv_residency=KvResidency(never_cold=given.pop("never_cold", False)))
    made = Request(name, (1, 2, 3), params, KeyChain(namespace), **given)
    made.phase = RequestPhase.RUNNING
    turns_of(1.0).begin(made, began)
    for token in range(num_tokens):
        made.append(token)
    made.num_computed = len(made.tokens) - 1
    return made


WANTING = running("wants", 0.0)


def test_the_longest_there_goes_first() -> None:
    all_of_them = [running("b", 2.0), running("a", 1.0), running("c", 3.0), WANTING]
    over = turns_of(5.0).over
    assert over(all_of_them, WANTING, 5.9) is None
    assert over(all_of_them, WANTING, 6.0) is all_of_them[1]
    assert over(all_of_them, WANTING, 99.0) is all_of_them[1]
    assert turns_of(None).over(all_of_them, WANTING, 99.0) is None
    assert Rotation(5.0).over(all_of_them, WANTING, 99.0) is None, "nothing would be kept"


@pytest.mark.parametrize(
    "given",
    [{"never_cold": True}, {"num_tokens": 3}, {"priority": -1}],
    ids=["never cold", "has just come back", "more urgent"],
)
def test_some_stay(given: dict[str, Any]) -> None:
    stays = running("a", 0.0, **given)
    assert turns_of(1.0).over([stays], WANTING, 99.0) is None
    goes = running("b", 50.0)
    assert turns_of(1.0).over([stays, goes], WANTING, 99.0) is goes


def test_a_turn_ends_between_two_blocks_if_it_can() -> None:
    some_tiers: Any = object()
    rotation = Rotation(1.0, 4, some_tiers)
    amid, between = running("a", 0.0, num_tokens=11), running("b", 0.0, num_tokens=10)
    assert (amid.num_computed, between.num_computed) == (13, 12)
    assert rotation.over([amid, between], WANTING, 1.2) is between
    assert rotation.over([amid], WANTING, 1.2) is None
    assert rotation.over([amid], WANTING, 1.5) is amid


def test_prompts_are_computed_to_their_end() -> None:
    prefilling = running("a", 0.0)
    prefilling.num_computed = 2
    assert turns_of(1.0).over([prefilling], WANTING, 99.0) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_turn_takes_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="turn_seconds is"):
        ResidencyConfig(turn_seconds=seconds)
