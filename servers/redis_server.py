"""A real redis-server on loopback, for the duration of a test."""

from __future__ import annotations

import shutil
from pathlib import Path

from servers import ServerProcess, free_port

EXECUTABLE = shutil.which("redis-server")
WHY_NOT = None if EXECUTABLE else "redis-server is not installed: apt-get install redis-server"


class RedisServer(ServerProcess):
    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        assert EXECUTABLE is not None
        self.port = port or free_port()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        ports = () if "--tls-port" in options else ("--port", str(self.port))
        bind = ("--bind", "127.0.0.1", "--save", "", "--dir", str(folder))
        super().__init__([EXECUTABLE, *ports, *bind, *options], [self.port], folder / "log")
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"
