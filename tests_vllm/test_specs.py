"""Groups of models that do not run on a CPU, with vLLM's own specs and its own block manager.

No engine. The manager allocates blocks for a load as the scheduler asks it to; the entries of the
tables that are not null must be exactly the blocks that a hit needs. A null where a block is needed
would make the load impossible, and a block that is not loaded would be read as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.connectors.vllm.audit_layout import layer_bytes
from penstock.connectors.vllm.groups import (
    describe_groups,
    is_latent,
    is_one_plain_spec,
    kept_ids,
    page_bytes,
    read_groups,
)
from penstock.connectors.vllm.layout import Cache, read_union
from penstock.errors import ConfigError
from penstock.groups.kinds import Group, Groups, Kind

torch = pytest.importorskip("torch")
specs = pytest.importorskip("vllm.v1.kv_cache_interface")
utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
managers = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager")
Layout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout
if not hasattr(utils, "kv_cache_groups_tp_replicas"):
    pytest.skip("these specs are those of vLLM 0.32", allow_module_level=True)

NULL = 0
MAX_LEN = 1 << 16


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    from vllm.config import VllmConfig
    from vllm.utils.hashing import sha256

    managers.register_all_kvcache_specs(VllmConfig())
    utils.init_none_hash(sha256)


# Specs as the models have them.


def full(block: int = 16, heads: int = 2, head: int = 64, **fields: Any) -> Any:
    return specs.FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=head, dtype=torch.bfloat16, **fields
    )


def window(block: int, span: int, **fields: Any) -> Any:
    return specs.SlidingWindowSpec(
        block_size=block,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16,
        sliding_window=span,
        **fields,
    )


def chunk(block: int, span: int) -> Any:
    return specs.ChunkedLocalAttentionSpec(
        block_size=block,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16,
        attention_chunk_size=span,
    )


def mla(block: int = 64, **fields: Any) -> Any:
    """DeepSeek V3.2's latent cache: 656 bytes a token."""
    known = {
        "num_kv_heads": 1,
        "head_size": 576,
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "state_content_bytes": 656,
        "max_tp_shards": 1,
    }
    return specs.MLAAttentionSpec(block_size=block, **{**known, **fields})


def indexer(block: int = 64) -> Any:
    """DeepSeek V3.2's keys of the sparse indexer: 128 numbers and a scale a token."""
    return mla(
        block,
        head_size=132,
        cache_dtype_str=None,
        state_content_bytes=None,
        cache_role=specs.SparseCacheRole.INDEXER,
    )


def gdn(block: int = 544, **fields: Any) -> Any:
    """Qwen3-Next's gated delta net on one worker: a convolution and 32 heads of 128 x 128."""
    return specs.MambaSpec(
        block_size=block,
        shapes=((3, 8192), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
        **fields,
    )


def replayed(block: int = 64) -> Any:
    """A window that vLLM computes again after every hit."""
    return specs.SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=128,
        bounded_replay=True,
    )


def ring(block: int = 8) -> Any:
    """Scratch of one block for each request."""
    return specs.CircularBufferSpec(
        block_size=block, num_kv_heads=1, head_size=128, dtype=torch.bfloat16
    )


def uniform(**layers: Any) -> Any:
    found = specs.UniformTypeKVCacheSpecs.from_specs(layers)
    assert found is not None
    return found


def config_of(*groups: Any, eagle: Sequence[int] = (), num_blocks: int = 2000) -> Any:
    return specs.KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            specs.KVCacheGroupSpec(
                list(getattr(spec, "kv_cache_specs", [f"layer {place}"])),
                spec,
                is_eagle_group=place in eagle,
            )
            for place, spec in enumerate(groups)
        ],
    )


def vllm_config(dcp: int = 1, block: int = 16) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=1
        ),
        cache_config=SimpleNamespace(
            block_size=block, prefix_match_unit=None, enable_prefix_caching=True
        ),
        kv_transfer_config=object(),
    )


# What they are read as.


def test_qwen3_next() -> None:
    page = 544 * 2 * 256 * 2 * 2
    attention = full(544, heads=2, head=256)
    state = gdn(page_size_padded=page * 2)
    config = config_of(attention, state, state, state)
    groups = read_groups(config, vllm_config())
    assert [group.kind for group in groups] == [Kind.FULL, *[Kind.STATE] * 3]
    assert (groups.unit_tokens, groups.align_tokens) == (544, 544)
    assert not is_one_plain_spec(config)
    assert not is_latent(config)
    sizes = page_bytes(config)
    assert sizes == {"layer 0": page, **{f"layer {n}": 2 * page for n in (1, 2, 3)}}
    words = describe_groups(config, vllm_config())
    assert "MambaSpec" in words
    assert "(32, 128, 128)" in words


