"""Makes the buffers through which blocks pass between HOST and a GPU's memory."""

from __future__ import annotations

import logging
from typing import Any

import torch

from penstock.codecs.base import Codec
from penstock.codecs.names import is_lossy
from penstock.errors import ConfigError
from penstock.transfer.cuda_link import StageBuffer
from penstock.transfer.paged import PagedMemory
from penstock.types import Direction
from penstock.units import MiB

log = logging.getLogger(__name__)

_STAGE_BYTES = 64 * MiB  # raw KV in each buffer
_LOSSY_STAGE_BYTES = 8 * MiB  # quantizing needs several times as much while it runs
_NUM_STAGES = 2  # per direction


def make_stages(
    memory: PagedMemory, gpu: Any, codec: Codec | None
) -> dict[Direction, list[StageBuffer]]:
    """Buffers for both directions; none if blocks are contiguous and raw, or cannot be staged.

    Compiles the kernels now, so that the first request does not wait for them.
    """
    stages: dict[Direction, list[StageBuffer]] = {direction: [] for direction in Direction}
    try:
        from penstock.transfer.cuda_stage import can_stage, make_stage
    except ImportError:
        if codec is not None:
            raise ConfigError(
                f'host.codec is "{codec.name}", but triton is not installed; install it, or set '
                'host.codec to "raw"'
            ) from None
        log.info("triton is not installed; blocks are copied layer by layer")
        return stages
    if codec is None and not can_stage(memory):
        return stages
    is_quantized = codec is not None and is_lossy(codec.name)
    stage_bytes = _LOSSY_STAGE_BYTES if is_quantized else _STAGE_BYTES
    num_blocks = max(1, stage_bytes // memory.block_bytes)
    for made in stages.values():
        made += [make_stage(memory, num_blocks, gpu, codec) for _ in range(_NUM_STAGES)]
    first = torch.zeros(1, dtype=torch.int64, device=gpu)
    stage = stages[Direction.SAVE][0]
    stage.gather(first)
    if not is_quantized:
        stage.scatter(first)  # writes back the same bytes
    torch.cuda.synchronize(gpu)
    return stages
