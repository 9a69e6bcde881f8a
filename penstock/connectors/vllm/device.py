"""A worker's device as vLLM registered it, and the copier for its blocks."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from penstock.connectors.vllm.layout import Cache, read_layout
from penstock.connectors.vllm.orders import Shard
from penstock.stores.host import ArenaHandle, HostArena
from penstock.transfer.copiers import Copier, ThreadCopier
from penstock.transfer.cuda_copier import CudaCopier, make_stages
from penstock.transfer.paged import PagedMemory, PagedMover, Part
from penstock.transfer.seals import Seals


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    memory: PagedMemory
    layout: str
    layer_names: tuple[str, ...]
    device: Any
    rank: int
    num_workers: int
    stages: Any = None  # buffers on a GPU

    @classmethod
    def of_layers(
        cls, kv_caches: Mapping[str, Any], kv_cache_config: Any, spec: Any
    ) -> WorkerDevice:
        """For one tensor per layer."""
        caches = {name: Cache.of(tensor) for name, tensor in kv_caches.items()}
        memory, layout = read_layout(caches, kv_cache_config.num_blocks, spec.page_size_bytes)
        device = next(iter(kv_caches.values())).device
        return cls._of(memory, layout, tuple(kv_caches), device)

    @classmethod
    def of_blocks(cls, kv_cache: Any, kv_cache_config: Any, spec: Any) -> WorkerDevice:
        """For one tensor of all layers. Its first dimension is either the layers or the blocks."""
        group = kv_cache_config.kv_cache_groups[0]
        num_layers, num_blocks = len(group.layer_names), kv_cache_config.num_blocks
        if kv_cache.shape[0] == num_layers != num_blocks:
            layers = {f"layer {index}": Cache.of(kv_cache[index]) for index in range(num_layers)}
            memory, layout = read_layout(layers, num_blocks, spec.page_size_bytes)
        else:
            whole = {"all layers": Cache.of(kv_cache)}
            page_bytes = spec.page_size_bytes * num_layers
            memory, layout = read_layout(whole, num_blocks, page_bytes)
        return cls._of(memory, layout, tuple(group.layer_names), kv_cache.device)

    @classmethod
    def _of(
        cls, memory: PagedMemory, layout: str, layer_names: tuple[str, ...], device: Any
    ) -> WorkerDevice:
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        stages = None if device.type == "cpu" else make_stages(memory, device)
        return cls(memory, layout, layer_names, device, rank, size, stages)

    def described(self, vllm_config: Any) -> WorkerDevice:
        """Add the attention backend to the layout: two may pack the same shape differently."""
        layers = vllm_config.compilation_config.static_forward_context
        names = set()
        for name in self.layer_names:
            layer = layers.get(name)
            backend = getattr(layer, "attn_backend", None)
            names.add(backend.get_name() if backend is not None else type(layer).__name__)
        packing = _processor() if self.device.type == "cpu" else _gpu(self.device)
        return replace(self, layout=f"{'/'.join(sorted(names))} on {packing}: {self.layout}")

    @property
    def shard(self) -> Shard:
        memory = self.memory
        return Shard(self.rank, memory.block_bytes, memory.num_blocks, self.layout, os.getpid())

    def open(self, handle: ArenaHandle, num_threads: int) -> Copier:
        """The copier between this device and the shared DRAM."""
        host = HostArena.open(handle)
        seals = Seals(host, memory=host.seals)
        part = Part(self.memory, host, self.rank, self.num_workers)
        if self.device.type == "cpu":
            return ThreadCopier(PagedMover(part, seals), num_threads)
        return CudaCopier(part, host, seals, self.device, self.stages)


def _gpu(device: Any) -> str:
    """The GPU's compute capability, by which vLLM chooses kernels.

    Without FP8 arithmetic, FP8 weights are multiplied by 16-bit activations, and the KV differs.
    """
    if device.type != "cuda":
        return str(device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device.type} {major}.{minor}"


def _processor() -> str:
    """The processor's widest instructions, for which vLLM packs keys and values."""
    cpu: Any = torch.cpu
    wide = [
        name
        for name in ("_is_amx_tile_supported", "_is_avx512_supported", "_is_avx2_supported")
        if getattr(cpu, name, lambda: False)()
    ]
    return f"{platform.machine()} {' '.join(wide)}"
