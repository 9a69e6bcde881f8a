"""Quarantine: a file that keeps a namespace's stored KV from being loaded, and says why.

    quarantine-NAMESPACE.json, in the disk tier's folder or in the user's state folder

The file is the report of the audit that failed. While it exists, no process that uses the same
folder loads or stores KV of this namespace. Deleting it ends the quarantine at the next start.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

NAMESPACE_DIGITS = 32


def state_folder() -> Path:
    """Where reports go if there is no disk tier, or if it cannot be written."""
    home = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    return base / "penstock"


class Quarantine:
    """The quarantine of one namespace."""

    def __init__(self, namespace: bytes, disk: Path | None, *, persists: bool = True) -> None:
        """`disk` is the disk tier's folder. Without lower tiers nothing survives a restart.

        Then `persists` is False: a report is written, but a later process does not look at it.
        """
        name = f"quarantine-{namespace.hex()[:NAMESPACE_DIGITS]}.json"
        folders = ([] if disk is None else [disk]) + [state_folder()]
        self._paths = [folder / name for folder in folders]
        self._persists = persists

    def find(self) -> Path | None:
        """The file that an earlier process has left, or None. Its content does not matter."""
        if not self._persists:
            return None
        return next((path for path in self._paths if os.path.lexists(path)), None)

    def impose(self, report: Mapping[str, object]) -> Path | None:
        """Write the report; returns its path, or None if it cannot be written anywhere."""
        text = json.dumps(report, indent=2) + "\n"
        for path in self._paths:
            try:
                _write_whole(path, text)
                return path
            except OSError as error:
                log.warning("the audit's report cannot be written to %s: %s", path, error)
        return None


def quarantine_files(folder: Path) -> Sequence[Path]:
    """The quarantines in a disk folder."""
    return sorted(folder.glob("quarantine-*.json"))


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".quarantine-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
