"""Weights named by what is in their files: another checkpoint never shares KV with this one.

Every byte counts: an edit to one matrix changes the KV of all layers behind it. Hashing takes about
as long as reading the files from the page cache, and a file that has not changed since the last
start (same inode, size and time) is not read again.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from blake3 import blake3

log = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAID_AFTER_SECONDS = 2.0


def fingerprint_files(
    source: Path, remembered: Path | None = None, beside: Sequence[str] = ()
) -> str | None:
    """Of a folder's weights or of one file; None where there are none.

    Files named `beside` them count too, where they are there.
    """
    files = [source] if source.is_file() else sorted(_weights_in(source))
    if not files:
        return None
    files += [path for name in beside if (path := source / name).is_file()]
    memory = _Memory(remembered or _default_memory())
    hasher = blake3(b"penstock files 1")
    started = time.monotonic()
    for file in files:
        name = "" if source.is_file() else file.relative_to(source).as_posix()
        hasher.update(len(name).to_bytes(8, "little") + name.encode() + memory.digest(file))
    if time.monotonic() - started > _SAID_AFTER_SECONDS:
        log.info("hashed the weights in %s in %.0f s", source, time.monotonic() - started)
    memory.write()
    return hasher.hexdigest()


def _weights_in(folder: Path) -> Iterable[Path]:
    for path in folder.iterdir():
        if path.suffix in _WEIGHTS and path.is_file():
            yield path


def _default_memory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "penstock" / "fingerprints.json"


class _Memory:
    """Digests of files by inode, size and time. Losing it costs a read, nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = False
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        self._known: dict[str, str] = known if isinstance(known, dict) else {}

    def digest(self, file: Path) -> bytes:
        stat = file.stat()
        name = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        try:
            return bytes.fromhex(self._known[name])
        except (KeyError, TypeError, ValueError):
            pass
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(file)
        self._known[name] = hasher.hexdigest()
        self._changed = True
        return hasher.digest()

    def write(self) -> None:
        if not self._changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, prefix="fingerprints-", delete=False
            ) as new:
                json.dump(self._known, new)
            os.replace(new.name, self._path)
        except OSError as error:
            log.info("fingerprints are not remembered: %s", error)