def test_states_without_prefix_caching_are_refused() -> None:
    state = specs.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match='set mamba_cache_mode to "align"'):
        read_groups(config_of(full(), state), vllm_config())


def test_deepseek_v32_on_a_worker_and_on_the_scheduler() -> None:
    layers = {"0.attn": mla(), "0.indexer": indexer(), "1.attn": mla(), "1.indexer": indexer()}
    on_worker = config_of(uniform(**layers))
    on_scheduler = utils.generate_scheduler_kv_cache_config([on_worker])
    for config in (on_worker, on_scheduler):
        groups = read_groups(config, vllm_config())
        assert groups.groups == (Group(0, Kind.FULL, 64),)
        assert groups.is_plain
        assert is_latent(config)
        assert not is_one_plain_spec(config)
    sizes = page_bytes(on_worker)
    assert sizes["0.attn"] == 64 * 656
    assert sizes["0.indexer"] == 64 * 132
    assert sum(sizes.values()) == on_worker.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    assert utils.kv_cache_groups_tp_replicas(on_worker.kv_cache_groups, 8) == 8


def test_plain_attention_beside_mla_is_not_kept_once_for_all() -> None:
    layers = {"attn": mla(dtype=torch.bfloat16, state_content_bytes=None), "draft": full(64)}
    config = config_of(uniform(**layers))
    assert read_groups(config, vllm_config()).is_plain
    assert not is_latent(config)


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize(
    "groups",
    [
        [full()],
        [mla()],
        [uniform(attn=mla(), indexer=indexer())],
        [full(64, dcp_sharded=False)],
        [full(544), gdn()],
        [full(16), window(16, 48, dcp_sharded=False)],
        [full(16), full(32, dcp_sharded=False)],
        [mla(64), window(16, 48, dcp_sharded=False)],
    ],
    ids=str,
)
def test_with_dcp_blocks_have_the_tokens_that_vllm_says(groups: list[Any], dcp: int) -> None:
    config, chosen = config_of(*groups), vllm_config(dcp, groups[0].block_size)
    found = read_groups(config, chosen)
    assert [group.block_tokens for group in found] == [
        utils.resolve_dcp_kv_block_size(spec, dcp) for spec in groups
    ]
    scheduler, hashed = utils.resolve_kv_cache_block_sizes(config, chosen)
    assert (found.align_tokens, found.unit_tokens) == (scheduler, hashed)
    assert (f"dcp {dcp} by 1" in describe_groups(config, chosen)) == (dcp > 1)


@pytest.mark.parametrize(("dcp", "expected"), [(1, 8), (2, 1), (8, 1)])
def test_with_dcp_mla_is_not_the_same_on_all_workers(dcp: int, expected: int) -> None:
    """We take vLLM's number for MLA."""
    config = config_of(uniform(attn=mla(), indexer=indexer()))
    assert utils.kv_cache_groups_tp_replicas(config.kv_cache_groups, 8, dcp) == expected


def test_gemma_4() -> None:
    config = config_of(window(64, 1024), full(32, heads=4))
    groups = read_groups(config, vllm_config())
    assert groups.groups == (Group(0, Kind.WINDOW, 64, 1024), Group(1, Kind.FULL, 32))
    assert (groups.unit_tokens, groups.align_tokens) == (32, 64)


def test_a_drafters_group_is_read_like_any_other() -> None:
    plain, eagle = config_of(full(), full(32)), config_of(full(), full(32), eagle=[1])
    assert read_groups(plain, vllm_config()) == read_groups(eagle, vllm_config())
    extra = read_groups(config_of(full(), window(16, 64, extra_retained_tokens=3)), vllm_config())
    assert extra.groups[1] == Group(1, Kind.WINDOW, 16, 64, 3)


def test_groups_that_vllm_computes_again_are_left_out() -> None:
    config, chosen = config_of(mla(), replayed(), ring(96)), vllm_config()
    assert kept_ids(config) == [0] == list(config.prefix_cacheable_group_ids)
    groups = read_groups(config, chosen)
    assert groups.groups == (Group(0, Kind.FULL, 64),)
    assert not groups.is_plain
    assert groups.align_tokens == utils.resolve_kv_cache_block_sizes(config, chosen)[0]
    assert list(page_bytes(config)) == ["layer 0"]
    assert not is_one_plain_spec(config)


