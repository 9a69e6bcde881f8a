"""The settings that a plan recommends, for `penstock serve` and for vLLM. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.codecs.names import AUTO
from penstock.config.options import EngineOptions
from penstock.connectors.vllm.settings import VllmSettings
from penstock.plan.fit import Fit, Hardware
from penstock.plan.verdict import PlanKind, PlanVerdict, format_count
from penstock.plan.ways import SERVED_BITS, Mode, ServingEngine, Way
from penstock.shapes.embedded import embedded_bytes_per_token, embedded_words
from penstock.shapes.shape import ModelShape
from penstock.types import Tier
from penstock.units import GiB, counted, format_bytes, format_seconds

DISK_PATH = "/var/cache/penstock"
_BLOCK_TOKENS = 16  # token budgets are rounded to whole blocks
_DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """If an engine's arguments are None, it cannot run the plan, and its note explains why."""

    serve: tuple[str, ...] | None  # arguments of `penstock serve`
    serve_note: str
    vllm: tuple[str, ...] | None  # arguments of `vllm serve`
    vllm_note: str
    vllm_settings: VllmSettings | None = None  # None: vLLM without Penstock


def make_settings(
    verdict: PlanVerdict, model: str, shape: ModelShape, hardware: Hardware, ways: Sequence[Way]
) -> PlanSettings:
    """For each engine, the settings of the best way that it can run.

    `model` is the name that the engines know.
    """
    kind = verdict.kind
    if not kind.runs:
        return PlanSettings(None, verdict.reasons[0], None, verdict.reasons[0])
    serve, serve_note = _serve(kind, model, shape, hardware, _first(ways, ServingEngine.SERVE))
    way = _first(ways, ServingEngine.VLLM)
    vllm, vllm_note, settings = _vllm(kind, model, shape.bits, hardware, way)
    return PlanSettings(serve, serve_note, vllm, vllm_note, settings)


def _first(ways: Sequence[Way], engine: ServingEngine) -> Way | None:
    return next((way for way in ways if engine in way.engines), None)


def _serve(
    kind: PlanKind, model: str, shape: ModelShape, hardware: Hardware, way: Way | None
) -> tuple[tuple[str, ...] | None, str]:
    if not shape.is_plain:
        return None, _why_not_planned(shape)
    if shape.bits not in SERVED_BITS:
        return None, f"`penstock serve` does not support {shape.bits}-bit KV."
    if way is None:
        return None, "`penstock serve` runs on one GPU, and these weights do not fit on one."
    is_fp8 = shape.bits == 8
    options = _serve_options(_kind_of(kind, way), model, hardware, way, is_fp8=is_fp8)
    num_servers = way.layout.num_servers
    if num_servers == 1:
        return options, _in_numbers(way)
    return options, (
        f"{_in_numbers(way)} Start one server on each of {num_servers} GPUs "
        "(CUDA_VISIBLE_DEVICES), each with its own --port and "
        f"{counted(way.part.num_sessions, 'session')}."
    )


def _why_not_planned(shape: ModelShape) -> str:
    per_token = embedded_bytes_per_token(shape)
    if per_token is None:
        return (
            "`penstock serve` refuses this model: it supports layers with keys and values of one "
            "size, with or without a window."
        )
    return (
        f"`penstock serve` keeps {format_bytes(per_token)} per token of this model: "
        f"{embedded_words(shape)}. This plan counts what vLLM keeps."
    )


def _vllm(
    kind: PlanKind, model: str, bits: int, hardware: Hardware, way: Way | None
) -> tuple[tuple[str, ...] | None, str, VllmSettings | None]:
    if way is None:
        none = "vLLM needs all KV of a running session on the GPU, and not one session fits."
        return None, none, None
    vllm, settings = _vllm_options(_kind_of(kind, way), model, hardware, way, is_fp8=bits == 8)
    note = _in_numbers(way)
    if way.layout.num_servers > 1:
        note += (
            f" {way.layout.num_servers} copies of the model run on "
            f"{counted(way.layout.gpus_each, 'GPU')} each; DRAM, disk and --max-num-seqs are for "
            "one copy."
        )
    return vllm, note, settings


