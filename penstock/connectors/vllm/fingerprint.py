"""Names weights by the content of their files, so that two checkpoints never share KV.

Every byte counts: an edit to one matrix changes the KV of all later layers. Hashing takes about as
long as reading the files from the page cache. A file that has not changed since the last start
(same inode, size and times) is not read again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

log = logging.getLogger(__name__)

_WEIGHTS = [
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".npy", ".ckpt", ".tensors"),
    *(".h5", ".msgpack", ".pdparams", ".onnx"),
]
# Files in a model's folder that cannot change the KV of given tokens: those of the tokenizer, and
# documentation. The model's config is digested elsewhere, as vLLM has read it, with overrides.
_HARMLESS_NAMES = frozenset(
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json"),
    ]
)
_HARMLESS_SUFFIXES = frozenset(
    [
        *(".md", ".txt", ".rst", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp4"),
        *(".jinja", ".model", ".tiktoken", ".ipynb"),
    ]
)
_HARMLESS_STEMS = frozenset({"README", "LICENSE", "NOTICE", "USE_POLICY"})
# `original` has the same weights in a format that vLLM does not read.
_SKIPPED_FOLDERS = frozenset({"original", "__pycache__"})
_SPLIT_GGUF = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_SAID_AFTER_SECONDS = 2.0


def fingerprint_files(source: Path, remembered: Path | None = None) -> str | None:
    """The digest of one file or of a folder with weights.

    None if there are no weights, or if files change meanwhile. In a folder every file counts unless
    it is known to be harmless: an index says which tensors are read, scales and code are stored
    beside the weights, and adapters have a config.
    """
    files = files_of(source)
    if not files:
        return None
    memory = _Memory(remembered or _default_memory())
    hasher = blake3(b"penstock files 2")
    started = time.monotonic()
    try:
        before = state_of(source)
        for file in files:
            name = "" if file == source else file.relative_to(_root(source)).as_posix()
            hasher.update(len(name).to_bytes(8, "little") + name.encode() + memory.digest(file))
        if state_of(source) != before:
            log.warning("The files in %s changed while they were read", source)
            return None
    except OSError as error:
        log.warning("The files in %s cannot be read: %s", source, error)
        return None
    if time.monotonic() - started > _SAID_AFTER_SECONDS:
        log.info("Hashed the weights in %s in %.0f s", source, time.monotonic() - started)
    memory.write()
    return hasher.hexdigest()


class _Stat(NamedTuple):
    path: str
    device: int
    inode: int
    num_bytes: int
    written_ns: int
    changed_ns: int


class FilesState(NamedTuple):
    """The stats of files. Equal only if no file has been touched."""

    stats: tuple[_Stat, ...]
    changed: float  # the latest time at which a file was changed, created or linked


def state_of(source: Path) -> FilesState:
    """The state of the files. Raises OSError if there are none."""
    folders = [] if source.is_file() else sorted(folder for folder, _ in _walk(source))
    paths = [*_links_on_the_way(source), source, *folders, *files_of(source)]
    stats = tuple(_stat(str(path)) for path in paths)
    return FilesState(stats, max(found.changed_ns for found in stats) / 1e9)


def is_unchanged(state: FilesState) -> bool:
    """Whether `state_of` would return the same, but cheaper. A new file changes its folder."""
    try:
        return all(_stat(found.path) == found for found in state.stats)
    except OSError:
        return False


def _stat(path: str) -> _Stat:
    link, found = os.lstat(path), os.stat(path)
    return _Stat(
        path,
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        max(found.st_ctime_ns, link.st_ctime_ns),
    )


def files_of(source: Path) -> list[Path]:
    """The files that count, sorted. Empty if there are no weights."""
    if source.is_file():
        return [source, *_beside_gguf(source)]
    found = sorted(_counted_in(source))
    return found if any(path.suffix in _WEIGHTS for path in found) else []


def process_start() -> float:
    """When this process started, by the clock of file timestamps, in seconds."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED


_IMPORTED = time.time()


def _root(source: Path) -> Path:
    return source.parent if source.is_file() else source


def _counted_in(folder: Path) -> Iterable[Path]:
    for place, names in _walk(folder):
        for name in names:
            path = place / name
            if not _is_harmless(path) and path.is_file():
                yield path


def _walk(folder: Path) -> Iterable[tuple[Path, list[str]]]:
    """A folder and its subfolders that may contain weights, with their file names."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # a link to a parent folder
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [
            name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")
        ]
        yield Path(place), names


def _is_harmless(path: Path) -> bool:
    return (
        path.name.startswith(".")
        or path.name in _HARMLESS_NAMES
        or path.suffix in _HARMLESS_SUFFIXES
        or (path.stem in _HARMLESS_STEMS and path.suffix not in _WEIGHTS)
    )


def _beside_gguf(file: Path) -> list[Path]:
    """The other parts of a split GGUF file, and the projector that is loaded with it."""
    if file.suffix != ".gguf":
        return []
    split = _SPLIT_GGUF.fullmatch(file.name)
    found = []
    for other in sorted(file.parent.glob("*.gguf")):
        part = _SPLIT_GGUF.fullmatch(other.name)
        is_part = split is not None and part is not None and part[1] == split[1]
        if other != file and other.is_file() and (is_part or "mmproj" in other.name):
            found.append(other)
    return found


def _links_on_the_way(source: Path) -> list[Path]:
    """Parent folders that are links: if one is redirected, the path leads to other files."""
    return [path for path in source.absolute().parents if path.is_symlink()]


def _default_memory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "penstock" / "fingerprints.json"


class _Memory:
    """A cache of file digests by inode, size and times. If it is lost, files are read again."""

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
            log.info("Fingerprints could not be written: %s", error)
