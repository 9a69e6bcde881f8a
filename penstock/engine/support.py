"""Which models are supported: those whose only state is the keys and values of every token.

A model is refused unless every layer keeps plain keys and values for every token and passes them
to the attention function. Any other state would not be restored, and the output would be wrong.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from penstock.engine import weights
from penstock.errors import ConfigError
from penstock.units import counted

_ADVICE = (
    "expected a decoder with full attention and plain keys and values in every layer "
    "(such as Llama, Qwen2, Qwen3, Mistral, Phi, Gemma 1); choose another model"
)


@dataclass(frozen=True, slots=True)
class Attention:
    """What one layer passes to the attention function."""

    layer: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    window: int | None
    extras: tuple[str, ...]  # arguments that Penstock's attention does not support


_seen: ContextVar[list[Attention]] = ContextVar("penstock attention seen")
_PROBE = "penstock-probe"
# Arguments that an attention function may ignore at inference.
_HARMLESS = {"dropout", "scaling", "position_ids", "use_cache", "sliding_window", "cache_position"}


def check_supported(config: Any) -> None:
    """Raise ConfigError if the model has state that KV blocks cannot restore."""
    inspect_attention(config)


def inspect_attention(config: Any) -> Attention:
    """What the layers pass to the attention function.

    Raises ConfigError if the model is not supported, for example because its layers differ.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if reason := _reason_in_config(config):
        raise ConfigError(f"{kind} models are not supported: {reason}; {_ADVICE}")
    layers = _probe(kind, config)
    if reason := _reason_in_layers(config, layers):
        raise ConfigError(f"{kind} models are not supported: {reason}; {_ADVICE}")
    return layers[0]


def _reason_in_config(config: Any) -> str:
    parts = [part for part in getattr(config, "sub_configs", {}) if part.endswith("_config")]
    senses = ("text", "vision", "audio", "image", "video", "speech", "vq")
    if getattr(config, "is_encoder_decoder", False):
        return "this one is an encoder-decoder"
    if any(part.startswith(senses) for part in parts):
        return f"this one is multimodal (it has a {parts[0]})"
    if getattr(config, "add_cross_attention", False):
        return "this one has cross-attention"
    if getattr(config, "kv_lora_rank", None):
        return "it stores compressed latents instead of keys and values (MLA)"
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers reuse the keys and values of other layers"
    layer_types = getattr(config, "layer_types", None)
    for layer_type in layer_types or ():
        if layer_type != "full_attention":
            return f"it has layers of type {layer_type}"
    window = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True) is not False and layer_types is None
    if window and is_used and window < (getattr(config, "max_position_embeddings", None) or 0):
        return f"its layers use a sliding window of {window} tokens"
    return ""


def _reason_in_layers(config: Any, layers: list[Attention]) -> str:
    if [seen.layer for seen in layers] != list(range(config.num_hidden_layers)):
        return (
            f"its {counted(config.num_hidden_layers, 'layer')} made "
            f"{counted(len(layers), 'call')} to the attention function instead of one each"
        )
    first = layers[0]
    if any(replace(seen, layer=first.layer) != first for seen in layers):
        return "its layers have different kinds of attention"
    if not first.is_causal:
        return "its attention is not causal, as in an encoder"
    if first.head_dim != first.value_dim:
        return f"its keys are {first.head_dim} wide and its values {first.value_dim}"
    if first.extras:
        return f"its attention needs {', '.join(first.extras)}, which Penstock does not support"
    if first.window is not None and first.window < config.max_position_embeddings:
        return f"its layers use a sliding window of {first.window} tokens"
    return ""


def _probe(kind: str, config: Any) -> list[Attention]:
    """Run the model without weights and record the calls to the attention function."""
    auto: Any = transformers  # its loaders are untyped
    auto.AttentionInterface.register(_PROBE, _note)
    seen: list[Attention] = []
    token = _seen.set(seen)
    try:
        with weights.quiet(), torch.device("meta"), torch.no_grad():
            model = auto.AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=torch.bfloat16,  # some expert kernels support no other dtype on "meta"
                attn_implementation="eager",
                trust_remote_code=False,
            )
            if getattr(model, "_is_stateful", False):
                raise ConfigError(f"{kind} models are not supported: they are recurrent; {_ADVICE}")
            model.eval()
            model.config._attn_implementation = _PROBE
            ids = torch.zeros(1, 3, dtype=torch.long)
            model(input_ids=ids, position_ids=torch.arange(3)[None], use_cache=False)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{kind} models do not run with Penstock's attention function "
            f"({type(error).__name__}: {weights.first_line(error)}); {_ADVICE}"
        ) from error
    finally:
        _seen.reset(token)
    return seen


def _note(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **others: Any
) -> tuple[Any, None]:
    given = {name: others[name] for name in others if others[name] is not None}
    seen = Attention(
        layer=getattr(module, "layer_idx", None),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        value_dim=value.shape[3],
        is_causal=bool(given.pop("is_causal", getattr(module, "is_causal", False))),
        window=given.get("sliding_window") or None,
        extras=tuple(n for n in given if n not in _HARMLESS and not n.startswith("output_")),
    )
    _seen.get().append(seen)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
