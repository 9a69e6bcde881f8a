"""`penstock probe`: how fast this machine's links are, and when loading beats computing."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.commands import JsonFlag, new_table, print_json, progress_bar, stdout_console
from penstock.costs.rates import PrefillRate, break_even_tokens
from penstock.errors import ConfigError
from penstock.machine import num_cores
from penstock.shapes.sizing import ModelShape, find_shape
from penstock.units import format_bytes, format_rate, format_seconds, parse_bytes

if TYPE_CHECKING:
    from penstock.plan.probe.links import Link
    from penstock.plan.probe.remote import RemoteProbe

EXAMPLE = (
    "Example: penstock probe --dir /mnt/nvme --model llama-3.1-8b\n\n"
    "Example: penstock probe --remote redis://cache:6379/0\n\n"
    "Example: penstock probe --prefill-tokens-per-second 9000 --json"
)
_MAX_DEFAULT_THREADS = 16
_MATRIX_SECONDS = 0.5
_BAR_WIDTH = 20
_GIVE_RATE = "to get break-even lengths, give --prefill-tokens-per-second"


class _Prefill(NamedTuple):
    rate: PrefillRate | None
    source: str  # where the rate comes from, or why it is unknown


def probe(
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="A known model, a config.json, or its folder."),
    ] = "smollm2-135m",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="A folder on the disk to measure. Default: the system's temporary folder.",
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Also measure this remote store (same form as remote.url)."
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="How much to copy, and to write to disk and remote store."
        ),
    ] = "256MiB",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, metavar="N", help="Threads that copy. Default: one per core, up to 16."
        ),
    ] = None,
    prefill_tokens_per_second: Annotated[
        float | None,
        typer.Option(metavar="RATE", help="Your engine's prefill rate. Default: estimated."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=0.01, max=60, metavar="S", help="Maximum time per measurement."),
    ] = 1.0,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine's links, and the prompt length from which loading beats computing.

    Copies and checksums memory, and writes and reads an unnamed file in DIR, bypassing the page
    cache. In a remote store it writes, reads and looks up its own values under penstock/probe/; a
    store that is nearly full may evict other values for them. Everything is removed at the end.
    Prompts of at least the break-even length load faster over that link than they are computed.
    """
    from penstock.plan.probe.disk import DiskProbe
    from penstock.plan.probe.links import BLOCK_BYTES, LinkProbe, measure_links
    from penstock.plan.probe.memory import ChecksumProbe, CopyProbe
    from penstock.plan.probe.packing import PackingProbe

    # Check all arguments before measuring anything.
    shape = find_shape(model)
    prefill = None
    if prefill_tokens_per_second is not None:
        prefill = _Prefill(_given_rate(prefill_tokens_per_second), "given")
    size_bytes = _size_bytes(size)
    directory = Path(tempfile.gettempdir()) if directory is None else directory
    packing = PackingProbe(seconds)
    probes: list[LinkProbe] = [
        CopyProbe(size_bytes, seconds, threads or min(num_cores(), _MAX_DEFAULT_THREADS)),
        ChecksumProbe(seconds),
        packing,
        DiskProbe(directory, size_bytes, seconds),
    ]
    store = None
    if remote is not None:
        from penstock.plan.probe.remote import RemoteProbe

        store = RemoteProbe(remote, size_bytes, seconds)
        probes.append(store)
    with progress_bar() as tick:
        links = measure_links(probes, tick)
        if prefill is None:
            tick("matrix product", 1.0)
            prefill = _estimate(shape, min(seconds, _MATRIX_SECONDS))
    break_evens = [_break_even(link, prefill, shape) for link in links]
    if not as_json:
        _draw(links, break_evens, prefill, model, shape, store, packing.pays_below)
        return
    rate = prefill.rate
    print_json(
        {
            "directory": str(directory),
            "size_bytes": size_bytes,
            "block_bytes": BLOCK_BYTES,
            "model": model,
            "kv_bytes_per_token": shape.bytes_per_token,
            "prefill": {
                "tokens_per_second": rate.tokens_per_second if rate else None,
                "quadratic_seconds_per_token2": rate.quadratic_seconds_per_token2 if rate else None,
                "source": prefill.source,
            },
            "links": [
                {
                    "name": link.name,
                    "block_bytes": link.block_bytes,
                    "num_threads": link.num_threads,
                    "bytes_per_second": link.bytes_per_second,
                    "gb_per_second": link.bytes_per_second / 1e9,
                    "block_seconds": link.block_seconds,
                    "latency_seconds": link.rate.latency_seconds,
                    "loads": link.loads,
                    "break_even_tokens": break_even,
                    "note": link.note,
                }
                for link, break_even in zip(links, break_evens, strict=True)
            ],
            "remote": _describe(store),
            "lossless_pays_below_bytes_per_second": packing.pays_below,
        }
    )


