"""The contents of a disk folder: one store per namespace, all under one cap.

    DIR/
      MANIFEST       JSON: the format version, and nothing else
      LOCK           held with flock by the only process that writes, for all namespaces
      NAMESPACE/     a store (see `slab`); named by the first 32 digits of the namespace

The functions here only read, except `claim`. `disk_folder` reads and writes blocks.
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

# LOCK, MANIFEST and its temporary file; the folder, and the directory of the store in use.
FOLDER_BYTES = 5 * PAGE_BYTES
_FLAT_VERSION = 1  # in this version a folder was the store of one namespace


@dataclass(frozen=True, slots=True)
class Shelf:
    """One namespace's store, as found in a folder."""

    path: Path
    geometry: Geometry | None  # None if the manifest is missing or damaged
    disk_bytes: int
    last_used: float  # last opened, written or closed, by the filesystem's clock

    @property
    def namespace(self) -> str:
        """The digits of the namespace that are in the path."""
        return self.path.name

    @property
    def title(self) -> str:
        return "unknown: its MANIFEST is damaged" if self.geometry is None else title(self.geometry)


def title(geometry: Geometry) -> str:
    """What a store is for, in one line."""
    known = geometry.description
    names = [known[name] for name in ("model", "dtype") if name in known]
    what = ", ".join(names) or f"namespace {geometry.namespace[:NAMESPACE_DIGITS]}"
    return f"{printable(what)}, blocks of {geometry.block_tokens} tokens"


def store_path(directory: Path, namespace: bytes) -> Path:
    return directory / namespace.hex()[:NAMESPACE_DIGITS]


def store_paths(directory: Path) -> list[Path]:
    """The directories of the folder's namespaces, sorted by name."""
    name = re.compile(NAMESPACE_NAME)
    try:
        return sorted(p for p in directory.iterdir() if name.fullmatch(p.name) and _is_ours(p))
    except FileNotFoundError:
        return []


def _is_ours(path: Path) -> bool:
    """Whether `path` is a store of ours, or the remains of one.

    Other programs use such names too, and our stores may be deleted to make room.
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
    """The stores in a folder, most recently used first; None if it is not a disk folder.

    Raises Foreign if the format version is another one or MANIFEST is damaged. Opens no store.
    """
    if not read_version(directory):
        return None
    shelves = map(look_at, store_paths(directory))
    return sorted(shelves, key=lambda shelf: shelf.last_used, reverse=True)


def read_version(directory: Path) -> int | None:
    """The folder's format version, or None if it is not a disk folder."""
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
            f"{directory}/MANIFEST is damaged ({printable(str(error))}); clear the folder with "
            f"`penstock store clear {directory}`, or choose another path."
        ) from None
    if version == _FLAT_VERSION:
        raise Foreign(
            f"{directory} was written by an earlier Penstock version (format version {version}); "
            "its blocks cannot be used. Choose another path, or clear it with "
            f"`penstock store clear {directory}`."
        )
    if not is_number or version != FORMAT_VERSION or "namespace" in fields:
        slab.refuse_other_version(directory, version)
        raise Foreign(
            f"{directory} is one namespace inside a disk folder; use its parent directory."
        )
    return FORMAT_VERSION


def find_writer(directory: Path) -> str | None:
    """The process that has the folder open for writing, as its LOCK file describes it."""
    with suppress(OSError):  # no such file, or the filesystem has no locks
        descriptor = os.open(directory / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # A shared lock that is freed at once: flock cannot be queried.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_lock(descriptor)
        finally:
            os.close(descriptor)
    return None


def claim(directory: Path) -> None:
    """Turn an empty folder into a disk folder. Only the process that holds its lock may do this."""
    if read_version(directory) is None:
        refuse_strangers_index(directory)
        remove_store_files(directory)  # a version 1 store without a manifest cannot be trusted
        slab.write_whole(directory, {"format_version": FORMAT_VERSION})
    for leftover in directory.glob(".MANIFEST-*"):
        leftover.unlink()  # a writer was killed before it could rename this file


def disk_bytes(path: Path) -> int:
    """Disk space of a store's files and of its directory."""
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