SIZES = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("SinkFullAttentionSpec", {"sink_len": 4}, "static attention sinks"),
        ("CrossAttentionSpec", {}, "cross-attention"),
        ("EncoderOnlyAttentionSpec", {}, "encoder-only attention"),
        ("HiddenStateCacheSpec", {}, "caches of hidden states"),
        ("RSWASpec", {"rswa_window": 32}, "reference sliding windows"),
        ("FullAttentionSpec", {"non_causal": True}, "not causal"),
    ],
)
def test_what_cannot_be_restored_is_refused(kind: str, fields: dict[str, Any], why: str) -> None:
    spec = getattr(specs, kind)(**SIZES, **fields)
    with pytest.raises(ConfigError, match=why):
        read_groups(config_of(full(), spec), vllm_config())


def test_a_group_that_lies_in_dram_is_refused() -> None:
    config = config_of(mla())
    config.kv_cache_groups[0].host_resident = True
    with pytest.raises(ConfigError, match="HiSparse"):
        read_groups(config, vllm_config())


def test_every_spec_of_this_vllm_is_known_or_refused() -> None:
    """A spec class that a new vLLM brings must be looked at."""
    from penstock.connectors.vllm import groups as read

    bases = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
    skipped = {"CircularBufferSpec"}  # never part of a prefix
    known = {*read._KINDS, *read._REFUSED, *bases, *skipped}
    found = {
        name
        for name, kind in vars(specs).items()
        if isinstance(kind, type) and issubclass(kind, specs.KVCacheSpec)
    }
    assert found <= known


def test_descriptions_are_the_same_in_every_process() -> None:
    for spec in (full(), mla(), indexer(), gdn(), window(16, 48), chunk(16, 64)):
        assert " at 0x" not in describe_groups(config_of(spec), vllm_config())


# What the block manager allocates for a load.


@dataclass
class Pool:
    """vLLM's block manager for fabricated groups, called as its scheduler does."""

    config: Any
    groups: Groups
    manager: Any
    hasher: Any
    align: int
    num_requests: int = 0

    @classmethod
    def of(cls, *groups: Any, dcp: int = 1, eagle: Sequence[int] = ()) -> Pool:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        on_worker, chosen = config_of(*groups, eagle=eagle), vllm_config(dcp, groups[0].block_size)
        config = utils.generate_scheduler_kv_cache_config([on_worker])
        scheduler, hashed = utils.resolve_kv_cache_block_sizes(config, chosen)
        manager = KVCacheManager(
            config,
            MAX_LEN,
            scheduler_block_size=scheduler,
            hash_block_size=hashed,
            max_in_flight_tokens=MAX_LEN,
            dcp_world_size=dcp,
            use_eagle=bool(eagle),
        )
        hasher = utils.get_request_block_hasher(hashed, sha256)
        return cls(config, read_groups(config, chosen), manager, hasher, scheduler)

    def request(self, num_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.num_requests += 1
        return Request(
            f"request {self.num_requests}",
            list(range(num_tokens)),
            SamplingParams(max_tokens=1),
            None,
            block_hasher=self.hasher,
        )

    def compute(self, num_tokens: int) -> None:
        """Compute a prompt in steps of one boundary, so that every state is kept, and end it."""
        request = self.request(num_tokens)
        while request.num_computed_tokens < num_tokens:
            self.manager.new_step_starts()
            step = min(self.align, num_tokens - request.num_computed_tokens)
            assert self.manager.allocate_slots(request, step) is not None
            request.num_computed_tokens += step
        self.manager.free(request)

    def load(self, num_tokens: int, end: int) -> tuple[int, list[list[int]], list[list[int]]]:
        """Allocate for a load up to `end`. Returns the local hit, its blocks and the tables."""
        request = self.request(num_tokens)
        self.manager.new_step_starts()
        blocks, start, _ = self.manager.get_computed_blocks(request)
        tail = start % self.align
        if tail:
            start -= tail
            blocks = self.manager.truncate_computed_blocks(blocks, start)
        local = [[block.block_id for block in group] for group in blocks.blocks]
        if end <= start:
            return start, local, []
        allocated = self.manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=start,
            new_computed_blocks=blocks,
            num_external_computed_tokens=end - start,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
            skip_zeroing_group_ids=self.config.prefix_cacheable_group_ids,
        )
        assert allocated is not None
        tables = self.manager.get_blocks(request.request_id).get_block_ids()
        self.manager.free(request)
        return start, local, [list(table) for table in tables]

    def check(self, num_tokens: int, end: int) -> int:
        """What a load of `end` tokens gets is what it needs. Returns the local hit."""
        start, local, tables = self.load(num_tokens, end)
        if not tables:
            return start
        for group in self.groups:
            table, found = tables[group.index], local[group.index]
            last = end // group.block_tokens
            there = [place for place, block in enumerate(table[:last]) if block != NULL]
            assert there == list(group.needed(end)), (group, end, start)
            new = list(group.needed(end, start))
            assert all(table[place] not in found for place in new)
            # What is not loaded is vLLM's own hit, at its own place.
            for place in there:
                if place not in new:
                    assert table[place] == found[place], (group, end, start)
        return start


