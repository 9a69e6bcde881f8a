"""A digest of everything in vLLM's configuration that is not known to be harmless to KV.

Config objects are walked field by field. What `harmless.py` lists is left out; everything else is
written down by name and value, so that a field nobody has heard of parts namespaces.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import os
import secrets
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import PurePath
from types import FunctionType
from typing import Any

from blake3 import blake3

from penstock.connectors.vllm.harmless import HARMLESS, HARMLESS_VALUES
from penstock.connectors.vllm.harmless_environment import COUNTED_ELSEWHERE, HARMLESS_ENVIRONMENT

log = logging.getLogger(__name__)

# Of a model's config, what says nothing about its KV.
_LABELS = ("_name_or_path", "transformers_version")

_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")

# Models whose code in vLLM 0.26 to 0.32 never asks for `max_model_len`, and ropes that never do.
# Phi-3's (longrope) asks only on which side of the length it was trained with it lies. All others
# may ask anything: Llama 4 scales its attention beyond 32768.
_LENGTH_FREE_MODELS = frozenset(
    [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3",
        "phi",
        "phi3",
        "phimoe",
        "gpt2",
        "opt",
        "gptj",
        "bloom",
        "olmoe",
        "granite",
        "granitemoe",
        "falcon",
        "gpt_oss",
        "stablelm",
        "cohere",
        "cohere2",
        "glm4",
        "glm4_moe",
        "internlm2",
        "exaone",
        "exaone4",
        "nemotron",
        "apertus",
        "ernie4_5",
        "ernie4_5_moe",
        "gpt_neox",
        "starcoder2",
        "olmo",
        "olmo2",
    ]
)
_HEADS = ("forcausallm", "lmheadmodel", "forconditionalgeneration")
_LENGTH_FREE_ROPES = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
_LONG_ROPE = "longrope"


def configuration_digest(vllm_config: Any, environment: Mapping[str, str] | None = None) -> str:
    """Equal for two configurations that make the same KV of the same tokens and weights."""
    found = {
        "config": describe(vllm_config),
        "length": _length(vllm_config.model_config),
        "environment": _environment(os.environ if environment is None else environment),
        "plugins": _plugins(),
    }
    return _digest(found)


def adapter_settings(lora_config: Any) -> str:
    """As `configuration_digest`, of what changes nothing but requests with a LoRA adapter."""
    return _digest(describe(lora_config))


def config_digest(hf_config: Any) -> str:
    """Of everything that a model's own config says, rope and its scaling among it."""
    known = {key: value for key, value in hf_config.to_dict().items() if key not in _LABELS}
    return _digest(describe(known))


def describe(value: Any, where: str = "vLLM's configuration") -> Any:
    """A config object as plain JSON, without what is harmless."""
    match value:
        case None | bool() | int() | float() | str():
            return value.value if isinstance(value, enum.Enum) else value
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case PurePath() | complex() | bytes():
            return str(value)
        case Mapping():
            return {
                str(key): describe(each, f"{where}[{key!r}]") for key, each in sorted_items(value)
            }
        case list() | tuple():
            return [describe(each, where) for each in value]
        case set() | frozenset():
            return sorted(json.dumps(describe(each, where), sort_keys=True) for each in value)
        case type() | FunctionType():
            return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return _describe_fields(value)
    if type(value).__module__ == "torch":  # a dtype, a device
        return str(value)
    if callable(getattr(value, "to_dict", None)):
        return describe(value.to_dict(), where)
    log.warning(
        "%s holds an object of %s, which Penstock cannot compare: KV is kept for this run only, "
        "and not shared with the next.",
        where,
        type(value),
    )
    return f"run {secrets.token_hex(16)}"


def sorted_items(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(mapping.items(), key=lambda item: str(item[0]))


def harmless_fields(name: str) -> set[str]:
    """Of the config class called `name`."""
    return {field for fields in HARMLESS.get(name, {}).values() for field in fields}


def harmless_variables() -> set[str]:
    return {name for names in HARMLESS_ENVIRONMENT.values() for name in names}


def _describe_fields(config: Any) -> dict[str, Any]:
    name = type(config).__name__
    harmless = harmless_fields(name)
    found: dict[str, Any] = {"": name}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if field.name in harmless or _is_without_effect(name, field.name, value):
            continue
        found[field.name] = describe(value, f"{name}.{field.name}")
    return found


def _is_without_effect(name: str, field: str, value: Any) -> bool:
    if (name, field) == ("VllmConfig", "speculative_config"):
        # Guesses from the prompt itself: what they cost is computed by the model as ever.
        return value is None or getattr(value, "method", None) == "ngram"
    return value in HARMLESS_VALUES.get((name, field), ())


def _length(model: Any) -> Any:
    """What `max_model_len` changes."""
    config = getattr(model, "hf_text_config", None) or model.hf_config
    said = config.to_dict()
    ropes = _ropes(said.get("rope_parameters")) + _ropes(said.get("rope_scaling"))
    kinds = {str(rope.get("rope_type", rope.get("type", "default"))) for rope in ropes}
    if not _is_length_free(said, model.hf_config.to_dict()):
        return model.max_model_len
    if not kinds <= _LENGTH_FREE_ROPES | {_LONG_ROPE}:
        return model.max_model_len
    borders = []
    for rope in ropes:
        if _LONG_ROPE in (rope.get("rope_type"), rope.get("type")):
            name = "original_max_position_embeddings"
            border = rope.get(name, said.get(name))
            if not isinstance(border, int):
                return model.max_model_len
            borders.append(border)
    return [model.max_model_len > border for border in borders]


def _is_length_free(text: dict[str, Any], whole: dict[str, Any]) -> bool:
    """By the code that vLLM runs, which the architecture names: anybody's may be a `llama`."""
    kind = text.get("model_type")
    if kind not in _LENGTH_FREE_MODELS:
        return False
    known = {f"{_joined(kind)}{head}" for head in _HEADS}
    return all(_joined(name) in known for name in whole.get("architectures") or ())


def _joined(name: str) -> str:
    return name.replace("_", "").removesuffix("text").lower()


def _ropes(said: Any) -> list[dict[str, Any]]:
    """One rope, or one for each kind of layer."""
    if not isinstance(said, dict):
        return []
    return [said, *(each for each in said.values() if isinstance(each, dict))]


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the variables that vLLM reads. What is not set has the default of this version."""
    counted = {*COUNTED_ELSEWHERE, *(_vllm_variables() - harmless_variables())}
    return {name: value for name, value in environment.items() if name in counted}


def _vllm_variables() -> set[str]:
    try:
        from vllm import envs
    except ImportError:  # tests of this room alone
        return set()
    return set(envs.environment_variables)


def _plugins() -> list[str]:
    """Code of others that vLLM loads at start: it may bring models and kernels of its own."""
    return sorted(
        f"{point.name} {point.value} {point.dist.version if point.dist else ''}"
        for group in _PLUGINS
        for point in entry_points(group=group)
    )


def _digest(found: Any) -> str:
    return blake3(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()
