"""Run one step of a model: pack the chunks into one row, return the logits that are sampled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine import fp8
from penstock.engine.anywhere.blending import key_changes
from penstock.engine.attention.torch import AttentionStep, DecodeKernel, SequenceSpan, register
from penstock.engine.host_blocks import HostBlocks
from penstock.engine.scheduler import Chunk
from penstock.engine.table import Addresses, Places, arriving_in
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena


class Runner(Protocol):
    only_queues: bool  # whether `run` returns before the step has been computed
    max_brought: int  # how many arriving blocks (see `table`) a step can bring

    def run(
        self, chunks: Sequence[Chunk], between_layers: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Write the chunks' KV to the pool; return the logits of chunks that sample.

        Blocks that arrive in their tables are brought to the device first.

        Logits are float32 [n, vocab], in the order of the chunks. A long step calls
        `between_layers` from time to time. On a GPU the step is only queued, so that the caller
        can do other work while it runs.
        """
        ...

    def takes_apart(self, num_tokens: int, end: int) -> bool:
        """Whether a step for the last `num_tokens` before `end` of a sequence is queued as quickly
        as one of single tokens."""
        ...

    def key_changes(self, chunk: Chunk) -> Tensor:
        """By how much the keys of each token change where it stands (see `anywhere.blending`).

        The chunk's KV is stored. In the first layer it is written again.
        """
        ...

    @property
    def is_doubtful(self) -> bool:
        """Whether what was queued last may turn out to be wrong: then `wait` raises."""
        ...

    def mark(self) -> Any:
        """The end of everything that has been queued so far, for `wait`."""
        ...

    def wait(self, between_layers: Callable[[], None] = lambda: None, end: Any = None) -> None:
        """Wait until `end`, or until everything that has been queued has ended."""
        ...

    def post(self, numbers: Tensor) -> Callable[[], list[int]]:
        """Start copying one row of int64 from the device. The function returned waits for them.

        Call it before the second `post` after this one. In the next `run`, a token `~n` below zero
        stands for the n-th of these numbers.
        """
        ...

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Prepare whatever can be prepared before the first request."""
        ...

    def close(self) -> None:
        """Stop. Afterwards nothing reads the pool or HOST."""
        ...


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The tokens of all chunks of a step in one row; chunks of one token come first."""

    token_ids: list[int]  # below zero: see `Runner.post`
    positions: NDArray[np.int64]
    singles: list[Chunk]  # chunks of one token, at the start of the row
    longer: list[tuple[int, Chunk]]  # the other chunks, with their offset in the row
    places: Places  # for each token, the place of the block that its KV belongs to
    is_written: NDArray[np.bool_]  # False for tokens whose KV is present already
    sampled: list[int]  # offsets whose logits are needed, in the order of the chunks

    @classmethod
    def of(cls, chunks: Sequence[Chunk], block_tokens: int) -> PackedRow:
        # A decode step is short and all singles: one list is faster than an array per sequence.
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
                longer.append((len(token_ids), chunk))
                mine = chunk.positions
                if mine is None:
                    mine = np.arange(chunk.start, chunk.end)
                    token_ids += chunk.request.tokens[chunk.start : chunk.end]
                else:
                    token_ids += [chunk.request.tokens[position] for position in mine.tolist()]
                positions.append(mine)
                places.append(chunk.request.table.places[mine // block_tokens])
                is_written.append(mine >= chunk.start + chunk.num_present)
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

    @property
    def has_arriving(self) -> bool:
        """Whether the step brings blocks from DRAM."""
        tables = [chunk.request.table for chunk in self.singles]
        tables += [chunk.request.table for _, chunk in self.longer]
        return any(table.arriving_pins for table in tables)


def places_of(chunk: Chunk, block_tokens: int) -> Places:
    """The places of the blocks that a chunk reads and writes."""
    return chunk.request.table.places[: -(-chunk.end // block_tokens)]


def span_of(begin: int, chunk: Chunk, blocks: Any, device: torch.device) -> SequenceSpan:
    """`blocks` as the step's memory takes them."""
    positions = None if chunk.positions is None else _indices(chunk.positions, device)
    return SequenceSpan(begin, chunk.num_tokens, chunk.start, blocks, positions)


class TorchMemory:
    """KV in a pool and in HOST, accessed by torch indexing."""

    def __init__(
        self, pool: Tensor, host: HostBlocks | None, row: PackedRow, block_tokens: int
    ) -> None:
        """`pool` has shape [blocks, layers, 2, block_tokens, kv_heads, head_dim]."""
        self.rounds = pool.dtype is fp8.DTYPE
        self.block_tokens = block_tokens
        # Torch cannot index e4m3 on all devices, but it can index bytes.
        self._pool = pool.view(torch.uint8) if self.rounds else pool
        self._host = host
        written = row.is_written
        self._rows = None if written.all() else _indices(np.flatnonzero(written), pool.device)
        self._blocks = _indices(row.places[written], pool.device)
        self._offsets = _indices(row.positions[written] % block_tokens, pool.device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self._rows is not None:
            keys, values = keys[self._rows], values[self._rows]
        if self.rounds:
            keys, values = fp8.narrow(keys), fp8.narrow(values)
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
            whole[torch.from_numpy(is_cold)] = self._host.layer(layer, ~blocks[is_cold])
            resident = whole
        if self.rounds:
            resident = resident.view(fp8.DTYPE)
        return resident[:, 0].flatten(0, 1), resident[:, 1].flatten(0, 1)


class TorchRunner:
    """Runs transformers' own modules on any torch device, with attention by torch or numba."""

    only_queues = False
    is_doubtful = False

    def __init__(
        self,
        model: Any,
        pool: DevicePool,
        block_tokens: int,
        num_heads: int,
        host: HostArena | None = None,
        *,
        host_form: LosslessFormat | None = None,
    ) -> None:
        """`host` holds cold blocks. `host_form`: their form, if they are packed."""
        register()
        self._model = model
        self._pool = pool
        self._block_tokens = block_tokens
        self._num_heads = num_heads
        self._has_kernel = _has_kernel(pool.tensor)
        self._host = None
        if host is not None and not pool.on_gpu:
            self._host = HostBlocks(pool, host, host_form)
        self._host_form = host_form
        self.max_brought = 0 if self._host is None else pool.num_slots
        self._addresses = Addresses.of_arenas(pool, host, is_packed=host_form is not None)
        self._posted = torch.zeros(1, dtype=torch.int64, device=pool.tensor.device)

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[Chunk], between_layers: Callable[[], None] = lambda: None
    ) -> Tensor:
        device = self._pool.tensor.device
        self._bring(*arriving_in([chunk.request.table for chunk in chunks]))
        row = PackedRow.of(chunks, self._block_tokens)
        singles: Sequence[Chunk] = row.singles
        spans = row.longer
        if not self._has_kernel:
            spans = [*enumerate(singles), *spans]
            singles = ()
        step = AttentionStep(
            TorchMemory(self._pool.tensor, self._host, row, self._block_tokens),
            [
                span_of(begin, chunk, places_of(chunk, self._block_tokens), device)
                for begin, chunk in spans
            ],
            self._decode_batch(singles),
            len(singles),
            between_layers,
        )
        ids = torch.tensor(row.token_ids, device=device)
        if min(row.token_ids) < 0:
            ids = torch.where(ids < 0, self._posted[(~ids).clamp(min=0)], ids)
        output = self._model(
            input_ids=ids[None],
            position_ids=_indices(row.positions, device)[None],
            use_cache=False,
            # At least one, or the model would compute the logits of every token.
            logits_to_keep=torch.tensor(row.sampled or [0], device=device),
            penstock=step,
        )
        logits: Tensor = output.logits[0, : len(row.sampled)].float()
        return logits

    def takes_apart(self, num_tokens: int, end: int) -> bool:
        return True  # nothing is queued

    @torch.inference_mode()
    def key_changes(self, chunk: Chunk) -> Tensor:
        device = self._pool.tensor.device
        row = PackedRow.of([chunk], self._block_tokens)
        return key_changes(
            self._model,
            torch.tensor(row.token_ids, device=device),
            _indices(row.positions, device),
            TorchMemory(self._pool.tensor, self._host, row, self._block_tokens),
            span_of(0, chunk, places_of(chunk, self._block_tokens), device),
        )

    def mark(self) -> Any:
        return None

    def wait(self, between_layers: Callable[[], None] = lambda: None, end: Any = None) -> None:
        """Return at once: the step ended when `run` returned."""

    def post(self, numbers: Tensor) -> Callable[[], list[int]]:
        self._posted = numbers
        return numbers.tolist

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Do nothing: numba caches its compiled code on disk."""

    def close(self) -> None:
        """Do nothing: the step ended when `run` returned."""

    def _bring(self, pins: Places, slots: Places) -> None:
        if not len(pins):
            return
        assert self._host is not None
        pool = self._pool.tensor
        # Torch cannot index e4m3 on all devices, but it can index bytes.
        pool = pool.view(torch.uint8) if pool.dtype is fp8.DTYPE else pool
        for layer in range(pool.shape[1]):
            pool[torch.from_numpy(slots), layer] = self._host.layer(layer, pins)

    def _decode_batch(self, singles: Sequence[Chunk]) -> DecodeKernel | None:
        if not singles:
            return None
        from penstock.engine.attention.cpu import DecodeBatch

        tables = [self._addresses.of(places_of(chunk, self._block_tokens)) for chunk in singles]
        lengths = [chunk.start + 1 for chunk in singles]
        return DecodeBatch(self._pool.tensor, tables, lengths, self._num_heads, self._host_form)


def _has_kernel(pool: Tensor) -> bool:
    """Whether there is a decode kernel; if not, torch attends one sequence at a time."""
    on_cpu = pool.device.type == "cpu"
    is_known = pool.dtype in (torch.float32, torch.bfloat16, fp8.DTYPE)
    return on_cpu and is_known and importlib.util.find_spec("numba") is not None


def _indices(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
