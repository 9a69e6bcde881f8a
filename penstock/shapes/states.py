"""The size of the state that one layer keeps per sequence, as vLLM allocates it.

    Mamba2              convolution: (kernel - 1) x (inner + 2 x groups x state size)
                        state:       heads x head size x state size
    Mamba1              convolution: (kernel - 1) x inner;  state: inner x state size
    gated delta net     convolution: (kernel - 1) x (2 x key heads x key size + value heads x value
                        size);  state: value heads x value size x key size
    KDA (Kimi)          as a gated delta net with as many key heads as value heads
    short convolution   (kernel - 1) x channels

A convolution has the model's dtype. A recurrent state has it too unless the config says otherwise:
`mamba_ssm_cache_dtype` (Nemotron-H, float32 if missing), `mamba_ssm_dtype` (Qwen3.5); KDA's is
always float32. Drafters, which make vLLM keep a few more columns, are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.shapes.fields import ConfigFields
from penstock.shapes.shape import is_count


class StateSize(NamedTuple):
    label: str
    num_heads: int  # which tensor parallelism splits
    num_bytes: int  # of one layer


def state_size(fields: ConfigFields, kind: str, model_bits: int) -> StateSize:
    """The state of a layer of this kind. Raises ConfigError if the config does not determine it."""
    if kind == "conv":
        channels = fields.count("conv_dim", "hidden_size")
        num_bytes = (fields.count("conv_L_cache") - 1) * channels * model_bits // 8
        return StateSize("short convolution state", channels, num_bytes)
    if isinstance(kda := fields.values.get("linear_attn_config"), dict):
        return _kda(ConfigFields(kda, fields.origin), model_bits)
    if fields.has("linear_num_value_heads"):
        return _gated_delta_net(fields, model_bits)
    if any(fields.has(name) for name in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")):
        return _mamba2(fields, model_bits)
    if fields.has("mamba_dt_rank"):
        return _mamba1(fields, model_bits)
    raise ConfigError(
        f"{fields.origin} has layers of type {kind[:80]!r}, whose state has an unknown size: "
        "expected Mamba, a gated delta net, KDA or short convolutions; choose another model"
    )


def _mamba2(fields: ConfigFields, model_bits: int) -> StateSize:
    heads = fields.count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    size = fields.count("mamba_d_state", "ssm_state_size")
    if fields.has("mamba_num_heads"):  # Nemotron-H
        head_dim = fields.count("mamba_head_dim")
        inner = heads * head_dim
    else:
        inner = fields.about("mamba_d_ssm") or _expanded(fields)
        name = "mamba_headdim" if fields.has("mamba_headdim") else "mamba_d_head"
        head_dim = fields.about(name) or inner // heads  # Granite says "auto"
    groups = fields.count("mamba_n_groups", "n_groups", "mamba_ngroups")
    kernel = fields.count("mamba_d_conv", "conv_kernel")
    default = 32 if fields.kind.startswith("nemotron_h") else model_bits
    state_bits = fields.bits("mamba_ssm_cache_dtype", default)
    convolution = (kernel - 1) * (inner + 2 * groups * size)
    state = heads * head_dim * size
    return StateSize("Mamba2 state", heads, convolution * model_bits // 8 + state * state_bits // 8)


def _mamba1(fields: ConfigFields, model_bits: int) -> StateSize:
    inner = _expanded(fields)
    per_channel = fields.count("mamba_d_conv") - 1 + fields.count("mamba_d_state")
    return StateSize("Mamba state", inner, inner * per_channel * model_bits // 8)


def _gated_delta_net(fields: ConfigFields, model_bits: int) -> StateSize:
    value_heads = fields.count("linear_num_value_heads")
    value_dim, key_dim = fields.count("linear_value_head_dim"), fields.count("linear_key_head_dim")
    channels = 2 * fields.count("linear_num_key_heads") * key_dim + value_heads * value_dim
    convolution = (fields.count("linear_conv_kernel_dim") - 1) * channels
    # vLLM reads this field for Qwen3.5 and its successors, not for Qwen3-Next.
    state_bits = model_bits
    if fields.kind != "qwen3_next":
        state_bits = fields.bits("mamba_ssm_dtype", model_bits)
    state = value_heads * value_dim * key_dim
    return StateSize(
        "gated delta net state",
        value_heads,
        convolution * model_bits // 8 + state * state_bits // 8,
    )


def _kda(fields: ConfigFields, model_bits: int) -> StateSize:
    heads, head_dim = fields.count("num_heads"), fields.count("head_dim")
    convolution = (fields.count("short_conv_kernel_size") - 1) * 3 * heads * head_dim
    return StateSize(
        "KDA state", heads, convolution * model_bits // 8 + heads * head_dim * head_dim * 4
    )


def _expanded(fields: ConfigFields) -> int:
    expand = fields.values.get("mamba_expand")
    if not (is_count(expand) or (isinstance(expand, float) and expand > 0)):
        raise fields.wrong("mamba_expand", "expected a number above 0")
    return int(expand * fields.count("hidden_size"))
