"""A real mooncake_master on loopback, for the length of a test."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from penstock.errors import ConfigError
from penstock.stores.mooncake import MooncakeClient
from servers import pause

_BESIDE = Path(sys.executable).with_name("mooncake_master")
EXECUTABLE = str(_BESIDE) if _BESIDE.exists() else shutil.which("mooncake_master")


def why_not() -> str | None:
    """What is missing to test Mooncake here."""
    if EXECUTABLE is None:
        return "mooncake_master is not installed: pip install '.[mooncake]'"
    try:
        MooncakeClient("mooncake://127.0.0.1:50051", timeout_seconds=1)
    except ConfigError as error:
        return str(error)
    return None


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class MooncakeMaster:
    """Keeps its ports, so that it can be killed and started again."""

    def __init__(self, folder: Path, *, running: bool = True) -> None:
        self.port, self.metrics = free_port(), free_port()
        self._log = folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        if running:
            self.start()

    def url(self, **options: str) -> str:
        given = {"metrics": str(self.metrics), **options}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return f"mooncake://127.0.0.1:{self.port}?{query}"

    def start(self) -> None:
        assert EXECUTABLE is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    EXECUTABLE,
                    f"--rpc_port={self.port}",
                    f"--metrics_port={self.metrics}",
                    "--rpc_address=127.0.0.1",
                    "--metrics_host=127.0.0.1",
                    "--enable_http_metadata_server=false",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        for port in (self.port, self.metrics):
            self._await_listening(port)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It accepts connections, and never answers."""
        assert self._process is not None
        pause(self._process)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _await_listening(self, port: int) -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    return
            except OSError:
                assert self._process is not None
                if self._process.poll() is not None:
                    break
                time.sleep(0.02)
        raise RuntimeError(f"mooncake_master did not start: {self._log.read_text()}")
