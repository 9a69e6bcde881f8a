"""A real mooncake_master on loopback, for the duration of a test."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from penstock.errors import ConfigError
from penstock.stores.mooncake import MooncakeClient
from servers import ServerProcess, free_port

_BESIDE = Path(sys.executable).with_name("mooncake_master")
EXECUTABLE = str(_BESIDE) if _BESIDE.exists() else shutil.which("mooncake_master")


def why_not() -> str | None:
    """What is missing to test Mooncake on this machine."""
    if EXECUTABLE is None:
        return "mooncake_master is not installed: pip install '.[mooncake]'"
    try:
        MooncakeClient("mooncake://127.0.0.1:50051", timeout_seconds=1)
    except ConfigError as error:
        return str(error)
    return None


class MooncakeMaster(ServerProcess):
    def __init__(self, folder: Path, *, running: bool = True) -> None:
        assert EXECUTABLE is not None
        self.port, self.metrics = free_port(), free_port()
        folder.mkdir(parents=True, exist_ok=True)
        options = [
            f"--rpc_port={self.port}",
            f"--metrics_port={self.metrics}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            "--enable_http_metadata_server=false",
        ]
        super().__init__([EXECUTABLE, *options], [self.port, self.metrics], folder / "log")
        if running:
            self.start()

    def url(self, **options: str) -> str:
        given = {"metrics": str(self.metrics), **options}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return f"mooncake://127.0.0.1:{self.port}?{query}"
