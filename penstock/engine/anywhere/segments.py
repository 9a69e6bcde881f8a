"""Segments of a prompt whose KV may be used wherever they stand. Pure.

A segment's KV is that of a prompt of its own: computed from position 0, with nothing before it. So
its blocks have the keys of such a prompt, and one that begins a prompt is an ordinary prefix. Its
tokens after the last complete block, and those that are mended, are computed where they stand.

The KV of a prompt with segments differs from that of the same tokens without. So from the first
segment on, the keys of the prompt's own blocks also depend on the segments and how they are mended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.params import Mending
from penstock.errors import ConfigError
from penstock.keys import KeyChain, Namespace
from penstock.types import BlockKey

MIN_REUSED_TOKENS = 64  # shorter segments are computed: finding and placing them gains nothing
MAX_SEGMENTS = 1024


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt, and which of its tokens are reused."""

    start: int  # its place in the prompt, in tokens
    end: int
    keys: tuple[BlockKey, ...]  # of its complete blocks
    tokens: tuple[int, ...]  # of its complete blocks
    reused: range  # positions in the prompt whose KV is not computed
    name: bytes  # of the segment in the keys of the prompt's own blocks
    namespace: Namespace
    blend_share: float = 0.0  # of the reused tokens, computed after all

    @property
    def saved_share(self) -> float:
        """Of the tokens of its blocks: those that are not computed."""
        return (1 - self.blend_share) * len(self.reused) / len(self.tokens)


def find_segments(
    prompt_ids: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    mending: Mending,
    namespace: Namespace,
) -> tuple[Segment, ...]:
    """The segments that are worth reusing, in order. `bounds`: where each begins and ends.

    A segment at the start of the prompt is an ordinary prefix, and not among them. Raises
    ConfigError if the bounds are not in order within the prompt.
    """
    _check(bounds, len(prompt_ids))
    size = namespace.block_tokens
    share = mending.blend_share if mending.is_blend else 0.0
    found = []
    for start, end in bounds:
        # The prompt's last token is always computed, because sampling needs its logits.
        num_blocks = (min(end, len(prompt_ids) - 1) - start) // size
        reused = range(start + mending.num_first_tokens, start + num_blocks * size)
        if not start or len(reused) < MIN_REUSED_TOKENS:
            continue
        tokens = tuple(prompt_ids[start : start + num_blocks * size])
        keys = tuple(KeyChain(namespace, tokens).keys)
        # Where the reused tokens end also depends on the prompt's length.
        name = f"segment {start} {end} {reused.stop} {mending.words}".encode()
        found.append(Segment(start, end, keys, tokens, reused, name, namespace, share))
    return tuple(found)


def extend_chain(chain: KeyChain, prompt_ids: Sequence[int], segments: Sequence[Segment]) -> None:
    """Append a prompt to an empty chain: the keys of the prompt's own blocks."""
    at = 0
    for segment in segments:
        chain.extend(prompt_ids[at : segment.start])
        chain.mix(segment.name)
        at = segment.start
    chain.extend(prompt_ids[at:])


def cut_at_segments(
    prompt_ids: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    namespace: Namespace,
    max_tokens: int,
) -> list[tuple[Sequence[int], Sequence[BlockKey]]]:
    """Whose KV a hint for a prompt is for, as tokens and keys: the prompt without marks, and each
    segment on its own.

    From the first reused segment on, a prompt with marks has other blocks than one without: what
    is between its segments is of use to nobody else. Tokens beyond `max_tokens` are left out.
    Raises ConfigError if the bounds are not in order within the prompt.
    """
    _check(bounds, len(prompt_ids))
    size = namespace.block_tokens
    parts = [prompt_ids[:max_tokens]]
    for start, end in bounds:
        num_tokens = (min(end, max_tokens) - start) // size * size
        if start and num_tokens >= MIN_REUSED_TOKENS:
            parts.append(prompt_ids[start : start + num_tokens])
    return [(part, KeyChain(namespace, part).keys) for part in dict.fromkeys(map(tuple, parts))]


def check_number(num_segments: int) -> None:
    """Raises ConfigError if a prompt has too many segments."""
    if num_segments > MAX_SEGMENTS:
        raise ConfigError(
            f"the prompt has {num_segments} segments that may be reused anywhere; expected at most "
            f"{MAX_SEGMENTS}. Join short ones."
        )


def _check(bounds: Sequence[tuple[int, int]], num_tokens: int) -> None:
    check_number(len(bounds))
    before = 0
    for start, end in bounds:
        if not before <= start <= end <= num_tokens:
            raise ConfigError(
                f"a segment has the tokens {start} to {end} of {num_tokens}, after one that ends "
                f"at {before}; expected segments in order, within the prompt, that do not overlap."
            )
        before = end
