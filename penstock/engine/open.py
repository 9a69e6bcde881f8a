"""Open an engine from a user's options. `LLM` and `penstock serve` both use this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from penstock.config import Config
from penstock.config.options import KV_FP8, EngineOptions, tiers_config
from penstock.engine import fp8
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel, load_model
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.engine.weights import first_line
from penstock.errors import ConfigError
from penstock.events import KvEventsDropped, Observer
from penstock.events import tell as tell_all
from penstock.install import KV_EVENTS, require
from penstock.kv_events.held import HeldBlocks
from penstock.shapes.sizing import suggest_block_tokens
from penstock.stores.preflight import check_block, check_tiers
from penstock.types import BlockSpec
from penstock.units import GiB, format_bytes

if TYPE_CHECKING:
    from penstock.kv_events.publisher import KvEventPublisher


def open_engine(
    options: EngineOptions,
    config: Config | None = None,
    *,
    observers: tuple[Observer, ...] = (),
    progress: Callable[[str], None] | None = None,
) -> Engine:
    """Load the model, allocate memory, open the tiers. `config` overrides the options' tiers.

    Raises ConfigError, Locked, Foreign or Full; then nothing stays open.
    """
    tiers = config if config is not None else tiers_config(options)
    if tiers is not None:
        check_tiers(tiers)  # fail before the weights are read, not after
    kv_events = _open_kv_events(options, observers)
    try:
        return _open_engine(options, tiers, observers, progress, kv_events)
    except BaseException:
        if kv_events is not None:
            kv_events.close()
        raise


def _open_engine(
    options: EngineOptions,
    tiers: Config | None,
    observers: tuple[Observer, ...],
    progress: Callable[[str], None] | None,
    kv_events: KvEventPublisher | None,
) -> Engine:
    tell = progress or (lambda _: None)
    if kv_events is not None:
        tell(f"publishing KV events on {kv_events.endpoint}")
        observers = (*observers, kv_events.held)
    residency = _residency(options)
    device = _device(options.device)
    dtype = default_dtype(device) if options.dtype == "auto" else options.dtype

    def check_blocks(token_values: int) -> None:
        kv_dtype = fp8.DTYPE if options.kv_cache_dtype == KV_FP8 else getattr(torch, dtype)
        token_bytes = token_values * kv_dtype.itemsize
        block_tokens = options.block_tokens or suggest_block_tokens(token_bytes)
        spec = BlockSpec(bytes(32), token_bytes * block_tokens, block_tokens)
        if tiers is not None:
            check_block(tiers, spec)
        if options.device_kv_gib is not None and options.device_kv_gib * GiB < spec.block_bytes:
            raise ConfigError(
                f"device_kv_gib is {options.device_kv_gib}, less than one block "
                f"({format_bytes(spec.block_bytes)}): expected room for many blocks; raise it, or "
                "choose smaller block_tokens."
            )

    loaded = load_model(
        options.model,
        dtype=dtype,
        device=device,
        progress=progress,
        before_weights=check_blocks,
    )
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{options.model} has no tokenizer: expected tokenizer.json next to the weights; "
            "add it, or choose another model."
        )
    loaded = _shortened(loaded, options.max_model_len)
    settings = EngineConfig(
        _pool_bytes(options, device),
        options.block_tokens,
        options.max_num_batched_tokens,
        options.max_num_seqs,
        options.max_waiting,
        residency,
        options.audit_share,
        options.kv_cache_dtype,
        None if options.launch_ahead else False,
        options.cold_attention,
        None if options.load_in_step else False,
    )
    tell("allocating memory for KV")
    try:
        engine = Engine(loaded, settings, tiers, observers, kv_events)
        try:
            engine.runner.warm_up(tell)
        except BaseException:
            engine.close()
            raise
    except torch.OutOfMemoryError as error:
        pool = format_bytes(settings.device_kv_bytes)
        raise ConfigError(
            f"{device} ran out of memory with a KV pool of {pool} ({first_line(error)}): "
            "activations and KV fetched ahead also need memory; lower device_kv_gib or "
            "gpu_memory_utilization, or free memory on the device."
        ) from None
    return engine


def _open_kv_events(
    options: EngineOptions, observers: tuple[Observer, ...]
) -> KvEventPublisher | None:
    if options.kv_events is None:
        return None
    require("kv-events", KV_EVENTS, "kv_events")
    from penstock.kv_events.publisher import KvEventPublisher

    held = HeldBlocks(on_dropped=lambda count: tell_all(observers, [KvEventsDropped(count)]))
    return KvEventPublisher(
        options.kv_events, options.kv_events_topic, options.kv_events_replay, held=held
    )


def _shortened(loaded: LoadedModel, max_model_len: int | None) -> LoadedModel:
    """Limit the context length. KV stays the same: rotary embeddings use the model's length."""
    if max_model_len is None:
        return loaded
    if max_model_len > loaded.max_tokens:
        raise ConfigError(
            f"max_model_len is {max_model_len}: {loaded.name} supports at most "
            f"{loaded.max_tokens} tokens; lower it, or leave it out."
        )
    return replace(loaded, max_tokens=max_model_len)


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    """bfloat16 if the device supports it in hardware, else float32."""
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    # In software, torch computes bfloat16 many times slower than float32.
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def _residency(options: EngineOptions) -> ResidencyConfig:
    cold_gib = options.max_cold_gib_per_step
    return ResidencyConfig(
        options.cold_kv,
        options.resident_prefix_tokens,
        options.resident_tail_tokens,
        options.session_device_tokens,
        options.device_high_watermark,
        options.device_low_watermark,
        None if cold_gib is None else max(1, int(cold_gib * GiB)),
        options.turn_seconds,
    )


def _pool_bytes(options: EngineOptions, device: str) -> int:
    """The size of the device pool. Call it once the weights are loaded."""
    if options.device_kv_gib is not None:
        return int(options.device_kv_gib * GiB)
    if not device.startswith("cuda"):
        return GiB
    free, total = torch.cuda.mem_get_info(device)
    # A step also needs activations of the batch and attention's workspace.
    working = 1 * GiB + options.max_num_batched_tokens * 512 * 1024
    room = int(total * options.gpu_memory_utilization) - (total - free) - working
    if room <= 0:
        raise ConfigError(
            f"gpu_memory_utilization is {options.gpu_memory_utilization}: no memory is left for "
            f"KV after the weights and {working / GiB:.1f} GiB of working memory; raise it, or "
            "choose a smaller model."
        )
    return room
