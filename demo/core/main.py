"""Demo of the core: fill DRAM, spill to disk, kill -9, restart, load back, verify.

    python demo/core/main.py [--out DIR]

Writes DIR/report.html with a chart. Exits with 1 if a single bit is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from picture import report
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from worker import BLOCK_TOKENS, BLOCKS, DISK_BYTES, HOST_BYTES, SPEC

Facts = dict[str, object]
KILL_AFTER = 7  # conversations: more than DRAM holds, fewer than the disk does
console = Console()


def live(mode: str, directory: Path, kill_after: int | None = None) -> Iterator[Facts]:
    """Run a worker and yield its reports; kill -9 it while it saves the next conversation."""
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), mode, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if not line.endswith("}\n"):
                continue  # cut off by the kill
            facts = json.loads(line)
            yield facts
            if kill_after is not None and facts.get("number") == kill_after:
                worker.send_signal(signal.SIGKILL)
                kill_after = None
                yield {"what": "killed", "time": facts["time"]}
    if mode == "load" and worker.returncode:
        raise SystemExit(f"the worker failed with exit code {worker.returncode}")


def show(title: str, story: Iterator[Facts]) -> list[Facts]:
    """Show a worker's progress with a bar for each tier."""
    told = []
    columns = (TextColumn("  {task.description:5}"), BarColumn(40), TextColumn("{task.fields[n]}"))
    console.print(f"[bold]{title}[/bold]")
    with Progress(*columns, console=console) as progress:
        bars = {tier: progress.add_task(tier.upper(), n="") for tier in ("host", "disk")}
        for facts in story:
            told.append(facts)
            if facts["what"] == "usage":
                size = int(facts["used"]) * SPEC.block_bytes / 1e6
                progress.update(
                    bars[str(facts["tier"])],
                    completed=int(facts["used"]),
                    total=int(facts["slots"]),
                    n=f"{facts['used']:>4} blocks, {size:,.0f} MB",
                )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo/out/core"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="store-", dir=out))
    try:
        console.print(
            f"Blocks of {BLOCK_TOKENS} tokens of SmolLM2-135M: {SPEC.block_bytes:,} bytes each. "
            f"DRAM {HOST_BYTES >> 20} MiB, disk {DISK_BYTES >> 20} MiB.\n"
        )
        first = show(
            f"1. A process saves conversations of {BLOCKS * BLOCK_TOKENS:,} tokens: DRAM fills up, "
            "the rest spills to disk …",
            live("save", directory, KILL_AFTER),
        )
        console.print("   [red]… kill -9, in the middle of a write.[/red]\n")
        second = show(
            "2. A new process opens the directory and loads everything back.",
            live("load", directory),
        )
    finally:
        shutil.rmtree(directory)
    verified = summarise(first, second)
    page = report(first, second, out)
    console.print(f"\nReport with a chart: {page}")
    sys.exit(0 if verified else 1)


def summarise(first: list[Facts], second: list[Facts]) -> bool:
    saved = [facts for facts in first if facts["what"] == "saved"]
    spilled = {facts["number"] for facts in first if facts["what"] == "spilled"}
    recovered = max(int(facts["blocks"]) for facts in second if facts["what"] == "recovered")
    from_disk = [f for f in second if f["what"] == "loaded" and f["source"] == "disk"]
    from_host = [f for f in second if f["what"] == "loaded" and f["source"] == "host"]
    table = Table(title="\nWhat happened", title_justify="left")
    for name in ("", "blocks", "MB", "GB/s", "bit for bit"):
        table.add_column(name, justify="left" if not name else "right")
    for name, rows in (
        ("saved to DRAM", saved),
        ("loaded from disk after the kill", from_disk),
        ("loaded from DRAM", from_host),
    ):
        num = sum(int(row["blocks"]) for row in rows)
        size = num * SPEC.block_bytes
        seconds = sum(float(row["seconds"]) for row in rows) or 1e-9
        right = "" if rows is saved else f"{sum(int(row['right']) for row in rows)} of {num}"
        table.add_row(name, f"{num}", f"{size / 1e6:,.0f}", f"{size / seconds / 1e9:.1f}", right)
    console.print(table)
    loaded = {row["number"] for row in from_disk if row["right"] == BLOCKS}
    lost = spilled - loaded
    all_right = all(row["right"] == row["blocks"] for row in from_disk + from_host)
    console.print(
        f"{recovered} blocks survived the kill. "
        + ("[red]LOST OR WRONG[/red]" if lost or not all_right else "Every one of them is correct.")
    )
    return bool(from_disk and from_host) and all_right and not lost


if __name__ == "__main__":
    main()
