"""Runs one step of a model: packs the chunks into one row, returns logits where they are asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.torch import Cold, DecodeKernel, Span, Step, register
from penstock.engine.scheduler import Chunk
from penstock.engine.table import Addresses, Places
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena


class Runner:
    def __init__(
        self,
        model: Any,
        pool: DevicePool,
        block_tokens: int,
        num_heads: int,
        host: HostArena | None = None,
    ) -> None:
        """`host` is where cold blocks lie."""
        register()
        self._model = model
        self._pool = pool
        self._block_tokens = block_tokens
        self._num_heads = num_heads
        self._has_kernel = _has_kernel(pool.tensor)
        self._host = None if host is None else pool.like(host)
        self._addresses = Addresses(pool.address, pool.stride_bytes)
        if host is not None:
            self._addresses = Addresses(
                pool.address, pool.stride_bytes, host.address, host.stride_bytes
            )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Write the chunks' KV into the pool; logits [n, vocab], float32, of those that sample.

        Logits come in the order of the chunks.
        """
        device = self._pool.tensor.device
        # Sequences that decode come first in the row; `sorted` keeps the order among the others.
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
        token_ids: list[int] = []
        positions: list[int] = []
        written: list[int] = []  # rows whose KV is not in the pool yet …
        blocks: list[int] = []  # … and where it goes
        spans: list[Span] = []
        tables: list[Places] = []
        last_rows: dict[int, int] = {}
        for index in order:
            chunk = chunks[index]
            request, start, end = chunk.request, chunk.start, chunk.start + chunk.num_tokens
            table = request.table.places[: -(-end // self._block_tokens)]
            if self._has_kernel and chunk.num_tokens == 1:
                tables.append(self._addresses.of(table))
            else:
                spans.append(_span(len(token_ids), chunk, table, device))
            new = range(start + chunk.num_present, end)
            written += range(len(token_ids) + chunk.num_present, len(token_ids) + chunk.num_tokens)
            blocks += [int(table[position // self._block_tokens]) for position in new]
            token_ids += request.tokens[start:end]
            positions += range(start, end)
            last_rows[index] = len(token_ids) - 1
        sampled = [last_rows[index] for index, chunk in enumerate(chunks) if chunk.samples]
        row = torch.tensor([positions], device=device)
        rows = _indices(written, device) if len(written) < len(positions) else None
        step = Step(
            self._pool.tensor,
            self._host,
            _indices(blocks, device),
            (row[0] if rows is None else row[0, rows]) % self._block_tokens,
            spans,
            self._decode_batch(tables, [position + 1 for position in positions[: len(tables)]]),
            len(tables),
            rows,
        )
        output = self._model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=row,
            use_cache=False,
            # At least one row, or the model would compute the logits of all of them.
            logits_to_keep=torch.tensor(sampled or [0], device=device),
            penstock=step,
        )
        logits: Tensor = output.logits[0, : len(sampled)].float()
        return logits

    def _decode_batch(
        self, tables: Sequence[Places], lengths: Sequence[int]
    ) -> DecodeKernel | None:
        if not tables:
            return None
        from penstock.engine.attention.cpu import DecodeBatch

        return DecodeBatch(self._pool.tensor, tables, lengths, self._num_heads)


def _span(begin: int, chunk: Chunk, table: Places, device: torch.device) -> Span:
    places = torch.tensor(table, device=device)
    is_cold = places < 0
    if not chunk.request.table.num_cold:
        return Span(begin, chunk.num_tokens, chunk.start, places)
    indices = is_cold.nonzero()[:, 0]
    cold = Cold((~is_cold).nonzero()[:, 0], indices, ~places[indices])
    return Span(begin, chunk.num_tokens, chunk.start, places[~is_cold], cold)


def _has_kernel(pool: Tensor) -> bool:
    """Whether decode has a kernel of its own here; else torch attends sequence by sequence."""
    on_cpu = pool.device.type == "cpu" and pool.dtype in (torch.float32, torch.bfloat16)
    return on_cpu and importlib.util.find_spec("numba") is not None


def _indices(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)  # an empty list has no type
