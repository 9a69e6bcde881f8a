"""`penstock store`: look into a disk store or a remote one, audit it, empty it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.commands import (
    JsonFlag,
    new_table,
    print_fields,
    print_json,
    progress_bar,
    stdout_console,
)
from penstock.errors import ConfigError
from penstock.units import format_bytes

# The store itself is imported by each command: it brings what the other commands do not need.

app = typer.Typer()


@app.callback(invoke_without_command=True)
def _store(context: typer.Context) -> None:
    """Look into a disk store or a remote one, audit it, empty it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Place = Annotated[
    str,
    typer.Argument(
        metavar="DIR_OR_URL",
        help="The folder that disk.path names, or the URL that remote.url names.",
        show_default=False,
    ),
]
_MAX_SHOWN = 50
_KEY_DIGITS = 16


@app.command("ls", epilog="Example: penstock store ls /var/cache/penstock --blocks")
def list_store(
    place: Place,
    blocks: Annotated[
        bool,
        typer.Option(
            "--blocks",
            help="Also list every block: slot, key, generation; in a remote store name and size.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what a disk store or a remote one holds. Reads only, also while servers write to it."""
    if _is_url(place):
        from penstock.commands import remote_store

        remote_store.list_remote(place, names=blocks, as_json=as_json)
        return
    from penstock.commands import audit

    directory = Path(place)
    geometry = audit.read_manifest(directory)
    audit.check_index(directory)
    num_slots, num_used, num_damaged = audit.count_slots(directory), 0, 0
    held = []
    with progress_bar() as tick:
        for entry in audit.read_index(directory):
            num_damaged += entry.damaged
            if entry.record is not None and entry.record.held:
                num_used += 1
                if blocks:
                    held.append((entry.slot, entry.record.key.hex(), entry.record.generation))
            if entry.slot % audit.RECORDS_AT_ONCE == 0:
                tick("reading the index", entry.slot / num_slots)
    writer = audit.find_writer(directory)
    num_free = num_slots - num_used
    num_disk_bytes = audit.disk_bytes(directory)
    if as_json:
        facts: dict[str, object] = {
            "directory": str(directory),
            "format_version": geometry.format_version,
            "namespace": geometry.namespace,
            "block_bytes": geometry.block_bytes,
            "block_tokens": geometry.block_tokens,
            "num_slots": num_slots,
            "num_used": num_used,
            "num_free": num_free,
            "num_damaged_records": num_damaged,
            "capacity_bytes": num_slots * geometry.block_bytes,
            "used_bytes": num_used * geometry.block_bytes,
            "free_bytes": num_free * geometry.block_bytes,
            "disk_bytes": num_disk_bytes,
            "writer": writer,
        }
        if blocks:
            names = ("slot", "key", "generation")
            facts["blocks"] = [dict(zip(names, block, strict=True)) for block in held]
        print_json(facts)
        return

    def count(num_blocks: int) -> str:
        return f"{num_blocks:,} blocks, {format_bytes(num_blocks * geometry.block_bytes)}"

    block_size = f"{geometry.block_tokens:,} tokens, {format_bytes(geometry.block_bytes)}"
    damaged = [
        ("damaged", f"{num_damaged:,} record{'s' * (num_damaged > 1)}; see penstock store check")
    ]
    print_fields(
        str(directory),
        [
            ("format version", str(geometry.format_version)),
            ("namespace", geometry.namespace),
            ("block", block_size),
            ("capacity", count(num_slots)),
            ("used", f"{count(num_used)} ({num_used / max(num_slots, 1):.0%})"),
            ("free", count(num_free)),
            *(damaged if num_damaged else []),
            ("on disk", format_bytes(num_disk_bytes)),
            ("writer", writer or "none"),
        ],
    )
    if blocks:
        # Plain lines, not a table: there may be millions.
        typer.echo(f"\n{'slot':>10}  {'key':<{_KEY_DIGITS + 1}}  generation")
        for slot, key, generation in held:
            typer.echo(f"{slot:>10}  {key[:_KEY_DIGITS]}…  {generation}")


@app.command("check", epilog="Example: penstock store check /var/cache/penstock --repair")
def check_store(
    place: Place,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Clear what is damaged, so that it is not offered again."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Audit a store: every record or head, and every block against its checksum.

    Exits with 0 if all is sound, 1 if damage was found (repaired or not), 2 if it cannot be read.
    Reads only, unless it repairs; for that no server may have a disk store open. In a remote store
    only values of the secret in PENSTOCK_REMOTE_SECRET can be verified.
    """
    if _is_url(place):
        from penstock.commands import remote_store

        remote_store.check_remote(place, repair=repair, as_json=as_json)
        return
    from penstock.commands import audit
    from penstock.stores.disk import DiskStore

    directory = Path(place)
    geometry = audit.read_manifest(directory)
    audit.check_index(directory)
    num_slots = audit.count_slots(directory)
    repair = repair and num_slots > 0
    store = DiskStore(directory, geometry.spec, None, read_only=not repair)
    try:
        with progress_bar() as tick:
            found = audit.audit(store, geometry, lambda share: tick("checking", share))
        num_cleared = audit.clear_records(store, found.damages) if repair else 0
    finally:
        store.close()
    damages = found.damages
    if as_json:
        print_json(
            {
                "directory": str(directory),
                "sound": not damages,
                "num_slots": num_slots,
                "num_ok": found.num_ok,
                "num_corrupt": len(damages),
                "num_empty": found.num_empty,
                "num_changed": found.num_changed,
                "num_cleared": num_cleared,
                "damaged": [
                    {
                        "slot": damage.slot,
                        "key": damage.key.hex() if damage.key is not None else None,
                        "problem": damage.problem,
                    }
                    for damage in damages
                ],
            }
        )
    else:
        changed = [("changed meanwhile", f"{found.num_changed:,}")] if found.num_changed else []
        cleared = [("cleared", f"{num_cleared:,}")] if repair else []
        print_fields(
            f"{directory}: {'damage was found' if damages else 'sound'}",
            [
                ("ok", f"{found.num_ok:,}"),
                ("corrupt", f"{len(damages):,}"),
                ("empty", f"{found.num_empty:,}"),
                *changed,
                *cleared,
            ],
        )
        if damages:
            table = new_table("slot", "key", "problem")
            table.columns[1].justify = table.columns[2].justify = "left"
            for damage in damages[:_MAX_SHOWN]:
                key = f"{damage.key.hex()[:_KEY_DIGITS]}…" if damage.key is not None else "–"
                table.add_row(str(damage.slot), key, damage.problem)
            stdout_console().print(table)
            if len(damages) > _MAX_SHOWN:
                typer.echo(f"and {len(damages) - _MAX_SHOWN:,} more; --json lists all")
            if not repair:
                typer.echo(f"Clear them with: penstock store check {directory} --repair")
    if damages:
        raise typer.Exit(1)


@app.command("clear", epilog="Example: penstock store clear /var/cache/penstock --yes")
def clear_store(
    place: Place,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Of a remote store, only this namespace: 32 digits that store ls shows.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Empty a store, also one that is damaged or of another version.

    Deletes the store's own files, or in a remote store the values whose name begins with
    penstock/1/, and nothing else. Refuses while a server has a disk store open.
    """
    if _is_url(place):
        from penstock.commands import remote_store

        remote_store.clear_remote(place, namespace=namespace, yes=yes, as_json=as_json)
        return
    if namespace is not None:
        raise ConfigError(
            "--namespace is given with a folder, which holds one namespace: expected it with the "
            "URL of a remote store; leave it out"
        )
    from penstock.commands import audit
    from penstock.stores.directory import lock_directory, remove_store_files

    if as_json and not yes:
        raise ConfigError("--json leaves no place for a question: expected --yes with it")
    directory = Path(place)
    audit.check_is_store(directory)
    # Taken before asking: what is asked about is then what is deleted.
    lock = lock_directory(directory)
    try:
        size = format_bytes(audit.disk_bytes(directory))
        if not yes and not typer.confirm(f"Delete all {size} of KV in {directory}?", err=True):
            raise typer.Abort
        freed_bytes = remove_store_files(directory)
    finally:
        os.close(lock)
    if as_json:
        print_json({"directory": str(directory), "freed_bytes": freed_bytes})
    else:
        typer.echo(f"{directory} is empty; {format_bytes(freed_bytes)} were given back.")


def _is_url(place: str) -> bool:
    return "://" in place
