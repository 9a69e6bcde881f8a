from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from penstock.engine.params import SamplingParams
from penstock.errors import ConfigError


def test_defaults_are_those_of_vllm() -> None:
    ours = {"kv_residency", "kv_hints", "kv_mending", "awaits_prefill", "structured_outputs"}
    defaults = dataclasses.asdict(SamplingParams())
    assert {name: value for name, value in defaults.items() if name not in ours} == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "ignore_eos": False,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": (),
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": 1.0},
        {"n": True},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 10**400},
        {"temperature": "1"},
        {"temperature": None},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": "7"},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": ["a", 1]},
        {"stop": {"a"}},
        {"stop": b"a"},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["2"]},
        {"stop_token_ids": "2"},
        {"stop_token_ids": 2},
        {"max_tokens": 0},
        {"max_tokens": 1.0},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": True},
        {"ignore_eos": 1},
        {"skip_special_tokens": None},
        {"include_stop_str_in_output": 1},
        {"logit_bias": [5]},
        {"logit_bias": {"5": 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {True: 1}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {5: True}},
        {"logit_bias": dict.fromkeys(range(1025), 1)},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"{name} is .*: expected .+; correct it") as caught:
        SamplingParams(**wrong)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("name", "edges"),
    {
        "n": (1, 16_384),
        "temperature": (0, 5e-324, 1e308),
        "top_p": (5e-324, 1e-9, 1),
        "top_k": (-1, 0, 1, 10**9),
        "min_p": (0, 1),
        "seed": (-(2**63), 0, 2**64 - 1),
        "max_tokens": (1, 10**9, None),
        "min_tokens": (0, 16),
        "logprobs": (0, 20, None),
        "repetition_penalty": (0.01, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
    }.items(),
    ids=str,
)
def test_edges_are_inside(name: str, edges: tuple[float | None, ...]) -> None:
    assert [getattr(SamplingParams(**{name: edge}), name) for edge in edges] == list(edges)


def test_min_tokens_may_reach_max_tokens() -> None:
    params = SamplingParams(min_tokens=3, max_tokens=3)
    assert (params.min_tokens, params.max_tokens) == (3, 3)
    params = SamplingParams(min_tokens=99, max_tokens=None)
    assert (params.min_tokens, params.max_tokens) == (99, None)


def test_stops_are_tuples_however_given() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop_token_ids=[7, 8]).stop_ids == (7, 8)
    again = dataclasses.replace(SamplingParams(stop="end", stop_token_ids=[7]), max_tokens=1)
    assert (again.stop, again.stop_token_ids) == (("end",), (7,))
    assert hash(again) == hash(dataclasses.replace(again))


def test_whole_numbers_become_floats() -> None:
    assert isinstance(SamplingParams(temperature=0).temperature, float)


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


def test_penalised() -> None:
    assert not SamplingParams().penalised
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).penalised


def test_seed_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1).seed is None


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_biases_are_bounded_as_in_vllm() -> None:
    params = SamplingParams(logit_bias={9: 1e9, 3: -math.inf, 4: 0.5})
    assert params.biases == ((3, -100.0), (4, 0.5), (9, 100.0))
    assert dataclasses.replace(params, n=2).biases == params.biases
    assert hash(params)
