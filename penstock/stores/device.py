"""DEVICE: the engine's KV pool. A block is one contiguous run of bytes."""

from __future__ import annotations

import ctypes
import math

import torch

from penstock.errors import ConfigError
from penstock.stores.host import HostArena
from penstock.types import Slot
from penstock.units import format_bytes


class DevicePool:
    """[num_blocks, num_layers, 2, block_tokens, kv_heads, head_dim], on a CPU or a GPU."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        shape = (num_blocks, num_layers, 2, block_tokens, num_kv_heads, head_dim)
        try:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch raises several types for "out of memory"
            size = format_bytes(math.prod(shape) * dtype.itemsize)
            raise ConfigError(
                f"the device pool of {size} does not fit {device} ({str(error).splitlines()[0]}); "
                "lower device_kv_gib, or free memory on the device."
            ) from None
        self.num_slots = num_blocks
        self.block_bytes = self.tensor[0].numel() * self.tensor.element_size()
        self.stride_bytes = self.block_bytes
        self.address = self.tensor.data_ptr()

    def like(self, arena: HostArena) -> torch.Tensor:
        """A tensor over the slots of an arena in DRAM, with the shape of this pool's blocks."""
        flat = torch.frombuffer(arena.buffer, dtype=self.tensor.dtype)
        stride = arena.stride_bytes // self.tensor.element_size()
        strides = (stride, *self.tensor.stride()[1:])
        return flat.as_strided((arena.num_slots, *self.tensor.shape[1:]), strides)

    @property
    def on_gpu(self) -> bool:
        return self.tensor.device.type != "cpu"

    def view(self, slot: Slot) -> memoryview:
        if self.on_gpu:
            raise TypeError("a block in GPU memory cannot be viewed from the CPU")
        address = self.address + slot * self.stride_bytes
        return memoryview((ctypes.c_char * self.stride_bytes).from_address(address)).cast("B")
