"""Brings cold blocks to the device layer by layer, beside the computation.

While one layer is computed, the link would lie idle: what the next ones will read of HOST is copied
by a few programs on streams of their own, into room for some layers in turn. A block that several
sequences read crosses the link once. What there is no room for is read where it lies. Behind the
last layer come the first ones of the next step, where that is likely to read the same blocks: the
link carries on while logits are computed, tokens sampled and the next step is made ready.

Steps may be replayed from a graph, and what is brought ahead never is: events that both know say
when a room is free, and when it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention import triton as kernels
from penstock.engine.decode_plan import DecodePlan
from penstock.engine.fetch_choice import FetchChoice, FetchPlan
from penstock.engine.table import Addresses, BlockTable, Places

_cuda: Any = torch.cuda  # carries no types

_NUM_ROOMS = 8
_ROOM_BYTES = 64 << 20  # for a layer, at most
_MIN_ROOM_BYTES = 1 << 20
_POOL_SHARE = 32  # all rooms together take at most so small a part of what the pool takes
_NUM_STREAMS = 2  # in turn: while a layer's last bytes are under way, the next one's begin
_NUM_PROGRAMS = 12  # so many keep a PCIe Gen5 link busy, and leave the processors to others


def num_fetched_at_once(layer_bytes: int, pool_bytes: int, num_slots: int) -> int:
    """How many blocks there is room for. `layer_bytes`: of one layer in a block."""
    share = pool_bytes // _POOL_SHARE // _NUM_ROOMS
    room_bytes = min(_ROOM_BYTES, max(_MIN_ROOM_BYTES, share))
    return max(1, min(room_bytes // layer_bytes, num_slots))


class _Blocks(NamedTuple):
    """Addresses, the first that is wanted, and how many there are: in tensors, for a graph."""

    sources: Tensor
    first: Tensor
    num_sources: Tensor


class _Event:
    """Recorded and waited for inside of graphs and outside; nothing where there are no streams."""

    def __init__(self, on_gpu: bool) -> None:
        self._event: Any = _cuda.Event(external=True) if on_gpu else None
        self.record()  # one that never was cannot be waited for in a graph

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def hold_up(self, stream: Any) -> None:
        if self._event is not None:
            stream.wait_event(self._event)


class Fetcher:
    def __init__(
        self, plan: DecodePlan, num_layers: int, layer: Sequence[int], like: Tensor
    ) -> None:
        """`layer` is the shape of a layer's KV in a block; `like` a tensor of its kind."""
        self._num_layers = num_layers
        # At most half of the layers: what was brought ahead is read before its list is renewed.
        self._num_rooms = max(1, min(_NUM_ROOMS, num_layers // 2))
        self._rooms = like.new_empty((self._num_rooms, plan.max_fetched, *layer))
        self._layer_bytes = self._rooms[0, 0].numel() * self._rooms.itemsize
        zero = torch.zeros_like(plan.num_fetched)
        self._late = _Blocks(plan.fetched, plan.first_fetched, plan.num_fetched)
        self._all = _Blocks(plan.fetched, zero, plan.num_fetched)
        # The plan is filled anew while these are still read.
        self._ahead = _Blocks(
            torch.zeros_like(plan.fetched), zero, torch.zeros_like(plan.num_fetched)
        )
        self._choice = FetchChoice(plan.max_fetched)
        on_gpu = like.device.type == "cuda"
        self._streams: list[Any] = []
        if on_gpu:
            # Before others: few as they are, they must not wait for a whole product to end.
            self._streams = [_cuda.Stream(like.device, priority=-1) for _ in range(_NUM_STREAMS)]
        self._came: dict[int, Any] = {}  # events, by layer
        self._all_came = _Event(on_gpu)  # the last layer
        self._are_free = [_Event(on_gpu) for _ in range(self._num_rooms)]
        self._came_ahead = [_Event(on_gpu) for _ in range(self._num_rooms)]

    def choose(
        self, tables: Sequence[BlockTable], places: Sequence[Places], addresses: Addresses
    ) -> FetchPlan:
        """See `FetchChoice`. The step that is told of it must be the next."""
        return self._choice.choose(tables, places, addresses)

    def choose_nothing(self) -> None:
        """The next step that is told what to read fetches nothing."""
        self._choice.forget()

    def begin(self) -> None:
        """Behind what fills the plan, before the first layer."""
        for layer in range(self._num_rooms):
            self._follow(layer)
            self._fetch(layer, self._late, after=[self._came_ahead[layer]])

    def address(self, layer: int) -> int:
        """Where the layer's blocks lie for what is queued from now on."""
        if self._streams:
            _cuda.current_stream().wait_event(self._came[layer])
        return self._room(layer).data_ptr()

    def end(self, layer: int) -> None:
        """All that reads the layer has been queued."""
        following = layer + self._num_rooms
        if following < self._num_layers:
            self._follow(following)
            self._fetch(following, self._all)
            return
        if following == self._num_layers:
            # Kernels, not copies: a GPU's copy engines take turns, and loads may be under way.
            torch.add(self._all.sources, 0, out=self._ahead.sources)
            torch.add(self._all.num_sources, 0, out=self._ahead.num_sources)
        self._are_free[layer % self._num_rooms].record()

    def fetch_ahead(self) -> None:
        """Behind a step that has been queued: the first layers of the next, if it will likely read
        the same blocks. HOST must stay pinned until they have come."""
        if not self._choice.is_steady or self._num_layers < 2 * self._num_rooms:
            return
        for layer in range(self._num_rooms):
            self._fetch(layer, self._ahead, after=[self._all_came, self._are_free[layer]])
        self._choice.bring_ahead()

    def _follow(self, layer: int) -> None:
        if self._streams:
            self._stream(layer).wait_stream(_cuda.current_stream())

    def _fetch(self, layer: int, blocks: _Blocks, after: Sequence[_Event] = ()) -> None:
        stream = self._stream(layer)
        for event in after:
            event.hold_up(stream)
        with nullcontext() if stream is None else _cuda.stream(stream):
            offset = layer * self._layer_bytes
            kernels.fetch_layer(*blocks, offset, self._room(layer), _NUM_PROGRAMS)
            if blocks is self._ahead:
                self._came_ahead[layer].record()
                return
            if layer == self._num_layers - 1:
                self._all_came.record()
            if stream is not None:
                self._came[layer] = _cuda.Event()
                self._came[layer].record()

    def _stream(self, layer: int) -> Any:
        return self._streams[layer % _NUM_STREAMS] if self._streams else None

    def _room(self, layer: int) -> Tensor:
        return self._rooms[layer % self._num_rooms]
