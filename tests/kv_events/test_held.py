"""What is held and what has changed: a router that applies the changes knows the truth."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_events.router import CPU, DISK, GPU, REMOTE, Place, Router

from penstock.events import Quarantined, Removed, Stored
from penstock.keys import KeyChain, Namespace
from penstock.kv_events.held import HeldBlocks, NamedSequence, TierChange, short_hash
from penstock.kv_events.salts import published_salt, with_salt
from penstock.kv_events.wire import CLEARED, events_of, pack
from penstock.types import BlockKey, Tier

SIZE = 4
PLACES: dict[Tier, Place] = dict(zip(Tier, (GPU, CPU, DISK, REMOTE), strict=True))


def sequence(tokens: list[int], tenant: str = "") -> NamedSequence:
    chain = KeyChain(Namespace("m", "w", "d", "l", SIZE, tenant=tenant), tokens)
    return NamedSequence(chain.keys, tokens, SIZE, tenant)


def publish(held: HeldBlocks, router: Router) -> None:
    """What the publisher does."""
    while (changes := held.take(3)) != []:
        if changes is None:
            router.read(pack([CLEARED]))
            blocks = held.reset()
            for tier in Tier:
                stored = (TierChange(tier, b, True) for b in blocks if b.is_in(tier))
                router.read(pack(list(events_of(stored))))
        else:
            router.read(pack(list(events_of(changes))))


def test_a_block_is_published_with_its_prompt_in_each_tier() -> None:
    held, router = HeldBlocks(), Router()
    prompt = sequence(list(range(11)))  # two blocks and a part of one
    held.name(prompt, range(2))
    held.stored(Tier.DEVICE, prompt.keys)
    held(Stored(Tier.HOST, tuple(prompt.keys)))
    held(Stored(Tier.DISK, tuple(prompt.keys[:1])))
    publish(held, router)
    both = {(None, (0, 1, 2, 3)), (None, tuple(range(8)))}
    assert router.prompts(GPU) == router.prompts(CPU) == both
    assert router.prompts(DISK) == {(None, (0, 1, 2, 3))}
    assert router.events[0]["block_hashes"] == [short_hash(key) for key in prompt.keys]
    held(Removed(Tier.HOST, tuple(prompt.keys), evicted=True))
    publish(held, router)
    assert not router.prompts(CPU)
    assert router.prompts(GPU) == both
    held.check()


def test_the_hash_is_the_one_that_vllm_makes_of_bytes() -> None:
    key = BlockKey(bytes(range(32)))
    assert short_hash(key) == int.from_bytes(key, "big") & ((1 << 64) - 1)


def test_consecutive_blocks_of_a_prompt_share_an_event() -> None:
    held, router = HeldBlocks(), Router()
    prompt, other = sequence(list(range(40))), sequence(list(range(50, 90)))
    for each in (prompt, other):
        held.name(each, range(10))
        held.stored(Tier.HOST, each.keys)
    for event in events_of(held.take(100) or []):
        router.apply(event)
    assert [len(event["block_hashes"]) for event in router.events] == [10, 10]


def test_a_salt_is_never_left_out() -> None:
    held, router = HeldBlocks(), Router()
    for tenant in ("", "header:acme", with_salt("", "pepper"), with_salt("header:acme", "pepper")):
        prompt = sequence(list(range(8)), tenant)
        held.name(prompt, range(2))
        held.stored(Tier.DEVICE, prompt.keys)
    publish(held, router)
    salts = {None, "header:acme", "pepper", "11:header:acme cache_salt:pepper"}
    assert {salt for salt, _ in router.prompts(GPU)} == salts
    assert len(router.held[GPU]) == 8


def test_routers_are_told_the_salt_of_the_request() -> None:
    assert published_salt(with_salt("", "pepper")) == "pepper"
    assert published_salt("header:acme") == "header:acme"
    assert published_salt("") == ""


def test_blocks_found_on_disk_are_published_when_their_prompt_comes() -> None:
    held, router = HeldBlocks(), Router()
    prompt = sequence(list(range(12)))
    held(Stored(Tier.DISK, tuple(prompt.keys[:2])))
    publish(held, router)
    assert not router.events  # a router could not use a key without tokens
    held.recognize(prompt)
    publish(held, router)
    assert router.prompts(DISK) == {(None, (0, 1, 2, 3)), (None, tuple(range(8)))}
    held.check()


def test_a_tier_that_is_emptied_holds_nothing() -> None:
    held, router = HeldBlocks(), Router()
    prompt = sequence(list(range(8)))
    held.name(prompt, range(2))
    for tier in Tier:
        held.stored(tier, prompt.keys)
    held.emptied(Tier.DEVICE)
    publish(held, router)
    assert [len(router.held[place]) for place in PLACES.values()] == [0, 2, 2, 2]
    held(Quarantined(""))
    held(Stored(Tier.HOST, tuple(prompt.keys)))  # it may still be used for running sequences
    publish(held, router)
    assert not any(router.held.values())
    held.check()


def test_what_only_the_remote_store_holds_is_limited() -> None:
    held, router = HeldBlocks(max_remote=2), Router()
    prompt = sequence(list(range(16)))
    held.name(prompt, range(4))
    held.stored(Tier.REMOTE, prompt.keys)
    publish(held, router)
    assert len(router.held[REMOTE]) == 2
    held.check()


def test_dropped_changes_are_counted_and_lead_to_a_reset() -> None:
    dropped: list[int] = []
    woken: list[None] = []
    held = HeldBlocks(max_queued=3, on_dropped=dropped.append, on_change=lambda: woken.append(None))
    router = Router()
    prompt = sequence(list(range(40)))
    held.name(prompt, range(10))
    held.stored(Tier.DEVICE, prompt.keys)
    assert dropped == [4]
    assert held.num_dropped == 4
    assert len(woken) == 2  # for the first change, and for the reset
    publish(held, router)
    assert router.events[0] == CLEARED
    assert len(router.held[GPU]) == 10
    held.stored(Tier.HOST, prompt.keys[:3])
    publish(held, router)
    assert len(router.held[CPU]) == 3


PROMPTS = [
    sequence([family, *range(salt * 4, salt * 4 + 15)], "" if salt else "header:acme")
    for family in range(2)
    for salt in range(2)
]
operations = st.lists(
    st.tuples(
        st.sampled_from(("store", "remove", "empty", "publish", "recognize", "forget")),
        st.sampled_from(Tier),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, 4),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(operations, st.sampled_from((2, 5, 1000)))
def test_a_router_knows_the_truth(steps: list[tuple[str, Tier, int, int]], max_queued: int) -> None:
    """Whatever happens, and however small the queue is."""
    held, router = HeldBlocks(max_queued=max_queued), Router()
    truth: dict[Tier, set[BlockKey]] = defaultdict(set)
    for what, tier, number, count in steps:
        prompt = PROMPTS[number]
        keys = prompt.keys[:count]
        if what == "store":
            # On the device a sequence's blocks are named first; elsewhere tokens may be unknown.
            if tier is Tier.DEVICE:
                held.name(prompt, range(count))
            held.stored(tier, keys)
            truth[tier] |= set(keys)
        elif what == "remove":
            held.removed(tier, keys)
            truth[tier] -= set(keys)
        elif what == "empty":
            held.emptied(tier)
            truth[tier].clear()
        elif what == "publish":
            publish(held, router)
        elif what == "recognize":
            held.recognize(prompt)
        else:
            held.forget_changes()
        held.check()
    for prompt in PROMPTS:
        held.recognize(prompt)
    publish(held, router)
    for tier in Tier:
        assert router.held[PLACES[tier]] == {short_hash(key) for key in truth[tier]}
