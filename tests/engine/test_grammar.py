"""Structured answers: valid whatever the model says, and the same whatever happens to KV."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tiny import BLOCK_BYTES, BLOCK_TOKENS, idle

from penstock.config import Config, HostConfig
from penstock.engine import grammar, mask_threads
from penstock.engine.engine import Engine
from penstock.engine.grammar import CompiledGrammar
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig
from penstock.engine.structure import GrammarSource, StructuredOutputsParams
from penstock.errors import ConfigError

Said = list[tuple[int, float | None]]


@pytest.fixture
def engines(loaded: LoadedModel) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(num_blocks: int = 256) -> Engine:
        size, hot = num_blocks * BLOCK_BYTES, ResidencyConfig(cold=False)
        config = EngineConfig(size, BLOCK_TOKENS, 128, residency=hot)
        made.append(Engine(loaded, config, Config(HostConfig(256 * BLOCK_BYTES))))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompts(num: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 40_000) for _ in range(rng.randint(20, 90))] for _ in range(num)]


def run(
    engine: Engine, params: list[SamplingParams]
) -> tuple[list[Said], list[Request], list[str]]:
    asked = zip(prompts(len(params)), params, strict=True)
    requests = [engine.add(str(n), ids, each) for n, (ids, each) in enumerate(asked)]
    said: dict[str, Said] = {request.id: [] for request in requests}
    texts = dict.fromkeys(said, "")
    progresses = []
    for _ in range(10_000):
        if not engine.has_work:
            break
        progresses += engine.step()
    for each in progresses:
        said[each.request.id].append((each.sampled.token_id, each.sampled.logprob))
        texts[each.request.id] += each.text
    return list(said.values()), requests, list(texts.values())


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose documents are short."""
    kinds = ["string", "integer", "boolean", "enum", "null"]
    kind = rng.choice(kinds + ["object", "array"] * (depth < 2))
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", 'q"', "é", 5, None, True], 2)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 5)}
    if kind == "integer":
        return {"type": "integer", "minimum": -9, "maximum": rng.randint(0, 99)}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth + 1), "maxItems": 2}
    if kind == "object":
        names = rng.sample(["a", "name", "two words"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: schema(rng, depth + 1) for name in names},
            "required": names[: rng.randint(0, len(names))],
            "additionalProperties": False,
        }
    return {"type": kind}


