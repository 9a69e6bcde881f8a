"""Find a model by name, check that it is supported, and load it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.config.options import EMBEDDED
from penstock.engine import weights
from penstock.engine.attention.torch import NAME as ATTENTION
from penstock.engine.support import check_supported, inspect_attention
from penstock.errors import ConfigError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with the facts that identify and shape its KV."""

    model: Any  # a transformers ForCausalLM in eval mode that uses ATTENTION
    tokenizer: Any  # None if the model has none
    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_tokens: int  # longest context
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    weights_fingerprint: str
    rope: str  # rope parameters as canonical JSON, for keys.Namespace
    device: str = "cpu"
    windows: tuple[int, ...] = ()  # of each layer, in tokens; 0, or empty: all tokens
    attention: str = ""  # what else makes attention unusual, for keys.Namespace


def load_model(
    name: str,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
    before_weights: Callable[[int], None] = lambda _: None,
) -> LoadedModel:
    """Load `name`: `smollm2-135m`, a folder, a .gguf file, or a name on the Hugging Face hub.

    `before_weights` is called with the number of KV values per token before the weights are read,
    and may raise. Raises ConfigError if the model cannot be found, cannot be read or is not
    supported.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    _check_device(device)
    tell = progress or weights.say_nothing
    gguf = _find_gguf(name)
    if gguf is None:
        return _load(name, _find_source(name), _DTYPES[dtype], device, tell, before_weights)
    folder = weights.gguf_folder(gguf, _DTYPES[dtype], check_supported, tell)
    refusals: list[ConfigError] = []

    def ask(token_values: int) -> None:
        try:
            before_weights(token_values)
        except ConfigError as error:
            refusals.append(error)
            raise

    try:
        return _load(name, str(folder), _DTYPES[dtype], device, tell, ask)
    except ConfigError as error:
        if error in refusals:
            raise
        # The unpacked folder is damaged. We wrote it ourselves, so make it again.
        folder = weights.gguf_folder(gguf, _DTYPES[dtype], check_supported, tell, rebuild=True)
        return _load(name, str(folder), _DTYPES[dtype], device, tell, before_weights)


def _find_gguf(name: str) -> Path | None:
    if name == EMBEDDED:
        return weights.embedded_gguf()
    return Path(name).expanduser() if name.lower().endswith(".gguf") else None


def _find_source(name: str) -> str:
    """The path if `name` is a folder, else `name` itself, as a name on the hub."""
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return str(path)
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"there is no model at {name!r}: expected a folder with config.json and safetensors, a "
            f".gguf file, a name on the Hugging Face hub, or {EMBEDDED}"
        )
    return name


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {device!r} cannot be used ({weights.first_line(error)}): expected cpu, or "
            "cuda on a machine with a GPU and a CUDA build of torch"
        ) from None


def _load(
    name: str,
    source: str,
    dtype: torch.dtype,
    device: str,
    tell: Callable[[str], None],
    before_weights: Callable[[int], None],
) -> LoadedModel:
    config = weights.read_config(source)
    attention = inspect_attention(config)
    before_weights(2 * config.num_hidden_layers * attention.num_kv_heads * attention.head_dim)
    if attention.has_idle_window:
        config.sliding_window = None  # it has no effect, and attention is faster without
    tell(f"loading {name}")
    model = weights.read_weights(source, config, dtype)
    tokenizer = weights.read_tokenizer(source)
    fingerprint = weights.fingerprint(model)
    try:
        model.eval().requires_grad_(False).to(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the weights of {name} do not fit on {device} ({weights.first_line(error)}): free "
            "memory there, or choose a smaller model or dtype"
        ) from None
    model.config._attn_implementation = ATTENTION
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        num_layers=config.num_hidden_layers,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        max_tokens=_max_tokens(config),
        vocab_size=_vocab_size(model, config),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        dtype=dtype,
        weights_fingerprint=fingerprint,
        rope=_rope_text(config),
        device=device,
        windows=attention.windows,
        attention=attention.text,
    )


def _max_tokens(config: Any) -> int:
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have different ones for windowed and for other layers.
    each = [rope] if "rope_type" in rope else [part for part in rope.values() if part]
    for part in each:
        if not isinstance(part, dict) or part.get("rope_type") != "longrope":
            continue
        # Beyond this length all keys are rotated differently: stored keys would be wrong.
        for holder in (part, vars(config)):
            longest = min(longest, int(holder.get("original_max_position_embeddings") or longest))
    return longest


def _vocab_size(model: Any, config: Any) -> int:
    """Token ids valid for both input and output: with padding the two sizes may differ."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    sizes = [getattr(inputs, "num_embeddings", None), getattr(outputs, "out_features", None)]
    return min([int(config.vocab_size), *(int(size) for size in sizes if size is not None)])


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """From the generation config, or else the config; plus the tokenizer's, which ends chats."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    found: list[int | None] = [ids] if isinstance(ids, int) else list(ids or ())
    found.append(getattr(tokenizer, "eos_token_id", None))
    return frozenset(token for token in found if token is not None)


def _rope_text(config: Any) -> str:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return ""
    # Some kinds of rope scaling depend on the context length.
    known = {"max_position_embeddings": config.max_position_embeddings, **rope}
    return json.dumps(known, sort_keys=True, separators=(",", ":"))
