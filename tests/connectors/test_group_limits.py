"""Reading vLLM's KV cache groups, with specs that look like its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.connectors.vllm.groups import page_bytes, read_groups


class FullAttentionSpec(SimpleNamespace):
    """Attention of a layer."""


class CircularBufferSpec(SimpleNamespace):
    """The keys of tokens that are not compressed yet."""

    prefix_cacheable = False


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """Layers of several sizes."""


def config(*specs: Any) -> Any:
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer {index}"])
        for index, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def vllm_config(dcp: int = 1) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=dcp))


@pytest.mark.parametrize(("ring", "align"), [(4, 16), (48, 48)])
def test_a_group_that_vllm_fills_anew_limits_hits(ring: int, align: int) -> None:
    found = read_groups(
        config(FullAttentionSpec(block_size=16), CircularBufferSpec(block_size=ring)),
        vllm_config(),
    )
    assert [group.index for group in found] == [0]
    assert found.align_tokens == align, "vLLM's own hits are multiples of all block sizes"
    assert not found.is_plain, "vLLM has two groups: block ids do not tell which load failed"
    assert found.max_hit(96) == 96 - align, "the ring lacks the tokens before the last one"
    assert found.max_hit(97) == 96


def test_attention_alone_is_loaded_up_to_its_last_token() -> None:
    found = read_groups(config(FullAttentionSpec(block_size=16)), vllm_config())
    assert found.is_plain
    assert found.max_hit(96) == 96


def test_a_layer_that_uses_the_cache_of_another_has_no_size_of_its_own() -> None:
    sizes = UniformTypeKVCacheSpecs(
        kv_cache_specs={"a": SimpleNamespace(page_size_bytes=8)}, page_size_bytes=24
    )
    made = config(sizes)
    made.kv_cache_groups[0].layer_names = ["a", "shares the cache of a"]
    assert page_bytes(made) == {"a": 8}
