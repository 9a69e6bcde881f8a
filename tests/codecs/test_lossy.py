"""The lossy codecs: every bit pattern, bounds of the error, sizes, and bytes that never change."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.codecs.base import Codec
from penstock.codecs.blocks import BlockValues, PartValues
from penstock.codecs.layout import AXES, DIM, HEAD, KIND, LAYER, TOKEN, KvLayout
from penstock.codecs.lossy import LossyCodec, open_lossy
from penstock.codecs.lossy_format import group_size, lossy_packed_bytes
from penstock.codecs.names import LOSSY
from penstock.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LAYERS, TOKENS, HEADS, HEAD_DIM = 2, 16, 3, 8
SHAPE = (LAYERS, 2, HEADS, TOKENS, HEAD_DIM)
LARGEST = 2.0**126
SMALLEST_SCALE = 2.0**-100


def layout_of(dtype: str = "bfloat16", **sizes: int) -> KvLayout:
    given = {"num_layers": LAYERS, "block_tokens": TOKENS, "kv_heads": HEADS, "head_dim": HEAD_DIM}
    return KvLayout.of_engine(dtype, **{**given, **sizes})


def ordered(layout: KvLayout, values: Tensor) -> Tensor:
    """[block, layer, kind, head, token, dim] as the bytes of the layout, [block, bytes]."""
    order = (LAYER, KIND, HEAD, TOKEN, DIM)
    places = [0, *(1 + order.index(axis) for axis, _ in layout.axes)]
    return values.permute(places).contiguous().view(torch.uint8).reshape(len(values), -1)


def values_of(layout: KvLayout, raw: Tensor) -> Tensor:
    """The reverse."""
    axes = [axis for axis, _ in layout.axes]
    places = [0, *(1 + axes.index(axis) for axis in (LAYER, KIND, HEAD, TOKEN, DIM))]
    return raw.view(DTYPES[layout.dtype]).view(len(raw), *layout.shape).permute(places)


def random_values(dtype: str, num_blocks: int, seed: int, shape: Any = SHAPE) -> Tensor:
    """Like KV: some channels and tokens are much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((num_blocks, *shape), generator=generator)
    channels = torch.randn(shape[-1], generator=generator).exp()
    tokens = torch.randn((shape[-2], 1), generator=generator).exp()
    return (values * channels * tokens + channels).to(DTYPES[dtype])


def through(codec: LossyCodec, values: Tensor) -> Tensor:
    packed, fits = codec.pack_tensor(ordered(codec.layout, values))
    assert fits.all()
    assert packed.shape == (len(values), codec.packed_bytes)
    return values_of(codec.layout, codec.unpack_tensor(packed))


def worst_errors(name: str, values: Tensor) -> Tensor:
    """The largest error that the format allows, for each value, before the result is rounded.

    bfloat16 scales are rounded by at most 1/256.
    """
    values = values.double()
    rounded = 1 + 1 / 256
    if name == "fp8":
        largest = values.abs().amax((-2, -1), keepdim=True)
        # Three bits of mantissa; codes below 2**-6 are multiples of 2**-9.
        scale = (largest / 448).clamp_min(SMALLEST_SCALE)
        return torch.maximum(values.abs() / 16, scale / 1024) * (1 + 1e-5)
    if name == "int8":
        scale = (values.abs().amax(-1, keepdim=True) / 127).clamp_min(SMALLEST_SCALE)
        return (scale * rounded / 2).expand(values.shape)
    keys, vectors = values[:, :, 0], values[:, :, 1].unflatten(-1, (-1, group_size(SHAPE[-1])))

    def half_step(of: Tensor, axis: int) -> Tensor:
        ranges = of.amax(axis, keepdim=True) - of.amin(axis, keepdim=True)
        scale = (ranges / 15).clamp_min(SMALLEST_SCALE)
        return (scale * rounded / 2 * (1 + 1e-5)).expand(of.shape)

    return torch.stack((half_step(keys, -2), half_step(vectors, -1).flatten(-2)), 2)


