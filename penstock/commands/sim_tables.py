"""Shows the results of `penstock sim`: tables in a terminal, or an HTML page with charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.commands import new_table, stdout_console
from penstock.units import counted, format_bytes, format_seconds

Sizes = dict[str, float]
_TIERS = ("device", "host", "disk")


def draw(results: dict[str, Any], sizes: Sequence[Sizes], unit: str) -> None:
    console = stdout_console()
    for number, trace in enumerate(results["traces"]):
        pairs = [
            (p, s) for p, s in zip(results["points"], sizes, strict=True) if p["trace"] == number
        ]
        console.print(
            f"{trace['name']}: {counted(trace['num_requests'], 'request')}, "
            f"{counted(trace['num_blocks'], 'prompt block')} of "
            f"{counted(trace['block_tokens'], 'token')}, {format_seconds(trace['seconds'])}"
        )
        fixed, shown = _fixed_and_shown(pairs)
        if fixed:
            same = ", ".join(f"{tier} {size:,.5g} {unit}" for tier, size in fixed.items())
            console.print(f"Same in every row: {same}.")
        console.print(_capacities(pairs, trace["block_tokens"]))
        console.print(_hits(pairs, shown, unit, is_timed=results["is_timed"]))
        if results["is_timed"]:
            console.print(_times(pairs, shown, unit))
            if trace["has_segments"]:
                console.print(_reuse(pairs, shown, unit))
            if any(point["links"] for point, _ in pairs):
                console.print(_links(pairs, shown, unit))
    if results["is_timed"]:
        rates = results["rates"]
        console.print(
            f"{results['model']} on {results['num_gpus']} x {results['gpu']}: prefill "
            f"{rates['prefill_tokens_per_second']:,.0f} tokens/s, a decode step "
            f"{format_seconds(rates['decode_base_seconds'])} plus the time for its context."
        )
    console.print(codec_note(results["codecs"], has_disk=any(size["disk"] for size in sizes)))
    console.print(
        "Optimum: the most hits possible with as many blocks as all tiers hold, knowing the "
        "future. Unbounded: a cache that keeps everything."
    )


def codec_note(codecs: dict[str, Any], *, has_disk: bool) -> str:
    """Which codec was assumed, and why."""
    host, disk = codecs["host"], codecs["disk"]
    if not has_disk or host["codec"] == disk["codec"]:
        where = "DRAM and disk" if has_disk else "DRAM"
        return f"Codec of {where}: {_codec(host)}"
    return f"Codec of DRAM: {_codec(host)} Codec of the disk: {_codec(disk)}"


def _codec(found: dict[str, Any]) -> str:
    size = "" if found["ratio"] == 1 else f", {found['ratio']:.3g} of the size"
    return f"{found['codec']}{size}. {found['why']}"


_Pairs = Sequence[tuple[dict[str, Any], Sizes]]


def _fixed_and_shown(pairs: _Pairs) -> tuple[Sizes, list[str]]:
    """The tiers whose size is the same in every row, and those that need a column."""
    counts = {tier: {size[tier] for _, size in pairs} for tier in _TIERS}
    fixed = {tier: found.pop() for tier, found in counts.items() if len(found) == 1}
    shown = [tier for tier in _TIERS if tier not in fixed]
    return {tier: size for tier, size in fixed.items() if size}, shown


def _head(point: dict[str, Any], size: Sizes, shown: Sequence[str]) -> list[str]:
    return [point["policy"], *(f"{size[tier]:,.5g}" for tier in shown)]


def _capacities(pairs: _Pairs, block_tokens: int) -> str:
    """How many tokens and blocks the tiers hold; a range if rows differ."""
    parts = []
    for tier in _TIERS:
        counts = sorted({point[f"num_{tier}_blocks"] or 0 for point, _ in pairs} - {0})
        if counts:
            blocks = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
            tokens = [count * block_tokens for count in (counts[0], counts[-1])]
            shown = " to ".join(f"{count:,}" for count in dict.fromkeys(tokens))
            parts.append(f"{tier} {shown} tokens ({blocks} blocks)")
    return f"Room: {', '.join(parts)}."


def _hits(pairs: _Pairs, shown: Sequence[str], unit: str, *, is_timed: bool) -> Any:
    by_tier = [f"on {tier}" for tier in _TIERS] if is_timed else []
    columns = ["hits", *by_tier, "optimum", "unbounded"]
    table = new_table("policy", *_size_names(shown, unit), *columns, title="Hit rate")
    for point, size in pairs:
        tiers = [_share(point["hit_rate_by_tier"][tier]) for tier in _TIERS] if is_timed else []
        limits = ("optimum_hit_rate", "unbounded_hit_rate")
        table.add_row(
            *_head(point, size, shown),
            _share(point["hit_rate"]),
            *tiers,
            *(_share(point[name]) for name in limits),
        )
    return table


def _times(pairs: _Pairs, shown: Sequence[str], unit: str) -> Any:
    names = ("TTFT P50", "P90", "P99", "in tok/s", "out tok/s", "rejected")
    table = new_table("policy", *_size_names(shown, unit), *names, title="Times")
    for point, size in pairs:
        times = point["first_token_seconds"].values()
        table.add_row(
            *_head(point, size, shown),
            *("–" if time is None else format_seconds(time) for time in times),
            f"{point['input_tokens_per_second']:,.0f}",
            f"{point['output_tokens_per_second']:,.0f}",
            f"{sum(point['rejections'].values()):,}",
        )
    return table


def _reuse(pairs: _Pairs, shown: Sequence[str], unit: str) -> Any:
    names = ("found as a prefix", "reused anywhere", "mended", "of prompts with")
    table = new_table("policy", *_size_names(shown, unit), *names, title="Tokens of prompts")
    for point, size in pairs:
        counts = ("num_prefix_tokens", "num_reused_tokens", "num_mended_tokens", "num_input_tokens")
        table.add_row(*_head(point, size, shown), *(f"{point[name]:,}" for name in counts))
    return table


def _links(pairs: _Pairs, shown: Sequence[str], unit: str) -> Any:
    lanes = ["host_load", "host_save", "disk_load", "disk_save"]
    used = [lane for lane in lanes if any(lane in point["links"] for point, _ in pairs)]
    names = [lane.replace("_", " ") for lane in used]
    more = ["flash/day"] if "disk_save" in used else []
    table = new_table("policy", *_size_names(shown, unit), *names, *more, title="Bytes moved")
    for point, size in pairs:
        carried = [point["links"].get(lane) for lane in used]
        row = ["–" if lane is None else format_bytes(lane["num_bytes"]) for lane in carried]
        if more:
            row.append(format_bytes(point["flash_bytes_per_day"]))
        table.add_row(*_head(point, size, shown), *row)
    return table


def write_plot(path: Path, results: dict[str, Any], sizes: Sequence[Sizes], unit: str) -> None:
    from penstock.sim.picture import sections
    from penstock.sim.plot import page

    note = f"{results['model']}, {format_bytes(results['kv_bytes_per_token'])} of KV per token."
    if results["is_timed"]:
        note += f" One instance on {results['num_gpus']} x {results['gpu']}, simulated."
    drawn = sections(results["traces"], results["points"], sizes, unit)
    path.write_text(page("penstock sim", note, drawn), encoding="utf-8")


def _size_names(shown: Sequence[str], unit: str) -> list[str]:
    return [f"{tier} {unit}" for tier in shown]


def _share(share: float) -> str:
    return f"{share:.3f}"
