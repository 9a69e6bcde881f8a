"""Whatever a request holds, it is refused with a sentence or served: no step fails of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import BLOCK_BYTES, BLOCK_TOKENS

from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.events import Event, StepFailed
from penstock.hints import Hint

told: list[Event] = []


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    # A tokenizer whose own end lies beyond what the model can say, as with some fine-tunes.
    odd = replace(loaded, eos_token_ids=frozenset({0, loaded.vocab_size, 2**40}))
    made = Engine(odd, EngineConfig(32 * BLOCK_BYTES, BLOCK_TOKENS), observers=(told.append,))
    yield made
    made.close()


def finish(engine: Engine) -> None:
    for _ in range(2_000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    assert engine.take_failed() == []
    assert not any(isinstance(event, StepFailed) for event in told)


def test_an_id_is_used_again_only_when_its_request_has_ended(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    first = engine.add("same", [1, 2, 3], params)
    with pytest.raises(ConfigError, match="'same' has not ended"):
        engine.add("same", [4, 5, 6], params)
    finish(engine)
    second = engine.add("same", [1, 2, 3], params)
    finish(engine)
    assert first.output_ids == second.output_ids


def test_an_end_beyond_the_vocabulary_is_not_kept_from_the_model(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=4)
    request = engine.add("a", [1, 2, 3], params)
    finish(engine)
    assert len(request.output_ids) >= 3


NUMBERS: Any = st.one_of(
    st.sampled_from([0, 1, -1, 2, 20, 21, 49_151, 49_152, 2**31, 2**63, 2**64, 2**70, 10**400]),
    st.sampled_from([0.0, -0.0, 1.0, 0.5, 1e-320, 1e308, math.nan, math.inf, -math.inf]),
    st.sampled_from([True, None, "1", b"1", "", [], [0], {}]),
    st.integers(-3, 60_000),
    st.floats(),
)
IDS: Any = st.one_of(NUMBERS, st.lists(NUMBERS, max_size=4))
FIELDS = {
    "n": NUMBERS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": NUMBERS,
    "min_p": NUMBERS,
    "seed": NUMBERS,
    "stop": st.one_of(NUMBERS, st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3)),
    "stop_token_ids": IDS,
    "max_tokens": st.one_of(st.just(3), NUMBERS),
    "min_tokens": st.one_of(st.just(2), NUMBERS),
    "logprobs": NUMBERS,
    "repetition_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "kv_residency": st.dictionaries(
        st.sampled_from(["prefix_tokens", "tail_tokens", "device_tokens", "never_cold"]), NUMBERS
    ),
    "kv_hints": st.dictionaries(
        st.sampled_from(["session", "retain_seconds", "on_end", "prefetch"]), NUMBERS
    ),
}


@settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    given_fields=st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
    ),
    prompt=st.one_of(st.just([5, 6, 7]), IDS),
    priority=st.one_of(st.just(0), NUMBERS),
    tenant=st.one_of(st.just(""), NUMBERS, st.text(max_size=3), st.just("\ud800")),
)
def test_odd_values(
    engine: Engine, given_fields: dict[str, Any], prompt: Any, priority: Any, tenant: Any
) -> None:
    try:
        params = SamplingParams(**{"max_tokens": 3, **given_fields})
        engine.add("odd", prompt, params, priority=priority, tenant=tenant)
    except PenstockError:
        assert not engine.has_work
    if not isinstance(prompt, list):
        prompt = [prompt]
    with suppress(PenstockError):
        engine.hint(Hint("prefetch"), prompt, tenant=tenant)
    finish(engine)
