"""How many bytes a packed block needs, and why a codec cannot pack some KV. Pure numbers."""

from __future__ import annotations

from penstock.codecs.layout import VALUE_BYTES, KvLayout
from penstock.codecs.lossless_format import MAX_RATIO, LosslessFormat, fit_lossless
from penstock.codecs.lossy_format import DTYPES as LOSSY_DTYPES
from penstock.codecs.lossy_format import lossy_packed_bytes
from penstock.codecs.names import LOSSLESS, LOSSY, RAW


def packed_block_bytes(
    codec: str,
    dtype: str,
    num_layers: int,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    *,
    is_latent: bool = False,
) -> int | None:
    """The bytes of one worker's part of a block; None if the codec does not apply (`why_not`).

    `is_latent`: one vector of `head_dim` per token and layer (MLA), in place of keys and values.
    """
    sizes = (num_layers, block_tokens, kv_heads, head_dim)
    if why_not(codec, dtype, *sizes, is_latent=is_latent):
        return None
    num_kinds = 1 if is_latent else 2
    num_values = num_kinds * num_layers * block_tokens * kv_heads * head_dim
    if codec == RAW:
        return num_values * VALUE_BYTES[dtype]
    if codec == LOSSLESS:
        form = _lossless(*sizes, is_latent=is_latent)
        return None if form is None else form.packed_bytes
    layout = KvLayout.of_engine(dtype, num_layers, block_tokens, kv_heads, head_dim)
    return lossy_packed_bytes(codec, layout)


def why_not(
    codec: str,
    dtype: str,
    num_layers: int,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    *,
    is_latent: bool = False,
) -> str:
    """Why the codec cannot pack such KV, as the end of a sentence; empty if it can."""
    if codec == RAW:
        return ""
    if codec == LOSSLESS:
        if dtype != "bfloat16":
            return f"the lossless codec packs bfloat16 only, and this KV is {dtype}"
        if _lossless(num_layers, block_tokens, kv_heads, head_dim, is_latent=is_latent) is None:
            what = "latents" if is_latent else "heads"
            return (
                f"the lossless codec would need more than {MAX_RATIO:.0%} of the size for {what} "
                f"of {head_dim} values"
            )
        return ""
    assert codec in LOSSY, codec
    if is_latent:
        return f"{codec} packs keys and values, and this KV is one latent per token (MLA)"
    if dtype not in LOSSY_DTYPES:
        return f"{codec} packs {', '.join(LOSSY_DTYPES)}, and this KV is {dtype}"
    if codec == "int4" and head_dim % 2:
        return f"int4 packs two values in a byte, and heads have {head_dim} values"
    return ""


def _lossless(
    num_layers: int, block_tokens: int, kv_heads: int, head_dim: int, *, is_latent: bool
) -> LosslessFormat | None:
    stretch_bytes = block_tokens * kv_heads * head_dim * VALUE_BYTES["bfloat16"]
    if is_latent:
        return fit_lossless([stretch_bytes] * num_layers)
    return fit_lossless([stretch_bytes] * (2 * num_layers), head_dim)
