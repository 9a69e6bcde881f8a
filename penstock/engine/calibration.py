"""Calibrates the audit: computes one prompt in two batch shapes and compares the KV.

Kernels round differently in other batch shapes. So what an audit computes differs a little from
what is stored, and how much depends on the model, the number type and the machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from penstock.audits.compare import Difference, compare_blocks
from penstock.audits.layout import DIM, HEAD, KV, TOKEN, BlockLayout
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.engine.runner import Runner
from penstock.engine.scheduler import Chunk
from penstock.keys import KeyChain, Namespace
from penstock.stores.device import DevicePool
from penstock.types import Slot

_MAX_TOKENS = 512
_NUM_SINGLE = 4  # tokens computed one by one, as in decoding


def engine_layout(loaded: LoadedModel, block_tokens: int, kv_dtype: torch.dtype) -> BlockLayout:
    """The layout of `DevicePool`'s blocks."""
    return BlockLayout.uniform(
        [str(number) for number in range(loaded.num_layers)],
        str(kv_dtype).removeprefix("torch."),
        (2, block_tokens, loaded.num_kv_heads, loaded.head_dim),
        (KV, TOKEN, HEAD, DIM),
    )


def computed_twice(
    runner: Runner,
    device: DevicePool,
    loaded: LoadedModel,
    layout: BlockLayout,
    namespace: Namespace,
    max_num_batched_tokens: int,
) -> list[list[Difference]]:
    """The differences of each block of a prompt that is computed in two shapes.

    Overwrites device blocks, so nothing may be in use. Empty if the pool is too small.
    """
    block_tokens = namespace.block_tokens
    most = min(_MAX_TOKENS, max_num_batched_tokens // 2, loaded.max_tokens - 1)
    num_blocks = min(max(1, most // block_tokens), device.num_slots // 3)
    num_tokens = num_blocks * block_tokens
    if not num_blocks or num_tokens >= loaded.max_tokens:
        return []
    rng = random.Random(0)
    prompt, other = (
        tuple(rng.randrange(loaded.vocab_size) for _ in range(num_tokens)) for _ in range(2)
    )

    def request(name: str, tokens: tuple[int, ...], number: int) -> Request:
        made = Request(name, tokens, SamplingParams(max_tokens=1), KeyChain(namespace))
        made.table.extend([Slot(number * num_blocks + at) for at in range(num_blocks)])
        return made

    whole, cut = request("whole", prompt, 0), request("cut", prompt, 1)
    beside = request("beside", other, 2)
    _run(runner, [Chunk(whole, 0, num_tokens)])
    # Pieces of uneven sizes next to another sequence, and the last tokens one by one.
    starts = sorted({0, num_tokens // 7, num_tokens // 2, max(0, num_tokens - _NUM_SINGLE)})
    for start, end in zip(starts, [*starts[1:], num_tokens], strict=True):
        size = end - start if start < num_tokens - _NUM_SINGLE else 1
        for first in range(start, end, size):
            _run(runner, [Chunk(beside, first, size), Chunk(cut, first, size)])
    return [
        compare_blocks(
            layout,
            _bytes(device, whole.table.slot(at)),
            _bytes(device, cut.table.slot(at)),
        )
        for at in range(num_blocks)
    ]


def _run(runner: Runner, chunks: Sequence[Chunk]) -> None:
    runner.run(chunks)
    runner.wait()


def _bytes(device: DevicePool, slot: Slot) -> memoryview:
    block = device.tensor[slot].contiguous().cpu().view(torch.uint8).flatten()
    return memoryview(block.numpy().tobytes())
