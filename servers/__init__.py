"""Real servers on loopback, for tests and benchmarks. Each keeps its ports through a restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def is_skipped(why_not: str | None) -> bool:
    """Whether to skip tests of a server that is not installed. CI allows no such skips."""
    return why_not is not None and not os.environ.get("REQUIRE_SERVERS")


def pause(process: subprocess.Popen[bytes]) -> None:
    """Stop a process: it keeps its connections and does not answer. Waits for all its threads."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class ServerProcess:
    """A server that can be killed and started again on the same ports."""

    def __init__(
        self,
        command: Sequence[str],
        ports: Sequence[int],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._environment = environment
        self._ports = ports
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it listens on all its ports."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment
            )
        for port in self._ports:
            self._await_listening(port)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """From now on it accepts connections and never answers."""
        assert self._process is not None
        pause(self._process)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _await_listening(self, port: int) -> None:
        assert self._process is not None
        end = time.monotonic() + 30
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"{self._command[0]} did not start: {self.log}")
