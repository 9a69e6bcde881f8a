"""What of vLLM's configuration parts namespaces: all that nobody has found to be harmless."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connectors.config_objects import config_object

from penstock.connectors.vllm import configuration
from penstock.connectors.vllm.configuration import (
    adapter_settings,
    configuration_digest,
    describe,
    harmless_fields,
    harmless_variables,
)
from penstock.connectors.vllm.harmless import HARMLESS, HARMLESS_VALUES
from penstock.connectors.vllm.harmless_environment import HARMLESS_ENVIRONMENT

FIELDS = json.loads((Path(__file__).parent / "vllm_fields.json").read_text())


class HfConfig:
    def __init__(self, **said: Any) -> None:
        self._said = said

    def to_dict(self) -> dict[str, Any]:
        return dict(self._said)


def model(said: dict[str, Any] | None = None, **fields: Any) -> Any:
    config = HfConfig(**({"model_type": "llama"} if said is None else said))
    return config_object("ModelConfig", **{"max_model_len": 1024, "hf_config": config, **fields})


def digest(environment: dict[str, str] | None = None, **fields: Any) -> str:
    fields.setdefault("model_config", model())
    return configuration_digest(config_object("VllmConfig", **fields), environment or {})


# The lists themselves. What a real vLLM has is walked in tests_vllm/test_identity.py.


def test_nothing_is_both_harmless_and_counted() -> None:
    for kind, counted in FIELDS["counted"].items():
        harmless = harmless_variables() if kind == "environment" else harmless_fields(kind)
        assert not harmless & set(counted), kind


def test_every_class_with_harmless_fields_is_one_that_is_walked() -> None:
    assert set(HARMLESS) <= set(FIELDS["counted"])
    assert {kind for kind, _ in HARMLESS_VALUES} <= set(HARMLESS)
    for kind, field in HARMLESS_VALUES:
        assert field in FIELDS["counted"][kind], "other values count"


def test_nothing_is_listed_twice() -> None:
    for groups in (*HARMLESS.values(), HARMLESS_ENVIRONMENT):
        names = [name for names in groups.values() for name in names]
        assert len(names) == len(set(names))


def test_fields_that_only_older_versions_have_are_classified_too() -> None:
    for kind, gone in FIELDS["gone"].items():
        harmless = harmless_variables() if kind == "environment" else harmless_fields(kind)
        assert set(gone) <= harmless | set(FIELDS["counted"][kind]), kind


# The digest.


def test_a_field_that_nobody_has_heard_of_counts() -> None:
    plain = digest(cache_config=config_object("CacheConfig"))
    known = [digest(cache_config=config_object("CacheConfig", brand_new=value)) for value in (1, 2)]
    assert len({plain, *known}) == 3
    strange = [digest(brand_new_config=config_object("New", field=value)) for value in (1, 2)]
    assert len({digest(), *strange}) == 3


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, field) for kind, groups in HARMLESS.items() for field in sum(groups.values(), ())],
)
def test_harmless_fields_change_nothing(kind: str, field: str) -> None:
    if kind == "VllmConfig":
        made = [digest(**{field: value}) for value in ("one", "other")]
    elif kind == "ModelConfig" and field not in ("hf_config", "hf_text_config", "max_model_len"):
        made = [digest(model_config=model(**{field: value})) for value in ("one", "other")]
    else:
        configs = [config_object(kind, **{field: value}) for value in ("one", "other")]
        made = [digest(some_config=config) for config in configs]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (kind, field)
        for kind, fields in FIELDS["counted"].items()
        for field in fields
        if kind not in ("VllmConfig", "environment")
    ],
)
def test_all_other_fields_part(kind: str, field: str) -> None:
    configs = [config_object(kind, **{field: value}) for value in ("one", "other")]
    assert digest(some_config=configs[0]) != digest(some_config=configs[1])


def test_a_compiler_of_somebodys_own_counts() -> None:
    names = ["", "inductor", "eager", "somebody.backend"]
    made = [digest(some=config_object("CompilationConfig", backend=name)) for name in names]
    assert made[0] == made[1] == made[2] != made[3]


def test_guesses_from_the_prompt_change_nothing_and_drafts_do() -> None:
    def with_method(method: str) -> str:
        return digest(speculative_config=config_object("SpeculativeConfig", method=method))

    assert digest(speculative_config=None) == with_method("ngram")
    assert with_method("eagle") != with_method("ngram")


def test_adapter_settings_are_told_apart_from_those_of_the_model() -> None:
    loras = [config_object("LoRAConfig", lora_dtype=name, max_loras=1) for name in "ab"]
    assert digest(lora_config=loras[0]) == digest(lora_config=loras[1])
    assert adapter_settings(loras[0]) != adapter_settings(loras[1])
    more = config_object("LoRAConfig", lora_dtype="a", max_loras=9)
    assert adapter_settings(more) == adapter_settings(loras[0])


# Lengths.


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


LONG = rope("longrope", original_max_position_embeddings=512)


@pytest.mark.parametrize(
    ("said", "lengths", "num_different"),
    [
        ({"model_type": "llama"}, (256, 1024, 4096), 1),
        ({"model_type": "llama", **rope("llama3")}, (256, 1024), 1),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn"}}, (256, 1024), 1),
        ({"model_type": "llama", **rope("dynamic")}, (256, 1024), 2),
        ({"model_type": "llama", **rope("of a new kind")}, (256, 1024), 2),
        ({"model_type": "llama4_text"}, (256, 1024), 2),
        ({"model_type": "of a new kind"}, (256, 1024), 2),
        ({}, (256, 1024), 2),
        ({"model_type": "phi3", **LONG}, (256, 512), 1),
        ({"model_type": "phi3", **LONG}, (512, 513), 2),
        ({"model_type": "phi3", **LONG}, (1024, 4096), 1),
        ({"model_type": "phi3", **rope("longrope")}, (1024, 4096), 2),
        (
            {
                "model_type": "phi3",
                "original_max_position_embeddings": 512,
                "rope_scaling": {"type": "longrope"},
            },
            (256, 1024, 4096),
            2,
        ),
        ({"model_type": "phi3", "rope_parameters": {"full": LONG["rope_parameters"]}}, (5, 999), 2),
        (
            {"model_type": "phi3", "rope_parameters": {**LONG["rope_parameters"], "a": {}}},
            (5, 999),
            2,
        ),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, (256, 1024), 1),
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}, (256, 1024), 1),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, (256, 1024), 1),
        ({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}, (256, 1024), 1),
        ({"model_type": "llama", "architectures": ["Llama4ForCausalLM"]}, (256, 1024), 2),
        ({"model_type": "llama", "architectures": ["SomebodysForCausalLM"]}, (256, 1024), 2),
        (
            {"model_type": "llama", "rope_parameters": {"a": {"rope_type": "default"}}},
            (256, 1024),
            1,
        ),
    ],
)
def test_the_length_counts_where_the_model_may_ask_for_it(
    said: dict[str, Any], lengths: tuple[int, ...], num_different: int
) -> None:
    made = {digest(model_config=model(said, max_model_len=length)) for length in lengths}
    assert len(made) == num_different


def test_the_rope_of_the_text_model_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = set()
    for length in (256, 1024):
        config = model({"model_type": "llama"}, max_model_len=length)
        config.hf_text_config = HfConfig(model_type="phi3", **LONG)
        made.add(digest(model_config=config))
    assert len(made) == 2


# The environment.


def test_variables_count_unless_they_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"VLLM_BATCH_INVARIANT", "VLLM_LOGGING_LEVEL", "VLLM_BRAND_NEW"}
    monkeypatch.setattr(configuration, "_vllm_variables", lambda: known)
    plain = digest({"HOME": "/root", "VLLM_SERVICE_HOST": "10.0.0.1"})
    assert plain == digest({"VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin"})
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_BRAND_NEW", "NVIDIA_TF32_OVERRIDE"):
        assert len({plain, digest({name: "0"}), digest({name: "1"})}) == 3


def test_plugins_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = digest()
    point = SimpleNamespace(name="mine", value="my:models", dist=SimpleNamespace(version="1"))
    monkeypatch.setattr(configuration, "entry_points", lambda group: [point])
    first = digest()
    point.dist.version = "2"
    assert len({plain, first, digest()}) == 3


# Values.


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
        ({3, 1, 2}, {1, 2, 3}),
        ((1, 2), [1, 2]),
        (Path("/a"), "/a"),
        (Colour.RED, Colour.RED),
        (HfConfig(a=1), {"a": 1}),
    ],
)
def test_equal_values_are_described_alike(one: Any, other: Any) -> None:
    assert json.dumps(describe(one)) == json.dumps(describe(other))


def test_different_values_are_described_differently() -> None:
    values = [None, False, 0, 1, 1.5, "1", "None", [1], [[1]], {"1": 1}, Colour.RED, Path, digest]
    assert len({json.dumps(describe(value)) for value in values}) == len(values)


def test_what_cannot_be_compared_is_for_this_run_alone() -> None:
    odd = object()
    assert digest(some=odd) != digest(some=odd)
