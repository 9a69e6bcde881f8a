"""vLLM's KV cache groups are read as ours, or refused with a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.connectors.vllm.groups import (
    describe_groups,
    is_latent,
    is_one_plain_spec,
    kept_ids,
    page_bytes,
    read_groups,
)
from penstock.errors import ConfigError
from penstock.groups.kinds import Group, Kind

# Stand-ins: a spec is known by the name of its class.


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 512
    dcp_sharded: bool = True
    prefix_cacheable: bool = True
    non_causal: bool = False


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class SlidingWindowSpec:
    block_size: int = 16
    page_size_bytes: int = 512
    sliding_window: int = 40
    extra_retained_tokens: int = 0
    dcp_sharded: bool = False


@dataclass(frozen=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    prefix_cacheable: bool = True


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 512
    attention_chunk_size: int = 64
    dcp_sharded: bool = False


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = 16
    page_size_bytes: int = 512
    mamba_cache_mode: str = "align"


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any] = field(default_factory=dict)

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())


def uniform(**layers: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(16, layers)


def group_of(spec: Any, *names: str, **fields: Any) -> Any:
    names = names or tuple(getattr(spec, "kv_cache_specs", ["layer"]))
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(names), **fields)


def config_of(*groups: Any) -> Any:
    found = [
        group if isinstance(group, SimpleNamespace) else group_of(group, f"layer {place}")
        for place, group in enumerate(groups)
    ]
    return SimpleNamespace(kv_cache_groups=found)


def parallel(dcp: int | None = None, interleave: int = 1) -> Any:
    fields = {} if dcp is None else {"decode_context_parallel_size": dcp}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave, **fields)
    )


def read(*groups: Any, dcp: int | None = None) -> tuple[Group, ...]:
    return read_groups(config_of(*groups), parallel(dcp)).groups


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FullAttentionSpec(32), Group(0, Kind.FULL, 32)),
        (MLAAttentionSpec(64), Group(0, Kind.FULL, 64)),
        (SlidingWindowSpec(16, sliding_window=48), Group(0, Kind.WINDOW, 16, 48)),
        (SlidingWindowSpec(16, extra_retained_tokens=3), Group(0, Kind.WINDOW, 16, 40, 3)),
        (SlidingWindowMLASpec(64, sliding_window=128), Group(0, Kind.WINDOW, 64, 128)),
        (ChunkedLocalAttentionSpec(16), Group(0, Kind.CHUNK, 16, 64)),
        (MambaSpec(128), Group(0, Kind.STATE, 128)),
    ],
    ids=str,
)
def test_each_kind_is_read(spec: Any, expected: Group) -> None:
    assert read(spec) == (expected,)


def test_groups_keep_vllms_numbers_and_order() -> None:
    found = read(SlidingWindowSpec(64), FullAttentionSpec(32), SlidingWindowSpec(64))
    assert [(group.index, group.kind) for group in found] == [
        (0, Kind.WINDOW),
        (1, Kind.FULL),
        (2, Kind.WINDOW),
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SinkFullAttentionSpec", "static attention sinks, because their KV is not part of"),
        ("CrossAttentionSpec", "cross-attention, because its KV depends on the encoder's"),
        ("EncoderOnlyAttentionSpec", "encoder-only attention, because it has no prefix"),
        ("HiddenStateCacheSpec", "caches of hidden states, because they are not KV"),
        ("HiSparseHotSpec", "HiSparse, because vLLM itself keeps its KV in DRAM"),
        ("HiSparseResidentSpec", "HiSparse, because vLLM itself keeps its KV in DRAM"),
        ("RSWASpec", "reference sliding windows, because what they keep depends on"),
        ("TomorrowsSpec", "KV caches of type TomorrowsSpec, which it does not know"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_cannot_be_restored_is_refused(name: str, why: str, is_wrapped: bool) -> None:
    spec = make_dataclass(name, [("block_size", int)])(16)
    with pytest.raises(ConfigError, match=f"^Penstock does not support {why}.*Start vLLM without"):
        read(FullAttentionSpec(), uniform(a=spec, b=spec) if is_wrapped else spec)


def test_attention_to_later_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="not causal, because KV then depends on later tokens"):
        read(FullAttentionSpec(non_causal=True))


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_without_prefix_caching_are_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match='set mamba_cache_mode to "align" and enable prefix'):
        read(FullAttentionSpec(), MambaSpec(mamba_cache_mode=mode))


def test_states_of_a_vllm_without_modes_are_refused() -> None:
    old = make_dataclass("MambaSpec", [("block_size", int)])(16)
    with pytest.raises(ConfigError, match="mamba_cache_mode"):
        read(old)


def test_a_group_in_dram_is_refused() -> None:
    with pytest.raises(ConfigError, match="HiSparse"):
        read(group_of(FullAttentionSpec(), host_resident=True))


def test_a_model_with_nothing_to_reuse_is_refused() -> None:
    for groups in ([], [FullAttentionSpec(prefix_cacheable=False)]):
        with pytest.raises(ConfigError, match="without a KV cache that can be reused"):
            read(*groups)


# Layers of one group with specs of their own.


def test_layers_of_one_kind_may_differ_in_size() -> None:
    small, large = MLAAttentionSpec(page_size_bytes=132), MLAAttentionSpec(page_size_bytes=656)
    config = config_of(group_of(uniform(attn=large, indexer=small)))
    assert read_groups(config, parallel()).groups == (Group(0, Kind.FULL, 16),)
    assert page_bytes(config) == {"attn": 656, "indexer": 132}


def test_full_attention_and_mla_are_one_kind() -> None:
    assert read(uniform(a=FullAttentionSpec(), b=MLAAttentionSpec())) == (Group(0, Kind.FULL, 16),)


@pytest.mark.parametrize(
    "layers",
    [
        {"a": FullAttentionSpec(), "b": SlidingWindowSpec()},
        {"a": SlidingWindowSpec(), "b": SlidingWindowSpec(sliding_window=41)},
        {"a": SlidingWindowSpec(), "b": SlidingWindowSpec(extra_retained_tokens=1)},
        {"a": FullAttentionSpec(16), "b": FullAttentionSpec(32)},
        {"a": ChunkedLocalAttentionSpec(), "b": ChunkedLocalAttentionSpec(attention_chunk_size=8)},
    ],
    ids=str,
)
def test_layers_of_several_kinds_in_one_group_are_refused(layers: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="group with layers of several kinds"):
        read(uniform(**layers))


# Groups that are left out.


def test_groups_that_are_computed_again_or_not_transferred_are_left_out() -> None:
    config = config_of(
        SlidingWindowMLASpec(prefix_cacheable=False),
        FullAttentionSpec(32),
        group_of(FullAttentionSpec(), "copy", enable_kv_transfer=False),
        group_of(SlidingWindowSpec(), "window", enable_kv_transfer=True),
    )
    assert kept_ids(config) == [1, 3]
    found = read_groups(config, parallel()).groups
    assert [(group.index, group.kind) for group in found] == [(1, Kind.FULL), (3, Kind.WINDOW)]
    assert page_bytes(config) == {"layer 1": 512, "window": 512}


def test_what_is_left_out_is_not_refused() -> None:
    scratch = make_dataclass(
        "CircularBufferSpec", [("block_size", int), ("prefix_cacheable", bool)]
    )
    config = config_of(FullAttentionSpec(), scratch(8, False))
    found = read_groups(config, parallel())
    assert [group.kind for group in found] == [Kind.FULL]
    assert not found.is_plain, "its blocks limit the lengths of hits"
    assert not is_one_plain_spec(config), "its layers still share memory with the others"
    assert "CircularBufferSpec" in describe_groups(config, parallel())


# Context parallelism.


def test_dcp_makes_the_blocks_of_sharded_specs_larger() -> None:
    specs = (
        FullAttentionSpec(16),
        FullAttentionSpec(16, dcp_sharded=False),
        SlidingWindowSpec(16),
        MambaSpec(32),  # says nothing: states are never sharded
    )
    for dcp in (1, 2, 4):
        sizes = [group.block_tokens for group in read(*specs, dcp=dcp)]
        assert sizes == [16 * dcp, 16, 16, 32]


def test_a_vllm_whose_specs_do_not_say_shards_full_attention() -> None:
    old = make_dataclass("FullAttentionSpec", [("block_size", int)])(16)
    assert read(old, dcp=2) == (Group(0, Kind.FULL, 32),)
    assert read(old) == (Group(0, Kind.FULL, 16),)


# What all of it is called.


def test_the_namespace_tells_groups_apart() -> None:
    mixes = [
        [FullAttentionSpec()],
        [MLAAttentionSpec()],
        [FullAttentionSpec(), SlidingWindowSpec()],
        [SlidingWindowSpec(), FullAttentionSpec()],
        [FullAttentionSpec(), SlidingWindowSpec(sliding_window=41)],
        [FullAttentionSpec(), SlidingWindowSpec(extra_retained_tokens=1)],
        [FullAttentionSpec(), ChunkedLocalAttentionSpec()],
        [FullAttentionSpec(), ChunkedLocalAttentionSpec(attention_chunk_size=32)],
        [FullAttentionSpec(), MambaSpec()],
        [FullAttentionSpec(), MambaSpec(page_size_bytes=1024)],
        [FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec()],
        [uniform(a=FullAttentionSpec(), b=FullAttentionSpec(page_size_bytes=8))],
    ]
    ways = [parallel(), parallel(1), parallel(2), parallel(4), parallel(2, interleave=64)]
    words = {describe_groups(config_of(*mix), way) for mix in mixes for way in ways}
    assert len(words) == len(mixes) * (len(ways) - 1)


def test_the_order_of_layers_in_a_group_is_of_no_account() -> None:
    one, other = FullAttentionSpec(), FullAttentionSpec(page_size_bytes=8)
    words = [
        describe_groups(config_of(mix), parallel())
        for mix in (uniform(a=one, b=other), uniform(b=other, a=one))
    ]
    assert words[0] == words[1]


def test_latent_caches_are_those_without_plain_attention() -> None:
    assert is_latent(config_of(MLAAttentionSpec()))
    assert is_latent(config_of(MLAAttentionSpec(), SlidingWindowMLASpec()))
    assert is_latent(config_of(group_of(uniform(a=MLAAttentionSpec(), b=MLAAttentionSpec()))))
    # Groups that are not kept do not count.
    assert is_latent(config_of(MLAAttentionSpec(), FullAttentionSpec(prefix_cacheable=False)))
    assert not is_latent(config_of(FullAttentionSpec()))
    assert not is_latent(config_of(MLAAttentionSpec(), SlidingWindowSpec()))
    assert not is_latent(config_of(group_of(uniform(a=MLAAttentionSpec(), b=FullAttentionSpec()))))


def test_old_stores_are_of_one_group_of_plain_attention() -> None:
    assert is_one_plain_spec(config_of(FullAttentionSpec()))
    for other in ([MLAAttentionSpec()], [SlidingWindowSpec()], [FullAttentionSpec()] * 2):
        assert not is_one_plain_spec(config_of(*other))
    assert not is_one_plain_spec(config_of(group_of(uniform(a=FullAttentionSpec()))))
