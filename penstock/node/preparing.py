"""Preparation: the kernel allocates a node's DRAM in the background, before blocks need it.

A page of shared memory counts towards the memory limit of the process that touches it first. If
engines did, a node's DRAM would count towards their containers. And a block's first save would wait
for its pages.

Nothing waits for this. While the machine has too little available memory, it pauses: after a node
was restarted, its engines hold the old DRAM until they have attached again.
"""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

from penstock.stores.host import HostMemory
from penstock.units import MiB, format_bytes

log = logging.getLogger(__name__)

_PIECE_BYTES = 64 * MiB
_RESERVE_BYTES = 512 * MiB  # left for everybody else
_PAUSE_SECONDS = 1.0
_PAUSES_BEFORE_WARNING = 60


class Preparation:
    """Runs on a thread of its own until all is allocated, or `stop`."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._stopping = threading.Event()
        self.num_bytes = 0  # allocated so far
        self._thread = threading.Thread(target=self._run, name="penstock-prepare", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Before the memory is closed."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        total, num_pauses = self._memory.num_bytes, 0
        while self.num_bytes < total and not self._stopping.is_set():
            size = min(_PIECE_BYTES, total - self.num_bytes)
            available = available_memory()
            if available is not None and available < size + _RESERVE_BYTES:
                num_pauses += 1
                if num_pauses == _PAUSES_BEFORE_WARNING:
                    log.warning(
                        "%s of %s of DRAM are allocated, and the machine has only %s left: expected"
                        " room for all of it; lower host.size, or free memory",
                        *map(format_bytes, (self.num_bytes, total, available)),
                    )
                self._stopping.wait(_PAUSE_SECONDS)
                continue
            try:
                self._memory.allocate(self.num_bytes, size)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel before 5.14
                    log.warning("DRAM is allocated when it is used: %s", error.strerror)
                return
            self.num_bytes += size


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What can be allocated without swapping; None if unknown."""
    try:
        lines = meminfo.read_text().splitlines()
        (found,) = (line.split() for line in lines if line.startswith("MemAvailable:"))
        return int(found[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
