"""Reads the index of a disk store record by record, and verifies its blocks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError, Corrupt, Foreign, StoreError
from penstock.stores import folder, slab
from penstock.stores.base import Block
from penstock.stores.directory import has_our_lock
from penstock.stores.disk import DiskStore
from penstock.stores.folder import Shelf
from penstock.stores.host import HostArena
from penstock.stores.slab import RECORD_BYTES, Geometry, SlabRecord
from penstock.types import BlockKey, Slot

RECORDS_AT_ONCE = 4096
_BATCH_BYTES = 32 << 20
_SETTLE_SECONDS = 0.05
_ZERO = bytes(RECORD_BYTES)


class AuditedSlot(NamedTuple):
    """One slot, as recorded in the index."""

    slot: Slot
    record: SlabRecord | None  # None if never written, or damaged
    damaged: bool


class DiskDamage(NamedTuple):
    slot: Slot | None  # None if the whole namespace cannot be read
    key: BlockKey | None  # None if the record itself is damaged
    problem: str


@dataclass(slots=True)
class DiskAudit:
    num_ok: int = 0
    num_empty: int = 0
    num_changed: int = 0  # rewritten by a server during the check; not damage
    num_cleared: int = 0
    damages: list[DiskDamage] = field(default_factory=list)


def count_slots(directory: Path) -> int:
    return (directory / "index").stat().st_size // RECORD_BYTES


def read_index(directory: Path) -> Iterator[AuditedSlot]:
    """Every slot, in order. Unlike the store's own scan, tells damaged records from empty ones."""
    num_slots = count_slots(directory)
    with (directory / "index").open("rb") as file:
        for start in range(0, num_slots, RECORDS_AT_ONCE):
            data = file.read(min(RECORDS_AT_ONCE, num_slots - start) * RECORD_BYTES)
            for index in range(len(data) // RECORD_BYTES):
                yield _entry(start + index, data[index * RECORD_BYTES : (index + 1) * RECORD_BYTES])


def _read_entry(directory: Path, slot: Slot) -> AuditedSlot:
    with (directory / "index").open("rb") as file:
        return _entry(slot, os.pread(file.fileno(), RECORD_BYTES, slot * RECORD_BYTES))


def _entry(slot: int, data: bytes) -> AuditedSlot:
    record = slab.unpack_record(data)
    # No bytes at all: the index has been shortened since its size was read.
    return AuditedSlot(Slot(slot), record, damaged=record is None and data not in (_ZERO, b""))


def audit(store: DiskStore, geometry: Geometry, tick: Callable[[float], None]) -> DiskAudit:
    """Read every block in the index and verify its checksum. Changes nothing."""
    found, suspects = DiskAudit(), list[Slot]()
    num_slots = count_slots(store.directory)
    arena = HostArena(geometry.spec, max(_BATCH_BYTES, geometry.stride_bytes))
    batch: list[tuple[Slot, SlabRecord]] = []

    def check_batch() -> None:
        blocks = [
            Block(record.key, slot, arena.view(Slot(index)))
            for index, (slot, record) in enumerate(batch)
        ]
        for block, error in zip(blocks, store.get(blocks), strict=True):
            if error is None:
                found.num_ok += 1
            else:
                suspects.append(block.slot)
        batch.clear()

    for entry in read_index(store.directory):
        if entry.damaged:
            suspects.append(entry.slot)
        elif entry.record is None or not entry.record.held:
            found.num_empty += 1
        else:
            batch.append((entry.slot, entry.record))
        if len(batch) == arena.num_slots or entry.slot % RECORDS_AT_ONCE == 0:
            check_batch()
            tick((entry.slot + 1) / num_slots)
    check_batch()
    if suspects:
        _check_again(store.directory, geometry, sorted(suspects), arena.view(Slot(0)), found)
    return found


def _check_again(
    directory: Path, geometry: Geometry, slots: list[Slot], memory: memoryview, found: DiskAudit
) -> None:
    """Read suspect slots again through newly opened files.

    A running server may have been writing a slot or extending a slab. A slot is damaged if it
    fails twice and its record has not changed.
    """
    time.sleep(_SETTLE_SECONDS)
    store = DiskStore(directory, geometry.spec, 0, read_only=True)
    try:
        for slot in slots:
            entry = _read_entry(directory, slot)
            record = entry.record
            if entry.damaged:
                found.damages.append(DiskDamage(slot, None, "the record is damaged"))
            elif record is None or not record.held:
                found.num_changed += 1
            elif (error := store.get([Block(record.key, slot, memory)])[0]) is None:
                found.num_ok += 1
            elif _read_entry(directory, slot) != entry:
                found.num_changed += 1
            else:
                problem = _name_problem(directory, geometry, slot, record, error)
                found.damages.append(DiskDamage(slot, record.key, problem))
    finally:
        store.close()


def _name_problem(
    directory: Path, geometry: Geometry, slot: Slot, record: SlabRecord, error: StoreError
) -> str:
    number, offset = geometry.place(slot)
    path = slab.slab_path(directory, number)
    if not path.exists():
        return f"{path.name} is missing"
    if path.stat().st_size < offset + geometry.stride_bytes:
        return f"{path.name} is truncated"
    if (record.namespace.hex(), record.length) != (geometry.namespace, geometry.block_bytes):
        return "the block belongs to another model or layout"
    return "the block fails its checksum" if isinstance(error, Corrupt) else str(error)


def clear_records(store: DiskStore, damages: list[DiskDamage]) -> int:
    """Mark damaged slots as empty, so that they are not used again. Returns how many are."""
    num_cleared = 0
    for damage in damages:
        assert damage.slot is not None
        store.drop(damage.key or BlockKey(bytes(32)), damage.slot)
        entry = _read_entry(store.directory, damage.slot)
        num_cleared += entry.record is not None and not entry.record.held
    return num_cleared


def shelves(directory: Path) -> list[Shelf]:
    """The namespaces in a folder, most recently used first."""
    _check_is_folder(directory)
    found = folder.look_into(directory)
    if found is None:
        raise _no_store(directory, "it has no MANIFEST")
    return found


def find_problem(shelf: Shelf) -> str | None:
    """Why a namespace cannot be read, and what to do; None if it can."""
    clear = f"delete it with `{slab.clear_command(shelf.path)}`"
    if shelf.geometry is None:
        return f"its MANIFEST is missing or damaged, so its blocks cannot be trusted: {clear}"
    if not (shelf.path / "index").is_file():
        return f"its index is missing, so its blocks cannot be found: {clear}"
    return None


def _check_is_folder(directory: Path) -> None:
    if not directory.is_dir():
        problem = "is not a folder" if directory.exists() else "does not exist"
        raise ConfigError(f"{directory} {problem}: expected the folder of a disk store")


def check_is_store(directory: Path) -> None:
    """Accept a damaged MANIFEST, but refuse a file of that name that Penstock did not write."""
    _check_is_folder(directory)
    if not (directory / "MANIFEST").is_file():
        raise _no_store(directory, "it has no MANIFEST")
    try:
        fields = json.loads((directory / "MANIFEST").read_bytes())
        is_ours = isinstance(fields, dict) and "format_version" in fields
    except (ValueError, RecursionError):
        is_ours = False
    if not is_ours and not has_our_lock(directory):
        raise _no_store(directory, "its MANIFEST was not written by Penstock, and there is no LOCK")


def _no_store(directory: Path, reason: str) -> Foreign:
    return Foreign(f"{directory} holds no Penstock store ({reason}); check the path")