def fits(value: Any, wanted: dict[str, Any]) -> bool:
    if "enum" in wanted:
        return any(value == each and type(value) is type(each) for each in wanted["enum"])
    kind = wanted["type"]
    if kind == "object":
        parts = wanted["properties"]
        has_all = set(wanted["required"]) <= set(value) <= set(parts)
        return has_all and all(fits(value[name], parts[name]) for name in value)
    if kind == "array":
        return len(value) <= 2 and all(fits(each, wanted["items"]) for each in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= wanted["maxLength"]
    if kind == "integer":
        return isinstance(value, int) and wanted["minimum"] <= value <= wanted["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)


def test_a_random_model_always_writes_valid_json(engines: Callable[..., Engine]) -> None:
    rng = random.Random(3)
    schemas = [schema(rng) for _ in range(24)]
    params = [
        SamplingParams(
            seed=number,
            max_tokens=200,
            temperature=rng.choice([0, 0.7, 2]),
            top_p=rng.choice([1, 0.9]),
            top_k=rng.choice([0, 5]),
            frequency_penalty=rng.choice([0, 1.5]),
            ignore_eos=rng.random() < 0.3,
            min_tokens=rng.choice([0, 20]),
            structured_outputs=StructuredOutputsParams(json=each),
        )
        for number, each in enumerate(schemas)
    ]
    engine = engines()
    _, requests, texts = run(engine, params)
    for request, text, wanted in zip(requests, texts, schemas, strict=True):
        assert request.finish_reason == "stop", (text, wanted)
        assert fits(json.loads(text), wanted), (text, wanted)
    idle(engine)


def structured(number: int) -> SamplingParams:
    """Long answers, so that some are preempted."""
    structure = StructuredOutputsParams(regex="[a-z]{150,400}(, [0-9]+)*[.]")
    return SamplingParams(
        seed=number,
        temperature=number % 2 * 0.02,  # at 1, a random model's draws differ by rounding
        max_tokens=60,
        logprobs=0,
        presence_penalty=0.5,
        structured_outputs=structure,
    )


def test_preemption_and_faults_change_nothing(engines: Callable[..., Engine]) -> None:
    params = [structured(number) for number in range(6)]
    params[1] = replace(params[1], structured_outputs=None)
    params[2] = replace(params[2], structured_outputs=None, temperature=0.0)
    expected, _, texts = run(engines(), params)
    assert all(re.fullmatch("[a-z]+.*", text) for text in (texts[0], *texts[3:]))

    small = engines(14)
    found, _, _ = run(small, params)
    assert small.scheduler.num_preemptions > 0
    assert [[token for token, _ in each] for each in found] == [
        [token for token, _ in each] for each in expected
    ]
    idle(small)

    # A fault between two steps, that costs no request: all are computed again.
    broken = engines()
    schedule, calls = broken.scheduler.schedule, iter(range(10_000))

    def fail_once() -> Any:
        if next(calls) == 20:
            raise RuntimeError("a defect")
        return schedule()

    broken.scheduler.schedule = fail_once  # type: ignore[method-assign]
    again, requests, _ = run(broken, params)
    assert all(request.finish_reason in ("stop", "length") for request in requests)
    assert [[token for token, _ in each] for each in again] == [
        [token for token, _ in each] for each in expected
    ]


def test_stop_strings_and_aborts(engines: Callable[..., Engine]) -> None:
    engine = engines()
    params = replace(structured(1), stop=["e"], max_tokens=100)
    _, (request, _), (text, _) = run(engine, [params, structured(2)])
    assert request.finish_reason == "stop"
    assert request.stop_reason == "e"
    assert "e" not in text

    request = engine.add("gone", prompts(1)[0], structured(3))
    assert request.needs_last_token
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    engine.step()
    idle(engine)


def test_what_cannot_be_followed_is_refused_before_it_is_queued(
    engines: Callable[..., Engine],
) -> None:
    engine = engines()
    for given in ({"regex": "["}, {"json": {"type": "strin"}}, {"grammar": "start: start"}):
        with pytest.raises(ConfigError, match="correct or simplify"):
            engine.add("x", [5], SamplingParams(structured_outputs=given))
    for given in ({}, {"json": False}, {"json": 5}, {"regex": ""}, {"choice": []}, {"rgex": "a"},
                  {"json": {}, "regex": "a"}):  # fmt: skip
        with pytest.raises(ConfigError, match="structured_outputs"):
            SamplingParams(structured_outputs=given)
    assert not engine.has_work


def test_a_grammar_needs_the_parameters_that_name_it(engines: Callable[..., Engine]) -> None:
    """Else sampling would run ahead of the grammar."""
    engine = engines()
    compiled = engine.grammars.compile(StructuredOutputsParams(choice=["a"]))
    with pytest.raises(ConfigError, match=r"without params\.structured_outputs"):
        engine.add("x", [5], SamplingParams(), grammar=compiled)
    assert not engine.has_work
    said = SamplingParams(structured_outputs={"choice": ["a"]}, max_tokens=4)
    request = engine.add("y", [5], said, grammar=compiled)
    while engine.has_work:
        engine.step()
    assert request.finish_reason == "stop"


def test_a_missing_library_is_named(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"llguidance is not installed.*structured\]"):
        engines().grammars.compile(StructuredOutputsParams(choice=["a"]))


DEEP = {
    "rules": {"grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(14_000))
        + 'r14000: "a"'},
    "terminals": {"grammar": "start: R0\n" + "".join(f"R{n}: R{n + 1}\n" for n in range(14_000))
        + 'R14000: "a"'},
    "references": {"json": {"$ref": "#/$defs/0", "$defs": {"6000": {"type": "null"}}
        | {f"{n}": {"$ref": f"#/$defs/{n + 1}"} for n in range(6000)}}},
    "lists": {"json": {"$ref": "#/$defs/0", "$defs": {"5000": {"type": "null"}}
        | {f"{n}": {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(5000)}}},
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_long_chains_of_rules_do_not_end_the_process(
    engines: Callable[..., Engine], name: str
) -> None:
    """Compilers call themselves for each: it takes more stack than threads usually have."""
    params = SamplingParams(max_tokens=2, structured_outputs=DEEP[name])
    _, (request,), _ = run(engines(), [params])
    assert request.finish_reason in ("stop", "length")


def test_few_large_grammars_are_remembered(engines: Callable[..., Engine]) -> None:
    """One of 262,144 characters may take 100 MB."""
    grammars = engines().grammars
    for number in range(7):
        grammars.compile(StructuredOutputsParams(choice=[f"{number}" * 200_000]))
    small = [StructuredOutputsParams(choice=[f"{number}"]) for number in range(40)]
    assert 1 < len(grammars._remembered) < 7
    for each in small:
        grammars.compile(each)
    assert len(grammars._remembered) == 32


def test_few_grammars_that_take_long_to_compile_are_remembered(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as they take long, however short their source is."""
    grammars = engines().grammars
    clock = itertools.count(step=4.0)  # each takes four seconds
    grammars.compile(StructuredOutputsParams(choice=["no"]))  # reads the tokenizer
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(clock))
    asked = [StructuredOutputsParams(choice=[f"{number}"]) for number in range(9)]
    for each in asked:
        grammars.compile(each)
    assert list(grammars._remembered) == [each.source for each in asked[-5:]]


def test_grammars_that_take_minutes_delay_no_others(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can stop a thread that compiles: others take its place."""
    engine, may_end, began = engines(), threading.Event(), threading.Semaphore(0)
    grammars, compile_one = engine.grammars, engine.grammars._compile
    monkeypatch.setattr(grammars._threads, "_late_seconds", 3600.0)
    known, quick = ({"choice": [text]} for text in ("known", "quick"))
    first = grammars.compile(StructuredOutputsParams.of(known))

    def compile_slowly(source: GrammarSource) -> CompiledGrammar:
        if "slow" in source.text:
            began.release()
            assert may_end.wait(60)
        return compile_one(source)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    slow = [
        grammars.submit(StructuredOutputsParams(choice=[f"slow{number}"])) for number in range(2)
    ]
    assert all(began.acquire(timeout=60) for _ in slow)
    assert grammars.submit(StructuredOutputsParams.of(known)).result(0) is first
    waiting = grammars.submit(StructuredOutputsParams.of(quick))
    grammars.replace_late()
    assert not waiting.running()  # the others are not late yet
    monkeypatch.setattr(grammars._threads, "_late_seconds", 0.0)
    grammars.replace_late()
    assert waiting.result(60)
    may_end.set()
    assert all(each.result(60) for each in slow)


def test_a_slow_grammar_delays_only_its_own_request(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on meanwhile, and answers are the same as if it had been fast."""
    params = [replace(structured(0), max_tokens=6), SamplingParams(temperature=0, max_tokens=40)]
    params.append(replace(params[0], structured_outputs={"choice": ["slow and steady"]}))
    expected, _, texts = run(engines(), params)
    assert texts[2] == "slow and steady"

    may_go_on, compute = threading.Event(), mask_threads._move

    def wait_first(*given: Any) -> None:
        assert may_go_on.wait(60)
        compute(*given)

    monkeypatch.setattr(mask_threads, "_move", wait_first)
    engine = engines()
    requests = [
        engine.add(str(n), *each) for n, each in enumerate(zip(prompts(3), params, strict=True))
    ]
    progresses = []
    while requests[1].finish_reason is None:
        progresses += engine.step()
    assert [requests[0].num_output, requests[2].num_output] == [1, 1]
    may_go_on.set()
    while engine.has_work:
        progresses += engine.step()
    said = [[p.sampled.token_id for p in progresses if p.request is each] for each in requests]
    assert [tokens[: len(plain)] for tokens, plain in zip(said, expected, strict=True)] == [
        [token for token, _ in plain] for plain in expected
    ]
    assert [each.finish_reason for each in requests] == ["length", "length", "stop"]
    idle(engine)
