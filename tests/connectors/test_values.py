"""What workers report about their values, and which codecs apply then."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.codecs.blocks import PartValues, TierCodecs
from penstock.codecs.layout import DIM, HEAD, KIND, LAYER, TOKEN
from penstock.connectors.vllm.audit_layout import layer_bytes
from penstock.connectors.vllm.layout import Cache, read_layout, read_union
from penstock.connectors.vllm.orders import Shard
from penstock.connectors.vllm.values import block_values, cache_dtypes, kv_layout, part_values
from penstock.types import Tier

BLOCKS = 10
HEADS, TOKENS, HEAD_DIM = 2, 16, 64
PAGE = HEADS * TOKENS * 2 * HEAD_DIM * 2  # bytes
NHD = (HEADS * TOKENS * 2 * HEAD_DIM, TOKENS * 2 * HEAD_DIM, 2 * HEAD_DIM, 1)


def cache(address: int, dtype: str = "bfloat16", *, token_first: bool = False) -> Cache:
    """[blocks, heads, tokens, K and V]; in memory tokens may come before heads."""
    strides = NHD
    if token_first:
        strides = (NHD[0], 2 * HEAD_DIM, HEADS * 2 * HEAD_DIM, 1)
    return Cache(address, (BLOCKS, HEADS, TOKENS, 2 * HEAD_DIM), strides, 2, dtype)


def attention_spec() -> Any:
    return SimpleNamespace(num_kv_heads=HEADS, head_size=HEAD_DIM)


def config_of(*groups: tuple[Any, list[str]]) -> Any:
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups
        ],
    )


def plain(num_layers: int = 3, *, on_cpu: bool = False, **options: Any) -> PartValues:
    caches = {f"{n}": cache((n + 1) << 30, **options) for n in range(num_layers)}
    memory, _ = read_layout(caches, BLOCKS, PAGE)
    config = config_of((attention_spec(), list(caches)))
    layers = layer_bytes(caches, memory, config, on_cpu=on_cpu)
    return part_values(memory, cache_dtypes(caches, config), layers)


def test_plain_attention_has_one_dtype_and_a_layout() -> None:
    values = plain()
    assert values.dtype == "bfloat16"
    assert values.stretches == (PAGE,) * 3
    assert values.layout is not None
    assert values.layout.axes == (
        (LAYER, 3),
        (HEAD, HEADS),
        (TOKEN, TOKENS),
        (KIND, 2),
        (DIM, HEAD_DIM),
    )
    assert values.layout.num_bytes == values.num_bytes


def test_the_order_in_memory_decides() -> None:
    layout = plain(token_first=True).layout
    assert layout is not None
    assert [name for name, _ in layout.axes] == [LAYER, TOKEN, HEAD, KIND, DIM]


def test_on_a_cpu_keys_are_packed_so_there_is_no_layout() -> None:
    values = plain(on_cpu=True)
    assert (values.dtype, values.layout) == ("bfloat16", None)


def test_quantized_kv_has_no_layout_and_is_not_packed() -> None:
    values = plain(dtype="float8_e4m3fn")
    assert (values.dtype, values.layout) == ("float8_e4m3fn", None)


def test_groups_that_share_memory_have_the_layout_of_one_of_them() -> None:
    caches = {name: cache((n + 1) << 30) for n, name in enumerate(["full 0", "full 1"])}
    caches["window 0"] = caches["full 0"]
    memory, _ = read_union(caches, BLOCKS, dict.fromkeys(caches, PAGE))
    config = config_of((attention_spec(), ["full 0", "full 1"]), (attention_spec(), ["window 0"]))
    layers = layer_bytes(caches, memory, config, on_cpu=False)
    layout = kv_layout(layers, memory.block_bytes)
    assert layout is not None
    assert layout.size(LAYER) == 2


def test_a_block_with_padding_has_no_layout() -> None:
    caches = {"a": replace_stride(cache(1 << 20), PAGE)}
    memory, _ = read_union(caches, BLOCKS, {"a": PAGE + 512})
    config = config_of((attention_spec(), ["a"]))
    layers = layer_bytes(caches, memory, config, on_cpu=False)
    assert kv_layout(layers, memory.block_bytes) is None


def replace_stride(one: Cache, stride: int) -> Cache:
    return one._replace(strides=(stride, *one.strides[1:]))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["torch.bfloat16", "torch.bfloat16"], {"bfloat16"}),
        (["torch.bfloat16", "torch.float32"], {"bfloat16", "float32"}),
    ],
)
def test_states_count_by_their_own_types(states: list[str], expected: set[str]) -> None:
    caches = {"full": cache(1 << 20), "state": cache(1 << 20, "int8")}
    spec = SimpleNamespace(shapes=[(4,), (4,)], dtypes=states)
    assert cache_dtypes(caches, config_of((attention_spec(), ["full"]), (spec, ["state"]))) == (
        expected
    )


# Whole blocks.


def shards(*parts: PartValues | None, device: str = "cuda", replicas: int = 1) -> list[Shard]:
    return [
        Shard(rank, 3 * PAGE, BLOCKS, "", 1, device=device, replicas=replicas, values=part)
        for rank, part in enumerate(parts)
    ]


def chosen(found: list[Shard], setting: str = "auto") -> str:
    return TierCodecs.choose({Tier.HOST: setting}, block_values(found)).host.name


def test_on_a_gpu_bfloat16_is_packed_and_on_a_cpu_it_is_not() -> None:
    assert chosen(shards(plain(), plain())) == "lossless"
    assert chosen(shards(plain(), plain(), device="cpu")) == "raw"
    assert chosen(shards(plain(), device="cpu"), "lossless") == "lossless"


def test_one_worker_that_cannot_pack_is_enough_for_raw() -> None:
    assert chosen(shards(plain(), None)) == "raw"
    assert chosen(shards(plain(), plain(dtype="float16"))) == "raw"
    mixed = replace(plain(), dtype="")
    assert "not known, or there are several" in block_values(shards(mixed)).why_not("lossless")


def test_workers_with_the_same_bytes_share_a_part() -> None:
    assert len(block_values(shards(plain(), plain(), replicas=2)).parts) == 1
    # If they would pack it in different ways, nobody packs it.
    other = replace(plain(), stretches=(3 * PAGE,))
    assert chosen(shards(plain(), other, replicas=2)) == "raw"
