"""What lies in a disk folder: one store for each namespace, side by side under one cap.

    DIR/
      MANIFEST       JSON: the format version, and nothing else
      LOCK           held with flock by the one process that writes, whichever namespace
      NAMESPACE/     a store (see `slab`); its name is the first 32 digits of the namespace

Functions here only look, except `claim`; the class that reads and writes is `disk_folder`'s.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import Foreign
from penstock.stores import slab
from penstock.stores.directory import (
    has_our_lock,
    read_lock,
    refuse_strangers_index,
    remove_store_files,
)
from penstock.stores.slab import FORMAT_VERSION, NAMESPACE_DIGITS, NAMESPACE_NAME, Geometry
from penstock.types import PAGE_BYTES
from penstock.units import printable

# LOCK, MANIFEST and the manifest's temporary; the folder itself and that of the store in use.
FOLDER_BYTES = 5 * PAGE_BYTES
_FLAT_VERSION = 1  # before, a folder was itself the store of one namespace


@dataclass(frozen=True, slots=True)
class Shelf:
    """One namespace's store in a folder, as it is found."""

    path: Path
    geometry: Geometry | None  # None: its manifest is gone or damaged
    disk_bytes: int
    last_used: float  # when it was last opened, written or closed, as the filesystem's clock has it

    @property
    def namespace(self) -> str:
        """As much of it as the path tells."""
        return self.path.name

    @property
    def title(self) -> str:
        return "unknown: its MANIFEST is damaged" if self.geometry is None else title(self.geometry)


def title(geometry: Geometry) -> str:
    """What a store is for, in a line."""
    known = geometry.description
    names = [known[name] for name in ("model", "dtype") if name in known]
    what = ", ".join(names) or f"namespace {geometry.namespace[:NAMESPACE_DIGITS]}"
    return f"{printable(what)}, blocks of {geometry.block_tokens} tokens"


def store_path(directory: Path, namespace: bytes) -> Path:
    return directory / namespace.hex()[:NAMESPACE_DIGITS]


def store_paths(directory: Path) -> list[Path]:
    """Where the folder's namespaces lie, in the order of their names."""
    name = re.compile(NAMESPACE_NAME)
    try:
        return sorted(p for p in directory.iterdir() if name.fullmatch(p.name) and _is_ours(p))
    except FileNotFoundError:
        return []


def _is_ours(path: Path) -> bool:
    """Whether a store of ours lies there, or what is left of one.

    Others name folders so too, and what is ours may be deleted to make room.
    """
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        is_begun = all(p.name == "LOCK" and not p.stat().st_size for p in path.iterdir())
        if is_begun or has_our_lock(path):
            return True
        fields = json.loads((path / "MANIFEST").read_bytes())
        return isinstance(fields, dict) and "format_version" in fields
    except (OSError, ValueError, RecursionError):
        return False


def look_at(path: Path) -> Shelf:
    geometry = None
    with suppress(Foreign):
        geometry = slab.read_manifest(path)
    return Shelf(path, geometry, disk_bytes(path), _last_used(path))


def look_into(directory: Path) -> list[Shelf] | None:
    """What a folder holds, most recently used first; None if it holds no store. Opens nothing.

    Raises Foreign for one of another format version, or whose MANIFEST is damaged.
    """
    if not read_version(directory):
        return None
    shelves = map(look_at, store_paths(directory))
    return sorted(shelves, key=lambda shelf: shelf.last_used, reverse=True)


def read_version(directory: Path) -> int | None:
    """The folder's format version, or None if there is no folder of ours."""
    try:
        fields = json.loads((directory / "MANIFEST").read_bytes())
        version = fields["format_version"]
        is_number = type(version) is int
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Foreign(f"{directory}/MANIFEST cannot be read: {error}.") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Foreign(
            f"{directory}/MANIFEST is damaged ({printable(str(error))}); expected Penstock's: "
            f"empty the folder with `penstock store clear {directory}`, or choose another path."
        ) from None
    if version == _FLAT_VERSION:
        raise Foreign(
            f"{directory} was written by an earlier Penstock (format version {version}), whose "
            "blocks this one cannot use; choose another path, or empty it with "
            f"`penstock store clear {directory}`."
        )
    if not is_number or version != FORMAT_VERSION or "namespace" in fields:
        slab.refuse_other_version(directory, version)
        raise Foreign(
            f"{directory} is one namespace of a disk folder, not the folder; give the path above "
            "it."
        )
    return FORMAT_VERSION


def find_writer(directory: Path) -> str | None:
    """The live process that has the folder open for writing, in the words of its LOCK file."""
    with suppress(OSError):  # no such file; or a filesystem that knows no locks
        descriptor = os.open(directory / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Asked with a shared lock, let go at once: there is no way to only look.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_lock(descriptor)
        finally:
            os.close(descriptor)
    return None


def claim(directory: Path) -> None:
    """Make an empty folder ours, or see that it is. Only its one writer may do this."""
    if read_version(directory) is None:
        refuse_strangers_index(directory)
        remove_store_files(directory)  # a flat store without a manifest: nothing vouches for it
        slab.write_whole(directory, {"format_version": FORMAT_VERSION})
    for leftover in directory.glob(".MANIFEST-*"):
        leftover.unlink()  # of a writer that was killed


def disk_bytes(path: Path) -> int:
    """Disk space of a store's own files and of the directory they lie in."""
    paths = [path / name for name in ("MANIFEST", "LOCK", "index")]
    paths += [path, *path.glob(".MANIFEST-*"), *(found for _, found in slab.slab_paths(path))]
    total = 0
    for one in paths:
        with suppress(OSError):
            total += one.stat().st_blocks * 512
    return total


def _last_used(path: Path) -> float:
    times = [0.0]
    for name in ("MANIFEST", "index"):
        with suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)
