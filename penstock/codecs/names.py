"""The names of the codecs that a tier can use."""

from __future__ import annotations

from collections.abc import Iterable

AUTO = "auto"
RAW = "raw"
LOSSLESS = "lossless"
LOSSY = ("fp8", "int8", "int4")
CODECS = (RAW, LOSSLESS, *LOSSY)


def is_lossy(codec: str) -> bool:
    return codec in LOSSY


def loss_of(codecs: Iterable[str]) -> str:
    """The lossy codecs among those of all tiers, as part of the namespace; empty if there is none.

    KV computed after lossy KV differs too, whichever tier it is stored in. So all blocks of an
    instance with a lossy tier have keys of their own.
    """
    return ",".join(sorted({codec for codec in codecs if is_lossy(codec)}))
