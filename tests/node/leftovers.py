"""What a test has opened or started, and must not outlive it even if the test fails.

Otherwise the test after it fails too: pytest reports every file that is left open.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

_ends: list[Callable[[], object]] = []


def at_end(end: Callable[[], object]) -> None:
    """Call `end` after the test. It must do no harm to what has ended already."""
    _ends.append(end)


def end_all() -> None:
    """The newest first: clients before their node."""
    while _ends:
        _ends.pop()()


def end_process(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
