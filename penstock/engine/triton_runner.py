"""Runs one step of a model on a GPU, with our own kernels that find blocks by their addresses.

A step in which every sequence adds one token is replayed from a CUDA graph (see `cuda_graphs`).
Steps with chunks of prompts run kernel by kernel, unless these are short, such as what is left of a
prompt that was found in DRAM (see `taken_apart`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.codecs.lossless_format import LosslessFormat
from penstock.config.options import COLD_DEVICE
from penstock.engine import fp8
from penstock.engine.anywhere.blending import key_changes
from penstock.engine.attention import packed_triton as packed
from penstock.engine.attention import triton as kernels
from penstock.engine.attention.rules import CAUSAL, LayerRules
from penstock.engine.attention.torch import AttentionStep, SequenceSpan, attend, prepare, register
from penstock.engine.bringing import Bringer
from penstock.engine.cold_opening import measure_rates, open_cold_attention
from penstock.engine.cuda_graphs import CudaGraphs
from penstock.engine.decode_plan import NO_FETCHES, DecodePlan, PartRoom, StepKind, span_blocks
from penstock.engine.drawing import DrawnRow, draw
from penstock.engine.fetch_choice import Fetches
from penstock.engine.fetching import Fetcher, fetch_room
from penstock.engine.fused import FusedDecoder, can_fuse
from penstock.engine.mailbox import Mailbox
from penstock.engine.models import LoadedModel
from penstock.engine.params import MAX_LOGPROBS, SamplingParams
from penstock.engine.runner import PackedRow, places_of, span_of
from penstock.engine.scheduler import Chunk
from penstock.engine.sending import sent
from penstock.engine.table import Addresses, Places
from penstock.engine.taken_apart import ShortChunks
from penstock.errors import BookError
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena

if TYPE_CHECKING:
    from penstock.engine.cold_attention import ColdAttention

_cuda: Any = torch.cuda  # mostly untyped

_POLL_SECONDS = 0.0001

_MAX_PARTS = 8192  # in one step, for two million tokens of context; more if one sequence has more
# Each token of a chunk that is taken apart reads what is before it. All of a step may read this
# share of the GPU's memory, which takes an H200 4 ms and an L4 10 ms. Memory that the CPU shares is
# large and slow.
_READ_APART = 1 / 8
_READ_APART_INTEGRATED = 1 / 64
_MAX_PARTS_APART = 1024  # beyond that, choosing what to fetch for all rows takes Python too long


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of one layer's KV in a block."""

    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # in which it is stored
    computed: torch.dtype  # in which the model computes
    host_form: LosslessFormat | None = None  # of HOST's blocks, if they are packed

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def is_fp8(self) -> bool:
        return self.dtype is fp8.DTYPE

    @property
    def layer_bytes(self) -> int:
        return 2 * self.block_tokens * self.token_bytes


