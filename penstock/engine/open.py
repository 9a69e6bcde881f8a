"""From what a user says (a model, sizes in GiB) to a running engine. `LLM` and `serve` share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.config import Config, load_config
from penstock.engine.engine import Engine, EngineConfig
from penstock.engine.models import EMBEDDED, load_model
from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.machine import check_machine
from penstock.units import GiB


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """vLLM's names where it has one. Sizes are in GiB."""

    model: str = EMBEDDED
    dtype: str = "auto"  # bfloat16 where the device computes in it, else float32
    device: str = "auto"  # cuda where there is one, else cpu
    kv_offloading_backend: str = "native"
    kv_offloading_size: float | None = None  # DRAM; 0: nothing is offloaded; None: the config's
    disk_path: str | None = None
    disk_size: float | None = None
    gpu_memory_utilization: float = 0.9  # of a GPU's memory: weights, working room and pool
    device_kv_gib: float | None = None  # the pool; None: 1 on a CPU, what is left on a GPU
    block_tokens: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_waiting: int = 256

    def __post_init__(self) -> None:
        if self.kv_offloading_backend != "native":
            raise ConfigError(
                f"kv_offloading_backend is {self.kv_offloading_backend!r}; Penstock knows its own "
                'tiers, named "native" as in vLLM.'
            )
        for name in ("kv_offloading_size", "disk_size"):
            self._check(name, low=0.0, expected="0 or more GiB")
        self._check("device_kv_gib", low=1e-6, expected="more than 0 GiB")
        self._check("gpu_memory_utilization", low=0.01, high=1.0, expected="a share up to 1")
        for name in ("block_tokens", "max_num_batched_tokens", "max_num_seqs", "max_waiting"):
            self._check(name, low=1, expected="a whole number of at least 1", whole=True)

    def _check(
        self, name: str, low: float, expected: str, high: float = 1 << 33, *, whole: bool = False
    ) -> None:
        value = getattr(self, name)
        kinds = int if whole else int | float
        fits = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
        if value is not None and not fits:
            raise ConfigError(f"{name} is {value!r}: expected {expected}; correct it.")


def open_engine(
    options: EngineOptions,
    config: Config | None = None,
    *,
    observers: tuple[Observer, ...] = (),
    progress: Callable[[str], None] | None = None,
) -> Engine:
    """Load the model, take the memory, open the tiers. `config` overrules the options' tiers.

    Raises ConfigError, Locked, Foreign or Full if something cannot be had; nothing stays open.
    """
    tell = progress or (lambda _: None)
    tiers = config if config is not None else tiers_config(options)
    if tiers is not None:
        check_machine(tiers)  # before the weights: it may save the wait for them
    device = _device(options.device)
    dtype = default_dtype(device) if options.dtype == "auto" else options.dtype
    loaded = load_model(options.model, dtype=dtype, device=device, progress=progress)
    settings = EngineConfig(
        _pool_bytes(options, device),
        options.block_tokens,
        options.max_num_batched_tokens,
        options.max_num_seqs,
        options.max_waiting,
    )
    tell("taking memory for KV")
    return Engine(loaded, settings, tiers, observers)


def tiers_config(options: EngineOptions, path: Path | None = None) -> Config | None:
    """The tiers that the options ask for, over the settings' other sources."""
    if options.kv_offloading_size == 0:
        if options.disk_path is not None:
            raise ConfigError(
                "disk_path is given and kv_offloading_size is 0; what goes to disk passes through "
                "DRAM: give it a size, or leave the disk out."
            )
        return None
    overrides: dict[str, object] = {}
    if options.kv_offloading_size is not None:
        overrides["host.size"] = int(options.kv_offloading_size * GiB)
    if options.disk_path is not None:
        overrides["disk.path"] = str(options.disk_path)
    if options.disk_size is not None:
        overrides["disk.size"] = int(options.disk_size * GiB)
    return load_config(path, overrides=overrides)


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    """bfloat16 where the device computes in it, else float32."""
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    # Without it torch computes bfloat16 in software, many times slower than float32.
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def _pool_bytes(options: EngineOptions, device: str) -> int:
    """The pool's size, once the weights are in place."""
    if options.device_kv_gib is not None:
        return int(options.device_kv_gib * GiB)
    if not device.startswith("cuda"):
        return GiB
    free, total = torch.cuda.mem_get_info(device)
    # What a step needs beside weights and pool: activations of the batch, attention's workspace.
    working = 1 * GiB + options.max_num_batched_tokens * 512 * 1024
    room = int(total * options.gpu_memory_utilization) - (total - free) - working
    if room <= 0:
        raise ConfigError(
            f"gpu_memory_utilization is {options.gpu_memory_utilization}: after the weights and "
            f"{working / GiB:.1f} GiB to work in, nothing is left for KV; raise it, or take a "
            "smaller model."
        )
    return room
