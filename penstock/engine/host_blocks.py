"""HOST's blocks as the CPU reads them: their values, whether they are packed or not."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine.table import Places
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import Slot


class HostBlocks:
    """Blocks with the shape of the pool's."""

    def __init__(
        self, pool: DevicePool, host: HostArena, form: LosslessFormat | None = None
    ) -> None:
        """`form`: of packed blocks. None: HOST holds raw blocks."""
        self._host = host
        self._layer_shape = pool.tensor.shape[2:]
        self._dtype = pool.tensor.dtype
        self._raw: Tensor | None = None
        if form is None:
            raw = pool.like(host)
            # Torch cannot index e4m3 on all devices, but it can index bytes.
            self._raw = raw.view(torch.uint8) if raw.element_size() == 1 else raw
        self._codec = None if form is None else LosslessCodec(form)

    def layer(self, layer: int, slots: Places) -> Tensor:
        """One layer of some blocks: [blocks, 2, block_tokens, kv_heads, head_dim]."""
        if self._raw is not None:
            return self._raw[:, layer][torch.from_numpy(slots)]
        assert self._codec is not None
        layer_bytes = self._layer_shape.numel() * self._dtype.itemsize
        raw = bytearray(len(slots) * layer_bytes)
        for index, slot in enumerate(slots.tolist()):
            one = memoryview(raw)[index * layer_bytes : (index + 1) * layer_bytes]
            self._codec.unpack_stretch(self._host.view(Slot(slot)), one, layer * layer_bytes)
        flat = torch.frombuffer(raw, dtype=self._dtype)
        return flat.view(len(slots), *self._layer_shape)
