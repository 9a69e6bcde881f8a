"""What the bytes of a block mean in vLLM, so that an audit can name the layer and the head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.audits.layout import DIM, HEAD, ITEM_BYTES, KV, TOKEN, BlockLayout, Stretch
from penstock.connectors.vllm.groups import kept_ids
from penstock.connectors.vllm.layout import Cache
from penstock.connectors.vllm.orders import LayerBytes, Shard
from penstock.groups.kinds import Groups
from penstock.transfer.paged import PagedMemory, PartPlace


def layer_bytes(
    caches: Mapping[str, Cache], memory: PagedMemory, kv_cache_config: Any, *, on_cpu: bool
) -> tuple[LayerBytes, ...]:
    """The bytes of each layer in a worker's part of a block."""
    found: list[LayerBytes] = []
    for index in kept_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[index]
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            cache = caches.get(name)
            offset = None if cache is None else memory.offset(cache.address)
            if cache is None or offset is None:
                continue
            spec = by_layer.get(name, group.kv_cache_spec)
            if hasattr(spec, "shapes"):
                found += _states(index, name, offset, spec)
            else:
                place = LayerBytes(index, name, offset, cache.dtype, ())
                found.append(_attention(place, cache, memory.num_blocks, spec, on_cpu=on_cpu))
    return tuple(found)


def whole_bytes(cache: Cache, memory: PagedMemory) -> tuple[LayerBytes, ...]:
    """For one tensor of all layers: each stretch of a block as numbers without a further order."""
    found: list[LayerBytes] = []
    offset = 0
    size = cache.element_bytes if cache.dtype in ITEM_BYTES else 1
    for stretch in memory.stretches:
        numbers = stretch.num_bytes // size
        found.append(LayerBytes(0, "any", offset, cache.dtype, (numbers,)))
        offset += stretch.num_bytes
    return tuple(found)


def audit_layouts(
    shards: Sequence[Shard], parts: Sequence[PartPlace], groups: Groups
) -> list[BlockLayout]:
    """The layout of each group's blocks, with the parts of all workers that write."""
    layouts = []
    for group in groups:
        stretches = [
            Stretch(
                _label(layer.name, shard, len(shards)),
                part.offset + layer.offset,
                layer.dtype,
                layer.shape,
                layer.axes,
                layer.strides,
            )
            for shard, part in zip(shards, parts, strict=True)
            if part.writes
            for layer in shard.layers
            if layer.group == group.index
        ]
        layouts.append(BlockLayout(tuple(stretches)))
    return layouts


def _label(name: str, shard: Shard, num_workers: int) -> str:
    return name if num_workers == 1 else f"{name} (stage {shard.stage}, rank {shard.rank})"


def _attention(
    place: LayerBytes, cache: Cache, num_blocks: int, spec: Any, *, on_cpu: bool
) -> LayerBytes:
    shape = (cache.shape[0] // num_blocks, *cache.shape[1:])
    strides = cache.strides
    if cache.dtype not in ITEM_BYTES:
        last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        return replace(place, shape=((last + 1) * cache.element_bytes,))
    axes: tuple[str, ...] = ("",) * len(shape)
    if len(shape) == 4 and shape[1] == getattr(spec, "num_kv_heads", 0):
        # [blocks, heads, tokens, K and V]: a token's K and V are neighbors on GPUs. On a CPU the
        # first half of a head's memory has the K of all tokens, packed for its instructions.
        rows, heads, num_tokens, num_dims = shape
        axes = ("", HEAD, TOKEN, DIM)
        if on_cpu and num_tokens % 2 == 0:
            shape = (rows, heads, 2, num_tokens // 2, num_dims)
            strides = (*strides[:2], strides[2] * num_tokens // 2, *strides[2:])
            axes = ("", HEAD, KV, "", "")
        elif not on_cpu and num_dims == 2 * getattr(spec, "head_size", 0):
            shape = (rows, heads, num_tokens, 2, num_dims // 2)
            strides = (*strides[:3], strides[3] * num_dims // 2, strides[3])
            axes = ("", HEAD, TOKEN, KV, DIM)
    return replace(place, shape=shape, strides=strides, axes=axes)


def _states(group: int, name: str, offset: int, spec: Any) -> list[LayerBytes]:
    """The states of a layer, one after the other."""
    found = []
    for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        words = str(dtype).removeprefix("torch.")
        size = int(dtype.itemsize)
        shape = tuple(shape)
        if words not in ITEM_BYTES:
            shape = (math.prod(shape) * size,)
        found.append(LayerBytes(group, f"{name} state {number}", offset, words, shape))
        offset += math.prod(shape) * (size if words in ITEM_BYTES else 1)
    return found
