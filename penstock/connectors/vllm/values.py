"""What codecs must know about the values in vLLM's blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.audits.layout import DIM, HEAD, ITEM_BYTES, KV, TOKEN
from penstock.codecs import layout as axes
from penstock.codecs.blocks import BlockValues, PartValues
from penstock.codecs.layout import KvLayout
from penstock.connectors.vllm.groups import kept_ids
from penstock.connectors.vllm.layout import Cache
from penstock.connectors.vllm.orders import LayerBytes, Shard
from penstock.transfer.paged import PagedMemory

_LOSSY_DTYPES = ("bfloat16", "float16", "float32")
_AXES = {HEAD: axes.HEAD, TOKEN: axes.TOKEN, KV: axes.KIND, DIM: axes.DIM}


def part_values(
    memory: PagedMemory, dtypes: set[str], layers: Sequence[LayerBytes] = ()
) -> PartValues:
    """The values of a worker's part of each block. `dtypes` are those of all caches in it."""
    return PartValues(
        memory.block_bytes,
        dtypes.pop() if len(dtypes) == 1 else "",
        tuple(stretch.num_bytes for stretch in memory.stretches),
        layout=kv_layout(layers, memory.block_bytes),
    )


def cache_dtypes(caches: Mapping[str, Cache], kv_cache_config: Any) -> set[str]:
    """The types of all numbers in these caches. One layer's states may have several."""
    specs = {}
    for index in kept_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[index]
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            specs[name] = by_layer.get(name, group.kv_cache_spec)
    found: set[str] = set()
    for name, cache in caches.items():
        states = getattr(specs.get(name), "dtypes", None)
        found.update([cache.dtype] if states is None else map(str, states))
    return {dtype.removeprefix("torch.") for dtype in found}


def kv_layout(layers: Sequence[LayerBytes], block_bytes: int) -> KvLayout | None:
    """The order of a block's values if all layers are alike and nothing else is in it.

    Known only where `audit_layout` can tell keys from values. Layers of several groups may use the
    same memory.
    """
    if not layers:
        return None
    first = layers[0]
    alike = {(layer.dtype, layer.shape, layer.strides, layer.axes) for layer in layers}
    if len(alike) > 1 or first.dtype not in _LOSSY_DTYPES:
        return None
    if set(first.axes) != {"", *_AXES} or len(first.axes) != 5 or first.shape[0] != 1:
        return None
    size = math.prod(first.shape) * ITEM_BYTES[first.dtype]
    offsets = sorted({layer.offset for layer in layers})
    if offsets != list(range(0, block_bytes, size)) or len(offsets) * size != block_bytes:
        return None
    found = sorted(
        zip(first.strides[1:], first.shape[1:], first.axes[1:], strict=True), reverse=True
    )
    expected = math.prod(first.shape)
    for stride, count, _ in found:
        expected //= count
        if count > 1 and stride != expected:
            return None
    inner = tuple((_AXES[name], count) for _, count, name in found)
    return KvLayout(first.dtype, ((axes.LAYER, len(offsets)), *inner))


def block_values(shards: Sequence[Shard]) -> BlockValues:
    """The values of whole blocks, from what all workers report."""
    parts: list[PartValues] = []
    for shard in shards:
        found = shard.values or PartValues(shard.block_bytes)
        if shard.rank % shard.replicas == 0:
            parts.append(found)
        elif found != parts[-1]:
            # It reads what another worker has packed. If they differ, pack nothing.
            parts[-1] = PartValues(parts[-1].num_bytes)
    return BlockValues(tuple(parts), on_gpu=all(shard.device == "cuda" for shard in shards))
