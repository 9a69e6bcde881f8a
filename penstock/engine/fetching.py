"""Brings cold blocks to the device layer by layer, beside the computation.

While one layer is computed, the link would lie idle: what the next ones will read of HOST is copied
by a few programs on a stream of their own, into room for some layers in turn. A block that several
sequences read crosses the link once. What there is no room for is read where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.attention import triton as kernels
from penstock.engine.decode_plan import DecodePlan
from penstock.engine.table import Addresses, Places

_cuda: Any = torch.cuda  # carries no types

_ROOM_BYTES = 64 << 20  # for a layer
_NUM_ROOMS = 3
_NUM_STREAMS = 2  # in turn: while a layer's last bytes are under way, the next one's begin
_NUM_PROGRAMS = 8  # so many keep a PCIe Gen5 link busy, and leave the processors to others


def num_fetched_at_once(layer_bytes: int, num_slots: int) -> int:
    """How many blocks there is room for. `layer_bytes`: of one layer in a block."""
    return max(1, min(_ROOM_BYTES // layer_bytes, num_slots))


class Fetcher:
    def __init__(self, plan: DecodePlan, layer: Sequence[int], like: Tensor) -> None:
        """`layer` is the shape of a layer's KV in a block; `like` a tensor of its kind."""
        self._plan = plan
        self._rooms = like.new_empty((_NUM_ROOMS, plan.max_fetched, *layer))
        self._layer_bytes = self._rooms[0, 0].numel() * self._rooms.itemsize
        self._num_layers = 0
        self._streams: list[Any] = []
        if like.device.type == "cuda":
            # Before others: few as they are, they must not wait for a whole product to end.
            self._streams = [_cuda.Stream(like.device, priority=-1) for _ in range(_NUM_STREAMS)]
        self._came: dict[int, Any] = {}  # events, by layer

    def choose(self, places: Places, addresses: Addresses) -> tuple[Places, Places]:
        """Of all sequences' blocks: their addresses, `~n` for the n-th that is fetched; and the
        addresses to fetch from. What most sequences read comes first."""
        table = addresses.of(places)
        at = np.flatnonzero(places < 0)
        cold, which, counts = np.unique(places[at], return_inverse=True, return_counts=True)
        chosen = np.sort(np.argsort(-counts, kind="stable")[: self._plan.max_fetched])
        numbers = np.full(len(cold), -1)
        numbers[chosen] = np.arange(len(chosen))
        numbers = numbers[which]
        is_fetched = numbers >= 0
        table[at[is_fetched]] = ~numbers[is_fetched]
        return table, addresses.of(cold[chosen])

    def begin(self, num_layers: int) -> None:
        """Behind what fills the plan, before the first layer."""
        self._num_layers = num_layers
        for layer in range(min(_NUM_ROOMS, num_layers)):
            self._fetch(layer)

    def address(self, layer: int) -> int:
        """Where the layer's blocks lie for what is queued from now on."""
        if self._streams:
            _cuda.current_stream().wait_event(self._came[layer])
        return self._rooms[layer % _NUM_ROOMS].data_ptr()

    def end(self, layer: int) -> None:
        """All that reads the layer has been queued."""
        if layer + _NUM_ROOMS < self._num_layers:
            self._fetch(layer + _NUM_ROOMS)

    def _fetch(self, layer: int) -> None:
        room, offset = self._rooms[layer % _NUM_ROOMS], layer * self._layer_bytes
        if not self._streams:
            kernels.fetch_layer(self._plan, offset, room, _NUM_PROGRAMS)
            return
        stream = self._streams[layer % _NUM_STREAMS]
        stream.wait_stream(_cuda.current_stream())
        with _cuda.stream(stream):
            kernels.fetch_layer(self._plan, offset, room, _NUM_PROGRAMS)
            self._came[layer] = _cuda.Event()
            self._came[layer].record()
