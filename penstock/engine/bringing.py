"""Brings blocks from DRAM to the device within a step, each layer just before the step needs it.

A prompt that is found in DRAM needs a step for its last tokens. Loading first and computing then
takes as long as both together. Here kernels on separate streams copy one layer of all blocks after
the other, and the step waits for each layer where it attends: the link and the processors work at
the same time. The blocks stay where they were copied to, as after a load.

The list of blocks is at a fixed address, so a step that brings blocks can be captured as a graph.
A block is pinned in DRAM until the step has ended, and nobody else may read it on the device before
the step was queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine.attention import packed_triton as packed
from penstock.engine.attention.bring_triton import (
    copy_blocks,
    unpack_blocks,
    unpack_constants,
    words_of,
)
from penstock.engine.attention.triton import pull_words
from penstock.engine.fetching import buffer_room
from penstock.engine.table import Addresses, BlockTable, arriving_in

_cuda: Any = torch.cuda  # mostly untyped

_MAX_BYTES = 1 << 30  # what one step brings at most: for more, copy engines are faster by more
_NUM_STREAMS = 2  # used in turn: one layer begins while the last bytes of another arrive
# Layers that are queued before the step's own work. Queueing takes Python longer than the copies of
# a short prompt take: all of them at first would leave the processors idle.
_NUM_AHEAD = 4
# See `fetching`: enough to saturate a PCIe Gen5 link, and few enough to leave SMs free.
_NUM_PROGRAMS = 12
_NUM_PACKED_PROGRAMS = 8
_NUM_UNPACKING = 264


class Bringer:
    def __init__(
        self,
        num_layers: int,
        layer_bytes: int,
        pool_bytes: int,
        device: torch.device,
        form: LosslessFormat | None = None,
    ) -> None:
        """`layer_bytes`: of a raw block. `form`: of HOST's blocks, if they are packed."""
        self._num_layers = num_layers
        self._layer_bytes = layer_bytes
        self._on_gpu = device.type == "cuda"
        self.max_blocks = min(pool_bytes, _MAX_BYTES) // (num_layers * layer_bytes)
        self._buffers: list[torch.Tensor] = []  # in which packed layers arrive, one per stream
        if form is not None:
            # The address of a packed block is odd.
            self._packed_at = [
                packed.packed_at(form, layer * layer_bytes) - 1 for layer in range(num_layers)
            ]
            self._constants = unpack_constants(form, layer_bytes)
            size = packed.packed_layer_bytes(form, layer_bytes)
            room = buffer_room(pool_bytes) // (_NUM_STREAMS * size)
            self.max_blocks = min(self.max_blocks, room)
            self._buffers = [
                torch.empty((self.max_blocks, size), dtype=torch.uint8, device=device)
                for _ in range(_NUM_STREAMS)
            ]
        size = 1 + 2 * self.max_blocks
        self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=self._on_gpu)
        self._sent = torch.zeros(size, dtype=torch.int64, device=device)
        self._words = words_of(self._sent, layer_bytes)
        self._num_words = 1
        self._read: Any = None  # the list that was sent last
        self._streams: list[Any] = []
        if self._on_gpu:
            self._read = _cuda.Event()
            # High priority: these few programs must not wait for a matrix product to end.
            self._streams = [_cuda.Stream(device, priority=-1) for _ in range(_NUM_STREAMS)]
        self._num_queued = 0  # layers
        self._arrived: dict[int, Any] = {}  # by layer

    def fill(self, tables: Sequence[BlockTable], addresses: Addresses) -> bool:
        """Choose what the next step brings: the blocks that arrive in these tables.

        False if there are none.
        """
        pins, slots = arriving_in(tables)
        if not len(pins) and self._num_words == 1:
            return False  # as in the step before
        if self._read is not None:
            self._read.synchronize()
        self._num_words = 1 + 2 * len(pins)
        staged = self._staged.numpy()
        staged[0] = len(pins)
        staged[1 : self._num_words : 2] = addresses.of(~pins)
        staged[2 : self._num_words : 2] = addresses.of(slots)
        return len(pins) > 0

    def send(self) -> None:
        """Queue the transfer of the list to the device. No copy: it would wait for loads."""
        if self._on_gpu:
            pull_words(self._staged.data_ptr(), self._sent[: self._num_words])
            self._read.record()
        else:
            self._sent.copy_(self._staged)

    def begin(self) -> None:
        """Queue the first copies. Call it before the first layer is queued."""
        for stream in self._streams:
            stream.wait_stream(_cuda.current_stream())
        self._num_queued = 0
        self._queue_until(_NUM_AHEAD)

    def wait(self, layer: int) -> None:
        """Work that is queued from now on waits for this layer."""
        if self._on_gpu:
            self._queue_until(layer + 1 + _NUM_AHEAD)
            _cuda.current_stream().wait_event(self._arrived[layer])
        else:  # as late as it may be
            self._copy(layer)

    def end(self) -> None:
        """Work that is queued from now on waits for all copies."""
        self._queue_until(self._num_layers)
        for stream in self._streams:
            _cuda.current_stream().wait_stream(stream)
        self._arrived.clear()  # events of a graph that was captured are for nobody else

    def cut_short(self) -> None:
        """A step has failed halfway: wait for the copies that nothing waits for."""
        for stream in self._streams:
            stream.synchronize()

    def _queue_until(self, end: int) -> None:
        """Queue the copies of all layers before this one."""
        for layer in range(self._num_queued, min(end, self._num_layers) if self._on_gpu else 0):
            with _cuda.stream(self._streams[layer % _NUM_STREAMS]):
                self._copy(layer)
                self._arrived[layer] = _cuda.Event()
                self._arrived[layer].record()
            self._num_queued += 1

    def _copy(self, layer: int) -> None:
        at = layer * self._layer_bytes
        if not self._buffers:
            copy_blocks(self._sent, self._words, at, at, self._layer_bytes, _NUM_PROGRAMS)
            return
        buffer = self._buffers[layer % _NUM_STREAMS]
        size = buffer.shape[1]
        words, packed_at = words_of(buffer, size), self._packed_at[layer]
        copy_blocks(self._sent, words, packed_at, None, size, _NUM_PACKED_PROGRAMS)
        unpack_blocks(self._sent, buffer, at, _NUM_UNPACKING, self._constants)
