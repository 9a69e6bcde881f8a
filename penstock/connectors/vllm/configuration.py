"""Digests everything in vLLM's configuration that is not known to be harmless to KV.

Config objects are walked field by field. Fields that `harmless.py` lists are left out. All others
count with name and value, so that an unknown field splits the cache.
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

# Keys of a model's config that have no effect on its KV.
_LABELS = ("_name_or_path", "transformers_version")

_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")

# Models and ropes whose code in vLLM 0.26 to 0.32 does not read `max_model_len`. Phi-3's longrope
# only compares it with the length the model was trained with. Any other model may depend on it:
# Llama 4 scales its attention beyond 32768.
_LENGTH_FREE_MODELS = frozenset(
    [
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma"),
        *("gemma2", "gemma3_text", "gemma3", "phi", "phi3", "phimoe", "gpt2", "opt", "gptj"),
        *("bloom", "olmoe", "granite", "granitemoe", "falcon", "gpt_oss", "stablelm", "cohere"),
        *("cohere2", "glm4", "glm4_moe", "internlm2", "exaone", "exaone4", "nemotron", "apertus"),
        *("ernie4_5", "ernie4_5_moe", "gpt_neox", "starcoder2", "olmo", "olmo2"),
    ]
)
_HEADS = ("forcausallm", "lmheadmodel", "forconditionalgeneration")
_LENGTH_FREE_ROPES = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
_LONG_ROPE = "longrope"


def configuration_digest(vllm_config: Any, environment: Mapping[str, str] | None = None) -> str:
    """Equal for two configurations only if they make the same KV of the same tokens and weights."""
    found = {
        "config": describe(vllm_config),
        "length": _length(vllm_config.model_config),
        "environment": _environment(os.environ if environment is None else environment),
        "plugins": _plugins(),
    }
    return digest(found)


def adapter_settings(lora_config: Any) -> str:
    """A digest of the settings that only affect requests with a LoRA adapter."""
    return digest(describe(lora_config))


def config_digest(hf_config: Any) -> str:
    """A digest of a model's own config, including rope and its scaling."""
    known = {key: value for key, value in hf_config.to_dict().items() if key not in _LABELS}
    return digest(describe(known))


def describe(value: Any, where: str = "vLLM's configuration") -> Any:
    """A config object as plain JSON, without its harmless fields."""
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
        "%s contains an object of %s, which Penstock cannot compare. KV is therefore not reused "
        "after a restart or by other instances.",
        where,
        type(value),
    )
    return f"run {secrets.token_hex(16)}"


def sorted_items(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(mapping.items(), key=lambda item: str(item[0]))


def harmless_fields(name: str) -> set[str]:
    """The harmless fields of the config class `name`."""
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
        # N-gram drafts come from the prompt; the model itself computes their KV.
        return value is None or getattr(value, "method", None) == "ngram"
    return value in HARMLESS_VALUES.get((name, field), ())


def _length(model: Any) -> Any:
    """The effect of `max_model_len` on KV."""
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
    """Checks the architecture too, which names vLLM's code: any model may claim to be `llama`."""
    kind = text.get("model_type")
    if kind not in _LENGTH_FREE_MODELS:
        return False
    known = {f"{_joined(kind)}{head}" for head in _HEADS}
    return all(_joined(name) in known for name in whole.get("architectures") or ())


def _joined(name: str) -> str:
    return name.replace("_", "").removesuffix("text").lower()


def _ropes(said: Any) -> list[dict[str, Any]]:
    """The rope, or one rope for each kind of layer."""
    if not isinstance(said, dict):
        return []
    return [said, *(each for each in said.values() if isinstance(each, dict))]


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Those variables that count. Unset ones have the default of this version of vLLM."""
    counted = {*COUNTED_ELSEWHERE, *(_vllm_variables() - harmless_variables())}
    return {name: value for name, value in environment.items() if name in counted}


def _vllm_variables() -> set[str]:
    try:
        from vllm import envs
    except ImportError:  # tests run without vLLM
        return set()
    return set(envs.environment_variables)


def _plugins() -> list[str]:
    """Plugins that vLLM loads at start: they may add models and kernels."""
    return sorted(
        f"{point.name} {point.value} {point.dist.version if point.dist else ''}"
        for group in _PLUGINS
        for point in entry_points(group=group)
    )


def digest(found: Any) -> str:
    return blake3(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()
