"""How a model's KV is packed below the GPU: which codec each tier uses, and what remains. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.codecs.names import AUTO, CODECS, LOSSLESS, RAW, is_lossy
from penstock.codecs.sizes import packed_block_bytes, why_not
from penstock.costs.rates import LinkRate
from penstock.errors import ConfigError
from penstock.groups.kinds import Kind
from penstock.shapes.gpu_rates import GpuRates, KnownLink
from penstock.shapes.layer_groups import LayerGroup
from penstock.shapes.shape import ModelShape
from penstock.types import PAGE_BYTES, Tier, round_up


@dataclass(frozen=True, slots=True)
class Packing:
    """The codec of a tier, and how much it packs. `why` is a sentence for people."""

    codec: str
    ratio: float  # packed bytes per raw byte
    why: str

    @property
    def is_lossy(self) -> bool:
        return is_lossy(self.codec)

    def packed_bytes(self, raw_bytes: int) -> int:
        return raw_bytes if self.codec == RAW else math.ceil(raw_bytes * self.ratio)

    def slot_bytes(self, raw_bytes: int) -> int:
        """What a block takes in DRAM or on disk: whole pages."""
        return round_up(self.packed_bytes(raw_bytes), PAGE_BYTES)


def pack_shape(
    shape: ModelShape,
    codec: str = AUTO,
    block_tokens: int = 16,
    *,
    num_gpus: int = 1,
    setting: str = "the codec",
) -> Packing:
    """How a GPU's KV is packed. Raises ConfigError if the codec does not apply to this model.

    `auto` is lossless where that applies, and raw elsewhere. Each of `num_gpus` that share the
    model packs its own part of a block.
    """
    if codec not in (AUTO, *CODECS):
        expected = ", ".join((AUTO, *CODECS))
        raise ConfigError(f"{setting} is {codec[:80]!r}: expected one of {expected}; correct it")
    if codec == RAW:
        return Packing(RAW, 1.0, "raw was chosen, so KV is not packed.")
    wanted = LOSSLESS if codec == AUTO else codec
    obstacle = _obstacle(shape, wanted, block_tokens, num_gpus)
    if obstacle and codec == AUTO:
        return Packing(RAW, 1.0, f"KV is not packed: {obstacle}.")
    if obstacle:
        raise ConfigError(f"{setting} is {codec}, but {obstacle}: leave it out, or choose another")
    ratio = max(_ratio(shape, group, wanted, block_tokens, num_gpus) for group in shape.groups)
    if is_lossy(wanted):
        why = f"{wanted} was chosen. It is lossy: answers differ from those with raw KV."
    else:
        why = "KV is bfloat16, which is packed without loss, bit for bit."
    return Packing(wanted, ratio, why)


def pack_tiers(
    shape: ModelShape,
    codecs: Mapping[Tier, str],
    block_tokens: int = 16,
    *,
    num_gpus: int = 1,
    setting: str = "{tier}.codec",
) -> dict[Tier, Packing]:
    """The packing of each tier below the GPU. A lower tier left at `auto` uses DRAM's codec."""

    def pack(tier: Tier, codec: str) -> Packing:
        name = setting.format(tier=tier.label)
        return pack_shape(shape, codec, block_tokens, num_gpus=num_gpus, setting=name)

    host = pack(Tier.HOST, codecs.get(Tier.HOST, AUTO))
    chosen = {tier: codecs.get(tier, AUTO) for tier in (Tier.DISK, Tier.REMOTE)}
    return {
        Tier.HOST: host,
        **{tier: host if codec == AUTO else pack(tier, codec) for tier, codec in chosen.items()},
    }


def packed_rates(rates: GpuRates, packings: Mapping[Tier, Packing]) -> GpuRates:
    """Rates in bytes of raw KV. What crosses a link is packed, so they are higher than the link's.

    Packing and unpacking on a GPU are many times faster than its link, and are not counted.
    """
    links = {}
    for tier, link in rates.links.items():
        packing = packings[tier]
        if packing.codec == RAW:
            links[tier] = link
            continue
        rate = LinkRate(link.rate.bytes_per_second / packing.ratio, link.rate.latency_seconds)
        packed = f"; KV crosses it packed to {packing.ratio:.3g} of its size ({packing.codec})"
        links[tier] = KnownLink(rate, link.source + packed)
    cold = rates.cold_bytes_per_second / packings[Tier.HOST].ratio
    return replace(rates, links=links, cold_bytes_per_second=cold)


def _obstacle(shape: ModelShape, codec: str, block_tokens: int, num_gpus: int) -> str:
    """Why the codec does not apply, as the end of a sentence; empty if it does."""
    for group in shape.groups:
        if group.kind is Kind.STATE:
            return f"the model has a {group.label}, which is not packed"
        if group.fixed_bytes:
            return "the model's layers also keep an indexer's keys, which are not packed"
        sizes = _sizes(group, block_tokens, num_gpus)
        if why := why_not(codec, shape.kv_dtype, *sizes, is_latent=group.is_latent):
            return why
    return ""


def _ratio(
    shape: ModelShape, group: LayerGroup, codec: str, block_tokens: int, num_gpus: int
) -> float:
    sizes = _sizes(group, block_tokens, num_gpus)
    packed, raw = (
        packed_block_bytes(each, shape.kv_dtype, *sizes, is_latent=group.is_latent)
        for each in (codec, RAW)
    )
    assert packed is not None
    assert raw is not None
    return packed / raw


def _sizes(group: LayerGroup, block_tokens: int, num_gpus: int) -> tuple[int, int, int, int]:
    """Layers, tokens, heads and values per head of the part that one GPU holds."""
    num_kinds = 1 if group.is_latent else 2
    head_dim = group.elements // (num_kinds * group.num_heads)
    num_heads = 1 if group.is_latent else max(1, group.num_heads // num_gpus)
    return group.num_layers, block_tokens, num_heads, head_dim
