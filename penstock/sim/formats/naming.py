"""Keys for a trace's blocks: 32 bytes, like the server's. Equal keys share one object."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from blake3 import blake3

from penstock.keys import KeyChain, Namespace
from penstock.types import KEY_BYTES, BlockKey

DEFAULT_BLOCK_TOKENS = 16
_PIECE = re.compile(r"\w{1,8}|[^\w\s]")


class NumberNames(dict[int, BlockKey]):
    """Keys of blocks that a trace identifies by number; `names[number]` makes one on first use."""

    def __init__(self, space: str) -> None:
        super().__init__()
        self._space = f"penstock trace {space} ".encode()

    def __missing__(self, number: int) -> BlockKey:
        self[number] = name = BlockKey(blake3(self._space + b"%d" % number).digest())
        return name


class ChainNames:
    """Keys of token ids, chained like the server's: equal prefixes have equal keys."""

    def __init__(self, block_tokens: int) -> None:
        self._namespace = Namespace("trace", "", "", "", block_tokens)
        self._block_tokens = block_tokens
        self._known: dict[BlockKey, BlockKey] = {}

    def of(
        self, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Keys of the prompt's full blocks, and of those that the answer completes.

        An answer's last token is never read, so its KV is never computed. Raises ValueError for
        invalid ids.
        """
        chain = KeyChain(self._namespace, prompt)
        num_prompt = len(chain.keys)
        chain.extend(output[:-1])
        known = self._known
        keys = [known.setdefault(key, key) for key in chain.keys]
        return tuple(keys[:num_prompt]), tuple(keys[num_prompt:])


def own_names(space: str, number: int, count: int) -> tuple[BlockKey, ...]:
    """Keys that no other block has."""
    data = blake3(f"penstock trace {space} {number}".encode()).digest(length=KEY_BYTES * count)
    return tuple(
        BlockKey(data[start : start + KEY_BYTES]) for start in range(0, len(data), KEY_BYTES)
    )


def pseudo_tokens(text: str) -> list[int]:
    """Stand-ins for the tokens of a text: words, with long ones split, and punctuation.

    A tokenizer would split the text differently, but into about as many tokens. Texts with an
    equal prefix have an equal prefix of tokens.
    """
    return [zlib.crc32(piece.encode()) for piece in _PIECE.findall(text)]
