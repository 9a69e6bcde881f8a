"""Which requests are said to have used lossy KV."""

from __future__ import annotations

import pytest

from penstock.engine.lossy import LossyBlocks
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.keys import KeyChain, Namespace
from penstock.types import Slot, Tier

TOKENS = 16
LOSSY_DISK = {Tier.HOST: "raw", Tier.DISK: "int4"}


def new_request() -> Request:
    chain = KeyChain(Namespace("m", "w", "bfloat16", "layout", TOKENS))
    return Request("r", tuple(range(64)), SamplingParams(), chain)


def slots(*numbers: int) -> list[Slot]:
    return [Slot(number) for number in numbers]


@pytest.mark.parametrize("codecs", [{}, {Tier.HOST: "raw"}, {Tier.HOST: "lossless"}])
def test_without_a_lossy_tier_nothing_counts(codecs: dict[Tier, str]) -> None:
    lossy, request = LossyBlocks(TOKENS, codecs), new_request()
    lossy.loaded(request, 2, slots(0, 1))
    lossy.shared(request, slots(0, 1))
    lossy.computed(request, slots(2))
    assert request.num_lossy_tokens == 0


def test_every_loaded_block_counts_because_dram_may_have_it_from_the_disk() -> None:
    lossy, request = LossyBlocks(TOKENS, LOSSY_DISK), new_request()
    lossy.loaded(request, 3, [Slot(0), None, Slot(1)])
    assert request.num_lossy_tokens == 3 * TOKENS
    lossy.loaded(other := new_request(), 0, [])
    assert other.num_lossy_tokens == 0


def test_sharing_such_a_block_on_the_device_counts_too() -> None:
    lossy, first = LossyBlocks(TOKENS, LOSSY_DISK), new_request()
    lossy.loaded(first, 1, slots(0))
    lossy.computed(first, slots(1))  # after reading lossy KV
    lossy.computed(new_request(), slots(2))  # by a request that read none
    lossy.shared(second := new_request(), slots(0, 1, 2))
    assert second.num_lossy_tokens == 2 * TOKENS


def test_a_slot_that_is_computed_again_is_exact() -> None:
    lossy, first = LossyBlocks(TOKENS, LOSSY_DISK), new_request()
    lossy.loaded(first, 2, slots(0, 1))
    lossy.computed(new_request(), slots(0))
    lossy.shared(second := new_request(), slots(0, 1))
    assert second.num_lossy_tokens == TOKENS


@pytest.mark.parametrize("codecs", [{Tier.HOST: "fp8"}, LOSSY_DISK])
def test_reading_in_dram_counts(codecs: dict[Tier, str]) -> None:
    """Also if DRAM holds blocks as they are: it may have fetched them from a lossy disk again."""
    request = new_request()
    request.table.extend_places([0, ~5, ~6])  # two blocks in HOST
    LossyBlocks(TOKENS, {Tier.HOST: "raw"}).computed(request, [])
    assert request.num_lossy_tokens == 0
    LossyBlocks(TOKENS, codecs).computed(request, [])
    assert request.num_lossy_tokens == 2 * TOKENS


def test_a_block_that_returned_from_dram_counts_for_those_who_share_it() -> None:
    lossy, first = LossyBlocks(TOKENS, LOSSY_DISK), new_request()
    lossy.loaded(first, 1, [None])  # from the disk, and read in HOST
    lossy.returned(Slot(3))
    lossy.shared(second := new_request(), slots(3))
    assert second.num_lossy_tokens == TOKENS
    exact = LossyBlocks(TOKENS)
    exact.returned(Slot(3))
    exact.shared(third := new_request(), slots(3))
    assert third.num_lossy_tokens == 0
