"""The kinds of KV cache groups, and the blocks that a hit needs in each.

A model's layers form groups. All layers of a group need the KV of the same tokens:

    full     every token from the first on (plain attention, MLA)
    window   the last tokens, as many as the window is wide
    chunk    the tokens since the last border of a chunk
    state    one state, that of the last token (Mamba2, gated delta nets, short convolutions)

A hit of N tokens is legal if N is a multiple of every group's block size, and if every group has
the blocks it needs at N. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import ConfigError


class Kind(StrEnum):
    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Group:
    """One group of layers. `span` is the size of its window or chunk in tokens."""

    index: int  # its place in the model's list of groups, which is part of its keys
    kind: Kind
    block_tokens: int
    span: int = 0
    extra_tokens: int = 0  # tokens before the window that are kept too, for drafters

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(
                f"a group has blocks of {self.block_tokens} tokens: expected 1 or more"
            )
        if self.kind in (Kind.WINDOW, Kind.CHUNK) and self.span < 1:
            raise ConfigError(f"a {self.kind} group has a span of {self.span}: expected 1 or more")

    @property
    def is_full(self) -> bool:
        return self.kind is Kind.FULL

    def first_needed(self, num_tokens: int) -> int:
        """The index of the first block that a hit of `num_tokens` needs."""
        match self.kind:
            case Kind.FULL:
                return 0
            case Kind.WINDOW:
                first = num_tokens - self.span + 1 - self.extra_tokens
                return max(0, first) // self.block_tokens
            case Kind.CHUNK:
                return num_tokens // self.span * self.span // self.block_tokens
            case Kind.STATE:
                return num_tokens // self.block_tokens - 1

    def needed(self, num_tokens: int, start: int = 0) -> range:
        """The blocks that a hit of `num_tokens` needs, of which `start` are on the device."""
        first = max(self.first_needed(num_tokens), start // self.block_tokens)
        return range(first, num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model whose KV is kept."""

    groups: tuple[Group, ...]
    # The block sizes of groups that are not kept, because they are filled anew after every hit.
    # What they hold may depend on the tokens since the last multiple of all block sizes.
    others: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("a model without KV cache groups has nothing to keep")

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def is_plain(self) -> bool:
        """One group of full attention: every number of whole blocks is legal."""
        return len(self.groups) == 1 and self.groups[0].is_full and not self.others

    @property
    def all_full(self) -> bool:
        return all(group.is_full for group in self.groups)

    @property
    def full(self) -> Sequence[Group]:
        return [group for group in self.groups if group.is_full]

    @property
    def partial(self) -> Sequence[Group]:
        """The groups that need only some blocks, of which checkpoints are kept."""
        return [group for group in self.groups if not group.is_full]

    @property
    def unit_tokens(self) -> int:
        """Keys are chained in steps of this many tokens."""
        return math.gcd(*[group.block_tokens for group in self.groups])

    @property
    def align_tokens(self) -> int:
        """Legal hits are multiples of this many tokens."""
        return math.lcm(*[group.block_tokens for group in self.groups], *self.others)

    def max_hit(self, num_tokens: int) -> int:
        """The longest legal hit of a prompt, if everything is there.

        The last token is always computed. With full attention alone that is no matter: its KV is
        computed again in place. A window or a state would be one token too far, and a group that
        is not kept would lack the tokens before it.
        """
        top = num_tokens if self.all_full and not self.others else num_tokens - 1
        return max(0, top) // self.align_tokens * self.align_tokens
