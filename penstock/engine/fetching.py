"""Fetches cold blocks to the device layer by layer, during the computation.

While one layer is computed, a few programs on separate streams copy what the next layers will read
from HOST, into buffers for several layers. Packed blocks are unpacked on the way, so the buffers
hold raw layers. A block that several sequences read crosses the link once. Blocks that do not fit
the buffers are read directly from HOST. After the last layer, the first layers of the next step are
fetched if it will likely read the same blocks. So the link stays busy while logits are computed,
tokens are sampled and the next step is prepared.

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
from penstock.engine.attention import triton as kernels
from penstock.engine.decode_plan import DecodePlan
from penstock.engine.fetch_choice import FetchChoice, FetchPlan
from penstock.engine.table import Addresses, BlockTable, Places

_cuda: Any = torch.cuda  # untyped

_NUM_BUFFERS = 8
_BUFFER_BYTES = 64 << 20  # per layer, at most
_MIN_BUFFER_BYTES = 1 << 20
_POOL_SHARE = 32  # all buffers together take at most 1/32 of the pool's size
_NUM_STREAMS = 2  # used in turn: one layer begins while the last bytes of another arrive
_NUM_PROGRAMS = 12  # enough to saturate a PCIe Gen5 link, and few enough to leave SMs free
_NUM_UNPACKING = 24  # the same for packed blocks: these programs have half as many warps


def num_fetched_at_once(layer_bytes: int, pool_bytes: int, num_slots: int) -> int:
    """How many blocks the buffers hold. `layer_bytes`: the size of one layer in a block."""
    share = pool_bytes // _POOL_SHARE // _NUM_BUFFERS
    buffer_bytes = min(_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, share))
    return max(1, min(buffer_bytes // layer_bytes, num_slots))


class _Blocks(NamedTuple):
    """Addresses, the index of the first to fetch, and their number: in tensors, for graphs."""

    sources: Tensor
    first: Tensor
    num_sources: Tensor


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
        num_layers: int,
        layer: Sequence[int],
        like: Tensor,
        host_form: LosslessFormat | None = None,
    ) -> None:
        """`layer` is the shape of a layer's KV in a block, `like` a tensor of the same type.

        `host_form`: the form of HOST's blocks, if they are packed.
        """
        self._num_layers = num_layers
        self._host_form = host_form
        self._num_programs = _NUM_PROGRAMS if host_form is None else _NUM_UNPACKING
        # At most half of the layers, so that blocks fetched ahead are read before their list is
        # overwritten.
        self._num_buffers = max(1, min(_NUM_BUFFERS, num_layers // 2))
        self._buffers = like.new_empty((self._num_buffers, plan.max_fetched, *layer))
        self._layer_bytes = self._buffers[0, 0].numel() * self._buffers.itemsize
        zero = torch.zeros_like(plan.num_fetched)
        self._late = _Blocks(plan.fetched, plan.first_fetched, plan.num_fetched)
        self._all = _Blocks(plan.fetched, zero, plan.num_fetched)
        # A copy, because the plan is refilled while these are still read.
        self._ahead = _Blocks(
            torch.zeros_like(plan.fetched), zero, torch.zeros_like(plan.num_fetched)
        )
        self._choice = FetchChoice(plan.max_fetched)
        on_gpu = like.device.type == "cuda"
        self._streams: list[Any] = []
        if on_gpu:
            # High priority: these few programs must not wait for a matrix product to end.
            self._streams = [_cuda.Stream(like.device, priority=-1) for _ in range(_NUM_STREAMS)]
        # Events: a layer has arrived, the last one has; a buffer is free, has been filled ahead.
        self._arrived: dict[int, Any] = {}
        self._all_arrived = _Event(on_gpu)
        self._are_free = [_Event(on_gpu) for _ in range(self._num_buffers)]
        self._arrived_ahead = [_Event(on_gpu) for _ in range(self._num_buffers)]

    def choose(
        self, tables: Sequence[BlockTable], places: Sequence[Places], addresses: Addresses
    ) -> FetchPlan:
        """See `FetchChoice.choose`. The next step must use the result."""
        return self._choice.choose(tables, places, addresses)

    def choose_nothing(self) -> None:
        """The next step fetches nothing."""
        self._choice.forget()

    def begin(self) -> None:
        """Fetch the first layers. Call it after the plan was sent and before the first layer."""
        for layer in range(self._num_buffers):
            self._follow(layer)
            self._fetch(layer, self._late, after=[self._arrived_ahead[layer]])

    def address(self, layer: int) -> int:
        """The address of the layer's blocks, for work that is queued from now on."""
        if self._streams:
            _cuda.current_stream().wait_event(self._arrived[layer])
        return self._buffer(layer).data_ptr()

    def end(self, layer: int) -> None:
        """All work that reads the layer has been queued."""
        following = layer + self._num_buffers
        if following < self._num_layers:
            self._follow(following)
            self._fetch(following, self._all)
            return
        if following == self._num_layers:
            # Kernels, not copies: copies would queue behind loads in the GPU's copy engines.
            torch.add(self._all.sources, 0, out=self._ahead.sources)
            torch.add(self._all.num_sources, 0, out=self._ahead.num_sources)
        self._are_free[layer % self._num_buffers].record()

    def fetch_ahead(self) -> None:
        """Fetch the first layers of the next step, if it will likely read the same blocks.

        Call it after a step was queued. HOST must stay pinned until they have arrived.
        """
        if not self._choice.is_steady or self._num_layers < 2 * self._num_buffers:
            return
        for layer in range(self._num_buffers):
            self._fetch(layer, self._ahead, after=[self._all_arrived, self._are_free[layer]])
        self._choice.fetch_ahead()

    def _follow(self, layer: int) -> None:
        if self._streams:
            self._stream(layer).wait_stream(_cuda.current_stream())

    def _fetch(self, layer: int, blocks: _Blocks, after: Sequence[_Event] = ()) -> None:
        stream = self._stream(layer)
        for event in after:
            event.hold_up(stream)
        with nullcontext() if stream is None else _cuda.stream(stream):
            offset = layer * self._layer_bytes
            kernels.fetch_layer(
                *blocks, offset, self._buffer(layer), self._num_programs, self._host_form
            )
            if blocks is self._ahead:
                self._arrived_ahead[layer].record()
                return
            if layer == self._num_layers - 1:
                self._all_arrived.record()
            if stream is not None:
                self._arrived[layer] = _cuda.Event()
                self._arrived[layer].record()

    def _stream(self, layer: int) -> Any:
        return self._streams[layer % _NUM_STREAMS] if self._streams else None

    def _buffer(self, layer: int) -> Tensor:
        return self._buffers[layer % self._num_buffers]
