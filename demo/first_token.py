"""Measure the time to first token: prompt computed, KV loaded from DRAM, KV loaded from disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pace import Pace, Plan
from stage import Answer, Ear, OutOfTime, Stage, Tick, ask

from penstock.engine.engine import Engine
from penstock.types import Tier

BLOCK_TOKENS = 32
NUM_LOADS = 3  # loads from each tier; the median is shown
_PATIENCE = 1.5  # a prompt is shortened if it takes this many times the expected time
_WHOLE_TOKENS = 1_000  # prompts up to this length are never shortened
NAMES = {"computed": "recomputed", "host": "loaded from DRAM", "disk": "loaded from disk"}


@dataclass(frozen=True, slots=True)
class FirstToken:
    num_tokens: int  # of the prompt
    source: str  # computed, host or disk
    seconds: float  # from the request's arrival to its first token
    times_faster: float  # than computed
    num_loaded: int  # tokens of the prompt that were not computed
    num_bytes: int
    bytes_per_second: float | None  # of the load, end to end
    identical: bool


def measure(
    stage: Stage,
    pace: Pace,
    sizes: tuple[int, ...],
    num_answer: int,
    directory: Path,
    replan: Callable[[tuple[int, ...]], Plan],
) -> tuple[list[FirstToken], Plan]:
    """Time every size, shortest first. After each one `replan` limits the sizes of the rest."""
    rows: list[FirstToken] = []
    plan: Plan | None = None
    ear = Ear()
    total = sum(sizes) + len(sizes) * num_answer
    with stage.engine(sizes[-1] + 64, BLOCK_TOKENS, stage.tiers(total, directory), ear) as engine:
        ask(engine, [stage.writer.opening(900, 96)], 3)  # warm up threads and memory
        for index, wished in enumerate(sizes):
            size = wished if plan is None else plan.sizes[0]
            rows += _three_ways(stage, engine, ear, index, size, num_answer, pace)
            plan = replan(sizes[index + 1 :])
    assert plan is not None
    return rows, plan


def _three_ways(
    stage: Stage, engine: Engine, ear: Ear, seed: int, size: int, num_answer: int, pace: Pace
) -> list[FirstToken]:
    prompt = stage.writer.opening(seed, size)
    rows: list[FirstToken] = []
    expected: Answer | None = None
    for source, name in NAMES.items():
        tries = []
        for _ in range(1 if expected is None else NUM_LOADS):
            _empty(engine, also_host=source == "disk")
            ear.clear()
            with stage.screen.progress(f"{size:,} tokens, {name}") as tick:
                if expected is None:
                    answer = expected = _compute(engine, prompt, num_answer, tick, pace)
                    prompt, size = answer.prompt_ids, len(answer.prompt_ids)
                else:
                    (answer,) = ask(engine, [prompt], num_answer, tick)
                    what = f"{size} tokens {name}"
                    stage.comparison.hold(what, expected.token_ids, answer.token_ids)
            tries.append(_row(stage, ear, size, source, expected, answer))
        rows.append(sorted(tries, key=lambda row: row.seconds)[len(tries) // 2])
        stage.screen.say(f"  {size:>5,} tokens {name:<17} {rows[-1].seconds:>8.3f} s")
    return rows


def _compute(engine: Engine, prompt: list[int], num_answer: int, tick: Tick, pace: Pace) -> Answer:
    """Answer a prompt without any cached KV. If it takes too long, the prompt is shortened.

    A prompt is computed from its beginning, so the time so far counts for the shorter prompt; the
    time that it still needs for its first token is added.
    """
    most = _PATIENCE * pace.seconds(len(prompt)) if len(prompt) > _WHOLE_TOKENS else None
    try:
        (answer,) = ask(engine, [prompt], num_answer, tick, most)
    except OutOfTime as cut:
        (rest,) = ask(engine, [prompt[: cut.num_tokens]], num_answer)
        seconds = cut.seconds + rest.first_token_seconds
        answer = replace(rest, first_token_seconds=seconds, num_cached=0)
        answer = replace(answer, seconds=cut.seconds + rest.seconds)
    pace.observe([answer])
    return answer


def _empty(engine: Engine, *, also_host: bool) -> None:
    """Empty the device and, with `also_host`, DRAM; everything is on disk."""
    assert engine.offloader is not None
    engine.offloader.drain()
    engine.step()  # settles the saves, so that they release their blocks
    engine.pool.forget()
    if also_host:
        engine.offloader.empty_host()


def _row(
    stage: Stage, ear: Ear, size: int, source: str, expected: Answer, answer: Answer
) -> FirstToken:
    num_bytes = answer.num_loaded * stage.token_bytes
    tier = {"host": Tier.HOST, "disk": Tier.DISK}.get(source)
    if tier is None and answer.num_cached:
        raise RuntimeError(f"the computed run found {answer.num_cached} cached tokens")
    if tier is not None and not ear.num_bytes.get(tier):
        raise RuntimeError(f"{size} tokens: nothing was loaded from {tier.label}")
    if tier is Tier.HOST and ear.num_bytes.get(Tier.DISK):
        raise RuntimeError(f"{size} tokens: KV expected in DRAM was loaded from disk")
    return FirstToken(
        size,
        source,
        answer.first_token_seconds,
        expected.first_token_seconds / answer.first_token_seconds,
        answer.num_loaded,
        num_bytes,
        num_bytes / ear.load_seconds if ear.load_seconds else None,
        expected.token_ids == answer.token_ids,
    )
