"""Runs one step of a model: packs the chunks into one row, returns logits where they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.torch import Span, Step, register
from penstock.engine.scheduler import Chunk
from penstock.stores.device import DevicePool


class Runner:
    def __init__(self, model: Any, pool: DevicePool, block_tokens: int) -> None:
        register()
        self._model = model
        self._pool = pool
        self._block_tokens = block_tokens

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Write the chunks' KV into the pool; logits [n, vocab], float32, of those that sample."""
        token_ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        spans: list[Span] = []
        sampled: list[int] = []
        for chunk in chunks:
            request, start, end = chunk.request, chunk.start, chunk.start + chunk.num_tokens
            table = request.blocks[: -(-end // self._block_tokens)]
            spans.append(Span(len(token_ids), chunk.num_tokens, start, torch.tensor(table)))
            token_ids += request.tokens[start:end]
            positions += range(start, end)
            blocks += [table[position // self._block_tokens] for position in range(start, end)]
            if chunk.samples:
                sampled.append(len(token_ids) - 1)
        row = torch.tensor([positions])
        step = Step(self._pool.tensor, torch.tensor(blocks), row[0] % self._block_tokens, spans)
        output = self._model(
            input_ids=torch.tensor([token_ids]),
            position_ids=row,
            use_cache=False,
            # At least one row, or the model would compute the logits of all of them.
            logits_to_keep=torch.tensor(sampled or [0]),
            penstock=step,
        )
        logits: Tensor = output.logits[0, : len(sampled)].float()
        return logits
