from __future__ import annotations

import pytest

from penstock.codecs.layout import KvLayout
from penstock.codecs.lossless_format import fit_lossless
from penstock.codecs.lossy_format import lossy_packed_bytes
from penstock.codecs.names import CODECS, LOSSY
from penstock.codecs.sizes import packed_block_bytes, why_not

SHAPE = (32, 16, 8, 128)  # layers, tokens, KV heads, values per head


def test_sizes_are_those_of_the_codecs() -> None:
    raw = packed_block_bytes("raw", "bfloat16", *SHAPE)
    assert raw == 2 * 1024 * 1024
    form = fit_lossless([16 * 8 * 128 * 2] * 64, 128)
    assert form is not None
    assert form.raw_bytes == raw
    assert packed_block_bytes("lossless", "bfloat16", *SHAPE) == form.packed_bytes
    layout = KvLayout.of_engine("bfloat16", *SHAPE)
    for codec in LOSSY:
        packed = packed_block_bytes(codec, "bfloat16", *SHAPE)
        assert packed == lossy_packed_bytes(codec, layout) < 0.55 * raw


@pytest.mark.parametrize(
    ("codec", "dtype", "shape", "is_latent", "words"),
    [
        ("lossless", "float16", SHAPE, False, "this KV is float16"),
        ("lossless", "float32", SHAPE, False, "this KV is float32"),
        ("lossless", "float8_e4m3fn", SHAPE, False, "this KV is float8_e4m3fn"),
        ("lossless", "bfloat16", (2, 1, 1, 30), False, "heads of 30 values"),
        ("lossless", "bfloat16", (2, 1, 1, 30), True, "latents of 30 values"),
        ("int8", "bfloat16", (27, 16, 1, 576), True, "(MLA)"),
        ("fp8", "float8_e4m3fn", SHAPE, False, "this KV is float8_e4m3fn"),
        ("int4", "bfloat16", (2, 16, 2, 63), False, "63 values"),
    ],
)
def test_what_does_not_apply(
    codec: str, dtype: str, shape: tuple[int, int, int, int], is_latent: bool, words: str
) -> None:
    assert packed_block_bytes(codec, dtype, *shape, is_latent=is_latent) is None
    assert words in why_not(codec, dtype, *shape, is_latent=is_latent)


def test_latents_are_packed_without_loss() -> None:
    raw = packed_block_bytes("raw", "bfloat16", 61, 16, 1, 576, is_latent=True)
    packed = packed_block_bytes("lossless", "bfloat16", 61, 16, 1, 576, is_latent=True)
    assert raw == 61 * 16 * 576 * 2
    assert packed is not None
    assert packed < 0.78 * raw


def test_every_codec_has_a_size() -> None:
    for codec in CODECS:
        assert not why_not(codec, "bfloat16", *SHAPE)
        assert packed_block_bytes(codec, "bfloat16", *SHAPE)
