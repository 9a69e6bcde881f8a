"""A real redis-server on loopback, for the length of a test."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from servers import pause

EXECUTABLE = shutil.which("redis-server")
WHY_NOT = None if EXECUTABLE else "redis-server is not installed: apt-get install redis-server"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class RedisServer:
    """Keeps its port, so that it can be killed and started again."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self.folder = folder
        self._options = options
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert EXECUTABLE is not None
        ports = () if "--tls-port" in self._options else ("--port", str(self.port))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    EXECUTABLE,
                    *ports,
                    *("--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)),
                    *self._options,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._await_listening()

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It accepts connections, and never answers."""
        assert self._process is not None
        pause(self._process)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _await_listening(self) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                assert self._process is not None
                if self._process.poll() is not None:
                    break
                time.sleep(0.02)
        raise RuntimeError(f"redis-server did not start: {(self.folder / 'log').read_text()}")
