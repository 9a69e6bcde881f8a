"""Runs one step of a model: packs the chunks into one row, returns logits where they are asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.attention.torch import AttentionStep, DecodeKernel, SequenceSpan, register
from penstock.engine.scheduler import Chunk
from penstock.engine.table import Addresses, Places
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena


class Runner(Protocol):
    only_queues: bool  # `run` returns before the step has been computed

    def run(
        self, chunks: Sequence[Chunk], between_layers: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Put the chunks' KV into the pool; logits [n, vocab], float32, of those that sample.

        Logits come in the order of the chunks. A long step calls `between_layers` now and then.
        On a GPU it is only queued: what else there is to do is done while it runs.
        """
        ...

    def wait(self, between_layers: Callable[[], None] = lambda: None) -> None:
        """Until the step and what was queued behind it have ended."""
        ...

    def post(self, numbers: Tensor) -> Callable[[], list[int]]:
        """One row of 64-bit whole numbers from the device. Call what is returned for them, before
        others are posted."""
        ...

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Do what can be done before the first request."""
        ...

    def close(self) -> None:
        """Afterwards nothing reads the pool or HOST."""
        ...


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The tokens of all chunks of a step, one chunk behind the other; those of one token first."""

    token_ids: list[int]
    positions: NDArray[np.int64]
    singles: list[Chunk]  # of one token each, at the row's beginning
    longer: list[tuple[int, Chunk]]  # the others, and where they begin
    places: Places  # of the block that each token's KV goes to
    is_written: NDArray[np.bool_]  # but for tokens whose KV is there
    sampled: list[int]  # rows whose logits are asked for, in the order of the chunks

    @classmethod
    def of(cls, chunks: Sequence[Chunk], block_tokens: int) -> PackedRow:
        # A decode step is all singles, and short: a list each beats an array a sequence.
        singles = [chunk for chunk in chunks if chunk.num_tokens == 1]
        token_ids = [chunk.request.tokens[chunk.start] for chunk in singles]
        starts = [chunk.start for chunk in singles]
        blocks = [chunk.request.table.place(chunk.start // block_tokens) for chunk in singles]
        positions = [np.array(starts, np.int64)]
        places: list[Places] = [np.array(blocks, np.int64)]
        is_written = [np.array([chunk.num_present == 0 for chunk in singles], np.bool_)]
        longer: list[tuple[int, Chunk]] = []
        sampled: list[int] = []
        num_singles = 0
        for chunk in chunks:
            if chunk.num_tokens == 1:
                num_singles += 1
                last = num_singles - 1
            else:
                end = chunk.start + chunk.num_tokens
                longer.append((len(token_ids), chunk))
                mine = np.arange(chunk.start, end)
                positions.append(mine)
                places.append(chunk.request.table.places[mine // block_tokens])
                is_written.append(mine >= chunk.start + chunk.num_present)
                token_ids += chunk.request.tokens[chunk.start : end]
                last = len(token_ids) - 1
            if chunk.samples:
                sampled.append(last)
        return cls(
            token_ids,
            np.concatenate(positions),
            singles,
            longer,
            np.concatenate(places),
            np.concatenate(is_written),
            sampled,
        )


def places_of(chunk: Chunk, block_tokens: int) -> Places:
    """Where the blocks lie that a chunk reads and writes."""
    return chunk.request.table.places[: -(-(chunk.start + chunk.num_tokens) // block_tokens)]


class TorchMemory:
    """KV in a pool and in HOST, by torch's own indexing."""

    def __init__(
        self, pool: Tensor, host: Tensor | None, row: PackedRow, block_tokens: int
    ) -> None:
        """[blocks, layers, 2, block_tokens, kv_heads, head_dim], both."""
        self._pool = pool
        self._host = host
        written = row.is_written
        self._rows = None if written.all() else _indices(np.flatnonzero(written), pool.device)
        self._blocks = _indices(row.places[written], pool.device)
        self._offsets = _indices(row.positions[written] % block_tokens, pool.device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self._rows is not None:
            keys, values = keys[self._rows], values[self._rows]
        mine = self._pool[:, layer]
        mine[self._blocks, 0, self._offsets] = keys
        mine[self._blocks, 1, self._offsets] = values

    def history(self, layer: int, blocks: Places) -> tuple[Tensor, Tensor]:
        is_cold = blocks < 0
        resident = self._pool[:, layer][_indices(blocks[~is_cold], self._pool.device)]
        if is_cold.any():
            assert self._host is not None
            whole = resident.new_empty((len(blocks), *resident.shape[1:]))
            whole[torch.from_numpy(~is_cold)] = resident
            whole[torch.from_numpy(is_cold)] = self._host[:, layer][
                torch.from_numpy(~blocks[is_cold])
            ]
            resident = whole
        return resident[:, 0].flatten(0, 1), resident[:, 1].flatten(0, 1)


class TorchRunner:
    """On a CPU, or wherever torch runs: transformers' own modules, attention by torch or numba."""

    only_queues = False

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
        self._host = None if host is None or pool.on_gpu else pool.like(host)
        self._addresses = Addresses.of_arenas(pool, host)

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[Chunk], between_layers: Callable[[], None] = lambda: None
    ) -> Tensor:
        device = self._pool.tensor.device
        row = PackedRow.of(chunks, self._block_tokens)
        singles: Sequence[Chunk] = row.singles
        spans = row.longer
        if not self._has_kernel:
            spans = [*enumerate(singles), *spans]
            singles = ()
        step = AttentionStep(
            TorchMemory(self._pool.tensor, self._host, row, self._block_tokens),
            [
                SequenceSpan(
                    begin, chunk.num_tokens, chunk.start, places_of(chunk, self._block_tokens)
                )
                for begin, chunk in spans
            ],
            self._decode_batch(singles),
            len(singles),
            between_layers,
        )
        output = self._model(
            input_ids=torch.tensor([row.token_ids], device=device),
            position_ids=_indices(row.positions, device)[None],
            use_cache=False,
            # At least one row, or the model would compute the logits of all of them.
            logits_to_keep=torch.tensor(row.sampled or [0], device=device),
            penstock=step,
        )
        logits: Tensor = output.logits[0, : len(row.sampled)].float()
        return logits

    def wait(self, between_layers: Callable[[], None] = lambda: None) -> None:
        """It has ended."""

    def post(self, numbers: Tensor) -> Callable[[], list[int]]:
        return numbers.tolist

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Nothing: what numba compiles it keeps on disk."""

    def close(self) -> None:
        """Nothing: a step has ended when `run` returns."""

    def _decode_batch(self, singles: Sequence[Chunk]) -> DecodeKernel | None:
        if not singles:
            return None
        from penstock.engine.attention.cpu import DecodeBatch

        tables = [self._addresses.of(places_of(chunk, self._block_tokens)) for chunk in singles]
        lengths = [chunk.start + 1 for chunk in singles]
        return DecodeBatch(self._pool.tensor, tables, lengths, self._num_heads)


def _has_kernel(pool: Tensor) -> bool:
    """Whether decode has a kernel of its own here; else torch attends sequence by sequence."""
    on_cpu = pool.device.type == "cpu" and pool.dtype in (torch.float32, torch.bfloat16)
    return on_cpu and importlib.util.find_spec("numba") is not None


def _indices(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
