"""The shape of a model, which determines the size of its KV. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from penstock.errors import ConfigError
from penstock.units import MiB

_MAX_BLOCK_BYTES = 2 * MiB
_MIN_BLOCK_TOKENS = 16
_KNOWN_BITS = (4, 8, 16, 32)


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_count(name: str, value: object) -> None:
    if not is_count(value):
        raise ConfigError(f"{name} is {value!r}: expected a whole number above 0; correct it")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Determines the size of a model's KV and, roughly, the work of computing it.

    With `latent_dim`, the model keeps one compressed vector per token and layer (MLA, multi-head
    latent attention) instead of keys and values per head. With `window_tokens`,
    `num_window_layers` of its layers keep only that many of the most recent tokens.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    bits: int = 16
    num_params: int | None = None
    num_heads: int | None = None
    hidden_size: int | None = None
    latent_dim: int | None = None
    num_active_params: int | None = None  # for a mixture of experts: those that one token uses
    window_tokens: int | None = None
    num_window_layers: int = 0
    max_context_tokens: int | None = None  # the longest sequence; None: unknown

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            check_count(name, getattr(self, name))
        optional = ("num_params", "num_heads", "hidden_size", "latent_dim", "num_active_params")
        for name in (*optional, "window_tokens", "max_context_tokens"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.bits not in _KNOWN_BITS:
            raise ConfigError(
                f"bits is {self.bits!r}: expected one of {', '.join(map(str, _KNOWN_BITS))}; "
                "give the width of one KV element"
            )
        most = self.num_layers if self.window_tokens is not None else 0
        if not 0 <= self.num_window_layers <= most:
            raise ConfigError(
                f"num_window_layers is {self.num_window_layers}: expected 0 to {most}, with "
                "window_tokens set; correct it"
            )

    @property
    def is_mla(self) -> bool:
        return self.latent_dim is not None

    @property
    def is_mixture(self) -> bool:
        """Whether it is a mixture of experts: a token uses only some of the parameters."""
        return self.num_active_params is not None

    @property
    def bytes_per_token(self) -> int:
        """2 (K and V) x layers x KV heads x head_dim x bits/8; for MLA layers x latent x bits/8.

        For a token that every layer keeps. Beyond a sliding window fewer layers do: see `kv_bytes`.
        """
        return self._bytes(self.num_layers)

    @property
    def full_bytes_per_token(self) -> int:
        """Counts only the layers that keep every token, however long the sequence."""
        return self._bytes(self.num_layers - self.num_window_layers)

    @property
    def params_per_token(self) -> int | None:
        """About how many parameters one token is multiplied with: the work of prefill."""
        return self.num_params if self.num_active_params is None else self.num_active_params

    def kv_bytes(self, num_tokens: int, batch: int = 1) -> int:
        """KV of `batch` sequences; layers with a window keep at most that window."""
        if self.window_tokens is None or num_tokens <= self.window_tokens:
            return self.bytes_per_token * num_tokens * batch
        windows = self._bytes(self.num_window_layers) * self.window_tokens
        return (self.full_bytes_per_token * num_tokens + windows) * batch

    def _bytes(self, num_layers: int) -> int:
        width = self.latent_dim or 2 * self.num_kv_heads * self.head_dim
        return -(-num_layers * width * self.bits // 8)


def suggest_block_tokens(bytes_per_token: int) -> int:
    """The power of two, at least 16, that makes a block larger than 1 MiB and at most 2 MiB.

    16 if 16 tokens already exceed 2 MiB, because engines have no smaller blocks.
    """
    check_count("bytes_per_token", bytes_per_token)
    fitting_tokens = max(_MAX_BLOCK_BYTES // bytes_per_token, _MIN_BLOCK_TOKENS)
    return 1 << (fitting_tokens.bit_length() - 1)
