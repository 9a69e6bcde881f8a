"""Sums up a model's layers in groups that keep the same, from its config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from penstock.errors import ConfigError
from penstock.groups.kinds import Kind
from penstock.shapes.fields import ConfigFields
from penstock.shapes.layer_groups import LayerGroup
from penstock.shapes.layer_kinds import Layer, LayerKind
from penstock.shapes.shape import is_count
from penstock.shapes.states import state_size

# An indexer (DeepSeek-V3.2) keeps its keys in fp8, with a float32 scale for so many elements.
_SCALED_ELEMENTS = 128
_SCALE_BYTES = 4
_GEMMA4_GLOBAL_HEAD_DIM = 512  # if the config does not say


def read_groups(
    fields: ConfigFields,
    layers: Sequence[Layer],
    num_kv_heads: int,
    head_dim: int,
    latent_dim: int | None,
    model_bits: int,
) -> tuple[LayerGroup, ...]:
    """The groups in the order in which their first layers come."""

    def each() -> Iterator[LayerGroup]:
        for index, layer in enumerate(layers):
            kind = layer.kind
            if kind in (LayerKind.STATE, LayerKind.HYBRID):
                label, heads, num_bytes = state_size(fields, layer.name, model_bits)
                yield LayerGroup(
                    Kind.STATE, label, 1, heads, state_bytes=num_bytes, layers=(index,)
                )
            if kind in (LayerKind.STATE, LayerKind.NOTHING):
                continue
            if latent_dim is not None:
                group = _latent(fields, index, latent_dim)
            else:
                heads, dim = _heads(fields, index, kind, num_kv_heads, head_dim)
                group = LayerGroup(Kind.FULL, "full attention", 1, heads, 2 * heads * dim)
            yield replace(_limited(fields, group, kind), layers=(index,))

    groups = _merged(each())
    if not any(group.elements for group in groups):
        raise ConfigError(
            f"{fields.origin} has no layer with attention: expected the config.json of a decoder "
            "with attention; choose another file or a known model"
        )
    return groups


def _merged(groups: Iterable[LayerGroup]) -> tuple[LayerGroup, ...]:
    found: dict[LayerGroup, list[int]] = {}
    for group in groups:
        found.setdefault(replace(group, layers=()), []).extend(group.layers)
    return tuple(
        # One group has all layers: then there is nothing to tell apart.
        replace(group, num_layers=len(layers), layers=tuple(layers) if len(found) > 1 else ())
        for group, layers in found.items()
    )


def _limited(fields: ConfigFields, group: LayerGroup, kind: LayerKind) -> LayerGroup:
    """The group with its window or chunk, if it has one."""
    if kind is LayerKind.WINDOW:
        label, span = "sliding window", fields.count("sliding_window")
        return replace(group, kind=Kind.WINDOW, label=label, span=span)
    if kind is LayerKind.CHUNK:
        label, span = "chunked attention", fields.count("attention_chunk_size")
        return replace(group, kind=Kind.CHUNK, label=label, span=span)
    return group


def _heads(
    fields: ConfigFields, index: int, kind: LayerKind, num_kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """KV heads and elements per head of one layer. In Gemma 4 they differ between layers."""
    values = fields.values
    each = values.get("per_layer_config")
    if isinstance(each, dict):
        own = each.get(str(index))
        changed = ConfigFields(own if isinstance(own, dict) else {}, fields.origin)
        return (
            changed.maybe("num_key_value_heads") or num_kv_heads,
            changed.maybe("head_dim") or head_dim,
        )
    if not fields.kind.startswith("gemma4") or kind is not LayerKind.FULL:
        return num_kv_heads, head_dim
    heads = fields.maybe("num_global_key_value_heads") if values.get("attention_k_eq_v") else None
    return heads or num_kv_heads, fields.maybe("global_head_dim") or _GEMMA4_GLOBAL_HEAD_DIM


def _latent(fields: ConfigFields, index: int, latent_dim: int) -> LayerGroup:
    """One latent per token for all heads; in sparse models also an indexer's key."""
    group = LayerGroup(Kind.FULL, "MLA latents", 1, elements=latent_dim, is_latent=True)
    if not fields.has("index_topk"):
        return group
    # vLLM keeps a latent of 8-bit KV as fp8, its rotary part as bf16, and a float32 scale for
    # every 128 elements (fp8_ds_mla): 512 + 2 x 64 + 4 x 4 = 656 bytes in DeepSeek-V3.2.
    rank, rotary = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    packed = rank + 2 * rotary + _scales(rank)
    group = replace(group, packed_bytes=packed)
    if not _has_indexer(fields, index):
        return group
    size = fields.count("index_head_dim")
    label = "MLA latents and indexer keys"
    return replace(group, label=label, fixed_bytes=size + _scales(size))


def _scales(num_elements: int) -> int:
    return num_elements // _SCALED_ELEMENTS * _SCALE_BYTES


def _has_indexer(fields: ConfigFields, index: int) -> bool:
    """Some models share the choice of an indexer between neighboring layers."""
    pattern = fields.values.get("index_topk_pattern")
    if isinstance(pattern, str | list):
        return index >= len(pattern) or pattern[index] != "S"
    period = fields.maybe("index_topk_freq") or 1
    offset = fields.values.get("index_skip_topk_offset", 2)
    if not is_count(offset):
        raise fields.wrong("index_skip_topk_offset", "expected a whole number above 0")
    return max(index - offset + 1, 0) % period == 0
