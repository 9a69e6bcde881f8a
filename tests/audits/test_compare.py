"""Differences of blocks: what is measured, where it is found, and what is left out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.audits.compare import Difference, compare_blocks, differing_stretches
from penstock.audits.layout import DIM, HEAD, KV, TOKEN, BlockLayout, Stretch
from penstock.audits.tolerance import Tolerance

LAYERS, TOKENS, HEADS, SIZE = 3, 16, 4, 8
SHAPE = (2, TOKENS, HEADS, SIZE)
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layout(dtype: torch.dtype) -> BlockLayout:
    names = [f"model.layers.{number}" for number in range(LAYERS)]
    return BlockLayout.uniform(names, name(dtype), SHAPE, (KV, TOKEN, HEAD, DIM))


def block(seed: int = 0) -> torch.Tensor:
    return torch.randn(LAYERS, *SHAPE, generator=torch.Generator().manual_seed(seed))


def memory(values: torch.Tensor) -> memoryview:
    return memoryview(values.contiguous().view(torch.uint8).numpy().tobytes())


def compared(one: torch.Tensor, other: torch.Tensor) -> list[Difference]:
    return compare_blocks(layout(one.dtype), memory(one), memory(other))


@pytest.mark.parametrize("dtype", TYPES + FP8)
def test_the_same_is_the_same(dtype: torch.dtype) -> None:
    values = block().to(dtype)
    assert [each.value for each in compared(values, values.clone())] == [0.0] * LAYERS
    assert differing_stretches(layout(dtype), memory(values), memory(values)) == []


@pytest.mark.parametrize("dtype", TYPES + FP8)
def test_a_difference_is_relative_and_has_a_place(dtype: torch.dtype) -> None:
    values, other = block().to(dtype), block().to(dtype)
    other[1, 1, :, 2] = (other[1, 1, :, 2].float() * 2).to(dtype)
    found = compared(other, values)
    assert [each.value for each in found] == [0.0, pytest.approx(0.5, rel=0.02), 0.0]
    assert found[1].place == "layer model.layers.1, V, head 2"
    (bits,) = differing_stretches(layout(dtype), memory(other), memory(values))
    assert bits == found[1]


@pytest.mark.parametrize("dtype", FP8)
def test_eight_bits_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = torch.where(every.isfinite(), every, 0)
    for byte in range(256):
        one = torch.tensor([byte], dtype=torch.uint8)
        single = BlockLayout((Stretch("x", 0, name(dtype), (2,)),))
        unit = torch.tensor([1.0, 0.0]).to(dtype).view(torch.uint8)
        mine = torch.cat([unit[:1], one])
        (found,) = compare_blocks(single, memory(mine), memory(unit))
        value = every[byte].item()
        if one.view(dtype).float().isfinite().item():
            assert found.value == pytest.approx(abs(value) / math.hypot(1, value), abs=1e-6)
        else:
            assert found.value == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_finite_must_be_so_in_both(dtype: torch.dtype, value: float) -> None:
    values, other = block().to(dtype), block().to(dtype)
    other[2, 0, 5, 3, 1] = value
    assert [each.value for each in compared(values, other)] == [0.0, 0.0, math.inf]
    assert compared(other, values)[2].place == "layer model.layers.2, K, head 3"
    values[2, 0, 5, 3, 1] = value
    assert compared(other, values)[2].value == 0.0
    values[2, 0, 5, 3, 1] = -value if math.isinf(value) else 1.0
    assert compared(other, values)[2].value == math.inf


def test_rounding_errors_of_a_head_without_kv_are_no_difference() -> None:
    values, other = block(), block()
    values[0, 0, :, 1] = 0
    other[0, 0, :, 1] = 1e-12
    assert compared(values, other)[0].value < 1e-8
    assert compared(block() * 0, block() * 0)[0].value == 0.0


def test_large_numbers_do_not_overflow() -> None:
    values = block() * 1e37
    assert compared(values, -values)[0].value == pytest.approx(2.0)


def test_bytes_of_unknown_meaning_are_counted() -> None:
    opaque = BlockLayout((Stretch("indexer", 16, "fp8_ds_mla", (64,)),))
    one = np.zeros(96, np.uint8)
    other = one.copy()
    other[:16] = 1  # padding
    other[80:] = 1
    other[20:36] = 1
    (found,) = compare_blocks(opaque, memoryview(one), memoryview(other))
    assert found == Difference("indexer", "", None, 0.25)


def test_layouts_may_have_any_order_and_gaps() -> None:
    """A cache of [heads, kv, tokens, dim] that is kept as [tokens, heads, kv, dim]."""
    values = torch.randn(TOKENS, HEADS, 2, SIZE)
    view = values.permute(1, 2, 0, 3)
    stretch = Stretch(
        "0", 0, "float32", tuple(view.shape), (HEAD, KV, TOKEN, DIM), tuple(view.stride())
    )
    assert stretch.num_bytes == values.numel() * 4
    other = values.clone()
    other[:, 3, 0] += 1
    (found,) = compare_blocks(BlockLayout((stretch,)), memory(values), memory(other))
    assert (found.part, found.head) == ("K", 3)


def test_a_state_has_no_heads() -> None:
    state = BlockLayout((Stretch("mamba", 0, "float32", (32, 8), ("", "")),))
    one, other = torch.randn(32, 8), torch.randn(32, 8)
    (found,) = compare_blocks(state, memory(one), memory(other))
    assert (found.part, found.head, found.place) == ("", None, "layer mamba")
    assert found.value > 0.8


@pytest.mark.parametrize("dtype", TYPES + FP8)
@pytest.mark.parametrize(
    "fault",
    [
        lambda values: block(1),  # other tokens
        lambda values: values.roll(1, dims=2),  # shifted by one token
        lambda values: torch.cat([values[:2], 0 * values[2:]]),  # a layer that was not restored
        lambda values: torch.cat([values[1:], values[:1]]),  # layers in another order
        lambda values: values.flip(3),  # heads in another order
    ],
)
def test_every_fault_is_beyond_any_tolerance(dtype: torch.dtype, fault: object) -> None:
    """Even before calibration, when the limits are at their upper bounds."""
    values = block()
    wrong = fault(values).to(dtype)  # type: ignore[operator]
    tolerance = Tolerance(layout(dtype))
    assert not tolerance.is_calibrated
    assert tolerance.exceeded(compared(values.to(dtype), wrong))


@given(seed=st.integers(0, 1000), dtype=st.sampled_from(TYPES + FP8))
def test_rounding_is_within_the_tightest_tolerance(seed: int, dtype: torch.dtype) -> None:
    """Two paths that differ in the last bit of each number."""
    values = block(seed).double()
    noise = 1 + torch.finfo(dtype).eps / 4 * torch.randn(values.shape).double()
    tolerance = Tolerance(layout(dtype))
    tolerance.calibrate([])
    assert tolerance.exceeded(compared(values.to(dtype), (values * noise).to(dtype))) == []


def test_a_stretch_must_be_consistent() -> None:
    with pytest.raises(ValueError, match="dimensions"):
        Stretch("0", 0, "float32", (2, 3), (KV,))
    with pytest.raises(ValueError, match="strides"):
        Stretch("0", 0, "float32", (2, 3), (), (1,))
