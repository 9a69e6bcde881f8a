"""A real vllm-router on loopback, for the duration of a test."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from servers import ServerProcess, free_port

# Beside this Python; or in the environment of `make`, for tests that run in vLLM's own.
_PLACES = (
    Path(sys.executable).with_name("vllm-router"),
    Path(__file__).parent.parent / ".venv" / "bin" / "vllm-router",
)
EXECUTABLE = next((str(path) for path in _PLACES if path.exists()), shutil.which("vllm-router"))
WHY_NOT = None if EXECUTABLE else "vllm-router is not installed: pip install '.[dev]'"


class VllmRouter(ServerProcess):
    """Its workers must answer /health before it starts. Give `options` instead for roles."""

    def __init__(self, folder: Path, workers: Sequence[str], policy: str, *options: object) -> None:
        assert EXECUTABLE is not None
        self.port, metrics = free_port(), free_port()
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            [
                EXECUTABLE,
                *("--host", "127.0.0.1", "--port", str(self.port)),
                *("--prometheus-port", str(metrics), "--worker-startup-check-interval", "1"),
                *("--policy", policy),
                *(("--worker-urls", *workers) if workers else ()),
                *map(str, options),
            ],
            [self.port],
            folder / "log",
        )
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
