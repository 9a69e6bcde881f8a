"""A worker's device as vLLM registered it, and the copier for its blocks."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from penstock.codecs.base import Codec
from penstock.codecs.blocks import BlockValues, PartValues, choose_names
from penstock.codecs.names import RAW
from penstock.connectors.vllm.audit_layout import layer_bytes, whole_bytes
from penstock.connectors.vllm.groups import is_latent, is_one_plain_spec, page_bytes
from penstock.connectors.vllm.layout import Cache, read_layout, read_union
from penstock.connectors.vllm.orders import LayerBytes, Orders, Shard
from penstock.connectors.vllm.values import cache_dtypes, part_values
from penstock.node.delegated import join
from penstock.stores.host import ArenaHandle, HostArena
from penstock.transfer.copiers import Copier, ThreadCopier
from penstock.transfer.cuda_copier import CudaCopier
from penstock.transfer.cuda_stages import make_stages
from penstock.transfer.paged import PagedMemory, PagedMover, Part
from penstock.transfer.seals import Seals
from penstock.types import Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    memory: PagedMemory
    layout: str
    layer_names: tuple[str, ...]
    device: Any
    rank: int  # among the tensor-parallel workers of its stage
    num_ranks: int
    stage: int
    replicas: int  # this many consecutive ranks hold the same bytes
    layers: tuple[LayerBytes, ...] = ()  # what the bytes mean, for audits
    values: PartValues | None = None
    codec: str | None = None  # the one for which `stages` are made; None if there are none yet
    stages: Any = None  # buffers on a GPU

    @classmethod
    def of_layers(cls, kv_caches: Mapping[str, Any], kv_cache_config: Any) -> WorkerDevice:
        """For one tensor per layer."""
        num_blocks = kv_cache_config.num_blocks
        caches = {name: Cache.of(tensor) for name, tensor in kv_caches.items()}
        if is_one_plain_spec(kv_cache_config):
            page = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
            memory, layout = read_layout(caches, num_blocks, page)
        else:
            pages = page_bytes(kv_cache_config)
            memory, layout = read_union(caches, num_blocks, pages)
            caches = {name: cache for name, cache in caches.items() if name in pages}
        device = next(iter(kv_caches.values())).device
        found = cls._of(memory, layout, tuple(kv_caches), device, kv_cache_config)
        on_cpu = device.type == "cpu"
        layers = layer_bytes(caches, memory, kv_cache_config, on_cpu=on_cpu)
        values = part_values(memory, cache_dtypes(caches, kv_cache_config), layers)
        return replace(found, layers=layers, values=values)

    @classmethod
    def of_blocks(cls, kv_cache: Any, kv_cache_config: Any) -> WorkerDevice:
        """For one tensor of all layers. Its first dimension is either the layers or the blocks."""
        group = kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        num_layers, num_blocks = len(group.layer_names), kv_cache_config.num_blocks
        if kv_cache.shape[0] == num_layers != num_blocks:
            layers = {f"layer {index}": Cache.of(kv_cache[index]) for index in range(num_layers)}
            memory, layout = read_layout(layers, num_blocks, spec.page_size_bytes)
        else:
            whole = {"all layers": Cache.of(kv_cache)}
            page_bytes = spec.page_size_bytes * num_layers
            memory, layout = read_layout(whole, num_blocks, page_bytes)
        names = tuple(group.layer_names)
        found = cls._of(memory, layout, names, kv_cache.device, kv_cache_config)
        cache = Cache.of(kv_cache)
        values = part_values(memory, {cache.dtype})
        return replace(found, layers=whole_bytes(cache, memory), values=values)

    @classmethod
    def _of(
        cls,
        memory: PagedMemory,
        layout: str,
        layer_names: tuple[str, ...],
        device: Any,
        kv_cache_config: Any,
    ) -> WorkerDevice:
        num_ranks = get_tensor_model_parallel_world_size()
        return cls(
            memory,
            layout,
            layer_names,
            device,
            rank=get_tensor_model_parallel_rank(),
            num_ranks=num_ranks,
            stage=get_pp_group().rank_in_group,
            replicas=_replicas(kv_cache_config, num_ranks),
        )

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

    def prepared(self, setting: str) -> WorkerDevice:
        """Compile what copies need now, so that the first request does not wait for it.

        `setting` is host.codec. The orders decide; they differ if another worker's part cannot be
        packed.
        """
        values = BlockValues((self._values,), on_gpu=self.device.type == "cuda")
        name = choose_names({Tier.HOST: setting}, values)[Tier.HOST]
        try:
            return self._staged(RAW if values.why_not(name) else name)
        except Exception:
            if name == RAW:
                raise
            log.exception('This worker cannot pack blocks with the codec "%s"', name)
            return replace(self, values=None)._staged(RAW)  # then no worker packs

    def _staged(self, name: str) -> WorkerDevice:
        codec = self._open_codec(name)
        if self.device.type != "cpu":
            return replace(self, codec=name, stages=make_stages(self.memory, self.device, codec))
        if codec is not None:
            nothing = memoryview(bytearray(codec.raw_bytes))
            codec.pack(nothing, packed := memoryview(bytearray(codec.packed_bytes)))
            codec.unpack(packed, nothing)
        return replace(self, codec=name)

    @property
    def _values(self) -> PartValues:
        return self.values or PartValues(self.memory.block_bytes)

    def _open_codec(self, name: str) -> Codec | None:
        return None if name == RAW else BlockValues((self._values,)).open(name).parts[0]

    @property
    def shard(self) -> Shard:
        memory = self.memory
        return Shard(
            self.rank,
            memory.block_bytes,
            memory.num_blocks,
            self.layout,
            os.getpid(),
            self.stage,
            self.device.type,
            self.replicas,
            self.layers,
            self.values,
        )

    def open(self, orders: Orders, num_threads: int) -> Copier:
        """The copier between this device and its part of the shared DRAM."""
        assert orders.arena is not None
        host, seals = _open_dram(orders.arena)
        place = orders.parts[self.stage * self.num_ranks + self.rank]
        part = Part(self.memory, host, place, self._open_codec(orders.codec))
        if self.device.type == "cpu":
            return ThreadCopier(PagedMover(part, seals), num_threads)
        ready = self if self.codec == orders.codec else self._staged(orders.codec)
        return CudaCopier(part, host, seals, self.device, ready.stages)


def _open_dram(handle: ArenaHandle) -> tuple[HostArena, Seals]:
    """The memory of the scheduler's process or of a node, and its seals."""
    if handle.token:
        joined = join(handle)
        return joined.host, joined.seals
    host = HostArena.open(handle)
    return host, Seals(host, memory=host.seals)


def _replicas(kv_cache_config: Any, num_ranks: int) -> int:
    """How many consecutive ranks hold the same KV. Only MLA's is kept once for all of them.

    Plain attention with fewer heads than workers is kept once per worker, as it always was: stores
    stay valid.
    """
    if not is_latent(kv_cache_config):
        return 1
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1)) if num_ranks > 1 else 1


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
