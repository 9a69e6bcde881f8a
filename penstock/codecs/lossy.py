"""The lossy codecs: fp8, int8 and int4. `lossy_format` says what each byte is.

A codec sees single full blocks. It cannot know which of them is the last of a prompt, so it keeps
no tokens whole. What stays whole is up to the client: the tokens after the last full block never
leave the device, and at least the last token of a prompt is always computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.codecs import quantize
from penstock.codecs.layout import DIM, HEAD, KIND, LAYER, TOKEN, KvLayout
from penstock.codecs.lossy_format import lossy_layer_bytes, lossy_sections, lossy_version

_MAX_FLOAT16 = 65504.0
_ORDER = (LAYER, KIND, HEAD, TOKEN, DIM)
_Pack = Callable[[Tensor], list[Tensor]]
_Unpack = Callable[[Sequence[Tensor]], Tensor]
_QUANTIZERS: dict[str, tuple[_Pack, _Unpack]] = {
    "fp8": (quantize.to_fp8, quantize.from_fp8),
    "int8": (quantize.to_int8, quantize.from_int8),
    "int4": (quantize.to_int4, quantize.from_int4),
}


class LossyCodec:
    """Quantizes the parts of a layout, one at a time or many in a tensor on any device.

    The same values give the same bytes on a CPU and on a GPU. Temporary memory is up to ten times
    the raw bytes of a call for 16-bit values: pass large numbers of blocks in pieces.
    """

    def __init__(self, name: str, layout: KvLayout) -> None:
        """ConfigError if the codec cannot pack such values."""
        self.name = name
        self.layout = layout
        self.version = lossy_version(name, layout)
        self._sections = lossy_sections(name, layout)
        self.layer_bytes = lossy_layer_bytes(name, layout)
        self.raw_bytes = layout.num_bytes
        self.packed_bytes = layout.size(LAYER) * self.layer_bytes
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        axes = [axis for axis, _ in layout.axes]
        self._to_order = [0, *(1 + axes.index(axis) for axis in _ORDER)]
        self._from_order = [0, *(1 + _ORDER.index(axis) for axis in axes)]
        self._quantize, self._dequantize = _QUANTIZERS[name]

    def pack(self, raw: memoryview, packed: memoryview) -> bool:
        """False if a value is not finite, or larger than quantize.MAX_MAGNITUDE."""
        packed_blocks, fits = self.pack_tensor(_tensor(raw, self.raw_bytes))
        if not fits.item():
            return False
        _tensor(packed, self.packed_bytes).copy_(packed_blocks)
        return True

    def unpack(self, packed: memoryview, raw: memoryview) -> None:
        _tensor(raw, self.raw_bytes).copy_(self.unpack_tensor(_tensor(packed, self.packed_bytes)))

    def pack_tensor(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [blocks, raw_bytes] to uint8 [blocks, packed_bytes], and for each block whether
        it fits. Bytes of blocks that do not fit mean nothing. Never waits for a GPU."""
        num_blocks = len(raw)
        values = _typed(raw, self._dtype).view(num_blocks, *self.layout.shape)
        values = values.permute(self._to_order).float()
        runs = [
            numbers.to(getattr(torch, section.dtype))
            .contiguous()
            .view(torch.uint8)
            .reshape(num_blocks, self.layout.size(LAYER), section.num_bytes)
            for numbers, section in zip(self._quantize(values), self._sections, strict=True)
        ]
        return torch.cat(runs, -1).flatten(1), quantize.are_packable(values)

    def unpack_tensor(self, packed: Tensor) -> Tensor:
        """uint8 [blocks, packed_bytes] to uint8 [blocks, raw_bytes]. Never waits for a GPU."""
        num_blocks, num_layers = len(packed), self.layout.size(LAYER)
        runs = packed.reshape(num_blocks, num_layers, self.layer_bytes)
        sizes = [section.num_bytes for section in self._sections]
        numbers = [
            _typed(run, getattr(torch, section.dtype)).view(num_blocks, num_layers, *section.shape)
            for run, section in zip(torch.split(runs, sizes, -1), self._sections, strict=True)
        ]
        values = self._dequantize(numbers)
        if self._dtype == torch.float16:
            # A scale that was rounded up takes 65,504 to 65,532, which would become infinite.
            values = values.clamp(-_MAX_FLOAT16, _MAX_FLOAT16)
        values = values.to(self._dtype).permute(self._from_order)
        return values.contiguous().view(torch.uint8).reshape(num_blocks, self.raw_bytes)


def open_lossy(name: str, layout: KvLayout) -> LossyCodec:
    """ConfigError if no lossy codec has this name, or if it cannot pack such values."""
    return LossyCodec(name, layout)


def _tensor(view: memoryview, num_bytes: int) -> Tensor:
    """One block, [1, num_bytes], in the same memory if it is writable."""
    view = view[:num_bytes]
    # torch warns about memory that is read-only, and has no tensors for it.
    buffer = bytearray(view) if view.readonly else view
    return torch.frombuffer(buffer, dtype=torch.uint8)[None]


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes read as `dtype`, in one axis. Copies only if they are not dense or not aligned."""
    data = data.reshape(-1)
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
