"""`penstock store` for a disk store: list, check and clear its namespaces."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from penstock.audits.quarantine import quarantine_files
from penstock.codecs.names import RAW
from penstock.commands import Tick, disk_audit, print_fields, print_json, progress_bar
from penstock.commands.damage_table import print_damages
from penstock.commands.disk_audit import DiskAudit, DiskDamage
from penstock.errors import ConfigError
from penstock.stores import folder
from penstock.stores.directory import lock_directory, remove_store_files
from penstock.stores.disk import DiskStore
from penstock.stores.folder import Shelf
from penstock.stores.shared_cap import remove_store
from penstock.stores.slab import FORMAT_VERSION, Geometry
from penstock.units import counted, format_bytes, printable

_KEY_DIGITS = 16


def show(place: str, *, blocks: bool, as_json: bool) -> None:
    directory = Path(place)
    shelves = disk_audit.shelves(directory)
    with progress_bar() as tick:
        listed = [_list_store(shelf, tick, blocks=blocks) for shelf in shelves]
    writer = folder.find_writer(directory)
    num_disk_bytes = sum(shelf.disk_bytes for shelf in shelves)
    if as_json:
        facts = {
            "directory": str(directory),
            "format_version": FORMAT_VERSION,
            "writer": writer,
            "disk_bytes": num_disk_bytes,
            "quarantines": [str(path) for path in quarantine_files(directory)],
            "namespaces": listed,
        }
        print_json(facts)
        return
    rows = [
        ("namespaces", f"{len(shelves):,}"),
        ("on disk", format_bytes(num_disk_bytes)),
        ("writer", writer or "none"),
        *(("quarantine", str(path)) for path in quarantine_files(directory)),
    ]
    print_fields(str(directory), rows)
    for shelf, found in zip(shelves, listed, strict=True):
        typer.echo()
        print_fields(shelf.title, _rows(shelf, found))
        if blocks:
            # Plain lines, not a table: there may be millions of blocks.
            typer.echo(f"\n{'slot':>10}  {'key':<{_KEY_DIGITS + 1}}  generation")
            for block in found.get("blocks") or ():
                key = block["key"][:_KEY_DIGITS]
                typer.echo(f"{block['slot']:>10}  {key}…  {block['generation']}")


def _list_store(shelf: Shelf, tick: Tick, *, blocks: bool) -> dict[str, Any]:
    problem, geometry = disk_audit.find_problem(shelf), shelf.geometry
    facts: dict[str, Any] = {
        "namespace": _namespace(shelf),
        "description": None if geometry is None else geometry.description,
        "last_used": _when(shelf.last_used),
        "disk_bytes": shelf.disk_bytes,
        "problem": problem,
    }
    if problem or geometry is None:
        return facts
    num_slots, num_used, num_damaged = disk_audit.count_slots(shelf.path), 0, 0
    held = []
    for entry in disk_audit.read_index(shelf.path):
        num_damaged += entry.damaged
        if entry.record is not None and entry.record.held:
            num_used += 1
            if blocks:
                held.append((entry.slot, entry.record.key.hex(), entry.record.generation))
        if entry.slot % disk_audit.RECORDS_AT_ONCE == 0:
            tick(f"reading the index of {shelf.title}", entry.slot / num_slots)
    num_free = num_slots - num_used
    facts |= {
        "block_bytes": geometry.block_bytes,
        "block_tokens": geometry.block_tokens,
        "codec": geometry.description.get("codec", RAW),
        "num_slots": num_slots,
        "num_used": num_used,
        "num_free": num_free,
        "capacity_tokens": num_slots * geometry.block_tokens,
        "used_tokens": num_used * geometry.block_tokens,
        "num_damaged_records": num_damaged,
        "capacity_bytes": num_slots * geometry.block_bytes,
        "used_bytes": num_used * geometry.block_bytes,
        "free_bytes": num_free * geometry.block_bytes,
    }
    if blocks:
        names = ("slot", "key", "generation")
        facts["blocks"] = [dict(zip(names, block, strict=True)) for block in held]
    return facts


def _namespace(shelf: Shelf) -> str:
    return shelf.namespace if shelf.geometry is None else shelf.geometry.namespace


def _rows(shelf: Shelf, found: dict[str, Any]) -> list[tuple[str, str]]:
    head = [("namespace", shelf.namespace)]
    tail = [("on disk", format_bytes(shelf.disk_bytes)), ("last used", found["last_used"])]
    geometry = shelf.geometry
    if geometry is None or found["problem"]:
        return [*head, ("problem", found["problem"]), *tail]
    num_slots, num_used = found["num_slots"], found["num_used"]
    num_damaged = found["num_damaged_records"]
    damaged = f"{counted(num_damaged, 'record')}; run penstock store check"
    shown = ("model", "dtype", "block_tokens")  # shown in the title and in the "block" row
    return [
        *head,
        *(
            (printable(name), printable(text))
            for name, text in geometry.description.items()
            if name not in shown
        ),
        (
            "block",
            f"{counted(geometry.block_tokens, 'token')}, {format_bytes(geometry.block_bytes)}",
        ),
        ("capacity", _count(num_slots, geometry)),
        ("used", f"{_count(num_used, geometry)} ({num_used / max(num_slots, 1):.0%})"),
        *([("damaged", damaged)] if num_damaged else []),
        *tail,
    ]


def _count(num_blocks: int, geometry: Geometry) -> str:
    tokens = counted(num_blocks * geometry.block_tokens, "token")
    size = format_bytes(num_blocks * geometry.block_bytes)
    return f"{counted(num_blocks, 'block')}, {tokens}, {size}"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def check(place: str, *, repair: bool, as_json: bool) -> None:
    directory = Path(place)
    shelves = disk_audit.shelves(directory)
    lock = lock_directory(directory) if repair else None
    try:
        with progress_bar() as tick:
            checked = [_check_store(shelf, tick, repair=repair) for shelf in shelves]
    finally:
        if lock is not None:
            os.close(lock)
    num_damages = sum(len(found.damages) for found in checked)
    if as_json:
        _print_check(directory, shelves, checked)
    else:
        print_fields(
            f"{directory}: {'damage found' if num_damages else 'sound'}",
            [
                ("namespaces", f"{len(shelves):,}"),
                ("ok", f"{sum(found.num_ok for found in checked):,}"),
                ("corrupt", f"{num_damages:,}"),
                ("empty", f"{sum(found.num_empty for found in checked):,}"),
                *_if_any("changed during the check", sum(found.num_changed for found in checked)),
                *_if_any("cleared", sum(found.num_cleared for found in checked)),
            ],
        )
        for shelf, found in zip(shelves, checked, strict=True):
            if found.damages:
                rows = [_damage_row(damage) for damage in found.damages]
                print_damages(("slot", "key", "problem"), rows, shelf.title)
        if num_damages and not repair:
            typer.echo(f"Remove the damaged blocks with: penstock store check {directory} --repair")
    if num_damages:
        raise typer.Exit(1)


def _damage_row(damage: DiskDamage) -> tuple[str, str, str]:
    key = "–" if damage.key is None else f"{damage.key.hex()[:_KEY_DIGITS]}…"
    return "–" if damage.slot is None else str(damage.slot), key, damage.problem


def _if_any(name: str, count: int) -> list[tuple[str, str]]:
    return [(name, f"{count:,}")] if count else []


def _check_store(shelf: Shelf, tick: Tick, *, repair: bool) -> DiskAudit:
    if (problem := disk_audit.find_problem(shelf)) is not None:
        return DiskAudit(damages=[DiskDamage(None, None, problem)])
    geometry = shelf.geometry
    assert geometry is not None
    repair = repair and disk_audit.count_slots(shelf.path) > 0
    store = DiskStore(shelf.path, geometry.spec, None, read_only=not repair)
    try:
        found = disk_audit.audit(
            store, geometry, lambda share: tick(f"checking {shelf.title}", share)
        )
        if repair:
            found.num_cleared = disk_audit.clear_records(store, found.damages)
    finally:
        store.close()
    return found


def _print_check(directory: Path, shelves: list[Shelf], checked: list[DiskAudit]) -> None:
    print_json(
        {
            "directory": str(directory),
            "sound": not any(found.damages for found in checked),
            "namespaces": [
                {
                    "namespace": _namespace(shelf),
                    "num_ok": found.num_ok,
                    "num_corrupt": len(found.damages),
                    "num_empty": found.num_empty,
                    "num_changed": found.num_changed,
                    "num_cleared": found.num_cleared,
                    "damaged": [
                        {
                            "slot": damage.slot,
                            "key": damage.key.hex() if damage.key is not None else None,
                            "problem": damage.problem,
                        }
                        for damage in found.damages
                    ],
                }
                for shelf, found in zip(shelves, checked, strict=True)
            ],
        }
    )


def clear(place: str, *, namespace: str | None, yes: bool, as_json: bool) -> None:
    directory = Path(place)
    disk_audit.check_is_store(directory)
    # Locked before asking, so that exactly what the question names is deleted.
    lock = lock_directory(directory)
    try:
        paths = folder.store_paths(directory)
        if namespace is not None:
            paths = [_find_namespace(directory, paths, namespace)]
        num_bytes = sum(map(folder.disk_bytes, paths if namespace else [directory, *paths]))
        what = f"of {folder.look_at(paths[0]).title} " if namespace else ""
        question = f"Delete all {format_bytes(num_bytes)} of KV {what}in {directory}?"
        if not yes and not typer.confirm(question, err=True):
            raise typer.Abort
        freed_bytes = sum(map(remove_store, paths))
        if namespace is None:
            freed_bytes += remove_store_files(directory)
    finally:
        os.close(lock)
    if as_json:
        print_json({"directory": str(directory), "freed_bytes": freed_bytes})
    elif namespace is None:
        typer.echo(f"Cleared {directory}: {format_bytes(freed_bytes)} freed.")
    else:
        typer.echo(f"Deleted {paths[0]}: {format_bytes(freed_bytes)} freed.")


def _find_namespace(directory: Path, paths: list[Path], namespace: str) -> Path:
    found = [path for path in paths if namespace and path.name == namespace[: len(path.name)]]
    if not found:
        names = ", ".join(path.name for path in paths) or "none"
        raise ConfigError(
            f"--namespace is {namespace[:80]!r}, which {directory} does not hold: expected one of "
            f"those that `penstock store ls {directory}` shows ({names})"
        )
    return found[0]
