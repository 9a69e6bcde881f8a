"""Takes short chunks of prompts apart: each token becomes a row of the decode kernel. Pure.

Steps of single tokens are replayed from a graph. Queueing their kernels one by one, as for a chunk,
keeps the CPU busy for longer than a short chunk takes the GPU. All rows of a layer are stored
before any of them attends, so a row reads those before it, and everything before the chunk: the
longer that is, the more is read several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.scheduler import Chunk

MAX_APART = 64  # tokens of a step


@dataclass
class ShortChunks:
    """Decides which steps have chunks that are short enough.

    Where their blocks are makes no difference: answers must not depend on it.
    """

    part_tokens: int  # what a row reads is divided into parts of this size
    max_rows: int  # of a step
    max_parts: int  # of a step
    max_parts_apart: int  # of these, what may be read for the rows of chunks

    def num_parts(self, singles: Sequence[Chunk]) -> int:
        return sum(-(-(chunk.start + 1) // self.part_tokens) for chunk in singles)

    def suits(self, num_tokens: int, end: int) -> bool:
        """Whether the last `num_tokens` before `end` of a sequence would be taken apart."""
        num_parts = num_tokens * -(-end // self.part_tokens)
        is_little = num_parts <= min(self.max_parts, self.max_parts_apart)
        return is_little and num_tokens <= min(MAX_APART, self.max_rows)

    def taken_apart(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The same with the tokens of longer chunks as chunks of their own.

        All or none: a step with a chunk in one piece has no graph.
        """
        longer = [chunk for chunk in chunks if chunk.num_tokens > 1]
        if not longer or any(chunk.positions is not None for chunk in longer):
            return chunks  # what was placed is not in order
        singles = [chunk for chunk in chunks if chunk.num_tokens == 1]
        num_apart = sum(chunk.num_tokens for chunk in longer)
        if num_apart > min(MAX_APART, self.max_rows - len(singles)):
            return chunks
        apart = {
            id(chunk): [
                Chunk(chunk.request, chunk.start + n, 1, int(n < chunk.num_present))
                for n in range(chunk.num_tokens)
            ]
            for chunk in longer
        }
        num_parts = sum(map(self.num_parts, apart.values()))
        if num_parts > min(self.max_parts_apart, self.max_parts - self.num_parts(singles)):
            return chunks
        return [row for chunk in chunks for row in apart.get(id(chunk), (chunk,))]
