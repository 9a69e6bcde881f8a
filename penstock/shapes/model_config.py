"""A model's shape from its `config.json`, or from the same fields elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.shapes.shape import ModelShape, is_count

# For configs that give a window but not its layers: one in this many layers has no window.
_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}


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
    fields = _Fields(whole, origin)
    fields.check_layers_keep_kv()

    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.maybe("num_key_value_heads") or fields.maybe("num_kv_heads")
    if num_kv_heads is None:
        num_kv_heads = 1 if fields.values.get("multi_query") is True else num_heads
    if num_heads % num_kv_heads:
        raise fields.wrong(
            "num_key_value_heads", f"expected a divisor of the {num_heads} attention heads"
        )
    latent_dim = None
    if (kv_rank := fields.maybe("kv_lora_rank")) is not None:
        latent_dim = kv_rank + fields.count("qk_rope_head_dim")
    head_dim = _head_dim(fields, num_heads)
    attention = _attention_params(fields, num_heads, num_kv_heads, head_dim)
    num_params, num_active_params = _count_params(fields, attention)
    window_tokens, num_window_layers = _windows(fields)
    return ModelShape(
        num_layers=fields.count("num_hidden_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bits=_bits(fields) if bits is None else bits,
        num_params=num_params,
        num_heads=num_heads,
        hidden_size=fields.maybe("hidden_size"),
        latent_dim=latent_dim,
        num_active_params=num_active_params,
        window_tokens=window_tokens,
        num_window_layers=num_window_layers,
        max_context_tokens=_max_context(fields),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one config.json, with errors that name the file."""

    values: Mapping[str, Any]
    origin: str

    @property
    def kind(self) -> str:
        return str(self.values.get("model_type", ""))

    def count(self, name: str) -> int:
        value = self.maybe(name)
        if value is None:
            raise ConfigError(
                f"{self.origin} has no {name}: expected the config.json of a decoder with "
                "attention; choose another file or a known model"
            )
        return value

    def maybe(self, name: str) -> int | None:
        """None if the field is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not is_count(value):
            raise self.wrong(name, "expected a whole number above 0")
        return value

    def about(self, name: str) -> int:
        """0 if the field is missing or invalid: for estimates, which must not fail."""
        value = self.values.get(name)
        return value if is_count(value) else 0

    def wrong(self, name: str, expected: str) -> ConfigError:
        value = repr(self.values.get(name))[:80]
        return ConfigError(f"{name} in {self.origin} is {value}: {expected}; correct the file")

    def check_layers_keep_kv(self) -> None:
        """Refuse layers with a running state: their size does not grow with the tokens."""
        kinds = self.values.get("layer_types")
        for kind in kinds if isinstance(kinds, list) else []:
            if "attention" not in str(kind) or "linear" in str(kind):
                raise ConfigError(
                    f"{self.origin} has layers of type {str(kind)[:80]!r}, which keep no KV per "
                    "token: expected attention in every layer; choose another model"
                )


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


def _head_dim(fields: _Fields, num_heads: int) -> int:
    if fields.maybe("kv_lora_rank") is not None:
        # Some configs give only the rotary part as head_dim; a query has both parts.
        return fields.about("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
    if (head_dim := fields.maybe("head_dim")) is not None:
        return head_dim
    hidden_size = fields.count("hidden_size")
    if hidden_size % num_heads:
        raise fields.wrong(
            "hidden_size", f"expected a multiple of the {num_heads} attention heads, or a head_dim"
        )
    return hidden_size // num_heads


def _windows(fields: _Fields) -> tuple[int | None, int]:
    """The sliding window and how many layers have it. Older configs do not name the layers."""
    window, num_layers = fields.about("sliding_window"), fields.count("num_hidden_layers")
    if not window or fields.values.get("use_sliding_window") is False:
        return None, 0
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list):
        num_windows = sum("sliding" in str(kind) for kind in kinds)
    elif period := fields.about("sliding_window_pattern") or _PERIODS.get(fields.kind, 0):
        num_windows = num_layers - num_layers // period  # one layer per period has no window
    elif first := fields.about("max_window_layers"):
        num_windows = max(0, num_layers - first)
    else:
        num_windows = num_layers
    return (window, min(num_windows, num_layers)) if num_windows else (None, 0)


def _max_context(fields: _Fields) -> int | None:
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


def _bits(fields: _Fields) -> int:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(name)
    if value is None or value == "auto":
        return 16
    dtype = str(value).removeprefix("torch.").lower()
    if dtype in ("bfloat16", "bf16", "float16", "fp16", "half"):
        return 16
    if dtype in ("float32", "fp32", "float"):
        return 32
    if dtype.startswith(("float8", "fp8")):
        return 8
    raise fields.wrong(name, "expected bfloat16, float16, float32 or float8")


def _count_params(fields: _Fields, attention: int) -> tuple[int | None, int | None]:
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


def _attention_params(fields: _Fields, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
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
