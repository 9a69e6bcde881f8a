"""A real `penstock serve` on loopback, for benchmarks."""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from servers import ServerProcess, free_port

_START_SECONDS = 600.0  # to load a model on a busy machine


class PenstockServer(ServerProcess):
    """Starts at once; `wait_ready` waits for its model."""

    def __init__(
        self, folder: Path, model: Path, *options: object, environment: Mapping[str, str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        super().__init__(
            [
                *(sys.executable, "-m", "penstock", "serve", str(model)),
                *("--port", str(self.port)),
                *map(str, options),
            ],
            [],
            folder / "log",
            environment={
                **{k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")},
                **environment,
            },
        )
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> str:
        """Wait until it serves requests, and return its URL."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self.is_running:
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=10):
                    return self.url
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"penstock serve did not start: {self.log}")

    def load_decisions(self) -> dict[str, int]:
        """How often it loaded what it found in a tier, loaded a part, or computed it instead."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        name = 'penstock_load_decisions_total{choice="'
        return {
            line.removeprefix(name).split('"')[0]: int(float(line.split()[-1]))
            for line in lines
            if line.startswith(name)
        }