def assert_close(name: str, values: Tensor, result: Tensor) -> None:
    assert result.isfinite().all()
    allowed = worst_errors(name, values)
    # Rounding of the result to the dtype: half of its last bit, or half of its smallest number.
    info = torch.finfo(values.dtype)
    size = values.double().abs() + allowed
    allowed = allowed + torch.maximum(size * info.eps / 2, torch.tensor(info.tiny * info.eps))
    assert ((values.double() - result.double()).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_errors_stay_within_their_bounds(name: str, dtype: str) -> None:
    codec = open_lossy(name, layout_of(dtype))
    for seed, size in itertools.product(range(4), (1.0, 1e-4, 100.0)):
        values = (random_values(dtype, 8, seed) * size).to(DTYPES[dtype])
        assert_close(name, values, through(codec, values))


@pytest.mark.parametrize("name", LOSSY)
def test_all_bf16_patterns(name: str) -> None:
    """Patterns with similar exponents share blocks, so that bounds mean something; then mixed."""
    codec = open_lossy(name, layout_of())
    patterns = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    num_values = codec.layout.num_values
    magnitudes = patterns.float().abs()
    order = magnitudes.nan_to_num(nan=torch.inf).argsort(stable=True)
    mixed = torch.randperm(65536, generator=torch.Generator().manual_seed(0))
    for chosen in (order, mixed):
        padded = torch.cat((patterns[chosen], patterns[chosen]))
        values = padded[: 65536 // num_values * num_values + num_values].view(-1, *SHAPE)
        packed, fits = codec.pack_tensor(ordered(codec.layout, values))
        good = (values.float().abs() <= LARGEST).flatten(1).all(1)
        assert fits.tolist() == good.tolist()
        result = values_of(codec.layout, codec.unpack_tensor(packed))
        assert_close(name, values[good], result[good])
    assert good.tolist() == [False] * len(good)


@pytest.mark.parametrize("name", LOSSY)
def test_blocks_of_one_value(name: str) -> None:
    codec = open_lossy(name, layout_of())
    packed, again = bytearray(codec.packed_bytes), bytearray(codec.raw_bytes)
    for pattern in range(0, 65536, 257):
        value = torch.tensor(pattern).to(torch.uint16).view(torch.bfloat16)
        values = value.expand(1, *SHAPE)
        raw = ordered(codec.layout, values).numpy().tobytes()
        good = bool(value.float().abs() <= LARGEST)
        assert codec.pack(memoryview(raw), memoryview(packed)) is good
        if good:
            codec.unpack(memoryview(packed), memoryview(again))
            result = values_of(codec.layout, torch.frombuffer(again, dtype=torch.uint8)[None])
            assert_close(name, values, result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_does_not_fit(name: str, dtype: str) -> None:
    codec = open_lossy(name, layout_of(dtype))
    values = random_values(dtype, 4, 0)
    whole = values.clone()
    values[1, 1, 0, 2, 15, 7] = torch.nan
    values[2, 0, 1, 0, 3, 1] = -torch.inf
    raw = ordered(codec.layout, values)
    packed, fits = codec.pack_tensor(raw)
    assert fits.tolist() == [True, False, False, True]
    codec.unpack_tensor(packed)  # gives no error
    # The neighbors of a block that does not fit are packed as without it.
    alone, _ = codec.pack_tensor(ordered(codec.layout, whole))
    assert packed[[0, 3]].equal(alone[[0, 3]])
    for number, good in enumerate((True, False, False, True)):
        target = bytearray(codec.packed_bytes)
        assert codec.pack(memoryview(raw[number].numpy().tobytes()), memoryview(target)) is good
        assert bytes(target) == (packed[number].numpy().tobytes() if good else bytes(len(target)))


@pytest.mark.parametrize("name", LOSSY)
def test_the_largest_numbers_stay_finite(name: str) -> None:
    for dtype, largest in (("float16", 65504.0), ("float32", LARGEST), ("bfloat16", LARGEST)):
        codec = open_lossy(name, layout_of(dtype))
        sizes = torch.linspace(0.5, 1.0, 200).view(-1, 1, 1, 1, 1, 1) * largest
        values = sizes.expand(-1, *SHAPE).clone()
        values[..., ::2] *= -1
        values = values.to(DTYPES[dtype])
        assert_close(name, values, through(codec, values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_zeros_stay_zeros(name: str, dtype: str) -> None:
    codec = open_lossy(name, layout_of(dtype))
    values = torch.zeros((1, *SHAPE), dtype=DTYPES[dtype])
    assert through(codec, values).eq(0).all()
    assert through(codec, -values).eq(0).all()


@pytest.mark.parametrize("name", LOSSY)
def test_the_sign_of_a_zero_does_not_change_other_bytes(name: str) -> None:
    """Which zero a minimum returns depends on the order in which a device looks at them."""
    codec = open_lossy(name, layout_of())
    values = random_values("bfloat16", 1, 0).abs()
    values[..., 0::3] = 0.0
    other = values.clone()
    other[..., 3::6] = -0.0
    packed, other_packed = (codec.pack_tensor(ordered(codec.layout, v))[0] for v in (values, other))
    if name == "fp8":  # keeps the signs
        assert (packed ^ other_packed).unique().tolist() == [0, 0x80]
    else:
        assert packed.equal(other_packed)


def test_fp8_rounds_to_the_nearest_code_and_ties_to_even() -> None:
    """torch converts in different ways on different processors: compare with the definition."""

    def decoded(code: int) -> float:
        exponent, mantissa = code >> 3, code & 7
        if exponent == 0:
            return mantissa * 2.0**-9
        return (8 + mantissa) * 2.0 ** (exponent - 10)

    codes = [decoded(code) for code in range(127)]
    assert codes[-1] == 448
    sent, expected = [], []
    for code, (low, high) in enumerate(itertools.pairwise(codes)):
        middle = torch.tensor((low + high) / 2)
        below, above = middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))
        sent += [low, below.item(), middle.item(), above.item()]
        expected += [code, code, code + code % 2, code + 1]
    # 448 in every head: scales are 1. The rest is what shall be rounded.
    layout = layout_of("float32", num_layers=1, kv_heads=1, head_dim=64)
    codec = open_lossy("fp8", layout)
    values = torch.zeros(1, 1, 2, 1, 16, 64)
    values[..., 0, 0] = 448.0
    signed = torch.tensor(sent + [-value for value in sent])
    values[0, 0, 0].view(-1)[1 : 1 + len(signed)] = signed[: 16 * 64 - 1]
    packed, _ = codec.pack_tensor(ordered(layout, values))
    assert packed[0, :8].view(torch.float32).tolist() == [1.0, 1.0]
    wanted = torch.tensor(expected + [code | 0x80 for code in expected])[: 16 * 64 - 1]
    assert packed[0, 9 : 9 + len(wanted)].tolist() == wanted.tolist()


@pytest.mark.parametrize("name", LOSSY)
def test_other_orders_of_axes_give_the_same_bytes_and_values(name: str) -> None:
    values = random_values("bfloat16", 2, 1)
    sizes = dict(zip((LAYER, KIND, HEAD, TOKEN, DIM), SHAPE, strict=True))
    first = open_lossy(name, layout_of())
    expected, _ = first.pack_tensor(ordered(first.layout, values))
    result = through(first, values)
    for axes in random.Random(0).sample(list(itertools.permutations(AXES)), 20):
        layout = KvLayout("bfloat16", tuple((axis, sizes[axis]) for axis in axes))
        codec = open_lossy(name, layout)
        assert codec.pack_tensor(ordered(layout, values))[0].equal(expected)
        assert through(codec, values).equal(result)
        assert codec.version == first.version


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_many_at_once_are_the_same_bytes_as_one_at_a_time(name: str, dtype: str) -> None:
    codec: Codec = open_lossy(name, layout_of(dtype))
    batched = open_lossy(name, layout_of(dtype))
    raw = ordered(batched.layout, random_values(dtype, 5, 2))
    packed, fits = batched.pack_tensor(raw)
    unpacked = batched.unpack_tensor(packed)
    assert fits.dtype == torch.bool
    for number in range(5):
        one = bytearray(codec.packed_bytes + 3)  # views may be longer than needed
        assert codec.pack(memoryview(raw[number].numpy().tobytes()), memoryview(one))
        assert bytes(one) == packed[number].numpy().tobytes() + bytes(3)
        back = bytearray(codec.raw_bytes + 3)
        codec.unpack(memoryview(bytes(one)), memoryview(back))
        assert bytes(back) == unpacked[number].numpy().tobytes() + bytes(3)
    nothing, none = batched.pack_tensor(raw[:0])
    assert nothing.shape == (0, codec.packed_bytes)
    assert none.shape == (0,)
    assert batched.unpack_tensor(nothing).shape == (0, codec.raw_bytes)


@pytest.mark.parametrize("name", LOSSY)
def test_rows_of_a_larger_tensor_that_are_not_aligned(name: str) -> None:
    codec = open_lossy(name, layout_of("float32"))
    raw = ordered(codec.layout, random_values("float32", 3, 3))
    packed, _ = codec.pack_tensor(raw)
    apart = torch.zeros(3, codec.raw_bytes + 7, dtype=torch.uint8)
    apart[:, 3:-4] = raw
    assert codec.pack_tensor(apart[:, 3:-4])[0].equal(packed)
    assert codec.pack_tensor(apart[1:2, 3:-4])[0].equal(packed[1:2])
    packed_apart = torch.zeros(3, codec.packed_bytes + 5, dtype=torch.uint8)
    packed_apart[:, 1:-4] = packed
    expected = codec.unpack_tensor(packed)
    assert codec.unpack_tensor(packed_apart[:, 1:-4]).equal(expected)
    assert codec.unpack_tensor(packed_apart[2:, 1:-4]).equal(expected[2:])
    # One block at an odd address.
    odd = bytearray(1 + codec.raw_bytes)
    odd[1:] = raw[0].numpy().tobytes()
    target = bytearray(1 + codec.packed_bytes)
    assert codec.pack(memoryview(odd)[1:], memoryview(target)[1:])
    assert target[1:] == packed[0].numpy().tobytes()


@given(st.sampled_from(LOSSY), st.sampled_from(list(DTYPES)), st.randoms())
def test_bytes_that_nobody_packed_give_no_error(name: str, dtype: str, rng: random.Random) -> None:
    codec = open_lossy(name, layout_of(dtype))
    raw = bytearray(codec.raw_bytes)
    codec.unpack(memoryview(rng.randbytes(codec.packed_bytes)), memoryview(raw))


@pytest.mark.parametrize("head_dim", [2, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_sizes(name: str, dtype: str, head_dim: int) -> None:
    layout = layout_of(dtype, num_layers=2, kv_heads=2, head_dim=head_dim)
    codec = open_lossy(name, layout)
    values = random_values(dtype, 1, 0, (2, 2, 2, TOKENS, head_dim))
    packed, _ = codec.pack_tensor(ordered(layout, values))
    assert packed.shape == (1, codec.packed_bytes) == (1, lossy_packed_bytes(name, layout))
    assert codec.raw_bytes == layout.num_bytes
    assert codec.packed_bytes == 2 * codec.layer_bytes


def test_sizes_of_known_models() -> None:
    """Per layer, in bytes: scales (and minima), then codes."""
    smollm = layout_of(num_layers=30, kv_heads=3, head_dim=64)
    llama = layout_of(num_layers=32, kv_heads=8, head_dim=128)
    assert lossy_packed_bytes("fp8", smollm) == 30 * (2 * 3 * 4 + 2 * 3 * 16 * 64)
    assert lossy_packed_bytes("int8", smollm) == 30 * (2 * 3 * 16 * 2 + 2 * 3 * 16 * 64)
    assert lossy_packed_bytes("int4", smollm) == 30 * 3 * (64 * 4 + 16 * 4 + 2 * 16 * 32)
    assert lossy_packed_bytes("int4", llama) == 32 * 8 * (128 * 4 + 16 * 2 * 4 + 2 * 16 * 64)
    ratios = [lossy_packed_bytes(name, llama) / llama.num_bytes for name in LOSSY]
    assert [round(ratio, 3) for ratio in ratios] == [0.501, 0.508, 0.328]


def test_groups() -> None:
    sizes = {dim: group_size(dim) for dim in (2, 64, 80, 96, 128, 192, 256)}
    assert sizes == {2: 2, 64: 64, 80: 40, 96: 48, 128: 64, 192: 64, 256: 64}


def test_fp8_bytes() -> None:
    layout = layout_of("float32", num_layers=1, block_tokens=2, kv_heads=1, head_dim=2)
    keys, values = [448.0, -1.0, 0.0, 0.3], [0.5, 0.25, -0.125, 0.0]
    packed, _ = open_lossy("fp8", layout).pack_tensor(_engine_bytes(keys + values))
    # Scales 1 and 0.5 / 448. Codes: sign, 4 bits of exponent (bias 7), 3 bits of mantissa.
    scales = torch.tensor([1.0, 0.5 / 448]).view(torch.uint8).tolist()
    codes = [0x7E, 0xB8, 0x00, 0x2A, 0x7E, 0x76, 0xEE, 0x00]
    assert packed[0].tolist() == scales + codes


def test_int8_bytes() -> None:
    layout = layout_of("float32", num_layers=1, block_tokens=2, kv_heads=1, head_dim=2)
    keys, values = [127.0, -1.5, 0.0, -254.0], [0.0, 0.0, -63.5, 31.75]
    packed, _ = open_lossy("int8", layout).pack_tensor(_engine_bytes(keys + values))
    # Scales 1, 2, 2**-100 and 0.5. -1.5 and 63.5 lie halfway: the even code is chosen.
    scales = [0x80, 0x3F, 0x00, 0x40, 0x80, 0x0D, 0x00, 0x3F]
    codes = [127, 256 - 2, 0, 256 - 127, 0, 0, 256 - 127, 64]
    assert packed[0].tolist() == scales + codes


def test_int4_bytes() -> None:
    layout = layout_of("bfloat16", num_layers=1, block_tokens=2, kv_heads=1, head_dim=2)
    keys, values = [0.0, -1.0, 15.0, 29.0], [3.0, 18.0, -7.5, -7.5]
    raw = _engine_bytes(keys + values, torch.bfloat16)
    codec = open_lossy("int4", layout)
    packed, _ = codec.pack_tensor(raw)
    key_scales, key_minima = [0x80, 0x3F, 0x00, 0x40], [0x00, 0x00, 0x80, 0xBF]
    value_scales, value_minima = [0x80, 0x3F, 0x80, 0x0D], [0x40, 0x40, 0xF0, 0xC0]
    codes = [0x00, 0xFF, 0xF0, 0x00]
    assert packed[0].tolist() == [*key_scales, *key_minima, *value_scales, *value_minima, *codes]
    assert codec.unpack_tensor(packed).equal(raw)


def _engine_bytes(numbers: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).view(torch.uint8)[None]


# XXH3-64 of the bytes of `golden_values`. If one changes, stored blocks are read as other values:
# raise `_VERSION` in lossy_format.py.
GOLDEN = {
    ("fp8", "bfloat16"): "e279a531774b374f",
    ("fp8", "float16"): "fe08df743394b9e8",
    ("fp8", "float32"): "8da0dfb7ed14534c",
    ("int8", "bfloat16"): "38aef197fda1f21d",
    ("int8", "float16"): "827a4a6474838723",
    ("int8", "float32"): "e5c1cf7a2f4534fa",
    ("int4", "bfloat16"): "6c06adab3c50791b",
    ("int4", "float16"): "649486a13b85a95d",
    ("int4", "float32"): "4faa591c805ec1e9",
}


def golden_values(dtype: str) -> Tensor:
    """Numbers of many sizes that do not depend on torch's random numbers."""
    rng = random.Random(22)
    count = 4 * LAYERS * 2 * HEADS * TOKENS * HEAD_DIM
    numbers = [rng.uniform(-1, 1) * 2.0 ** rng.randint(-12, 6) for _ in range(count)]
    return torch.tensor(numbers).to(DTYPES[dtype]).view(4, *SHAPE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_golden_bytes(name: str, dtype: str) -> None:
    codec = open_lossy(name, layout_of(dtype))
    packed, _ = codec.pack_tensor(ordered(codec.layout, golden_values(dtype)))
    unpacked = codec.unpack_tensor(packed)
    digest = xxhash.xxh3_64_hexdigest(packed.numpy().tobytes() + unpacked.numpy().tobytes())
    assert digest == GOLDEN[name, dtype]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_a_gpu_makes_the_same_bytes(name: str, dtype: str) -> None:
    codec = open_lossy(name, layout_of(dtype, head_dim=128))
    for seed, size in itertools.product(range(8), (1.0, 1e-4, 100.0)):
        values = random_values(dtype, 16, seed, (*SHAPE[:-1], 128)) * size
        raw = ordered(codec.layout, values.to(DTYPES[dtype]))
        packed, fits = codec.pack_tensor(raw)
        on_gpu, fits_on_gpu = codec.pack_tensor(raw.cuda())
        assert fits_on_gpu.cpu().equal(fits)
        # Some blocks of float16 become infinite; the bytes of blocks that do not fit mean nothing.
        assert fits.any()
        packed, on_gpu = packed[fits], on_gpu[fits_on_gpu]
        assert on_gpu.cpu().equal(packed)
        assert codec.unpack_tensor(on_gpu).cpu().equal(codec.unpack_tensor(packed))


def test_versions_tell_formats_apart() -> None:
    layouts = [layout_of(), layout_of("float16"), layout_of(head_dim=16, kv_heads=3)]
    layouts += [layout_of(num_layers=3), layout_of(block_tokens=32), layout_of(kv_heads=4)]
    versions = {open_lossy(name, layout).version for name in LOSSY for layout in layouts}
    assert len(versions) == len(LOSSY) * len(layouts)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"int8" .* this KV is float8_e4m3fn; choose "raw"'):
        open_lossy("int8", layout_of("float8_e4m3fn"))
    with pytest.raises(ConfigError, match="even number of elements per head, and this KV has 7"):
        open_lossy("int4", layout_of(head_dim=7))
    with pytest.raises(ConfigError, match='"lossless" is not lossy'):
        open_lossy("lossless", layout_of())


def test_parts_of_a_block_may_differ() -> None:
    layouts = [layout_of(), layout_of(kv_heads=1)]
    parts = tuple(PartValues(one.num_bytes, one.dtype, (), None, one) for one in layouts)
    for name in LOSSY:
        codec = BlockValues(parts).open(name)
        assert codec.name == name
        assert codec.packed_bytes == sum(lossy_packed_bytes(name, one) for one in layouts)
        raw = b"".join(
            ordered(one, random_values("bfloat16", 1, 4, (LAYERS, 2, heads, TOKENS, HEAD_DIM)))
            .numpy()
            .tobytes()
            for one, heads in zip(layouts, (HEADS, 1), strict=True)
        )
        packed, result = bytearray(codec.packed_bytes), bytearray(codec.raw_bytes)
        assert codec.pack(memoryview(raw), memoryview(packed))
        codec.unpack(memoryview(packed), memoryview(result))
        first = layouts[0].num_bytes
        alone = open_lossy(name, layouts[1])
        expected, _ = alone.pack_tensor(
            torch.frombuffer(bytearray(raw[first:]), dtype=torch.uint8)[None]
        )
        assert packed[-alone.packed_bytes :] == expected.numpy().tobytes()
        assert result[first:] == alone.unpack_tensor(expected).numpy().tobytes()
    unknown = BlockValues((PartValues(layouts[0].num_bytes, "bfloat16"),))
    with pytest.raises(ConfigError, match="order of the KV's values in memory is not known"):
        unknown.open("int8")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", LOSSY)
def test_losses_do_not_add_up(name: str, dtype: str) -> None:
    """A block that was loaded from one tier may be packed again for another."""
    codec = open_lossy(name, layout_of(dtype, head_dim=64))
    values = random_values(dtype, 50, 5, (*SHAPE[:-1], 64))
    packed, _ = codec.pack_tensor(ordered(codec.layout, values))
    once = again = codec.unpack_tensor(packed)
    for _ in range(3):
        again = codec.unpack_tensor(codec.pack_tensor(again)[0])
    if name != "int4":
        assert again.equal(once)
        return

    def error(raw: Tensor) -> float:
        return (values_of(codec.layout, raw).double() - values.double()).norm().item()

    assert (again == once).double().mean() > 0.999
    assert error(again) < 1.001 * error(once)


def test_sizes_need_no_torch() -> None:
    code = "import sys, penstock.codecs.lossy_format; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
