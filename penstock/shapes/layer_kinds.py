"""What each layer of a model is, from its config.json. An unknown kind is an error, never a guess.

Newer configs list the layers (`layer_types`, `layers_block_type`). Older ones give a pattern, a
period or nothing, and their model's code knows the rest.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.shapes.fields import ConfigFields
from penstock.shapes.shape import is_count

MAX_LAYERS = 10_000
# For configs that give a window but not its layers: one in this many layers has no window.
_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "gemma3n_text": 5}
# Fields of layers that are not plain attention. They count only if nothing says which layers.
_SIGNS = (
    *("mamba_d_state", "mamba_d_conv", "ssm_state_size", "state_size", "ssm_cfg"),
    *("linear_num_value_heads", "linear_attn_config", "conv_L_cache", "attn_type_list"),
    *("hybrid_layer_pattern", "hybrid_override_pattern", "compress_ratios", "lru_width"),
    *("block_types", "attn_layer_indices", "attn_layer_period", "time_mix_extra_dim", "rwkv"),
)


class LayerKind(StrEnum):
    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"
    HYBRID = "hybrid"  # full attention and a state in one layer
    NOTHING = "nothing"  # no cache: an MLP or experts


class Layer(NamedTuple):
    kind: LayerKind
    name: str  # as in the config


_NAMES = {
    **dict.fromkeys(("full_attention", "attention", "*"), LayerKind.FULL),
    **dict.fromkeys(("sliding_attention", "sliding_window_attention"), LayerKind.WINDOW),
    "chunked_attention": LayerKind.CHUNK,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "M", "conv"), LayerKind.STATE),
    "hybrid": LayerKind.HYBRID,
    **dict.fromkeys(("mlp", "moe", "-", "E"), LayerKind.NOTHING),
}


def check_decoder(fields: ConfigFields) -> None:
    """Refuse models whose KV depends on more than the tokens before: they cannot be offloaded."""
    reasons = {
        "is_encoder_decoder": "an encoder and cross-attention",
        "cross_attention_layers": "layers with cross-attention",
        "add_cross_attention": "layers with cross-attention",
        "param_sink_number": "static attention sinks",
        "compress_ratios": "layers that compress several tokens into one",
    }
    for name, what in reasons.items():
        if fields.values.get(name):
            raise ConfigError(
                f"{fields.origin} has {what} ({name}), which Penstock does not support: expected "
                "a decoder whose KV depends only on the tokens before; choose another model"
            )


def read_layers(fields: ConfigFields) -> list[Layer]:
    """The kind of every layer, in order. Raises ConfigError if the config does not say."""
    layers = _listed(fields) or _patterned(fields) or _attention(fields)
    if (num := fields.maybe("num_hidden_layers")) is not None and num != len(layers):
        raise ConfigError(
            f"{fields.origin} lists {len(layers)} layers, but num_hidden_layers is {num}: "
            "expected the same number; correct the file"
        )
    if shared := fields.about("num_kv_shared_layers"):
        # The last layers read the KV of earlier ones and keep none (Gemma 3n and 4).
        kept = max(0, len(layers) - shared)
        layers[kept:] = [Layer(LayerKind.NOTHING, "shared KV")] * (len(layers) - kept)
    return layers


def _listed(fields: ConfigFields) -> list[Layer]:
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        listed = fields.values.get(name)
        if isinstance(listed, list if name != "hybrid_override_pattern" else str) and listed:
            return [_named(fields, str(kind)) for kind in listed[: MAX_LAYERS + 1]]
    return []


def _named(fields: ConfigFields, name: str) -> Layer:
    kind = _NAMES.get(name)
    if kind is None:
        raise ConfigError(
            f"{fields.origin} has layers of type {name[:80]!r}, which Penstock does not know: "
            f"expected one of {', '.join(name for name in _NAMES if len(name) > 1)}; choose "
            "another model"
        )
    if kind is LayerKind.WINDOW and fields.values.get("use_sliding_window") is False:
        kind = LayerKind.FULL
    return Layer(kind, name)


def _patterned(fields: ConfigFields) -> list[Layer]:
    """Layers with a state, where the config gives a period or their positions."""
    num, values = _num_layers(fields), fields.values
    full, state = Layer(LayerKind.FULL, "attention"), Layer(LayerKind.STATE, "mamba")
    if fields.kind == "falcon_h1":
        return [Layer(LayerKind.HYBRID, "hybrid")] * num
    if period := fields.about("attn_layer_period"):  # Jamba
        offset = values.get("attn_layer_offset", 0)
        return [full if index % period == offset else state for index in range(num)]
    if fields.kind == "bamba" and isinstance(found := values.get("attn_layer_indices"), list):
        return [full if index in found else state for index in range(num)]
    if isinstance(found := values.get("full_attn_idxs"), list):  # LFM2
        conv = Layer(LayerKind.STATE, "conv")
        return [full if index in found else conv for index in range(num)]
    if isinstance(kda := values.get("linear_attn_config"), dict):  # counts from 1
        return _kda_layers(fields, kda, num)
    if fields.has("linear_num_value_heads"):  # Qwen3-Next, Qwen3.5
        period = fields.about("full_attention_interval") or 4
        return [full if (index + 1) % period == 0 else state for index in range(num)]
    return []


def _kda_layers(fields: ConfigFields, kda: dict[str, Any], num: int) -> list[Layer]:
    states, attention = kda.get("kda_layers"), kda.get("full_attn_layers")
    full, state = Layer(LayerKind.FULL, "attention"), Layer(LayerKind.STATE, "kda")
    if isinstance(states, list) and isinstance(attention, list):
        layers = [full if index in attention else state for index in range(1, num + 1)]
        if all((index in states) is (layer is state) for index, layer in enumerate(layers, 1)):
            return layers
    raise fields.wrong(
        "linear_attn_config", f"expected each of {num} layers in kda_layers or full_attn_layers"
    )


def _attention(fields: ConfigFields) -> list[Layer]:
    """Layers of attention only, all alike or with windows or chunks at a regular distance."""
    for name in _SIGNS:
        if fields.has(name):
            raise ConfigError(
                f"{fields.origin} has {name}, so not all of its layers are plain attention, but "
                "it does not say which: expected layer_types; add it, or choose another model"
            )
    num, values = _num_layers(fields), fields.values
    full = Layer(LayerKind.FULL, "full_attention")
    chunk = Layer(LayerKind.CHUNK, "chunked_attention")
    window = Layer(LayerKind.WINDOW, "sliding_attention")
    if fields.about("attention_chunk_size"):  # Llama 4: layers with rotary positions
        if isinstance(rotary := values.get("no_rope_layers"), list) and rotary:
            return [chunk if value else full for value in rotary[: MAX_LAYERS + 1]]
        period = fields.about("no_rope_layer_interval") or 4
        return [chunk if (index + 1) % period else full for index in range(num)]
    if not fields.about("sliding_window") or values.get("use_sliding_window") is False:
        return [full] * num
    pattern = values.get("sliding_window_pattern")
    if pattern is not None and not is_count(pattern):
        raise fields.wrong("sliding_window_pattern", "expected a whole number, or layer_types")
    if period := pattern or _PERIODS.get(fields.kind, 0):
        return [window if (index + 1) % period else full for index in range(num)]
    first = fields.about("max_window_layers")  # Qwen2: the layers from here on
    return [window if index >= first else full for index in range(num)]


def _num_layers(fields: ConfigFields) -> int:
    num = fields.count("num_hidden_layers")
    if num > MAX_LAYERS:
        raise fields.wrong("num_hidden_layers", f"expected at most {MAX_LAYERS:,}")
    return num
