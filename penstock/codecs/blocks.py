"""What a client knows about the values in its blocks, and the codecs that apply to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blake3 import blake3

from penstock.codecs.base import BlockCodec, Codec, RawCodec
from penstock.codecs.layout import KvLayout
from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import fit_lossless
from penstock.codecs.lossy_format import why_not_lossy
from penstock.codecs.names import AUTO, LOSSLESS, RAW
from penstock.errors import ConfigError
from penstock.types import BlockSpec, Tier


@dataclass(frozen=True, slots=True)
class PartValues:
    """The values of one worker's part of a block. Plain data."""

    num_bytes: int
    dtype: str = ""  # as torch names it, without "torch."; empty if it is unknown or mixed
    stretches: tuple[int, ...] = ()  # in bytes; scattered on the device, adjacent in a block
    head_dim: int | None = None  # set if attention reads blocks in HOST
    layout: KvLayout | None = None  # None if it is unknown: then no lossy codec applies


@dataclass(frozen=True, slots=True)
class BlockValues:
    """The values of a client's blocks."""

    parts: tuple[PartValues, ...]
    on_gpu: bool = False

    def why_not(self, codec: str) -> str:
        """Why a codec does not apply to these blocks, in words; empty if it does."""
        for part in self.parts:
            if why := _why_not(codec, part):
                return why
        return ""

    def open(self, codec: str) -> BlockCodec:
        """The codec of whole blocks. Raises ConfigError if it does not apply to them."""
        if why := self.why_not(codec):
            raise ConfigError(f'the codec "{codec}" cannot be used: {why}; choose "raw" or "auto"')
        return BlockCodec(tuple(_open(codec, part) for part in self.parts))


@dataclass(frozen=True, slots=True)
class TierCodecs:
    """The codec of each tier below the device."""

    host: BlockCodec
    lower: Mapping[Tier, BlockCodec] = field(default_factory=dict)

    @classmethod
    def choose(cls, settings: Mapping[Tier, str], values: BlockValues) -> TierCodecs:
        """Open the codecs that the settings name. Raises ConfigError if one does not apply."""
        names = choose_names(settings, values)
        opened = {tier: _open_for(tier, name, values) for tier, name in names.items()}
        return cls(opened.pop(Tier.HOST), opened)

    def of(self, tier: Tier) -> BlockCodec:
        return self.host if tier is Tier.HOST else self.lower.get(tier, self.host)

    @property
    def names(self) -> dict[Tier, str]:
        return {Tier.HOST: self.host.name, **{t: codec.name for t, codec in self.lower.items()}}

    def spec(self, tier: Tier, spec: BlockSpec) -> BlockSpec:
        """The spec of a tier's store, from that of raw blocks.

        Its namespace contains the codec: bytes that were packed in another way are never found.
        """
        codec = self.of(tier)
        if not codec.version:
            return spec
        namespace = blake3(b"penstock codec 1" + spec.namespace + codec.version.encode()).digest()
        description = (*spec.description, ("codec", codec.name))
        return replace(
            spec, namespace=namespace, block_bytes=codec.packed_bytes, description=description
        )


def choose_names(settings: Mapping[Tier, str], values: BlockValues) -> dict[Tier, str]:
    """The codec of each tier. `auto` in a lower tier is the one of HOST: nothing is repacked."""
    host = settings.get(Tier.HOST, AUTO)
    if host == AUTO:
        # On a CPU packing takes longer than copying; on a GPU it makes copies faster.
        host = LOSSLESS if values.on_gpu and _can_pack_host(values) else RAW
    lower = {tier: name for tier, name in settings.items() if tier is not Tier.HOST}
    return {Tier.HOST: host, **{t: host if name == AUTO else name for t, name in lower.items()}}


def _can_pack_host(values: BlockValues) -> bool:
    """Whether everything that reads blocks in HOST can read them packed without loss."""
    if values.why_not(LOSSLESS):
        return False
    forms = [(part.head_dim, fit_lossless(part.stretches, part.head_dim)) for part in values.parts]
    return all(dim is None or (form and form.row_values == dim) for dim, form in forms)


def _open_for(tier: Tier, name: str, values: BlockValues) -> BlockCodec:
    try:
        return values.open(name)
    except ConfigError as error:
        raise ConfigError(f"{tier.label}.codec: {error}") from None


def _why_not(codec: str, part: PartValues) -> str:
    if codec == RAW:
        return ""
    if not part.dtype:
        return "the type of the KV's values is not known, or there are several"
    if codec == LOSSLESS:
        if part.dtype != "bfloat16":
            return f"it packs bfloat16, and this KV is {part.dtype}"
        if fit_lossless(part.stretches, part.head_dim) is None:
            return "blocks of this shape would not become smaller"
        return ""
    if part.layout is None:
        return "the order of the KV's values in memory is not known"
    return why_not_lossy(codec, part.layout)


def _open(codec: str, part: PartValues) -> Codec:
    if codec == RAW:
        return RawCodec(part.num_bytes)
    if codec == LOSSLESS:
        form = fit_lossless(part.stretches, part.head_dim)
        assert form is not None
        return LosslessCodec(form)
    from penstock.codecs.lossy import open_lossy  # torch: only those who ask for it need it

    assert part.layout is not None
    return open_lossy(codec, part.layout)
