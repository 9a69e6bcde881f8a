"""Our rule of legal hits against vLLM's own managers, over random mixes of groups. No engine.

vLLM keeps a coordinator for stores outside of it: given a set of blocks, it asks each group's
manager for the longest hit. The same set, asked through `penstock.groups`, must give the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.groups.kinds import Group, Groups, Kind
from penstock.groups.match import legal_hits, longest_hit
from penstock.types import Tier

torch = pytest.importorskip("torch")
store = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator",
    reason="this vLLM has no coordinator for outside stores; several groups need 0.30 or later",
)
managers = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager")
specs = pytest.importorskip("vllm.v1.kv_cache_interface")

Held = set[tuple[int, int]]  # index of a group, index of a block
NUM_CASES = 40  # per mix
MIXES = {
    "plain": ["full 4"],
    "MLA": ["mla 4"],
    "Gemma 3, gpt-oss": ["full 4", "window 4 12"],
    "a window that ends within a block": ["full 4", "window 4 9"],
    "a window alone": ["window 4 10"],
    "a window smaller than a block": ["full 4", "window 4 2"],
    "Gemma 4": ["full 4", "window 8 24"],
    "the larger blocks are full": ["full 8", "window 4 12"],
    "two windows": ["full 4", "window 4 8", "window 4 20"],
    "Llama 4": ["full 4", "chunk 4 16"],
    "Granite 4": ["full 4", "state 4"],
    "a state alone": ["state 4"],
    "all kinds": ["full 4", "window 4 12", "state 4", "chunk 4 32"],
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    from vllm.config import VllmConfig

    managers.register_all_kvcache_specs(VllmConfig())


def group_of(index: int, words: str) -> Group:
    kind, block_tokens, *span = words.split()
    kind = "full" if kind == "mla" else kind
    return Group(index, Kind(kind), int(block_tokens), *map(int, span))


def spec_of(words: str) -> Any:
    kind, *numbers = words.split()
    block, span = [*map(int, numbers), 0][:2]
    heads = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32, "block_size": block}
    match kind:
        case "full":
            return specs.FullAttentionSpec(**heads)
        case "mla":
            return specs.MLAAttentionSpec(**heads)
        case "window":
            return specs.SlidingWindowSpec(sliding_window=span, **heads)
        case "chunk":
            return specs.ChunkedLocalAttentionSpec(attention_chunk_size=span, **heads)
    return specs.MambaSpec(
        block_size=block,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )


class Both:
    """The same mix of groups for vLLM and for us."""

    def __init__(self, mix: Sequence[str], eagle: Sequence[int] = ()) -> None:
        self.groups = Groups(tuple(group_of(index, words) for index, words in enumerate(mix)))
        self._unit = self.groups.unit_tokens
        self._coordinator = store.MooncakeStoreCoordinator(
            [
                specs.KVCacheGroupSpec([f"layer {i}"], spec_of(words), is_eagle_group=i in eagle)
                for i, words in enumerate(mix)
            ],
            self.groups.align_tokens,
            self._unit,
        )

    def random_case(self, rnd: random.Random) -> tuple[Held, int, int]:
        """Blocks that are held, the number of tokens, and how many are on the device."""
        num_tokens = rnd.randrange(1, 100)
        held: Held = set()
        some = rnd.choice([0.5, 0.8, 0.95, 1.0])
        for group in self.groups:
            share = rnd.choice([some, 0.97, 1.0])
            num_blocks = num_tokens // group.block_tokens
            held.update((group.index, i) for i in range(num_blocks) if rnd.random() < share)
        start = rnd.choice([0, rnd.randrange(num_tokens)])
        return held, num_tokens, start // self.groups.align_tokens * self.groups.align_tokens

    def ours(self, held: Held, num_tokens: int, start: int) -> int:
        return longest_hit(self.groups, _holds(held), start, num_tokens)

    def legal(self, held: Held, num_tokens: int) -> list[int]:
        return list(legal_hits(self.groups, _holds(held), 0, num_tokens))

    def theirs(self, held: Held, num_tokens: int, start: int = 0, *, eagle: bool = True) -> int:
        """vLLM's hit, if the blocks before `start` are there as well."""
        hashes = [bytes([place]) * 8 for place in range(num_tokens // self._unit)]
        exists = set()
        for group in self.groups:
            steps = group.block_tokens // self._unit
            for index in range(num_tokens // group.block_tokens):
                is_before = (index + 1) * group.block_tokens <= start
                if is_before or (group.index, index) in held:
                    exists.add((group.index, hashes[(index + 1) * steps - 1]))
        limit = num_tokens if self.groups.all_full else num_tokens - 1
        pool = store.ExternalCachedBlockPool(self._unit, exists)
        _, num_hit = self._coordinator.find_longest_cache_hit(
            hashes, limit, pool, apply_eagle=eagle
        )
        return int(num_hit)


def _holds(held: Held) -> Any:
    return lambda group, index: Tier.HOST if (group.index, index) in held else None


def assert_same(mix: Sequence[str], rnd: random.Random, num_cases: int) -> None:
    both = Both(mix)
    for _ in range(num_cases):
        held, num_tokens, start = both.random_case(rnd)
        expected = both.theirs(held, num_tokens, start)
        assert both.ours(held, num_tokens, start) == expected, (mix, held, num_tokens, start)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_the_longest_hit_is_vllms(mix: list[str], seed: int) -> None:
    assert_same(mix, random.Random(seed), NUM_CASES * 3)


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_hit_is_vllms_for_random_groups(seed: int) -> None:
    rnd = random.Random(1000 + seed)
    kinds = rnd.choices(["full", "full", "window", "window", "chunk", "state"], k=1 + seed % 4)
    # vLLM takes chunks only if all groups have blocks of one size.
    sizes = [4] if "chunk" in kinds else rnd.choice([[4], [4, 8], [4, 8, 16]])
    # A window of one token needs nothing but the token itself; vLLM still looks for a block.
    spans = {"window": range(2, 50), "chunk": [8, 16, 32]}
    mix = []
    for kind in kinds:
        words = [kind, str(rnd.choice(sizes))]
        if kind in spans:
            words.append(str(rnd.choice(spans[kind])))
        mix.append(" ".join(words))
    assert_same(mix, rnd, NUM_CASES)


@pytest.mark.parametrize(
    ("mix", "eagle"),
    [
        (["full 4"], [0]),
        (["full 4", "window 4 12"], [0]),
        (["full 4", "window 4 12"], [1]),
        (["full 4", "window 8 24"], [0, 1]),
        (["full 4", "state 4"], [0]),
    ],
)
def test_with_a_drafter_vllms_hit_is_one_of_ours(mix: list[str], eagle: list[int]) -> None:
    """vLLM gives up the last block that the drafter's group has, for the drafter's sake alone.

    Its hit is legal, never longer than ours, and ours once that block is not given up.
    """
    both, rnd = Both(mix, eagle), random.Random(7)
    for _ in range(NUM_CASES * 5):
        held, num_tokens, _ = both.random_case(rnd)
        legal = both.legal(held, num_tokens)
        assert both.theirs(held, num_tokens) in [0, *legal]
        assert both.theirs(held, num_tokens, eagle=False) == max([0, *legal])


@pytest.mark.parametrize("seed", range(5))
def test_what_a_window_needs_is_what_vllm_does_not_free(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(NUM_CASES * 5):
        block, window = rnd.choice([4, 16, 32]), rnd.randrange(1, 200)
        extra = rnd.choice([0, 0, 1, 3])
        num_tokens = block * rnd.randrange(1, 50)
        free = managers.SlidingWindowManager.get_num_skipped_tokens(
            SimpleNamespace(sliding_window=window, extra_retained_tokens=extra), num_tokens
        )
        group = Group(0, Kind.WINDOW, block, window, extra)
        assert group.first_needed(num_tokens) == free // block


@pytest.mark.parametrize("seed", range(5))
def test_what_a_chunk_needs_is_what_vllm_does_not_free(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(NUM_CASES * 5):
        block, chunk = rnd.choice([4, 16, 32]), rnd.randrange(1, 200)
        num_tokens = block * rnd.randrange(1, 50)
        free = managers.ChunkedLocalAttentionManager.get_num_skipped_tokens(
            SimpleNamespace(attention_chunk_size=chunk), num_tokens
        )
        assert Group(0, Kind.CHUNK, block, chunk).first_needed(num_tokens) == free // block
