"""How many bytes a block of a trace has: on the device, in the tiers, and on its way back. Pure.

If every layer keeps every token, all three are the same. Otherwise windows, states and checkpoints
do not grow with the tokens. Their bytes are spread over the blocks of the trace:

    device     all tokens, windows and states of each request, over the tokens of all requests
    tiers      tokens of layers that keep all, and a checkpoint for each request, over all blocks
               that are saved
    loads      as on the device: a hit brings its tokens and one checkpoint
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.shapes.shape import ModelShape
from penstock.sim.trace import Trace
from penstock.types import BlockKey


@dataclass(frozen=True, slots=True)
class BlockSizes:
    device_bytes: int
    tier_bytes: int

    @property
    def load_bytes(self) -> int:
        return self.device_bytes


def plain_sizes(shape: ModelShape, block_tokens: int) -> BlockSizes:
    """As if every layer with attention kept every token."""
    return BlockSizes(block_tokens * shape.bytes_per_token, block_tokens * shape.bytes_per_token)


def block_sizes(shape: ModelShape, trace: Trace) -> BlockSizes:
    if not shape.partial_groups or not trace.requests:
        return plain_sizes(shape, trace.block_tokens)
    block_tokens = trace.block_tokens
    named: set[BlockKey] = set()
    num_unnamed = num_tokens = num_bytes = checkpoint_bytes = 0
    for request in trace.requests:
        length = request.num_input_tokens + request.num_output_tokens
        num_tokens += length
        num_bytes += shape.kv_bytes(length)
        checkpoint_bytes += shape.checkpoint_bytes(length)
        blocks = (*request.prompt_blocks, *request.output_blocks)
        named.update(blocks)
        num_unnamed += max(0, length // block_tokens - len(blocks))
    num_saved = max(1, len(named) + num_unnamed)
    growing = shape.full_bytes_per_token * block_tokens
    return BlockSizes(
        math.ceil(num_bytes * block_tokens / max(1, num_tokens)),
        math.ceil(growing + checkpoint_bytes / num_saved),
    )