MIXES: dict[str, Any] = {
    "plain": {"groups": [full()]},
    "Qwen3-Next": {"groups": [full(544), gdn(), gdn()]},
    "Qwen3-Next with drafts": {
        "groups": [full(544), gdn(num_speculative_blocks=2)],
        "eagle": [0],
    },
    "DeepSeek V3.2": {"groups": [uniform(attn=mla(), indexer=indexer())]},
    "MLA, DCP 2": {"groups": [mla()], "dcp": 2},
    "plain, DCP 4": {"groups": [full()], "dcp": 4},
    "GDN, DCP 2": {"groups": [full(544), gdn(1088)], "dcp": 2},
    "a replicated draft, DCP 2": {"groups": [full(16), full(16, dcp_sharded=False)], "dcp": 2},
    "Gemma 3": {"groups": [full(16), window(16, 40)]},
    "Gemma 4": {"groups": [window(64, 200), full(32)]},
    "the larger blocks are full": {"groups": [full(64), window(16, 100)]},
    "a window of one block": {"groups": [full(16), window(16, 16)]},
    "a window of one token": {"groups": [full(16), window(16, 1)]},
    "a window of a block and a token": {"groups": [full(16), window(16, 17)]},
    "two windows": {"groups": [full(16), window(16, 24), window(32, 90)]},
    "a window alone": {"groups": [window(16, 50)]},
    "Llama 4": {"groups": [full(16), chunk(16, 64)]},
    "chunks that end within a block": {"groups": [full(16), chunk(16, 40)]},
    "a state alone": {"groups": [gdn(32)]},
    "a state of larger blocks": {"groups": [full(16), gdn(64)]},
    "a state and a window": {"groups": [full(16), window(16, 40), gdn(16)]},
    "groups that are not kept": {"groups": [mla(64), replayed(), ring()]},
    "EAGLE": {"groups": [full(16), full(32)], "eagle": [1]},
    "EAGLE, a window": {
        "groups": [full(16), window(16, 40, extra_retained_tokens=3)],
        "eagle": [1],
    },
}


@pytest.fixture(params=MIXES.values(), ids=MIXES.keys())
def pool(request: pytest.FixtureRequest) -> Pool:
    mix = request.param
    return Pool.of(*mix["groups"], dcp=mix.get("dcp", 1), eagle=mix.get("eagle", ()))


def test_a_load_into_an_empty_cache_gets_the_blocks_it_needs(pool: Pool) -> None:
    assert pool.groups.align_tokens == pool.align
    num_tokens = 9 * pool.align + 1
    top = pool.groups.max_hit(num_tokens)
    for end in range(pool.align, top + 1, pool.align):
        assert pool.check(num_tokens, end) == 0


def test_a_load_after_a_local_hit_gets_the_other_blocks(pool: Pool) -> None:
    num_tokens = 9 * pool.align + 1
    top = pool.groups.max_hit(num_tokens)
    starts = set()
    for num_computed in range(1, 8):
        pool.manager.reset_prefix_cache()
        pool.compute(num_computed * pool.align + 1)
        for end in range(pool.align, top + 1, pool.align):
            starts.add(pool.check(num_tokens, end))
    # For a window of one token vLLM looks for a block where it needs none, and has no hits.
    if all(group.span != 1 for group in pool.groups):
        assert len(starts - {0}) > 3


def test_a_load_of_a_whole_prompt_of_full_attention(pool: Pool) -> None:
    """Windows and states compute the last token, so their longest load is shorter."""
    num_tokens = 4 * pool.align
    top = pool.groups.max_hit(num_tokens)
    is_whole = pool.groups.all_full and not pool.groups.others
    assert top == (num_tokens if is_whole else num_tokens - pool.align)
    assert pool.check(num_tokens, top) == 0


