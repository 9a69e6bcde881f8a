"""Prints a plan: as tables, or as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.codecs.names import AUTO
from penstock.commands import new_table, print_fields, stdout_console
from penstock.commands.group_rows import group_rows
from penstock.connectors.vllm.settings import VllmSettings, transfer_config
from penstock.plan.fit import WORKING_BYTES, Layout
from penstock.plan.planner import Plan
from penstock.plan.reuse import ReuseStats
from penstock.plan.verdict import format_count
from penstock.plan.ways import Mode, ServingEngine, Way, best_per_mode, target_of
from penstock.shapes.embedded import embedded_bytes_per_token, embedded_words
from penstock.shapes.gpu_rates import EXCHANGE_SECONDS, EXCHANGES_PER_LAYER, MEMORY_SHARE
from penstock.shapes.packing import Packing
from penstock.shapes.shape import suggest_block_tokens
from penstock.types import Tier
from penstock.units import counted, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.table import Table


def as_data(
    plan: Plan, reuse: ReuseStats | None, *, is_active_assumed: bool = False
) -> dict[str, Any]:
    found, settings, shape = plan.fit, plan.settings, plan.model.shape
    vllm_settings = settings.vllm_settings
    return {
        "model": plan.model.name,
        "gpu": plan.hardware.gpu.name,
        "num_gpus": plan.hardware.num_gpus,
        "layout": {
            "num_servers": plan.layout.num_servers,
            "gpus_each": plan.layout.gpus_each,
            "num_gpus_used": plan.layout.num_gpus,
        },
        "demand": asdict(plan.demand) | {"is_active_assumed": is_active_assumed},
        "kv": {
            "bytes_per_token": shape.bytes_per_token,
            "bytes_per_token_on_gpus": found.bytes_per_token,
            "bytes_per_session": found.session_bytes,
            "growing_bytes_per_token": shape.full_bytes_per_token,
            "checkpoint_bytes": found.checkpoint_bytes,
            "offloaded_bytes_per_session": found.offloaded_bytes,
            "groups": group_rows(shape, plan.demand.context_tokens),
            "embedded_bytes_per_token": embedded_bytes_per_token(shape),
            "block_tokens": suggest_block_tokens(shape.bytes_per_token),
            "bits": shape.bits,
            "latent_dim": shape.latent_dim,
            "window_tokens": shape.window_tokens,
            "num_window_layers": shape.num_window_layers,
            "num_copies": found.num_kv_copies,
            "max_context_tokens": shape.max_context_tokens,
        },
        "codecs": {
            tier.label: {
                "codec": packing.codec,
                "ratio": packing.ratio,
                "is_lossy": packing.is_lossy,
                "why": packing.why,
            }
            for tier, packing in plan.packings.items()
        },
        "fit": asdict(found) | {"host_tokens": found.host_tokens, "disk_tokens": found.disk_tokens},
        "tiers": {
            tier.label: {
                "bytes_per_second": link.rate.bytes_per_second,
                "latency_seconds": link.rate.latency_seconds,
                "break_even_tokens": plan.break_evens.get(tier),
                "session_seconds": plan.load_seconds[tier],
                "source": link.source,
            }
            for tier, link in plan.rates.links.items()
        },
        "prefill": {
            "tokens_per_second": plan.rates.prefill and plan.rates.prefill.tokens_per_second,
            "session_seconds": plan.compute_seconds,
            "source": plan.rates.prefill_source,
        },
        "decode": asdict(plan.cost),
        "ways": [_way_data(way, is_best=way is plan.ways[0]) for way in best_per_mode(plan.ways)],
        "ranking": _ranking(plan),
        "trace": None if reuse is None else asdict(reuse),
        "verdict": {
            "kind": plan.verdict.kind,
            "title": plan.verdict.title,
            "reasons": plan.verdict.reasons,
            "warnings": plan.verdict.warnings,
        },
        "settings": {
            "serve": _serve_command(plan),
            "serve_note": settings.serve_note,
            "vllm": _vllm_command(plan),
            "vllm_note": settings.vllm_note,
            "kv_transfer_config": None if vllm_settings is None else transfer_config(vllm_settings),
        },
        "assumptions": _assumptions(plan),
    }


def _way_data(way: Way, *, is_best: bool) -> dict[str, Any]:
    return {
        "mode": way.mode,
        "is_best": is_best and way.can_run,
        "can_run": way.can_run,
        "hosts": list(way.engines),
        "obstacle": way.obstacle or None,
        "num_servers": way.layout.num_servers,
        "gpus_each": way.layout.gpus_each,
        "num_running": way.num_running,
        "token_seconds": way.token_seconds,
        "tokens_per_second": way.tokens_per_second,
        "session_tokens_per_second": way.session_tokens_per_second,
        "cold_bytes": way.cold_bytes * way.layout.num_servers,
        "keeps_target": way.keeps_target,
    }


def draw(plan: Plan, reuse: ReuseStats | None, *, is_active_assumed: bool = False) -> None:
    from rich.text import Text

    console = stdout_console()
    print_fields(_title(plan), _sizes(plan, is_active_assumed=is_active_assumed))
    if reuse is not None:
        print_fields(f"The trace {reuse.name}", _trace(reuse))
    if plan.ways:
        _draw_tiers(plan)
        _draw_ways(plan)
    console.print(Text(f"\nVerdict: {plan.verdict.title}", style="bold"))
    console.print(_points("·", plan.verdict.reasons))
    if plan.verdict.warnings:
        console.print(_points("!", plan.verdict.warnings, style="yellow"))
    commands = (
        ("penstock serve", _serve_command(plan), plan.settings.serve_note),
        ("vLLM", _vllm_command(plan), plan.settings.vllm_note),
    )
    for engine, command, note in commands if plan.verdict.kind.runs else ():
        console.print(Text(f"\n{engine}", style="bold"))
        if note:
            console.print(f"  {note}")
        if command is not None:
            # Not wrapped, so that it can be pasted.
            console.print(command, soft_wrap=True)
    console.print(Text("\nHow these numbers were calculated", style="bold"))
    console.print(_points("·", _assumptions(plan), style="dim"))


def _points(mark: str, sentences: Iterable[str], style: str = "") -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row(f"  {mark}", sentence, style=style)
    return table


def _title(plan: Plan) -> str:
    gpus = f"{plan.hardware.num_gpus} x " if plan.hardware.num_gpus > 1 else ""
    return f"{plan.model.name} on {gpus}{plan.hardware.gpu.title}"


def _sizes(plan: Plan, *, is_active_assumed: bool) -> list[tuple[str, str]]:
    found, demand, shape = plan.fit, plan.demand, plan.model.shape
    token = f"{format_bytes(shape.bytes_per_token)} ({shape.bytes_per_token:,} bytes)"
    if found.num_kv_copies > 1:
        token += (
            f", {format_bytes(found.bytes_per_token)} on the GPUs: {found.num_kv_copies} copies "
            f"over {plan.layout.gpus_each} GPUs"
        )
    shared = ""
    if demand.shared_tokens:
        shared = f", of which {format_bytes(found.own_bytes)} is not shared"
    kept = "all sessions once"
    sessions_bytes = found.offloaded_own_bytes * demand.num_sessions
    if found.live_bytes * found.host_ratio > sessions_bytes + found.shared_bytes * found.host_ratio:
        kept = "all KV that the trace reads again"
    num_servers = plan.layout.num_servers
    weights = format_bytes(found.weight_bytes)
    if num_servers > 1:
        weights += f", {num_servers} copies"
    active = f"{demand.num_sessions:,} open, {demand.num_active:,} decoding at once"
    if is_active_assumed:
        active += " (assumed: a quarter; set --active)"
    if shape.partial_groups:
        token += f", of which {format_bytes(shape.full_bytes_per_token)} grows with the context"
    first = [
        ("KV per token", token),
        (
            f"session of {counted(demand.context_tokens, 'token')}",
            f"{format_bytes(found.session_bytes)}{shared}",
        ),
        *_embedded(plan),
        *([("layout", _layout(plan.layout))] if plan.hardware.num_gpus > 1 else []),
        ("weights", weights),
        ("GPU memory for KV", format_bytes(max(0, found.pool_bytes))),
        ("sessions", active),
    ]
    if not plan.ways:
        return first  # nothing can run, so there is nothing to buy
    rows = [
        *first,
        *_offloaded(plan),
        *_codecs(plan),
        ("sessions on the GPU", f"{found.sessions_on_device:,}"),
        (
            "sessions with DRAM",
            f"{found.sessions_with_host:,} with {format_bytes(found.host_bytes)}: "
            f"{_held(found.host_blocks, found.host_tokens)}",
        ),
    ]
    if found.disk_bytes:
        with_disk = (
            f"{found.sessions_with_disk:,} with {format_bytes(found.disk_bytes)} more: "
            f"{_held(found.disk_blocks, found.disk_tokens)}"
        )
        rows.append(("sessions with DRAM and disk", with_disk))
    rows.append(
        (
            "DRAM to buy",
            f"{format_bytes(found.recommended_host_bytes)} for KV ({kept}, plus 10%); at least "
            f"{format_bytes(found.least_host_bytes)}",
        )
    )
    return rows


def _embedded(plan: Plan) -> list[tuple[str, str]]:
    """What a session takes in `penstock serve`, if that is not what it takes in vLLM."""
    shape = plan.model.shape
    per_token = embedded_bytes_per_token(shape)
    if per_token is None or not (words := embedded_words(shape)):
        return []
    size = format_bytes(per_token * plan.demand.context_tokens)
    return [("session in penstock serve", f"{size}: {words}. Not counted below")]


def _offloaded(plan: Plan) -> list[tuple[str, str]]:
    """What a session takes in DRAM, if that is not what it takes on the GPU."""
    found, turns = plan.fit, plan.demand.num_turns
    is_packed = found.host_ratio != 1
    if found.offloaded_bytes == found.session_bytes:
        return []
    text = format_bytes(found.offloaded_bytes)
    if found.checkpoint_bytes:
        text += (
            f", with {counted(turns, 'checkpoint')} of windows and states, "
            f"{format_bytes(found.checkpoint_bytes)} each"
        )
    elif plan.model.shape.is_mla and plan.layout.gpus_each > 1:
        text += ": the GPUs hold the same latents (MLA), and DRAM keeps them once"
    if is_packed:
        text += f", packed to {found.host_ratio:.3g} of its size"
    return [("session in DRAM", text)]


def _codecs(plan: Plan) -> list[tuple[str, str]]:
    """Which codec was assumed, and why; one row for tiers with the same."""
    tiers = [Tier.HOST, *([Tier.DISK] if plan.fit.disk_bytes else [])]
    if plan.hardware.remote_codec != AUTO:
        tiers.append(Tier.REMOTE)
    by_packing: dict[Packing, list[Tier]] = {}
    for tier in tiers:
        by_packing.setdefault(plan.packings[tier], []).append(tier)
    return [
        (f"codec of {' and '.join(map(_name, same))}", f"{packing.codec}: {packing.why}")
        for packing, same in by_packing.items()
    ]


def _held(num_blocks: int, num_tokens: int) -> str:
    return f"{counted(num_tokens, 'token')}, {counted(num_blocks, 'block')}"


def _trace(reuse: ReuseStats) -> list[tuple[str, str]]:
    rate = reuse.requests_per_second
    return [
        (
            "requests",
            f"{reuse.num_requests:,}" + ("" if rate is None else f", {rate:.2f} per second"),
        ),
        (
            "tokens per request",
            f"{reuse.p50_tokens:,} P50, {reuse.p90_tokens:,} P90, {reuse.max_tokens:,} maximum",
        ),
        ("computed before", f"{reuse.reuse_share:.1%} of prompt tokens, if nothing is evicted"),
        (
            "read again",
            f"at most {reuse.num_live_blocks:,} blocks at a time, of {reuse.num_distinct_blocks:,} "
            f"with {counted(reuse.block_tokens, 'token')} each",
        ),
    ]


def _draw_tiers(plan: Plan) -> None:
    context = plan.demand.context_tokens
    table = new_table("from", "rate", f"{context:,} tokens", "faster than computing")
    for tier, link in plan.rates.links.items():
        table.add_row(
            _name(tier),
            format_rate(link.rate.bytes_per_second),
            format_seconds(plan.load_seconds[tier]),
            _break_even(plan, tier),
        )
    if plan.rates.prefill is not None and plan.compute_seconds is not None:
        rate = f"{plan.rates.prefill.tokens_per_second:,.0f} tokens/s"
        table.add_row("computing", rate, format_seconds(plan.compute_seconds), "–")
    stdout_console().print(table)


def _name(tier: Tier) -> str:
    return "DRAM" if tier is Tier.HOST else tier.label


def _break_even(plan: Plan, tier: Tier) -> str:
    if not plan.break_evens:
        return "not known"
    least = plan.break_evens[tier]
    if least is None:
        return "never"
    return "always" if least == 1 else f"from {least:,} tokens"


_MODES = {Mode.WHOLE: "on the GPU", Mode.TURNS: "in turns", Mode.COLD: "from DRAM"}


def _layout(layout: Layout) -> str:
    each = " each" if layout.num_servers > 1 else ""
    copies = counted(layout.num_servers, "copy", "copies")
    return f"{copies} of the model, on {counted(layout.gpus_each, 'GPU')}{each}"


def _draw_ways(plan: Plan) -> None:
    table = new_table(
        *("way", "copies x GPUs", "at once", "per token", "tokens/s", "per session"),
        *("vLLM", "serve"),
    )
    for way in best_per_mode(plan.ways):
        table.add_row(
            _MODES[way.mode],
            f"{way.layout.num_servers} x {way.layout.gpus_each}",
            f"{way.num_running:,}",
            format_seconds(way.token_seconds),
            format_count(way.tokens_per_second),
            format_count(way.session_tokens_per_second),
            *("yes" if engine in way.engines else "no" for engine in ServingEngine),
        )
    console = stdout_console()
    console.print(table)
    obstacles = [
        f"{_MODES[way.mode]}: not possible. {way.obstacle}."
        for way in best_per_mode(plan.ways)
        if way.obstacle
    ]
    console.print(_points("·", [*obstacles, _ranking(plan)], style="dim"))


def _ranking(plan: Plan) -> str:
    target = format_seconds(target_of(plan.demand))
    is_given = plan.demand.max_token_seconds is not None
    whose = "--max-token-ms" if is_given else "assumed: about as fast as people read"
    return (
        f"Ranked by tokens/s, among the ways that stay within {target} per token ({whose}). If "
        "none does, by time per token."
    )


def _serve_command(plan: Plan) -> str | None:
    serve = plan.settings.serve
    return None if serve is None else shlex.join(("penstock", "serve", *serve))


def _vllm_command(plan: Plan) -> str | None:
    vllm, settings = plan.settings.vllm, plan.settings.vllm_settings
    if vllm is None:
        return None
    command = shlex.join(("vllm", "serve", *vllm))
    if settings is None:
        return command
    return f'{command} --kv-transfer-config "$({shlex.join(_config_command(settings))})"'


def _config_command(settings: VllmSettings) -> list[str]:
    command = ["penstock", "vllm-config"]
    for name, value in settings.extra().items():
        if isinstance(value, Mapping):
            command += [part for one in value.items() for part in (f"--{name}", "=".join(one))]
            continue
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def _assumptions(plan: Plan) -> list[str]:
    hardware, rates = plan.hardware, plan.rates
    pool = (
        f"GPU memory for KV: {hardware.memory_utilization:.0%} of {hardware.num_gpus} x "
        f"{hardware.gpu.memory_bytes / 1e9:g} GB ({hardware.gpu.source}), minus the weights and "
        f"{format_bytes(WORKING_BYTES)} of working memory per GPU."
    )
    if hardware.device_kv_bytes is not None:
        pool = "GPU memory for KV: as given."
    weights = "all weights"
    if plan.model.shape.is_mixture:
        weights = "the weights of the experts that its tokens use"
    exchanges = []
    if rates.exchange_seconds:
        exchanges = [
            f"GPUs that share a model exchange results {EXCHANGES_PER_LAYER} times per layer: "
            f"{format_seconds(rates.exchange_seconds)} per step, assuming "
            f"{EXCHANGE_SECONDS * 1e6:.0f} microseconds each."
        ]
    return [
        pool,
        f"Prefill: {rates.prefill_source}.",
        *(f"Loads from {_name(tier)}: {link.source}." for tier, link in rates.links.items()),
        *_packed_note(plan),
        f"Decode: a step reads {weights} and the KV on the GPU at {MEMORY_SHARE:.0%} of the "
        "bandwidth in the data sheet, as one H200 did. At the same time it reads KV in DRAM at "
        f"{format_rate(rates.cold_bytes_per_second)}. It takes at least as long as computing its "
        "tokens at the prefill rate. Prompts computed in the same step are not included.",
        *exchanges,
        "Loads from below DRAM can overlap with computing the start of the prompt. These numbers "
        "do not include that.",
    ]


def _packed_note(plan: Plan) -> list[str]:
    if all(packing.ratio == 1 for packing in plan.packings.values()):
        return []
    return [
        "Rates and times are those of KV before it is packed: the packed bytes cross the link at "
        "its own rate. A block's packed bytes are rounded up to whole pages of 4 KiB. Packing and "
        "unpacking on the GPU are many times faster than its link, and are not counted."
    ]
