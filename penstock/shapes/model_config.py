"""A model's shape from its `config.json`, or from the same fields elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.groups.kinds import Kind
from penstock.shapes.config_groups import read_groups
from penstock.shapes.fields import ConfigFields
from penstock.shapes.layer_kinds import LayerKind, check_decoder, read_layers
from penstock.shapes.shape import ModelShape, is_count

# These have low-rank weights too, but their cache holds keys and values per head.
_NO_LATENTS = frozenset({"minicpm3"})
# Layers whose parameters the estimate below does not know.
_WITHOUT_COUNT = frozenset({LayerKind.STATE, LayerKind.HYBRID, LayerKind.NOTHING})


def shape_from_config(path: Path, bits: int | None = None) -> ModelShape:
    """Read a Hugging Face `config.json`: the file, or the folder that holds it.

    `bits` overrides the file's dtype (for example 8 for an fp8 cache). Without either it is 16, the
    default of engines. Raises ConfigError if the file does not determine the size of KV.
    """
    if path.is_dir():
        path = path / "config.json"
    return shape_from_fields(_read_json(path), str(path), bits)


def shape_from_fields(
    values: Mapping[str, Any], origin: str, bits: int | None = None
) -> ModelShape:
    """A model's shape from config fields; `origin` names their source in errors."""
    whole = dict(values)
    text = whole.get("text_config")
    if isinstance(text, dict):
        # A multimodal model's KV is its language model's. Fields missing there are at the top.
        whole |= {name: value for name, value in text.items() if value is not None}
    fields = ConfigFields(whole, origin)
    check_decoder(fields)
    model_bits = _model_bits(fields, is_needed=bits is None)
    layers = read_layers(fields)
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.maybe("num_key_value_heads") or fields.maybe("num_kv_heads")
    if num_kv_heads is None:
        num_kv_heads = 1 if fields.values.get("multi_query") is True else num_heads
    if num_heads % num_kv_heads:
        raise fields.wrong(
            "num_key_value_heads", f"expected a divisor of the {num_heads} attention heads"
        )
    latent_dim = None
    if (kv_rank := fields.maybe("kv_lora_rank")) is not None and fields.kind not in _NO_LATENTS:
        latent_dim = kv_rank + fields.count("qk_rope_head_dim")
    head_dim = _head_dim(fields, num_heads)
    groups = read_groups(fields, layers, num_kv_heads, head_dim, latent_dim, model_bits)
    num_params = num_active_params = None
    if all(layer.kind not in _WITHOUT_COUNT for layer in layers):
        attention = _attention_params(fields, num_heads, num_kv_heads, head_dim)
        num_params, num_active_params = _count_params(fields, attention)
    windows = [group for group in groups if group.kind is Kind.WINDOW]
    return ModelShape(
        num_layers=len(layers),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bits=model_bits if bits is None else bits,
        num_params=num_params,
        num_heads=num_heads,
        hidden_size=fields.maybe("hidden_size"),
        latent_dim=latent_dim,
        num_active_params=num_active_params,
        window_tokens=max((group.span for group in windows), default=None),
        num_window_layers=sum(group.num_layers for group in windows),
        max_context_tokens=_max_context(fields),
        half_dtype=fields.half_dtype(_dtype_name(fields)),
        groups=groups,
    )


def _model_bits(fields: ConfigFields, *, is_needed: bool) -> int:
    """The width of the model's dtype. If the width of KV is given, an unknown one counts as 16."""
    try:
        return fields.bits(_dtype_name(fields), 16)
    except ConfigError:
        if is_needed:
            raise
        return 16


def _dtype_name(fields: ConfigFields) -> str:
    return "dtype" if fields.has("dtype") else "torch_dtype"


def _read_json(path: Path) -> dict[str, Any]:
    advice = "expected a Hugging Face config.json or the folder that holds it; correct the path"
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"there is no file {path}: {advice}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {advice}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({str(error)[:200]}): {advice}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object: {advice}")
    return value


def _head_dim(fields: ConfigFields, num_heads: int) -> int:
    if fields.maybe("kv_lora_rank") is not None:
        # Some configs give only the rotary part as head_dim; a query has both parts.
        return fields.about("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
    for name in ("head_dim", "attention_head_dim"):
        if (head_dim := fields.maybe(name)) is not None:
            return head_dim
    hidden_size = fields.count("hidden_size")
    if hidden_size % num_heads:
        raise fields.wrong(
            "hidden_size", f"expected a multiple of the {num_heads} attention heads, or a head_dim"
        )
    return hidden_size // num_heads


def _max_context(fields: ConfigFields) -> int | None:
    """The longest sequence that engines accept, including the config's rope scaling."""
    limit = fields.about("max_position_embeddings") or fields.about("n_positions")
    scaling = fields.values.get("rope_scaling") or fields.values.get("rope_parameters")
    if not limit or not isinstance(scaling, dict):
        return limit or None
    kind = str(scaling.get("rope_type", scaling.get("type", "")))
    factor = scaling.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return limit  # llama3 and longrope: the config has the scaled length already
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings")
        limit = original if is_count(original) else limit
    return max(limit, int(limit * factor)) if 1 <= factor <= 1024 else limit


def _count_params(fields: ConfigFields, attention: int) -> tuple[int | None, int | None]:
    """Estimate all parameters and, for a mixture of experts, those that one token uses.

    Exact for models like Llama: gated MLPs, one vector per norm, no biases.
    """
    num_layers = fields.count("num_hidden_layers")
    hidden, vocab = fields.about("hidden_size"), fields.about("vocab_size")
    width = fields.about("intermediate_size")
    if not (hidden and vocab and width):
        return None, None
    embeddings = vocab * hidden * (1 if fields.values.get("tie_word_embeddings") is True else 2)
    outside_mlps = embeddings + hidden + num_layers * (attention + 2 * hidden)
    num_experts = (
        fields.about("n_routed_experts")
        or fields.about("num_local_experts")
        or fields.about("num_experts")
    )
    num_dense = min(fields.about("first_k_dense_replace"), num_layers)
    if not num_experts:
        num_dense = num_layers
    expert_width = fields.about("moe_intermediate_size") or width
    num_shared = fields.about("n_shared_experts")

    def params(num_used: int) -> int:
        mixture = hidden * (num_experts + 3 * expert_width * (num_used + num_shared))
        return outside_mlps + num_dense * 3 * hidden * width + (num_layers - num_dense) * mixture

    num_used = fields.about("num_experts_per_tok")
    return params(num_experts), params(num_used) if num_experts and num_used else None


def _attention_params(
    fields: ConfigFields, num_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    """One layer's query, key, value and output projections; for MLA, the low-rank ones."""
    hidden = fields.about("hidden_size")
    kv_rank, query_rank = fields.about("kv_lora_rank"), fields.about("q_lora_rank")
    if not kv_rank:
        return 2 * hidden * head_dim * (num_heads + num_kv_heads)
    rope, value_dim = fields.about("qk_rope_head_dim"), fields.about("v_head_dim")
    return (
        hidden * query_rank
        + (query_rank or hidden) * num_heads * head_dim
        + hidden * (kv_rank + rope)
        + kv_rank * num_heads * (head_dim - rope + value_dim)
        + num_heads * value_dim * hidden
    )