def _in_numbers(way: Way) -> str:
    return (
        f"{counted(way.num_running, 'session')} at once, {format_seconds(way.token_seconds)} per "
        f"token, {format_count(way.tokens_per_second)} tokens/s."
    )


def _kind_of(kind: PlanKind, way: Way) -> PlanKind:
    """The verdict for an engine whose best way differs from the plan's."""
    if kind not in (PlanKind.TAIL_PIN, PlanKind.TURNS, PlanKind.NEVER_COLD):
        return PlanKind.TAIL_PIN if way.mode is Mode.COLD else kind
    return {
        Mode.COLD: PlanKind.TAIL_PIN,
        Mode.TURNS: PlanKind.TURNS,
        Mode.WHOLE: PlanKind.NEVER_COLD,
    }[way.mode]


def _host_gib(found: Fit) -> float:
    """The given DRAM, at most what is recommended."""
    return _gib(min(found.host_bytes, found.recommended_host_bytes))


def _serve_options(
    kind: PlanKind, model: str, hardware: Hardware, way: Way, *, is_fp8: bool
) -> tuple[str, ...]:
    """Arguments of one server on one GPU."""
    alone, found, part = hardware.part(way.layout), way.found, way.part
    options: dict[str, object] = {}
    if alone.device_kv_bytes is not None:
        options["--device-kv-gib"] = _gib(alone.device_kv_bytes)
    elif alone.memory_utilization != _DEFAULTS.gpu_memory_utilization:
        options["--gpu-memory-utilization"] = alone.memory_utilization
    if is_fp8:
        options["--kv-cache-dtype"] = "fp8"
    if not kind.tiers:
        return (model, *_flat({"--kv-offloading-size": 0, **options}))
    options = {"--kv-offloading-size": _host_gib(found), **_disk(alone), **options}
    options["--max-num-seqs"] = way.seats_each
    codecs = [part for codec in _codecs(alone).items() for part in ("--set", "=".join(codec))]
    if kind is not PlanKind.TAIL_PIN:
        if way.turn_seconds is not None and way.seats_each == found.sessions_on_device:
            # A turn ends only if a waiting session lacks room, not a free sequence slot. So allow
            # all active sessions, and let the room decide how many run.
            options["--max-num-seqs"] = part.num_active
            options["--turn-seconds"] = math.ceil(way.turn_seconds * 10) / 10
        return (model, *_flat(options), *codecs, "--no-cold-kv")
    share_bytes = max(0, found.pool_bytes - found.shared_bytes) // way.seats_each
    budget = part.shared_tokens + share_bytes // found.bytes_per_token
    budget = max(_BLOCK_TOKENS, budget // _BLOCK_TOKENS * _BLOCK_TOKENS)
    tail = min(_DEFAULTS.resident_tail_tokens, budget)
    prefix = min(part.shared_tokens or _DEFAULTS.resident_prefix_tokens, budget - tail)
    options |= {"--resident-prefix-tokens": prefix, "--resident-tail-tokens": tail}
    if budget < part.context_tokens:
        options["--session-device-tokens"] = budget
    # Above this limit new sessions wait, so it must cover what all of them read.
    bound = max(way.cold_bytes, way.cost.cold_bytes_within_target or 0)
    options["--max-cold-gib-per-step"] = max(0.01, _gib(bound * 1.01))
    return (model, *_flat(options), *codecs)


def _vllm_options(
    kind: PlanKind, model: str, hardware: Hardware, way: Way, *, is_fp8: bool
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
    settings = VllmSettings(kv_offloading_size=_plain(_host_gib(way.found)))
    if alone.disk_bytes:
        disk_size = _plain(_gib(alone.disk_bytes))
        settings = replace(settings, disk_path=DISK_PATH, disk_size=disk_size)
    if codecs := _codecs(alone):
        settings = replace(settings, set=codecs)
    return (model, *_flat(options)), settings


def _codecs(hardware: Hardware) -> dict[str, str]:
    """The settings of codecs that differ from the default, for tiers that the plan uses."""
    has = {Tier.HOST: True, Tier.DISK: bool(hardware.disk_bytes), Tier.REMOTE: True}
    return {
        f"{tier.label}.codec": codec
        for tier, codec in hardware.codecs.items()
        if codec != AUTO and has[tier]
    }


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
    """32 rather than 32.0."""
    return int(size) if size.is_integer() else size
