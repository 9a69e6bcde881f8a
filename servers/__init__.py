"""Real servers on loopback, for tests and benchmarks. Each keeps its port through a restart."""

from __future__ import annotations

import os
import signal
import subprocess


def is_skipped(why_not: str | None) -> bool:
    """Whether tests of a server that cannot be had are passed over; the gate allows none."""
    return why_not is not None and not os.environ.get("REQUIRE_SERVERS")


def pause(process: subprocess.Popen[bytes]) -> None:
    """It keeps its connections, and answers no more. Until every thread of it stands, one may."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
