"""A plan as tables for people, and as plain data for programs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.commands import new_table, print_fields, stdout_console
from penstock.connectors.vllm.settings import VllmSettings, transfer_config
from penstock.plan.fit import WORKING_BYTES, Layout
from penstock.plan.planner import Plan
from penstock.plan.reuse import ReuseStats
from penstock.plan.verdict import format_count
from penstock.plan.ways import Mode, ServingEngine, Way, best_of_each_mode, target_of
from penstock.shapes.gpu_rates import EXCHANGE_SECONDS, EXCHANGES_PER_LAYER, MEMORY_SHARE
from penstock.shapes.shape import suggest_block_tokens
from penstock.types import Tier
from penstock.units import format_bytes, format_rate, format_seconds

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
            "block_tokens": suggest_block_tokens(shape.bytes_per_token),
            "bits": shape.bits,
            "latent_dim": shape.latent_dim,
            "window_tokens": shape.window_tokens,
            "num_window_layers": shape.num_window_layers,
            "num_copies": found.num_kv_copies,
            "max_context_tokens": shape.max_context_tokens,
        },
        "fit": asdict(found),
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
        "ways": [
            _way_data(way, is_best=way is plan.ways[0]) for way in best_of_each_mode(plan.ways)
        ],
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
    for host, command, note in commands if plan.verdict.kind.runs else ():
        console.print(Text(f"\n{host}", style="bold"))
        if note:
            console.print(f"  {note}")
        if command is not None:
            # As it is to be pasted: no line of a terminal's own.
            console.print(command, soft_wrap=True)
    console.print(Text("\nHow this was reckoned", style="bold"))
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
            f"over {plan.layout.gpus_each}"
        )
    shared = ""
    if demand.shared_tokens:
        shared = f", {format_bytes(found.own_bytes)} of it its own"
    kept = "all sessions once"
    if found.live_bytes > found.shared_bytes + found.own_bytes * demand.num_sessions:
        kept = "what the trace reads again"
    num_servers = plan.layout.num_servers
    weights = format_bytes(found.weight_bytes)
    if num_servers > 1:
        weights += f", {num_servers} copies"
    active = f"{demand.num_sessions:,}, {demand.num_active:,} of them decoding at once"
    if is_active_assumed:
        active += " (assumed: a quarter; say it with --active)"
    first = [
        ("KV of a token", token),
        (
            f"session of {demand.context_tokens:,}",
            f"{format_bytes(found.session_bytes)}{shared}",
        ),
        *([("GPUs shared out", _shared_out(plan))] if plan.hardware.num_gpus > 1 else []),
        ("weights", weights),
        ("room for KV on the GPU", format_bytes(max(0, found.pool_bytes))),
        ("sessions wanted", active),
    ]
    if not plan.ways:
        return first  # nothing runs, so that nothing is to be bought for it
    rows = [
        *first,
        ("sessions, GPU alone", f"{found.sessions_on_device:,}"),
        (
            "sessions with DRAM",
            f"{found.sessions_with_host:,} with {format_bytes(found.host_bytes)}",
        ),
    ]
    if found.disk_bytes:
        with_disk = f"{found.sessions_with_disk:,} with {format_bytes(found.disk_bytes)} more"
        rows.append(("sessions kept with a disk", with_disk))
    rows.append(
        (
            "DRAM to buy",
            f"{format_bytes(found.recommended_host_bytes)} for KV: {kept}, and a tenth; "
            f"{format_bytes(found.least_host_bytes)} at the least",
        )
    )
    return rows


def _trace(reuse: ReuseStats) -> list[tuple[str, str]]:
    rate = reuse.requests_per_second
    return [
        (
            "requests",
            f"{reuse.num_requests:,}" + ("" if rate is None else f", {rate:.2f} a second"),
        ),
        (
            "tokens of one",
            f"{reuse.p50_tokens:,} half of them, {reuse.p90_tokens:,} P90, "
            f"{reuse.max_tokens:,} at most",
        ),
        ("computed before", f"{reuse.reuse_share:.1%} of prompt tokens, if nothing is forgotten"),
        (
            "to be read again",
            f"{reuse.num_live_blocks:,} blocks of {reuse.block_tokens} tokens at the most, of "
            f"{reuse.num_distinct_blocks:,}",
        ),
    ]


def _draw_tiers(plan: Plan) -> None:
    context = plan.demand.context_tokens
    table = new_table("from", "rate", f"{context:,} tokens", "faster than computing")
    for tier, link in plan.rates.links.items():
        table.add_row(
            "DRAM" if tier is Tier.HOST else tier.label,
            format_rate(link.rate.bytes_per_second),
            format_seconds(plan.load_seconds[tier]),
            _break_even(plan, tier),
        )
    if plan.rates.prefill is not None and plan.compute_seconds is not None:
        rate = f"{plan.rates.prefill.tokens_per_second:,.0f} tokens/s"
        table.add_row("computed", rate, format_seconds(plan.compute_seconds), "–")
    stdout_console().print(table)


def _break_even(plan: Plan, tier: Tier) -> str:
    if not plan.break_evens:
        return "not known"
    least = plan.break_evens[tier]
    if least is None:
        return "never"
    return "always" if least == 1 else f"from {least:,} tokens on"


_MODES = {Mode.WHOLE: "on the GPU", Mode.TURNS: "in turns", Mode.COLD: "from DRAM"}


def _shared_out(plan: Plan) -> str:
    return _layout(plan.layout)


def _layout(layout: Layout) -> str:
    copies = "1 copy" if layout.num_servers == 1 else f"{layout.num_servers} copies"
    each = "1 GPU" if layout.gpus_each == 1 else f"{layout.gpus_each} GPUs"
    return f"{copies} of the model, {'each ' if layout.num_servers > 1 else ''}on {each}"


def _draw_ways(plan: Plan) -> None:
    table = new_table(
        *("way", "copies x GPUs", "at once", "a token", "tokens/s", "each"),
        *("vLLM", "serve"),
    )
    for way in best_of_each_mode(plan.ways):
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
        f"{_MODES[way.mode]}: {way.obstacle}"
        for way in best_of_each_mode(plan.ways)
        if way.obstacle
    ]
    console.print(_points("·", [*obstacles, _ranking(plan)], style="dim"))


def _ranking(plan: Plan) -> str:
    target = format_seconds(target_of(plan.demand))
    whose = "" if plan.demand.max_token_seconds else ", assumed: about as fast as people read"
    return (
        f"ranked: of what can run within {target} a token{' (--max-token-ms)' if not whose else ''}"
        f"{whose}, the most tokens/s first; if nothing can, the shortest time a token"
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
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def _assumptions(plan: Plan) -> list[str]:
    hardware, rates = plan.hardware, plan.rates
    pool = (
        f"room on the GPU: {hardware.memory_utilization:.0%} of {hardware.num_gpus} x "
        f"{hardware.gpu.memory_bytes / 1e9:g} GB ({hardware.gpu.source}), less the weights and "
        f"{format_bytes(WORKING_BYTES)} of working memory each"
    )
    if hardware.device_kv_bytes is not None:
        pool = "room on the GPU: as given"
    weights = "all weights"
    if plan.model.shape.is_mixture:
        weights = "the experts its tokens pass through, at most all weights,"
    exchanges = []
    if rates.exchange_seconds:
        exchanges = [
            f"GPUs that share a model exchange results {EXCHANGES_PER_LAYER} times a layer: "
            f"{format_seconds(rates.exchange_seconds)} of a step, at an assumed "
            f"{EXCHANGE_SECONDS * 1e6:.0f} microseconds each"
        ]
    return [
        pool,
        f"prefill: {rates.prefill_source}",
        *(f"{tier.label}: {link.source}" for tier, link in rates.links.items()),
        f"a step reads {weights} and resident KV at {MEMORY_SHARE:.0%} of the sheet's bandwidth, "
        f"as one H200 did, beside that cold KV at {format_rate(rates.cold_bytes_per_second)}, and "
        "takes no less than computing its tokens does at prefill's rate; prompts are not in it",
        *exchanges,
        "loads from below DRAM are also begun while the front of the prompt is computed, which "
        "these figures leave out",
    ]
