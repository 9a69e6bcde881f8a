"""Reads the KV cache groups of a model in vLLM, and refuses those that cannot be restored.

The scheduler knows what groups mean, the workers how their bytes lie: vLLM gives both different
specs. With pipeline parallelism the scheduler lists the layers of the first stage only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from penstock.connectors.vllm.support import refusal
from penstock.groups.kinds import Group, Groups, Kind

_KINDS = {
    "FullAttentionSpec": Kind.FULL,
    "MLAAttentionSpec": Kind.FULL,
    "SlidingWindowSpec": Kind.WINDOW,
    "SlidingWindowMLASpec": Kind.WINDOW,
    "ChunkedLocalAttentionSpec": Kind.CHUNK,
    "MambaSpec": Kind.STATE,
}

_REFUSED = {
    "SinkFullAttentionSpec": "static attention sinks, because their KV is not part of a prefix",
    "CrossAttentionSpec": "cross-attention, because its KV depends on the encoder's input",
    "EncoderOnlyAttentionSpec": "encoder-only attention, because it has no prefix",
    "HiddenStateCacheSpec": "caches of hidden states, because they are not KV",
    "HiSparseHotSpec": "HiSparse, because vLLM itself keeps its KV in DRAM",
    "HiSparseResidentSpec": "HiSparse, because vLLM itself keeps its KV in DRAM",
    "RSWASpec": "reference sliding windows, because what they keep depends on the prompt's end",
}


def read_groups(kv_cache_config: Any, vllm_config: Any) -> Groups:
    """The groups whose KV is kept. Raises ConfigError for a group that cannot be restored."""
    dcp = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    found = []
    kept = kept_ids(kv_cache_config)
    for index in kept:
        group = kv_cache_config.kv_cache_groups[index]
        if getattr(group, "host_resident", False):
            raise refusal("HiSparse, because vLLM itself keeps its KV in DRAM")
        found.append(_group(index, layer_specs(group.kv_cache_spec), dcp))
    if not found:
        raise refusal("a model without a KV cache that can be reused")
    others = [
        _block_tokens(spec, dcp)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if index not in kept
        for spec in layer_specs(group.kv_cache_spec)
    ]
    return Groups(tuple(found), tuple(sorted(set(others))))


def kept_ids(kv_cache_config: Any) -> list[int]:
    """The groups that vLLM's own prefix cache has too. It computes the others again."""
    kept = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        is_cached = getattr(group.kv_cache_spec, "prefix_cacheable", True)
        if is_cached and getattr(group, "enable_kv_transfer", True):
            kept.append(index)
    return kept


def layer_specs(spec: Any) -> Collection[Any]:
    """The specs of a group's layers, which may differ in size but not in kind."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return (spec,) if by_layer is None else list(by_layer.values())


def page_bytes(kv_cache_config: Any) -> dict[str, int]:
    """The size of a block in each layer of the kept groups, with padding."""
    pages = {}
    for index in kept_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[index]
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            if by_layer is None:
                pages[name] = int(group.kv_cache_spec.page_size_bytes)
            elif name in by_layer:  # the others use the cache of one of these
                pages[name] = int(by_layer[name].page_size_bytes)
    return pages


def is_latent(kv_cache_config: Any) -> bool:
    """Whether all KV is MLA's, which every tensor-parallel worker holds as a whole."""
    specs = [
        spec
        for index in kept_ids(kv_cache_config)
        for spec in layer_specs(kv_cache_config.kv_cache_groups[index].kv_cache_spec)
    ]
    return all(
        type(spec).__name__ in {"MLAAttentionSpec", "SlidingWindowMLASpec"} for spec in specs
    )


def is_one_plain_spec(kv_cache_config: Any) -> bool:
    """Whether all layers are plain attention with blocks of the same size."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ == "FullAttentionSpec"


def describe_groups(kv_cache_config: Any, vllm_config: Any) -> str:
    """All groups in words, for the namespace."""
    parallel = vllm_config.parallel_config
    words = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = sorted({_describe(spec) for spec in layer_specs(group.kv_cache_spec)})
        words.append(f"{index}: {' / '.join(specs)}")
    dcp = getattr(parallel, "decode_context_parallel_size", 1)
    if dcp > 1:
        words.append(f"dcp {dcp} by {getattr(parallel, 'cp_kv_cache_interleave_size', 1)}")
    return "; ".join(words)


def _group(index: int, specs: Iterable[Any], dcp: int) -> Group:
    groups = {_read(index, spec, dcp) for spec in specs}
    if len(groups) != 1:
        raise refusal("a KV cache group with layers of several kinds")
    return groups.pop()


def _read(index: int, spec: Any, dcp: int) -> Group:
    name = type(spec).__name__
    if name in _REFUSED:
        raise refusal(_REFUSED[name])
    kind = _KINDS.get(name)
    if kind is None:
        raise refusal(f"KV caches of type {name}, which it does not know")
    if getattr(spec, "non_causal", False):
        raise refusal("attention that is not causal, because KV then depends on later tokens")
    block_tokens = _block_tokens(spec, dcp, is_sharded=kind is Kind.FULL)
    match kind:
        case Kind.WINDOW:
            extra = getattr(spec, "extra_retained_tokens", 0)
            return Group(index, kind, block_tokens, spec.sliding_window, extra)
        case Kind.CHUNK:
            return Group(index, kind, block_tokens, spec.attention_chunk_size)
        case Kind.STATE:
            if getattr(spec, "mamba_cache_mode", "none") != "align":
                raise refusal(
                    'state layers without prefix caching: set mamba_cache_mode to "align" and '
                    "enable prefix caching"
                )
    return Group(index, kind, block_tokens)


def _block_tokens(spec: Any, dcp: int, *, is_sharded: bool = False) -> int:
    """The tokens of a block, over all ranks that share it. `is_sharded`: unless vLLM says."""
    return int(spec.block_size) * (dcp if getattr(spec, "dcp_sharded", is_sharded) else 1)


def _describe(spec: Any) -> str:
    fields = getattr(type(spec), "__dataclass_fields__", {})
    shown = [f"{name}={getattr(spec, name)}" for name in sorted(fields)]
    return f"{type(spec).__name__}({', '.join(shown)})"
