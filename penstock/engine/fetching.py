"""Fetches cold blocks to the device layer by layer, during the computation.

While one layer is computed, a few programs on separate streams copy what is read next from HOST,
into several buffers. A buffer holds one layer of one wave of blocks (see `fetch_choice`). Packed
blocks arrive in a buffer of their own and are unpacked from there, so the link is never kept
waiting. A block that several sequences read in one wave crosses the link once, and not in layers
whose window does not reach it. After the last
layer, the first layers of the next step are fetched if it will likely read the same blocks. So the
link stays busy while logits are computed, tokens are sampled and the next step is prepared.

Steps may be replayed from a graph; fetching ahead never is. Events that both use say when a buffer
is free and when it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine.attention import packed_triton as packed
from penstock.engine.attention import triton as kernels
from penstock.engine.decode_plan import DecodePlan
from penstock.engine.fetch_choice import CpuPart, FetchChoice, FetchPlan
from penstock.engine.reach import Reach
from penstock.engine.table import PACKED_MARK, Addresses, BlockTable, Places

_cuda: Any = torch.cuda  # untyped

_NUM_BUFFERS = 8
_BUFFER_BYTES = 64 << 20  # per wave and layer, at most, unless a span is larger
_POOL_SHARE = 32  # all buffers together take at most 1/32 of the pool's size ...
_MIN_ROOM_BYTES = 8 << 20  # ... or as much as this beside a small pool
_NUM_STREAMS = 2  # used in turn: one buffer fills while the last bytes of another arrive
# Enough programs to saturate a PCIe Gen5 link, and few enough to leave SMs free. With more, packed
# blocks came more slowly.
_NUM_PROGRAMS = 12
_NUM_PACKED_PROGRAMS = 8
_NUM_UNPACKING = 264  # programs that unpack, for a short time


def buffer_room(pool_bytes: int) -> int:
    """How many bytes buffers for blocks from HOST may take beside a pool of this size."""
    return max(_MIN_ROOM_BYTES, pool_bytes // _POOL_SHARE)


class FetchRoom(NamedTuple):
    num_buffers: int
    num_blocks: int  # in each: one layer of them


def fetch_room(
    layer_bytes: int,
    arrival_bytes: int,
    num_layers: int,
    pool_bytes: int,
    num_slots: int,
    span_blocks: int,
) -> FetchRoom | None:
    """Divide the room for fetched blocks into buffers. None if a span has no room at all.

    `layer_bytes` and `arrival_bytes`: the size of one layer in a block, and in a packed one (0 if
    none is packed). `num_slots`: of HOST.
    """
    room_bytes = buffer_room(pool_bytes)
    arrivals_bytes = _NUM_STREAMS * arrival_bytes
    least = max(1, min(span_blocks, num_slots))
    # At most half of the layers, so that blocks fetched ahead are read before their list is
    # overwritten.
    num_buffers = min(
        _NUM_BUFFERS,
        max(1, num_layers // 2),
        (room_bytes // least - arrivals_bytes) // layer_bytes,
    )
    if num_buffers < 1:
        return None
    most = min(
        _BUFFER_BYTES // layer_bytes, room_bytes // (num_buffers * layer_bytes + arrivals_bytes)
    )
    return FetchRoom(num_buffers, max(least, min(most, num_slots)))


class _Blocks(NamedTuple):
    """What a step fetches: in tensors, for graphs. See `DecodePlan`."""

    sources: Tensor
    waves: Tensor


class _Unit(NamedTuple):
    """What one buffer holds: a layer of a wave's blocks."""

    number: int  # counted through the step
    layer: int
    wave: int


class _Event:
    """An event that graphs and other work both record and wait for. Does nothing on a CPU."""

    def __init__(self, on_gpu: bool) -> None:
        self._event: Any = _cuda.Event(external=True) if on_gpu else None
        self.record()  # a graph cannot wait for an event that was never recorded

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def hold_up(self, stream: Any) -> None:
        if self._event is not None:
            stream.wait_event(self._event)


