"""Which models are supported: those whose only state is the keys and values of every token.

A model is refused unless every layer passes keys and values of every token to the attention
function, and asks for nothing there that our kernels do not do (see `attention.rules`). Any other
state would not be restored, and the output would be wrong.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from penstock.engine import weights
from penstock.engine.masks import RECORDED, Mask, record_masks, window_of
from penstock.errors import ConfigError
from penstock.units import counted

_ADVICE = (
    "expected a decoder that attends to keys and values of earlier tokens in every layer (such as "
    "Llama, Qwen, Mistral, Phi, Gemma 1 to 3, gpt-oss, DeepSeek V2 and V3); choose another model"
)
_WINDOWED = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Attention:
    """What one layer passes to the attention function."""

    layer: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    window: int | None  # that it asks the attention function for
    mask: Mask | None  # that it passes, in a probe that records masks
    cap: float
    has_sinks: bool
    extras: tuple[str, ...]  # arguments that Penstock's attention does not support


@dataclass(frozen=True, slots=True)
class ModelAttention:
    """What all layers of a model pass to the attention function."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    windows: tuple[int, ...]  # of each layer; 0: it attends to all tokens
    caps: tuple[float, ...]  # see `LayerRules`
    has_sinks: tuple[bool, ...]
    has_idle_window: bool = False  # all layers ask for a window that is longer than the context

    @property
    def head_dim(self) -> int:
        """The width of keys and values as they are kept: the narrower ones are padded."""
        return max(self.key_dim, self.value_dim)

    @property
    def text(self) -> str:
        """What is not plain in it, for `keys.Namespace`: empty for most models.

        The fingerprint has the config, but not the defaults that a version of transformers adds.
        """
        found = []
        if any(self.windows):
            found.append(f"windows {' '.join(map(str, self.windows))}")
        if any(self.caps):
            found.append(f"caps {' '.join(map(str, self.caps))}")
        if any(self.has_sinks):
            found.append(f"sinks {' '.join(str(int(has)) for has in self.has_sinks)}")
        if self.key_dim != self.value_dim:
            found.append(f"keys of {self.key_dim}, values of {self.value_dim}, padded with zeros")
        return "; ".join(found)


_seen: ContextVar[list[Attention]] = ContextVar("penstock attention seen")
_PROBE = "penstock-probe"
# Arguments that an attention function may ignore at inference.
_HARMLESS = {"dropout", "scaling", "position_ids", "use_cache", "cache_position"}
_RULES = {"sliding_window", "softcap", "s_aux"}


def check_supported(config: Any) -> None:
    """Raise ConfigError if the model has state that KV blocks cannot restore."""
    inspect_attention(config)


def inspect_attention(config: Any) -> ModelAttention:
    """What the layers pass to the attention function.

    Raises ConfigError if the model is not supported, for example because its layers differ.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if reason := _reason_in_config(config):
        raise ConfigError(f"{kind} models are not supported: {reason}; {_ADVICE}")
    layers = _probe(kind, config, _PROBE)
    if reason := _reason_in_layers(config, layers):
        raise ConfigError(f"{kind} models are not supported: {reason}; {_ADVICE}")
    windows = [_in_effect(config, layer.window) for layer in layers]
    if _may_mask(config, layers):
        # Plain transformers obeys the masks. Our kernels see only what each layer asks for.
        masked = _probe(kind, config, RECORDED)
        if reason := _reason_in_masks(config, masked, windows):
            raise ConfigError(f"{kind} models are not supported: {reason}; {_ADVICE}")
    first = layers[0]
    return ModelAttention(
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        key_dim=first.head_dim,
        value_dim=first.value_dim,
        windows=tuple(windows),
        caps=tuple(layer.cap for layer in layers),
        has_sinks=tuple(layer.has_sinks for layer in layers),
        has_idle_window=first.window is not None
        and not any(windows)
        and _WINDOWED[1] not in (getattr(config, "layer_types", None) or ()),
    )


def _reason_in_config(config: Any) -> str:
    parts = [part for part in getattr(config, "sub_configs", {}) if part.endswith("_config")]
    senses = ("text", "vision", "audio", "image", "video", "speech", "vq")
    if getattr(config, "is_encoder_decoder", False):
        return "this one is an encoder-decoder"
    if any(part.startswith(senses) for part in parts):
        return f"this one is multimodal (it has a {parts[0]})"
    if getattr(config, "add_cross_attention", False):
        return "this one has cross-attention"
    if getattr(config, "index_topk", None):
        return "it keeps keys of an indexer, which chooses the tokens to attend to"
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers reuse the keys and values of other layers"
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in _WINDOWED:
            return f"it has layers of type {layer_type}"
    return ""


def _reason_in_layers(config: Any, layers: list[Attention]) -> str:
    if [seen.layer for seen in layers] != list(range(config.num_hidden_layers)):
        return (
            f"its {counted(config.num_hidden_layers, 'layer')} made "
            f"{counted(len(layers), 'call')} to the attention function instead of one each"
        )
    first = layers[0]
    if len({_without_rules(seen) for seen in layers}) > 1:
        return "its layers have different numbers or sizes of heads"
    if not first.is_causal:
        return "its attention is not causal, as in an encoder"
    if first.extras:
        return f"its attention needs {', '.join(first.extras)}, which Penstock does not support"
    return ""


def _without_rules(seen: Attention) -> Attention:
    """What all layers must have in common."""
    return replace(seen, layer=None, window=None, cap=0.0, has_sinks=False)


def _in_effect(config: Any, window: int | None) -> int:
    """The window, or 0 if all tokens of the longest context are in it."""
    return 0 if window is None or window >= config.max_position_embeddings else window


def _may_mask(config: Any, layers: list[Attention]) -> bool:
    """Whether masks may do more than hide later tokens."""
    has_types = any(kind != _WINDOWED[0] for kind in getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True) is not False
    asks = any(_in_effect(config, layer.window) for layer in layers)
    return has_types or asks or bool(window and is_used and _in_effect(config, window))


def _reason_in_masks(config: Any, layers: list[Attention], windows: list[int]) -> str:
    for layer, asked in zip(layers, windows, strict=True):
        found = window_of(layer.mask, config.max_position_embeddings)
        if found is None:
            return f"layer {layer.layer} hides other tokens than those before a window"
        if found != asked:
            return f"layer {layer.layer} asks for {_words(asked)}, but its mask has {_words(found)}"
    return ""


def _words(window: int) -> str:
    return f"a window of {counted(window, 'token')}" if window else "no window"


def _probe(kind: str, config: Any, name: str) -> list[Attention]:
    """Run the model without weights and record the calls to the attention function.

    `name`: `_PROBE`, with which no masks are made, as when the model runs; or `RECORDED`.
    """
    auto: Any = transformers  # its loaders are untyped
    auto.AttentionInterface.register(name, _note)
    if name == RECORDED:
        record_masks()
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
            model.config._attn_implementation = name
            ids = torch.zeros(1, 3, dtype=torch.long)
            given = {"attention_mask": torch.ones_like(ids)} if name == RECORDED else {}
            model(input_ids=ids, position_ids=torch.arange(3)[None], use_cache=False, **given)
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
        mask=attention_mask if isinstance(attention_mask, Mask) else None,
        cap=float(given.get("softcap") or 0.0),
        has_sinks="s_aux" in given,
        extras=tuple(
            n
            for n in given
            if n not in _HARMLESS and n not in _RULES and not n.startswith("output_")
        ),
    )
    _seen.get().append(seen)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
