"""LMCache's disk backends in the same directory, as peers of the disk benchmark."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.disk_link import TOTAL_BYTES
from benchmarks.harness import BLOCK_SIZES, Row

SCRIPT = Path(__file__).with_name("lmcache_storage.py")


def run(python: str, directory: Path, ours: Sequence[Row]) -> Iterator[Row]:
    """One row for each of LMCache's figures: ours, with theirs as the peer."""
    by_name = {row.name: row for row in ours}
    for backend in ("local_disk", "fs", "fs_native"):
        for label, block_bytes in BLOCK_SIZES.items():
            with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=directory) as folder:
                answer = subprocess.run(
                    [
                        *(python, str(SCRIPT), "--json", "--dir", folder, "--backend", backend),
                        *("--block-bytes", str(block_bytes)),
                        *("--num-blocks", str(TOTAL_BYTES // block_bytes)),
                    ],
                    capture_output=True,
                    text=True,
                    check=True,
                )
            result = json.loads(answer.stdout.splitlines()[-1])
            for direction in ("save", "load"):
                row = by_name[f"DISK {direction} end to end, {label}"]
                theirs = result[f"{direction}_bytes_per_second"] / 1e9
                name = f"{row.name}, beside a peer"
                yield Row(name, row.ours, row.unit, theirs, result["peer"], "", row.ours / theirs)