class Fetcher:
    def __init__(
        self,
        plan: DecodePlan,
        num_buffers: int,
        num_layers: int,
        layer: Sequence[int],
        like: Tensor,
        host_form: LosslessFormat | None = None,
        cpu_part: CpuPart | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        """`layer` is the shape of a layer's KV in a block, `like` a tensor of the same type.

        `num_buffers`: see `fetch_room`. `host_form`: the form of HOST's blocks, if they are packed.
        `windows`: of each layer, in tokens; 0, or empty: all tokens.
        """
        self._num_layers = num_layers
        self._have_windows = [window > 0 for window in windows or [0] * num_layers]
        self._num_waves = 1
        self._num_buffers = num_buffers
        self._buffers = like.new_empty((self._num_buffers, plan.max_fetched, *layer))
        self._layer_bytes = self._buffers[0, 0].numel() * self._buffers.itemsize
        self._form = host_form
        self._arrivals: list[Tensor] = []  # of packed layers, one per stream
        if host_form is not None:
            size = packed.packed_layer_bytes(host_form, self._layer_bytes)
            shape = (plan.max_fetched, size)
            self._arrivals = [
                torch.empty(shape, dtype=torch.uint8, device=like.device)
                for _ in range(_NUM_STREAMS)
            ]
        self._now = _Blocks(plan.fetched, plan.waves)
        # Copies of the first waves, because the plan is refilled while these are still read.
        num_ahead = min(len(plan.fetched), self._num_buffers * plan.max_fetched)
        num_numbers = min(len(plan.waves), self._num_buffers * packed.WAVE_NUMBERS.value)
        self._ahead = _Blocks(
            torch.zeros_like(plan.fetched[:num_ahead]), torch.zeros_like(plan.waves[:num_numbers])
        )
        reach = Reach.of(windows, plan.block_tokens)
        self._choice = FetchChoice(plan.max_fetched, plan.span_blocks, cpu_part, reach)
        self._was_cut_short = False  # the last step: it may still fetch what nothing waits for
        on_gpu = like.device.type == "cuda"
        self._streams: list[Any] = []
        if on_gpu:
            # High priority: these few programs must not wait for a matrix product to end.
            self._streams = [_cuda.Stream(like.device, priority=-1) for _ in range(_NUM_STREAMS)]
        # Events: a unit has arrived, the last ones have; a buffer is free, has been filled ahead.
        self._arrived: dict[int, Any] = {}
        self._all_arrived = [_Event(on_gpu) for _ in range(_NUM_STREAMS)]
        self._are_free = [_Event(on_gpu) for _ in range(self._num_buffers)]
        self._arrived_ahead = [_Event(on_gpu) for _ in range(self._num_buffers)]

    def choose(
        self,
        tables: Sequence[BlockTable],
        places: Sequence[Places],
        lengths: Sequence[int],
        addresses: Addresses,
    ) -> FetchPlan:
        """See `FetchChoice.choose`. The next step must use the result."""
        self._let_fetches_end()
        chosen = self._choice.choose(tables, places, lengths, addresses)
        self._num_waves = max(1, len(chosen.fetches.num_sources))
        return chosen

    def choose_nothing(self) -> None:
        """The next step fetches nothing."""
        self._let_fetches_end()
        self._choice.forget()
        self._num_waves = 1

    def cut_short(self) -> None:
        """A step has failed halfway: nothing that it fetched or chose counts any more."""
        self._choice.forget()
        self._was_cut_short = True

    def begin(self) -> None:
        """Fetch the first units. Call it after the plan was sent and before the first layer."""
        for number in range(self._num_buffers):
            unit = self._unit(number)
            self._follow(unit)
            # A graph does not run on the streams on which blocks were fetched ahead. All units that
            # use the same arrival buffer must have left it, even if this one is there.
            after = self._arrived_ahead[number::_NUM_STREAMS]
            self._fetch(unit, self._now, is_first=True, after=after)

    def address(self, layer: int, wave: int) -> int:
        """The address of the wave's blocks, for work that is queued from now on."""
        number = layer * self._num_waves + wave
        if self._streams:
            _cuda.current_stream().wait_event(self._arrived.pop(number))
        return self._buffer(number).data_ptr()

    def end(self, layer: int, wave: int) -> None:
        """All work that reads the layer of the wave's blocks has been queued."""
        number = layer * self._num_waves + wave
        following = number + self._num_buffers
        num_units = self._num_layers * self._num_waves
        if following < num_units:
            unit = self._unit(following)
            self._follow(unit)
            self._fetch(unit, self._now)
            return
        if following == num_units:
            # Kernels, not copies: copies would queue behind loads in the GPU's copy engines.
            for source, target in zip(self._now, self._ahead, strict=True):
                torch.add(source[: len(target)], 0, out=target)
        self._are_free[number % self._num_buffers].record()

    def fetch_ahead(self) -> None:
        """Fetch the first units of the next step, if it will likely read the same blocks.

        Call it after a step was queued. HOST must stay pinned until they have arrived.
        """
        if not self._choice.is_steady or self._num_layers < 2 * self._num_buffers:
            return
        for number in range(self._num_buffers):
            after = [*self._all_arrived, self._are_free[number]]
            self._fetch(self._unit(number), self._ahead, after=after)
        self._choice.fetch_ahead()

    def _let_fetches_end(self) -> None:
        """After a step that was cut short, the next one must not change what is still read."""
        if self._was_cut_short:
            for stream in self._streams:
                _cuda.current_stream().wait_stream(stream)
            self._arrived.clear()
            self._was_cut_short = False

    def _unit(self, number: int) -> _Unit:
        return _Unit(number, *divmod(number, self._num_waves))

    def _follow(self, unit: _Unit) -> None:
        if self._streams:
            self._stream(unit).wait_stream(_cuda.current_stream())

    def _fetch(
        self, unit: _Unit, blocks: _Blocks, *, is_first: bool = False, after: Sequence[_Event] = ()
    ) -> None:
        stream = self._stream(unit)
        for event in after:
            event.hold_up(stream)
        with nullcontext() if stream is None else _cuda.stream(stream):
            self._copy(unit, blocks, is_first=is_first)
            if blocks is self._ahead:
                self._arrived_ahead[unit.number].record()
                return
            if unit.number >= self._num_layers * self._num_waves - _NUM_STREAMS:
                self._all_arrived[unit.number % _NUM_STREAMS].record()
            if stream is not None:
                self._arrived[unit.number] = _cuda.Event()
                self._arrived[unit.number].record()

    def _copy(self, unit: _Unit, blocks: _Blocks, *, is_first: bool) -> None:
        target = self._buffer(unit.number)
        offset = unit.layer * self._layer_bytes
        which = {"is_first": is_first, "has_window": self._have_windows[unit.layer]}
        if self._form is None:
            kernels.fetch_layer(*blocks, unit.wave, offset, target, _NUM_PROGRAMS, **which)
            return
        arrival = self._arrivals[unit.number % _NUM_STREAMS]
        kernels.fetch_layer(
            *blocks,
            unit.wave,
            packed.packed_at(self._form, offset) - PACKED_MARK,
            arrival.view(torch.int64),
            _NUM_PACKED_PROGRAMS,
            **which,
        )
        packed.unpack_layer(
            arrival, blocks.waves, unit.wave, target, _NUM_UNPACKING, self._form, **which
        )

    def _stream(self, unit: _Unit) -> Any:
        return self._streams[unit.number % _NUM_STREAMS] if self._streams else None

    def _buffer(self, number: int) -> Tensor:
        return self._buffers[number % self._num_buffers]