# Where vLLM puts the layers of such models in memory.


def tensors_of(config: Any, layout: Any) -> dict[str, Any]:
    """Each layer's view, as a worker makes it."""
    size = config.kv_cache_tensors[0].size
    raw = torch.zeros(size, dtype=torch.int8)
    by_layer = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            by_layer[name] = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(
                name, group.kv_cache_spec
            )
    found = {}
    for tensor in config.kv_cache_tensors:
        views = specs.create_kv_cache_views(
            raw, by_layer[tensor.layers[0]], config.num_blocks, layout, tensor
        )
        found.update(zip(tensor.layers, views, strict=True))
    return found


def laid_out(layout: Any, *groups: tuple[Any, int]) -> Any:
    """vLLM's own plan of memory for groups with so many layers each."""
    given = [
        specs.KVCacheGroupSpec(
            list(getattr(spec, "kv_cache_specs", [f"{place}.{n}" for n in range(num_layers)])),
            spec,
        )
        for place, (spec, num_layers) in enumerate(groups)
    ]
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=4,
    )
    config = SimpleNamespace(
        cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None)
    )
    return utils.get_kv_cache_config_from_groups(config, given, 1 << 34)


def copy_block(memory: Any, source: int, target: int) -> None:
    for stretch in memory.stretches:
        ctypes.memmove(
            stretch.address + target * stretch.stride_bytes,
            stretch.address + source * stretch.stride_bytes,
            stretch.num_bytes,
        )


PAGE = 16 * 2 * 64 * 2 * 2  # bytes of `full()`
IN_MEMORY: dict[str, list[tuple[Any, int]]] = {
    "windows": [(full(), 2), (window(16, 40), 2), (window(16, 40), 1)],
    "states": [
        (full(), 2),
        (
            specs.MambaSpec(
                block_size=16,
                shapes=((3, 40), (2, 16, 16)),
                dtypes=(torch.bfloat16, torch.float32),
                mamba_cache_mode="align",
                page_size_padded=PAGE,
            ),
            2,
        ),
    ],
    "DeepSeek V3.2": [(uniform(a=mla(), i=indexer(), b=mla(), j=indexer()), 4)],
    "two sizes": [(full(), 3), (window(32, 40), 2)],
    "padding": [
        (full(page_size_padded=PAGE + 64), 2),
        (window(16, 8, page_size_padded=PAGE + 64), 2),
    ],
}


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("groups", IN_MEMORY.values(), ids=IN_MEMORY.keys())
def test_a_block_is_copied_with_all_that_any_layer_has_in_it(
    groups: list[tuple[Any, int]], layout: Any
) -> None:
    try:
        config = laid_out(layout, *groups)
        views = tensors_of(config, layout)
    except (AssertionError, ValueError):
        return  # vLLM itself cannot lay out these layers so
    caches = {name: Cache.of(view) for name, view in views.items()}
    try:
        memory, _ = read_union(caches, config.num_blocks, page_bytes(config))
    except ConfigError:
        assert not layout.is_block_compact, "a page is one stretch of bytes, so it can be copied"
        return
    for group in config.kv_cache_groups:
        mine = {name: views[name].view(torch.int8) for name in group.layer_names}
        for view in views.values():
            view.view(torch.int8).zero_()
        for number, view in enumerate(mine.values()):
            view[1] = number + 1
        copy_block(memory, 1, 3)
        for number, view in enumerate(mine.values()):
            assert bool((view[3] == number + 1).all())
            assert not bool(view[2].any()), "no other block is written"
            assert not bool(view[0].any())
    for on_cpu in (False, True):
        found = layer_bytes(caches, memory, config, on_cpu=on_cpu)
        assert {one.name.split(" state")[0] for one in found} == set(views)


def test_block_compact_layouts_are_tried() -> None:
    """Otherwise the test above shows nothing."""
    compact = [layout for layout in Layout if layout.is_block_compact]
    assert any(layout.is_block_outermost for layout in compact)
    assert any(not layout.is_block_outermost for layout in compact)
    for groups in IN_MEMORY.values():
        assert any(_can_lay_out(layout, groups) for layout in compact)


def _can_lay_out(layout: Any, groups: list[tuple[Any, int]]) -> bool:
    try:
        tensors_of(laid_out(layout, *groups), layout)
    except (AssertionError, ValueError):
        return False
    return True