def _draw(
    links: Sequence[Link],
    break_evens: Sequence[int | None],
    prefill: _Prefill,
    model: str,
    shape: ModelShape,
    store: RemoteProbe | None,
    packing_pays_below: float | None,
) -> None:
    from rich.bar import Bar

    size = format_bytes(links[0].block_bytes)
    alike = len({link.block_bytes for link in links}) == 1
    table = new_table("link", "rate", "", f"{size} block" if alike else "one block", "break-even")
    bars = table.columns[2]
    bars.justify, bars.min_width, bars.max_width = "left", 8, _BAR_WIDTH
    for column in table.columns:
        column.no_wrap = column is not bars  # in a narrow terminal only the bars shrink
    fastest = max(link.bytes_per_second for link in links)
    for link, break_even in zip(links, break_evens, strict=True):
        table.add_row(
            link.name,
            format_rate(link.bytes_per_second),
            Bar(fastest, 0, link.bytes_per_second, color="cyan"),
            format_seconds(link.block_seconds),
            _show_break_even(link, break_even, prefill),
        )
    console = stdout_console()
    console.print(table)
    if not alike:
        console.print(f"A block has {size} unless its link names another size.")
    console.print(f"{model}: {format_bytes(shape.bytes_per_token)} of KV per token.")
    if prefill.rate is None:
        console.print(f"Prefill rate unknown: {prefill.source}.")
    else:
        console.print(f"Prefill: {prefill.rate.tokens_per_second:,.0f} tokens/s, {prefill.source}.")
    if store is not None and (lookups := store.lookups) is not None:
        console.print(
            f"Remote lookups: {lookups.names_per_second:,.0f} blocks/s, "
            f"{lookups.num_names} at a time in {format_seconds(lookups.seconds)}."
        )
    if packing_pays_below is not None:
        console.print(
            "Packing bfloat16 KV without loss on this CPU makes loads faster over links below "
            f"{format_rate(packing_pays_below)} (disk.codec, remote.codec). A GPU packs by itself."
        )
    for note in dict.fromkeys(link.note for link in links if link.note):
        console.print(f"Note: {note}.")


def _describe(store: RemoteProbe | None) -> dict[str, object] | None:
    if store is None:
        return None
    return {"url": store.shown, "lookups": store.lookups and store.lookups._asdict()}


def _show_break_even(link: Link, break_even: int | None, prefill: _Prefill) -> str:
    if not link.loads or prefill.rate is None:
        return "–"
    if break_even is None:
        return "never"
    return "always" if break_even == 1 else f"{break_even:,} tokens"


def _break_even(link: Link, prefill: _Prefill, shape: ModelShape) -> int | None:
    if not link.loads or prefill.rate is None:
        return None
    return break_even_tokens(link.rate, prefill.rate, shape.bytes_per_token)


def _estimate(shape: ModelShape, seconds: float) -> _Prefill:
    from penstock.plan.probe.memory import measure_matrix_product
    from penstock.shapes.gpu_rates import estimate_prefill

    operations_per_second = measure_matrix_product(seconds)
    if operations_per_second is None:
        return _Prefill(None, f"numpy, which estimates it, is not installed; {_GIVE_RATE}")
    rate = estimate_prefill(shape, operations_per_second)
    if rate is None:
        return _Prefill(None, f"the model's number of parameters is unknown; {_GIVE_RATE}")
    gflops = operations_per_second / 1e9
    return _Prefill(rate, f"estimated from a matrix product at {gflops:,.0f} GFLOP/s")


def _given_rate(tokens_per_second: float) -> PrefillRate:
    try:
        return PrefillRate(tokens_per_second)
    except ConfigError:
        raise ConfigError(
            f"--prefill-tokens-per-second is {tokens_per_second}: expected a number above 0"
        ) from None


def _size_bytes(size: str) -> int:
    try:
        return parse_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"--size: {error}") from None
