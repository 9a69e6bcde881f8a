"""Files in memory that are handed to other processes, which must not be able to break them.

A process that has such a file could shrink it, and every process that maps it would be killed at
its next access. And through /proc it could open for writing what it got for reading. The kernel's
seals forbid both for ever.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python has no name for it


def make_memory_file(name: str, num_bytes: int) -> int:
    """A file of this size, for ever."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(file)
        raise
    return file


def end_changes(file: int, *, is_written_here_only: bool = False) -> None:
    """Let nobody change these rules any more. Call it once this process has mapped the file.

    If `is_written_here_only`, only mappings that exist now can be written to.
    """
    if is_written_here_only:
        with suppress(OSError):  # an older kernel: clients still get it for reading only
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
