"""A plan as settings: the options of `penstock serve`, and those of vLLM. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.config.options import EngineOptions
from penstock.connectors.vllm.settings import VllmSettings
from penstock.plan.fit import Fit, Hardware
from penstock.plan.verdict import Kind
from penstock.plan.ways import Way
from penstock.units import GiB

DISK_PATH = "/var/cache/penstock"
_BLOCK_TOKENS = 16  # budgets in whole blocks
_DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True)
class Pasted:
    """None stands where a host cannot do it, and the sentence says why; else it is a hint."""

    serve: tuple[str, ...] | None  # behind `penstock serve`
    serve_note: str
    vllm: tuple[str, ...] | None  # behind `vllm serve`
    vllm_note: str
    vllm_settings: VllmSettings | None = None  # None: without Penstock


def nothing(why: str) -> Pasted:
    return Pasted(None, why, None, why)


def host_gib(found: Fit) -> float:
    """No more than is of use."""
    return _gib(min(found.host_bytes, found.recommended_host_bytes))


def serve_options(kind: Kind, model: str, hardware: Hardware, way: Way) -> tuple[str, ...]:
    """Of one server on one GPU."""
    alone, found, part = hardware.part(way.layout), way.found, way.part
    options: dict[str, object] = {}
    if alone.device_kv_bytes is not None:
        options["--device-kv-gib"] = _gib(alone.device_kv_bytes)
    elif alone.memory_utilization != _DEFAULTS.gpu_memory_utilization:
        options["--gpu-memory-utilization"] = alone.memory_utilization
    if not kind.tiers:
        return (model, *_flat({"--kv-offloading-size": 0, **options}))
    options = {"--kv-offloading-size": host_gib(found), **_disk(alone), **options}
    options["--max-num-seqs"] = way.seats_each
    if kind is not Kind.TAIL_PIN:
        if way.turn_seconds is not None and way.seats_each == found.sessions_on_device:
            # A turn ends when another lacks room, not a seat: room decides how many run.
            options["--max-num-seqs"] = part.num_active
            options["--turn-seconds"] = math.ceil(way.turn_seconds * 10) / 10
        return (model, *_flat(options), "--no-cold-kv")
    share_bytes = max(0, found.pool_bytes - found.shared_bytes) // way.seats_each
    budget = part.shared_tokens + share_bytes // found.bytes_per_token
    budget = max(_BLOCK_TOKENS, budget // _BLOCK_TOKENS * _BLOCK_TOKENS)
    tail = min(_DEFAULTS.resident_tail_tokens, budget)
    prefix = min(part.shared_tokens or _DEFAULTS.resident_prefix_tokens, budget - tail)
    options |= {"--resident-prefix-tokens": prefix, "--resident-tail-tokens": tail}
    if budget < part.context_tokens:
        options["--session-device-tokens"] = budget
    # Beyond the bound new sessions wait: it must be as large as what all of them read.
    bound = max(way.cold_bytes, way.cost.cold_bytes_within_target or 0)
    options["--max-cold-gib-per-step"] = max(0.01, _gib(bound * 1.01))
    return (model, *_flat(options))


def vllm_options(
    kind: Kind, model: str, hardware: Hardware, way: Way, *, is_fp8: bool
) -> tuple[tuple[str, ...], VllmSettings | None]:
    alone = hardware.part(way.layout)
    options: dict[str, object] = {"--max-model-len": way.part.context_tokens}
    if way.layout.gpus_each > 1:
        options["--tensor-parallel-size"] = way.layout.gpus_each
    if way.layout.num_servers > 1:
        options["--data-parallel-size"] = way.layout.num_servers
    if alone.device_kv_bytes is None:
        options["--gpu-memory-utilization"] = alone.memory_utilization
    if is_fp8:
        options["--kv-cache-dtype"] = "fp8"
    if not kind.tiers:
        return (model, *_flat(options)), None
    options["--max-num-seqs"] = way.seats_each
    settings = VllmSettings(kv_offloading_size=_plain(host_gib(way.found)))
    if alone.disk_bytes:
        disk_size = _plain(_gib(alone.disk_bytes))
        settings = replace(settings, disk_path=DISK_PATH, disk_size=disk_size)
    return (model, *_flat(options)), settings


def _disk(hardware: Hardware) -> dict[str, object]:
    if not hardware.disk_bytes:
        return {}
    return {"--disk-path": DISK_PATH, "--disk-size": _gib(hardware.disk_bytes)}


def _flat(options: dict[str, object]) -> list[str]:
    return [
        text
        for name, value in options.items()
        for text in (name, f"{value:g}" if isinstance(value, float) else str(value))
    ]


def _gib(num_bytes: float) -> float:
    return max(0.01, round(num_bytes / GiB, 2))


def _plain(size: float) -> float:
    """32, not 32.0, as a person would write it."""
    return int(size) if size.is_integer() else size
