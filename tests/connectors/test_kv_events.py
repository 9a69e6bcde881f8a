"""News of blocks for routers: told once a tier, and only of blocks whose vLLM name is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools import keys_of

from penstock.connectors.vllm.kv_events import BlockNews, TierEvent
from penstock.events import LookedUp, Removed, Stored
from penstock.groups.kinds import Group, Kind
from penstock.types import BlockKey, Tier

HOST, DISK = Tier.HOST, Tier.DISK
TOKENS = 4
GROUP = Group(0, Kind.FULL, TOKENS)
KEYS = keys_of(5)


def request(num_hashes: int = 5, lora: object = None) -> Any:
    return SimpleNamespace(
        all_token_ids=list(range(100, 120)),
        block_hashes=[f"hash {index}" for index in range(num_hashes)],
        lora_request=lora,
    )


@pytest.fixture
def news() -> BlockNews:
    news = BlockNews()
    news.name(KEYS[:3], 0, request(), GROUP)
    assert news.take() == []
    return news


def stored(tier: Tier, index: int) -> TierEvent:
    parent = f"hash {index - 1}" if index else None
    first = 100 + index * TOKENS
    tokens = list(range(first, first + TOKENS))
    return TierEvent(tier, f"hash {index}", True, parent, tokens, group=GROUP)


def removed(tier: Tier, index: int) -> TierEvent:
    return TierEvent(tier, f"hash {index}", False, group=GROUP)


def test_a_block_is_told_with_its_parent_and_its_tokens(news: BlockNews) -> None:
    news(Stored(HOST, tuple(KEYS[:3])))
    assert news.take() == [stored(HOST, index) for index in range(3)]
    assert news.take() == [], "once"


def test_each_tier_is_told_for_itself(news: BlockNews) -> None:
    news(Stored(HOST, (KEYS[0],)))
    news(Stored(DISK, (KEYS[0],)))
    assert news.take() == [stored(HOST, 0), stored(DISK, 0)]
    news(Stored(HOST, (KEYS[0],)))
    assert news.take() == [], "it is there already"
    news(Removed(HOST, (KEYS[0],), evicted=True))
    assert news.take() == [removed(HOST, 0)]
    news(Stored(HOST, (KEYS[0],)))  # loaded from the disk
    assert news.take() == [stored(HOST, 0)]
    news(Removed(DISK, (KEYS[0],), evicted=False))
    news(Removed(HOST, (KEYS[0],), evicted=True))
    assert news.take() == [removed(DISK, 0), removed(HOST, 0)]


def test_all_tiers_are_lost_at_once(news: BlockNews) -> None:
    news(Stored(HOST, (KEYS[0], KEYS[1])))
    news(Stored(DISK, (KEYS[0],)))
    news.take()
    news.lose_all()
    assert news.take() == [removed(HOST, 0), removed(DISK, 0), removed(HOST, 1)]
    news(Stored(HOST, (KEYS[0],)))
    assert news.take() == [], "it has no name any more"


def test_a_block_in_no_tier_is_forgotten(news: BlockNews) -> None:
    news(Stored(HOST, (KEYS[0],)))
    news(Stored(DISK, (KEYS[0],)))
    news(Removed(HOST, (KEYS[0],), evicted=True))
    news(Removed(DISK, (KEYS[0],), evicted=True))
    news.take()
    news(Stored(DISK, (KEYS[0],)))
    assert news.take() == [], "nobody has named it again"
    news.name(KEYS[:1], 0, request(), GROUP)
    news(Stored(HOST, (KEYS[0],)))
    assert news.take() == [stored(HOST, 0)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "remove"]), st.sampled_from([HOST, DISK]),
                  st.integers(0, 4)),
        max_size=60,
    )
)  # fmt: skip
def test_news_add_up_to_what_the_tiers_hold_and_no_more_is_remembered(
    story: list[tuple[str, Tier, int]],
) -> None:
    news = BlockNews()
    held: set[tuple[Tier, str]] = set()
    told: set[tuple[Tier, str]] = set()
    for what, tier, index in story:
        place = (tier, f"hash {index}")
        if what == "store":
            news.name([KEYS[index]], index, request(), GROUP)  # as every save does
            news(Stored(tier, (KEYS[index],)))
            held.add(place)
        elif place in held:
            news(Removed(tier, (KEYS[index],), evicted=True))
            held.remove(place)
        for one in news.take():
            assert ((one.tier, one.hash) in told) is not one.is_stored, "told twice"
            (told.add if one.is_stored else told.remove)((one.tier, one.hash))
        assert told == held
    assert len(news._named) == len({name for _, name in held})


def test_blocks_that_nobody_named_are_passed_over(news: BlockNews) -> None:
    stranger = BlockKey(b"?" * 32)
    news(Stored(DISK, (stranger, KEYS[1])))  # as after a restart
    news(Removed(DISK, (stranger,), evicted=True))
    news(Removed(HOST, (KEYS[1],), evicted=True))  # it was never there
    assert news.take() == [stored(DISK, 1)]


def test_blocks_whose_hash_vllm_has_not_made_yet_are_passed_over() -> None:
    news = BlockNews()
    news.name(KEYS[:5], 0, request(num_hashes=2), GROUP)
    news(Stored(HOST, tuple(KEYS[:5])))
    assert news.take() == [stored(HOST, 0), stored(HOST, 1)]


def test_blocks_are_named_from_where_they_stand_in_their_request() -> None:
    news = BlockNews()
    news.name(KEYS[3:5], 3, request(), GROUP)
    news(Stored(HOST, tuple(KEYS[3:5])))
    assert news.take() == [stored(HOST, 3), stored(HOST, 4)]


def test_an_adapter_is_told() -> None:
    news = BlockNews()
    lora = SimpleNamespace(lora_int_id=3, lora_name="sql")
    news.name(KEYS[:1], 0, request(lora=lora), GROUP)
    news(Stored(HOST, (KEYS[0],)))
    (told,) = news.take()
    assert told.lora is lora


def test_other_events_are_nothing_to_it(news: BlockNews) -> None:
    news(LookedUp(3, ()))
    assert news.take() == []
