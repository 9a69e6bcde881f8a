"""Chooses which tokens of reused segments are mended: those whose keys change most.

The first layer's keys and values depend on a token and its position alone, so they are right where
they were placed. The second layer's are the first that depend on what stands before. They are
computed for all tokens, compared with those that were placed, and the rest of the model is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.anywhere.looks import Look, LookPart
from penstock.engine.attention.torch import AttentionStep, KvMemory, SequenceSpan
from penstock.engine.request import Request
from penstock.engine.scheduler import Chunk
from penstock.engine.table import Places

_COMPARED_LAYER = 1


class _Compared(Exception):
    """Ends a forward pass: the layers that follow are not needed."""


class _Comparing:
    """Writes the first layer's KV; compares the second one's with what is stored."""

    rounds = True  # tokens attend to keys as they are stored, so that all have the same history

    def __init__(self, memory: KvMemory, span: SequenceSpan) -> None:
        self.block_tokens = memory.block_tokens
        self._memory = memory
        self._span = span
        self.changes: Tensor | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer < _COMPARED_LAYER:
            self._memory.write(layer, keys, values)
            return
        span = self._span
        stored, _ = self._memory.history(layer, span.blocks)
        stored = stored[span.num_past : span.num_past + span.num_new]
        self.changes = (keys.float() - stored.float()).square().sum((1, 2))
        raise _Compared

    def history(self, layer: int, blocks: Any) -> tuple[Tensor, Tensor]:
        return self._memory.history(layer, blocks)


def key_changes(
    model: Any, ids: Tensor, positions: Tensor, memory: KvMemory, span: SequenceSpan
) -> Tensor:
    """By how much the keys of each token of a chunk change where it stands."""
    comparing = _Comparing(memory, span)
    try:
        model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=1,
            penstock=AttentionStep(comparing, [span]),
        )
    except _Compared:
        assert comparing.changes is not None
        return comparing.changes
    return torch.zeros(len(ids), device=ids.device)  # a model of one layer


def look_at(
    part: LookPart[Request], key_changes_of: Callable[[Chunk], Tensor], max_tokens: int
) -> None:
    """Look at more tokens of a request and, if these were the last, choose those to mend.

    `max_tokens`: at once, because of the memory that this takes.
    """
    look, positions = part.look, part.positions
    for first in range(positions.start, positions.stop, max_tokens):
        num_tokens = min(max_tokens, positions.stop - first)
        look.changes.append(key_changes_of(Chunk(look.request, first, num_tokens)))
    if part.is_last:
        _choose(look)


def _choose(look: Look[Request]) -> None:
    request = look.request
    share = request.params.mending.blend_share
    chosen = choose_mended(torch.cat(look.changes), look.start, look.reused, share)
    if request.mended is None:
        request.num_reused_tokens = sum(map(len, look.reused)) - len(chosen)
        request.num_mended_tokens = len(chosen)
    request.mended, request.seen = chosen, look.reused


def choose_mended(changes: Tensor, start: int, reused: Sequence[range], share: float) -> Places:
    """The positions of `share` of each part whose keys change most. `changes` begin at `start`."""
    chosen = []
    for part in reused:
        num_chosen = min(len(part), round(share * len(part)))
        mine = changes[part.start - start : part.stop - start]
        chosen.append(mine.topk(num_chosen).indices.cpu().numpy() + part.start)
    return np.sort(np.concatenate(chosen)).astype(np.int64)
