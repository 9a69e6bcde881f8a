"""A model's layers in groups: what each group keeps, and how many bytes that is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.groups.kinds import Kind


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same. Attention keeps KV per token; a state has one size for any length.

    `elements` are those of one token in one layer: K and V of all heads, or one latent (MLA).
    """

    kind: Kind
    label: str  # for people: "full attention", "sliding window", "Mamba2 state"
    num_layers: int
    num_heads: int = 1  # KV heads, or heads of a state, which tensor parallelism splits
    elements: int = 0
    fixed_bytes: int = 0  # per token and layer, whatever the width of KV: an indexer's keys
    packed_bytes: int = 0  # per token and layer with 8-bit KV, if that is not one byte an element
    state_bytes: int = 0  # per layer
    span: int = 0  # of a window or chunk, in tokens
    is_latent: bool = False  # MLA: one latent for all heads, which every GPU of a server holds
    layers: tuple[int, ...] = ()  # which layers, if there are other groups

    def __post_init__(self) -> None:
        keeps = self.state_bytes if self.kind is Kind.STATE else self.elements
        if self.num_layers < 1 or keeps < 1:
            raise ConfigError(
                f"a group of {self.num_layers} layers ({self.label}) keeps {keeps} bytes or "
                "elements per layer: expected 1 or more of both"
            )
        if self.kind in (Kind.WINDOW, Kind.CHUNK) and self.span < 1:
            raise ConfigError(f"a {self.label} has {self.span} tokens: expected 1 or more")

    def token_bytes(self, bits: int) -> int:
        """Bytes of one token in all layers of the group; 0 for a state."""
        if self.kind is Kind.STATE:
            return 0
        fixed = self.num_layers * self.fixed_bytes
        if bits == 8 and self.packed_bytes:
            return self.num_layers * self.packed_bytes + fixed
        return -(-self.num_layers * self.elements * bits // 8) + fixed

    def held_tokens(self, num_tokens: int) -> int:
        """How many of a sequence's tokens are kept at once. A chunk is counted when it is full."""
        if self.kind is Kind.STATE:
            return 0
        return num_tokens if self.kind is Kind.FULL else min(self.span, num_tokens)

    def held_bytes(self, num_tokens: int, bits: int) -> int:
        """Bytes of a sequence on the device, over all layers of the group, each once."""
        states = self.state_bytes * self.num_layers if num_tokens else 0
        return self.token_bytes(bits) * self.held_tokens(num_tokens) + states

    def num_copies(self, num_gpus: int) -> int:
        """How many of a server's GPUs hold each byte. Raises ConfigError if it cannot be split.

        With more GPUs than KV heads, several GPUs hold the same heads: 4 KV heads over 8 GPUs are
        2 copies. A latent has no heads to split, so every GPU holds it.
        """
        if self.is_latent:
            return num_gpus
        heads = self.num_heads
        if self.kind is Kind.STATE:
            if heads % num_gpus:
                raise ConfigError(
                    f"{heads} heads of a {self.label} cannot be split over {num_gpus} GPUs: "
                    "expected a number of GPUs that divides them"
                )
            return 1
        if heads % num_gpus and num_gpus % heads:
            raise ConfigError(
                f"{heads} KV heads cannot be split over {num_gpus} GPUs: expected a "
                "number of GPUs that divides them or is a multiple of them"
            )
        return max(1, num_gpus // heads)
