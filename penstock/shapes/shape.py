"""The shape of a model, which determines the size of its KV. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from penstock.errors import ConfigError
from penstock.groups.kinds import Kind
from penstock.shapes.layer_groups import LayerGroup
from penstock.units import MiB

_MAX_BLOCK_BYTES = 2 * MiB
_MIN_BLOCK_TOKENS = 16
_KNOWN_BITS = (4, 8, 16, 32)
_LONG = 1 << 62  # tokens: longer than any window


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_count(name: str, value: object) -> None:
    if not is_count(value):
        raise ConfigError(f"{name} is {value!r}: expected a whole number above 0; correct it")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Determines the size of a model's KV and, roughly, the work of computing it.

    `groups` says what each group of layers keeps. Without it, the other fields do: with
    `latent_dim`, one compressed vector per token and layer (MLA, multi-head latent attention)
    instead of keys and values per head; with `window_tokens`, `num_window_layers` of the layers
    keep only that many of the most recent tokens; the others keep every token.
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
    half_dtype: str = "bfloat16"  # of 16-bit KV: bfloat16 or float16
    groups: tuple[LayerGroup, ...] = ()

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
        if not self.groups:
            object.__setattr__(self, "groups", tuple(self._simple_groups()))

    def _simple_groups(self) -> Iterator[LayerGroup]:
        is_latent = self.latent_dim is not None
        elements = self.latent_dim or 2 * self.num_kv_heads * self.head_dim
        heads = 1 if is_latent else self.num_kv_heads
        if num_full := self.num_layers - self.num_window_layers:
            label = "MLA latents" if is_latent else "full attention"
            yield LayerGroup(Kind.FULL, label, num_full, heads, elements, is_latent=is_latent)
        if self.num_window_layers:
            yield LayerGroup(
                *(Kind.WINDOW, "sliding window", self.num_window_layers, heads, elements),
                span=self.window_tokens or 0,
                is_latent=is_latent,
            )

    @property
    def is_mla(self) -> bool:
        return self.latent_dim is not None

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps the keys and values of every token."""
        return all(group.kind is Kind.FULL and not group.is_latent for group in self.groups)

    @property
    def kv_dtype(self) -> str:
        """The dtype of KV values, as torch names it."""
        return {32: "float32", 16: self.half_dtype, 8: "float8_e4m3fn", 4: "4-bit"}[self.bits]

    @property
    def is_mixture(self) -> bool:
        """Whether it is a mixture of experts: a token uses only some of the parameters."""
        return self.num_active_params is not None

    @property
    def bytes_per_token(self) -> int:
        """2 (K and V) x layers x KV heads x head_dim x bits/8; for MLA layers x latent x bits/8.

        For a token that every layer with attention keeps. Beyond a window fewer layers do, and
        states do not grow with the tokens: see `kv_bytes`.
        """
        return sum(group.token_bytes(self.bits) for group in self.groups)

    @property
    def full_bytes_per_token(self) -> int:
        """What grows: only the layers that keep every token, however long the sequence."""
        return sum(group.token_bytes(self.bits) for group in self._full)

    @property
    def num_full_layers(self) -> int:
        return sum(group.num_layers for group in self._full)

    @property
    def params_per_token(self) -> int | None:
        """About how many parameters one token is multiplied with: the work of prefill."""
        return self.num_params if self.num_active_params is None else self.num_active_params

    @property
    def partial_groups(self) -> tuple[LayerGroup, ...]:
        """Windows, chunks and states. To continue a sequence, they need a checkpoint of it."""
        return tuple(group for group in self.groups if group.kind is not Kind.FULL)

    @property
    def _full(self) -> list[LayerGroup]:
        return [group for group in self.groups if group.kind is Kind.FULL]

    def kv_bytes(self, num_tokens: int, batch: int = 1, *, num_gpus: int = 1) -> int:
        """What `batch` sequences take on the device: all tokens, windows and states.

        Over several GPUs that share one copy of the model, some hold the same KV: it counts as
        often as it is held.
        """
        return batch * sum(
            group.held_bytes(num_tokens, self.bits) * group.num_copies(num_gpus)
            for group in self.groups
        )

    def growing_bytes(self, num_tokens: int, *, num_gpus: int = 1) -> int:
        """The part of `kv_bytes` in layers that keep every token."""
        return num_tokens * sum(
            group.token_bytes(self.bits) * group.num_copies(num_gpus) for group in self._full
        )

    def checkpoint_bytes(self, num_tokens: int | None = None, *, num_gpus: int = 1) -> int:
        """One checkpoint: all windows, chunks and states after `num_tokens`. None: a long prompt.

        Exact for states. Windows and chunks are kept in whole blocks, and a chunk may be partly
        filled.
        """
        return sum(
            group.held_bytes(_LONG if num_tokens is None else num_tokens, self.bits)
            * group.num_copies(num_gpus)
            for group in self.partial_groups
        )

    def offloaded_bytes(self, num_tokens: int, num_turns: int = 1, *, num_gpus: int = 1) -> int:
        """What DRAM keeps of a sequence: every token of full layers, a checkpoint for each turn.

        `num_gpus` are those that share one copy of the model. Each saves what it holds, but MLA's
        latents are kept once for all of them.
        """
        total = 0
        for group in self.groups:
            times = 1 if group.kind is Kind.FULL else num_turns
            copies = 1 if group.is_latent else group.num_copies(num_gpus)
            total += group.held_bytes(num_tokens, self.bits) * times * copies
        return total


def suggest_block_tokens(bytes_per_token: int) -> int:
    """The power of two, at least 16, that makes a block larger than 1 MiB and at most 2 MiB.

    16 if 16 tokens already exceed 2 MiB, because engines have no smaller blocks.
    """
    check_count("bytes_per_token", bytes_per_token)
    fitting_tokens = max(_MAX_BLOCK_BYTES // bytes_per_token, _MIN_BLOCK_TOKENS)
    return 1 << (fitting_tokens.bit_length() - 1)