class _Memory:
    """KV at addresses (see `attention.torch.KvMemory`)."""

    def __init__(self, shape: _Shape, addresses: Tensor) -> None:
        self.rounds = shape.is_fp8
        self.block_tokens = shape.block_tokens
        self._shape = shape
        self._addresses = addresses  # of each row's keys in the first layer; 0: already written

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        shape = self._shape
        kernels.store_tokens(
            keys,
            values,
            self._addresses,
            layer * shape.layer_bytes,
            shape.block_tokens,
            is_fp8=shape.is_fp8,
        )

    def history(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        shape = self._shape
        size = (2, len(blocks), shape.block_tokens, shape.kv_heads, shape.head_dim)
        both = torch.empty(size, dtype=shape.computed, device=blocks.device)
        kernels.copy_layer(
            blocks, layer * shape.layer_bytes, both, shape.host_form, is_fp8=shape.is_fp8
        )
        return both[0].flatten(0, 1), both[1].flatten(0, 1)


class _Decode:
    """Sequences of one new token each (see `attention.torch.DecodeKernel`)."""

    def __init__(self, shape: _Shape, plan: DecodePlan, room: PartRoom, num_programs: int) -> None:
        self._shape = shape
        self._plan = plan
        self._room = room
        self._num_programs = num_programs
        self.fetcher: Fetcher | None = None  # in steps that fetch cold blocks
        self.cold: ColdAttention | None = None  # in steps in which the CPU attends to some
        self.between_waves: Callable[[], None] = lambda: None

    def attend(self, query: Tensor, layer: int, scale: float, rules: LayerRules = CAUSAL) -> Tensor:
        shape = self._shape
        if self.cold is not None:
            if not rules.is_causal_alone:  # `cold_opening.why_not` should have refused the model
                raise BookError(
                    "the CPU attends to cold KV of a layer with a window, sinks or a cap"
                )
            self.cold.ask(query, layer, scale)
        num_waves = 1 if self.fetcher is None else self._plan.num_waves
        for wave in range(num_waves):
            if num_waves > 1:  # queueing them takes long: the GPU accepts only so much at once
                self.between_waves()
            fetched = 0 if self.fetcher is None else self.fetcher.address(layer, wave)
            kernels.attend_wave(
                query,
                self._plan,
                self._room,
                layer * shape.layer_bytes,
                scale,
                shape.kv_heads,
                shape.block_tokens,
                self._num_programs,
                wave,
                fetched,
                rules,
                is_fp8=shape.is_fp8,
            )
            if self.fetcher is not None:
                self.fetcher.end(layer, wave)
        if self.cold is not None:
            self.cold.collect(self._room, layer)
        attended: Tensor = kernels.merge_parts(query, self._plan, self._room, rules)
        return attended


class _Reads(NamedTuple):
    """What a step of single tokens reads (see `DecodePlan.fill`)."""

    table: Places
    num_blocks: list[int]
    lengths: list[int]
    fetches: Fetches


class _Mark(NamedTuple):
    event: Any
    is_long: bool  # whether the step takes long


class TritonRunner:
    """Runs on a GPU or, without graphs, in Triton's interpreter on a CPU."""

    only_queues = True

    def __init__(
        self,
        loaded: LoadedModel,
        pool: DevicePool,
        block_tokens: int,
        host: HostArena | None = None,
        *,
        max_num_seqs: int,
        use_graphs: bool = True,
        host_form: LosslessFormat | None = None,
        cold_attention: str = COLD_DEVICE,
        brings: bool = False,
    ) -> None:
        """`host_form`: the form of HOST's blocks, if they are packed.

        Cold blocks can be read only if `reads_host` is True afterwards. `cold_attention`: see
        `cold_split`. `brings`: whether steps may bring blocks (see `bringing`).
        """
        register()
        self.num_fetched = 0  # cold blocks fetched during their step
        self.num_ahead = 0  # of those, blocks whose first layers were fetched before it
        self._num_heads = loaded.num_heads
        self._windows = loaded.windows or (0,) * loaded.num_layers
        self._device = pool.tensor.device
        self._like = torch.empty(0, dtype=loaded.dtype, device=self._device)
        self._model = loaded.model
        kv_dtype = pool.tensor.dtype
        self._shape = _Shape(
            block_tokens, loaded.num_kv_heads, loaded.head_dim, kv_dtype, loaded.dtype, host_form
        )
        buffers = None
        if host is not None:
            layer_bytes = self._shape.layer_bytes
            buffers = fetch_room(
                layer_bytes,
                0 if host_form is None else packed.packed_layer_bytes(host_form, layer_bytes),
                loaded.num_layers,
                pool.num_slots * pool.block_bytes,
                host.num_slots,
                span_blocks(kernels.PART_TOKENS, block_tokens),
            )
        self.reads_host = buffers is not None
        if buffers is None:
            host = None
        self._addresses = Addresses.of_arenas(pool, host, is_packed=host_form is not None)
        max_blocks = max_num_seqs * -(-loaded.max_tokens // block_tokens)
        self._plan = DecodePlan(
            max_num_seqs,
            max_blocks,
            block_tokens,
            kernels.PART_TOKENS,
            self._device,
            0 if buffers is None else buffers.num_blocks,
        )
        # The longest sequence must have room, or no step could have it.
        num_slots = pool.num_slots + (0 if host is None else host.num_slots)
        longest = min(loaded.max_tokens, num_slots * block_tokens)
        most = max(_MAX_PARTS, -(-longest // kernels.PART_TOKENS))
        self._max_parts = min(self._plan.max_items, most)
        on_gpu = self._device.type == "cuda"
        num_processors = 1
        max_parts_apart = _MAX_PARTS_APART
        if on_gpu:
            properties = _cuda.get_device_properties(self._device)
            num_processors = properties.multi_processor_count
            share = _READ_APART_INTEGRATED if properties.is_integrated else _READ_APART
            part_bytes = kernels.PART_TOKENS * pool.block_bytes // block_tokens
            most = int(properties.total_memory * share) // part_bytes
            max_parts_apart = min(most, _MAX_PARTS_APART)
        self._short_chunks = ShortChunks(
            kernels.PART_TOKENS, max_num_seqs, self._max_parts, max_parts_apart
        )
        num_programs = num_processors * kernels.cut_for(self._device).programs_per_processor
        # Rows that fill up a graph's batch have a part each.
        num_parts = self._max_parts + max_num_seqs
        room = PartRoom.make(num_parts, loaded.num_heads, loaded.head_dim, self._device)
        self._decode = _Decode(self._shape, self._plan, room, num_programs)
        self._fused = None
        if can_fuse(loaded.model):
            self._fused = FusedDecoder(loaded.model, loaded.max_tokens, block_tokens, kv_dtype)
        self._fetcher = None
        self._cold: ColdAttention | None = None
        if buffers is not None and host is not None:
            if cold_attention != COLD_DEVICE:
                self._cold = open_cold_attention(
                    cold_attention,
                    loaded,
                    kv_dtype,
                    block_tokens,
                    host,
                    host_form,
                    max_rows=max_num_seqs,
                    span_blocks=self._plan.span_blocks,
                    part_tokens=kernels.PART_TOKENS,
                    device=self._device,
                )
            like = _as_copied(pool.tensor)
            self._fetcher = Fetcher(
                self._plan,
                buffers.num_buffers,
                loaded.num_layers,
                like.shape[2:],
                like,
                host_form,
                self._cold,
                self._windows,
            )
        self._bringer: Bringer | None = None
        if brings and host is not None:
            self._bringer = Bringer(
                loaded.num_layers,
                self._shape.layer_bytes,
                pool.num_slots * pool.block_bytes,
                self._device,
                host_form,
            )
        self.max_brought = 0 if self._bringer is None else self._bringer.max_blocks
        scratch = torch.zeros(pool.block_bytes, dtype=torch.uint8, device=self._device)
        self._scratch = scratch
        self._nowhere: Places = np.array([scratch.data_ptr()], np.int64)
        max_numbers = max_num_seqs * (3 + 2 * MAX_LOGPROBS)  # see `sampler`
        self._mailbox = Mailbox(max_numbers, max_num_seqs, self._device) if on_gpu else None
        # The numbers posted last, for tokens that the CPU does not know.
        self._kept = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)
        if self._mailbox is not None:
            self._kept = self._mailbox.kept
        self._is_long = False  # whether the step that was queued last takes long
        self._graphs = None
        if on_gpu and use_graphs:
            kinds = [StepKind()]
            if self._fetcher is not None:
                kinds.append(StepKind(fetches=True))
            if self._cold is not None:
                kinds.append(StepKind(fetches=True, on_cpu=True))
            if self._bringer is not None:
                kinds.append(StepKind(brings=True))
            self._graphs = CudaGraphs(
                self.fill,
                self._send_plan,
                self.forward,
                self._plan,
                max_num_seqs,
                self._device,
                kinds,
                self._cut_short,
            )

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[Chunk], between_layers: Callable[[], None] = lambda: None
    ) -> Tensor:
        try:
            return self._run(chunks, between_layers)
        except BaseException:
            self._cut_short()
            raise

    def _cut_short(self) -> None:
        """A step has failed halfway."""
        if self._fetcher is not None:
            self._fetcher.cut_short()
        if self._cold is not None:
            self._cold.cut_short()
        if self._bringer is not None:
            self._bringer.cut_short()

    def _run(self, chunks: Sequence[Chunk], between_layers: Callable[[], None]) -> Tensor:
        rows = self._short_chunks.taken_apart(chunks) if self._replays else chunks
        row = PackedRow.of(rows, self._shape.block_tokens)
        num_parts = self._short_chunks.num_parts(row.singles)
        if num_parts > self._max_parts:  # too many for the plan at once
            if len(row.singles) == 1:
                raise ValueError(
                    f"a sequence of {row.singles[0].start + 1} tokens is longer than device and "
                    "DRAM together hold"
                )
            half = len(chunks) // 2
            first = self._run(chunks[:half], between_layers)
            if self._cold is not None:  # its threads serve one step after the other
                self.wait(between_layers)
            return torch.cat([first, self._run(chunks[half:], between_layers)])
        if self._graphs is not None and not row.longer:
            logits = self._graphs.run(row, between_layers, brings=row.has_arriving)
            begin = row.sampled[0] if row.sampled else 0
            end = begin + len(row.sampled)
            if row.sampled == list(range(begin, end)):  # a slice needs no index on the GPU
                logits = logits[begin:end].to(torch.float32, copy=True)
            else:
                logits = logits[sent(torch.tensor(row.sampled), logits)].float()
        else:
            logits = self._run_without_graph(row, between_layers)
        if self._fetcher is not None:
            self._fetcher.fetch_ahead()
        tables = [chunk.request.table for chunk in row.singles]
        is_short = len(rows) == len(chunks) and not row.longer
        self._is_long = not is_short or any(t.num_cold or t.arriving_pins for t in tables)
        return logits

    def takes_apart(self, num_tokens: int, end: int) -> bool:
        return self._replays and self._short_chunks.suits(num_tokens, end)

    @property
    def _replays(self) -> bool:
        """Whether steps of single tokens are replayed. In the interpreter they are as if."""
        on_gpu = self._device.type == "cuda"
        return not on_gpu or (self._graphs is not None and self._graphs.captures)

    @torch.inference_mode()
    def key_changes(self, chunk: Chunk) -> Tensor:
        row = PackedRow.of([chunk], self._shape.block_tokens)
        ids, positions, addresses = torch.from_numpy(self._inputs(row)).to(self._device)
        table = self._addresses.of(places_of(chunk, self._shape.block_tokens))
        blocks = torch.from_numpy(table).to(self._device)
        span = span_of(0, chunk, blocks, self._device)
        # Not the fused pass: it writes each layer's keys before they could be compared.
        return key_changes(self._model, ids, positions, _Memory(self._shape, addresses), span)

    @property
    def is_doubtful(self) -> bool:
        return self._cold is not None and self._cold.is_open

    def mark(self) -> Any:
        if self._device.type != "cuda":
            return None
        done: Any = _cuda.Event()
        done.record()
        is_long, self._is_long = self._is_long, False
        return _Mark(done, is_long)

    def wait(self, between_layers: Callable[[], None] = lambda: None, end: Any = None) -> None:
        mark: _Mark | None = end or self.mark()
        if mark is not None:
            while mark.is_long and not mark.event.query():
                between_layers()
                time.sleep(_POLL_SECONDS)
            mark.event.synchronize()
        if self._cold is not None:
            self._cold.check()

    def post(self, numbers: Tensor) -> Callable[[], list[int]]:
        if self._mailbox is not None:
            return self._mailbox.post(numbers)
        self._kept[: len(numbers)] = numbers[: len(self._kept)]
        return numbers.tolist

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Compile the kernels and capture the graphs, so that no request waits for them."""
        if self._graphs is not None:
            self._graphs.capture_all(progress)
        if self._cold is not None and self._device.type == "cuda":
            progress("measuring how fast the CPU attends")
            self._cold.rates = measure_rates(
                self._cold.threads, self._shape.host_form, self._seconds_without_cold()
            )
        progress("compiling the kernels for prompts")
        self._compile_prefill()
        if self._device.type == "cuda":
            prepare(self._num_heads, self._shape.kv_heads, self._shape.head_dim, self._like)

    def close(self) -> None:
        """Wait for blocks that were fetched ahead for a step that will not run."""
        if self._cold is not None:
            self._cold.cut_short()
        if self._device.type == "cuda":
            _cuda.synchronize(self._device)
        if self._cold is not None:
            self._cold.close()

    @torch.inference_mode()
    def _seconds_without_cold(self) -> float:
        if self._graphs is None or not self._graphs.captures:
            return 0.0
        seconds = []
        for _ in range(3):
            _cuda.synchronize()
            started = time.perf_counter()
            self._graphs.replay_empty()
            _cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    @torch.inference_mode()
    def _compile_prefill(self) -> None:
        """Compute some tokens without a context and after one, and draw one. Nothing is written."""
        block_tokens = self._shape.block_tokens
        num_new = 2 * block_tokens
        any_block = int(self._addresses.of(np.zeros(1, np.int64))[0])
        zeros = torch.zeros(num_new, dtype=torch.int64, device=self._device)
        for num_past in (0, block_tokens):
            num_blocks = (num_past + num_new) // block_tokens
            blocks = torch.full((num_blocks,), any_block, device=self._device)
            spans = [SequenceSpan(0, num_new, num_past, blocks)]
            logits = self.forward(zeros, zeros, zeros, zeros[:1], 0, spans, kind=StepKind())
        draw(logits.float(), [DrawnRow(SamplingParams(), torch.Generator())])
        self.post(zeros[:1])()

    def _run_without_graph(self, row: PackedRow, between_layers: Callable[[], None]) -> Tensor:
        brings = self._brings(row)
        kind = StepKind(brings=brings)
        if row.singles:
            reads = self._reads(row.singles)
            self._plan.fill(
                reads.table,
                reads.num_blocks,
                reads.lengths,
                fetches=reads.fetches,
            )
            kind = self._kind_of(reads)._replace(brings=brings)
            self._send_plan(kind)
        elif brings and self._bringer is not None:
            self._bringer.send()
        kept = self._send(np.array(row.sampled or [0], np.int64))
        ids, positions, addresses = self._send(self._inputs(row))
        logits = self.forward(
            ids,
            positions,
            addresses,
            kept,
            len(row.singles),
            self._spans(row),
            kind=kind,
            between_waves=between_layers,
        )
        return logits[: len(row.sampled)].float()

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        addresses: Tensor,
        kept: Tensor,
        num_singles: int,
        spans: Sequence[SequenceSpan],
        *,
        kind: StepKind,
        between_waves: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Logits of the rows `kept`. Single tokens, which the plan describes, come first.

        `between_waves` is called in each layer if they come in several waves.
        """
        kernels.take_kept(ids, self._kept)
        bringer = self._bringer if kind.brings else None
        if bringer is not None:
            bringer.begin()
        self._decode.between_waves = between_waves
        self._decode.fetcher = self._fetcher if kind.fetches else None
        self._decode.cold = self._cold if kind.on_cpu else None
        if self._decode.fetcher is not None:
            self._decode.fetcher.begin()
        memory = _Memory(self._shape, addresses)
        step = AttentionStep(
            memory,
            spans,
            self._decode if num_singles else None,
            num_singles,
            await_layer=(lambda layer: None) if bringer is None else bringer.wait,
        )
        logits = self._compute(ids, positions, addresses, kept, step)
        if bringer is not None:
            bringer.end()
        return logits

    def _compute(
        self, ids: Tensor, positions: Tensor, addresses: Tensor, kept: Tensor, step: AttentionStep
    ) -> Tensor:
        if self._fused is None:
            output = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=kept,
                penstock=step,
            )
            logits: Tensor = output.logits[0]
            return logits

        scale = self._fused.scale

        def attend_layer(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rules = LayerRules(window=self._windows[layer])
            return attend(step, layer, query, key, value, scale, rules).flatten(1)

        return self._fused.forward(ids, positions, addresses, kept, attend_layer)

    def fill(self, row: PackedRow | None, num_rows: int) -> StepKind:
        """Fill the plan with `num_rows` rows: those of `row`, then rows that do nothing."""
        if row is None and self._cold is not None:  # a step that was filled in will not run
            self._cold.cut_short()
        singles = [] if row is None else row.singles
        reads = self._reads(singles)
        others = [1] * (num_rows - len(singles))  # one block and one token each
        rows = [np.zeros(0, np.int64)] * 3 if row is None else list(self._inputs(row))
        self._plan.fill(
            np.concatenate([reads.table, self._nowhere.repeat(len(others))]),
            reads.num_blocks + others,
            reads.lengths + others,
            rows,
            reads.fetches,
        )
        return self._kind_of(reads)._replace(brings=self._brings(row))

    def _brings(self, row: PackedRow | None) -> bool:
        """Whether blocks arrive in the step. The bringer gets their list."""
        if self._bringer is None:
            return False
        chunks = [] if row is None else [*row.singles, *(chunk for _, chunk in row.longer)]
        # A chunk that was taken apart has one table.
        tables = {id(chunk.request.table): chunk.request.table for chunk in chunks}
        return self._bringer.fill(list(tables.values()), self._addresses)

    def _kind_of(self, reads: _Reads) -> StepKind:
        """What the step does with cold blocks. The CPU's threads get their tasks."""
        on_cpu = self._cold is not None and self._cold.fill(reads.fetches.on_cpu, reads.lengths)
        return StepKind(on_cpu or len(reads.fetches.sources) > 0, on_cpu)

    def _send_plan(self, kind: StepKind) -> None:
        """Queue the transfer of what the step needs to the device."""
        self._plan.send()
        if kind.on_cpu and self._cold is not None:
            self._cold.send()
        if kind.brings and self._bringer is not None:
            self._bringer.send()

    def _reads(self, singles: Sequence[Chunk]) -> _Reads:
        places = [places_of(chunk, self._shape.block_tokens) for chunk in singles]
        num_blocks = [len(mine) for mine in places]
        lengths = [chunk.start + 1 for chunk in singles]
        tables = [chunk.request.table for chunk in singles]
        if self._fetcher is None or not any(table.num_cold for table in tables):
            if self._fetcher is not None:
                self._fetcher.choose_nothing()
            none: Places = np.zeros(0, np.int64)
            everything = self._addresses.of(np.concatenate([*places, none]))
            return _Reads(everything, num_blocks, lengths, NO_FETCHES)
        chosen = self._fetcher.choose(tables, places, lengths, self._addresses)
        self.num_fetched += len(chosen.fetches.sources)
        self.num_ahead += sum(chosen.fetches.num_there)
        return _Reads(chosen.table, num_blocks, lengths, chosen.fetches)

    def _inputs(self, row: PackedRow) -> NDArray[np.int64]:
        """Token ids, positions, and the address of each row's keys in the first layer."""
        offsets = row.positions % self._shape.block_tokens * self._shape.token_bytes
        addresses = np.where(row.is_written, self._addresses.of(row.places) + offsets, 0)
        return np.stack([row.token_ids, row.positions, addresses])

    def _send(self, numbers: NDArray[np.int64]) -> Tensor:
        """Queue a copy to the device, behind steps that are computed there."""
        staged = torch.from_numpy(numbers)
        if self._device.type != "cuda":
            return staged.to(self._device)
        # Torch keeps the pinned memory until the copy has ended.
        return staged.pin_memory().to(self._device, non_blocking=True)

    def _spans(self, row: PackedRow) -> list[SequenceSpan]:
        spans = []
        for begin, chunk in row.longer:
            table = self._addresses.of(places_of(chunk, self._shape.block_tokens))
            blocks = self._send(table)
            spans.append(span_of(begin, chunk, blocks, self._device))
        return spans


def _as_copied(pool: Tensor) -> Tensor:
    """The pool as kernels copy it: pairs of e4m3 bytes, which not every GPU has a type for."""
    if pool.dtype is not fp8.DTYPE:
        return pool
    return pool.view(torch.uint8 if pool.shape[-1] % 2 else torch.int16)
