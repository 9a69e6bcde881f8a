"""A generated prompt: labelled pieces with their numbers of tokens, and the keys of its blocks.

Equal labels in equal order mean equal text. Nothing else about a text matters to a cache.
"""

from __future__ import annotations

from blake3 import blake3

from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey


class Context:
    """A prompt that grows at its end. `fork` it to continue it in different ways."""

    __slots__ = ("_block_tokens", "_num_pending", "_parent", "_pending", "keys", "num_tokens")

    def __init__(self, root: bytes, block_tokens: int) -> None:
        self.keys: list[BlockKey] = []  # of full blocks
        self.num_tokens = 0
        self._block_tokens = block_tokens
        self._parent = root
        self._pending = b""  # content of the last, partial block
        self._num_pending = 0

    def fork(self) -> Context:
        copy = Context(self._parent, self._block_tokens)
        copy.keys = self.keys.copy()
        copy.num_tokens = self.num_tokens
        copy._pending = self._pending
        copy._num_pending = self._num_pending
        return copy

    def add(self, label: str, num_tokens: int) -> Context:
        piece = blake3(label.encode()).digest()
        self.num_tokens += num_tokens
        offset = 0
        while offset < num_tokens:
            taken = min(num_tokens - offset, self._block_tokens - self._num_pending)
            self._pending += b"%s%d+%d;" % (piece, offset, taken)
            self._num_pending += taken
            offset += taken
            if self._num_pending == self._block_tokens:
                self._parent = blake3(self._parent + self._pending).digest()
                self.keys.append(BlockKey(self._parent))
                self._pending, self._num_pending = b"", 0
        return self

    def ask(
        self, arrival_seconds: float, num_output: int, session: str, answer: str
    ) -> TraceRequest:
        """A request with this context as its prompt. The answer is appended to the context."""
        num_input, prompt_blocks = self.num_tokens, tuple(self.keys)
        self.add(answer, num_output)
        # An answer's last token has not been read yet, so its KV does not exist.
        num_blocks = (self.num_tokens - 1) // self._block_tokens
        output_blocks = tuple(self.keys[len(prompt_blocks) : num_blocks])
        return TraceRequest(
            arrival_seconds, num_input, num_output, prompt_blocks, output_blocks, session
        )
