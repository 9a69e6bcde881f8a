"""`penstock store`: list, check or clear a disk store or a remote store."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

import typer

from penstock.commands import JsonFlag
from penstock.errors import ConfigError

app = typer.Typer()


@app.callback(invoke_without_command=True)
def _store(context: typer.Context) -> None:
    """List, check or clear a disk store or a remote store."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Place = Annotated[
    str,
    typer.Argument(
        metavar="DIR_OR_URL",
        help="The folder set as disk.path, or the URL set as remote.url.",
        show_default=False,
    ),
]


@app.command("ls", epilog="Example: penstock store ls /var/cache/penstock --blocks")
def list_store(
    place: Place,
    blocks: Annotated[
        bool,
        typer.Option(
            "--blocks",
            help="Also list every block: slot, key and generation, or name and size in a remote "
            "store.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List what a disk store or a remote store holds, by namespace.

    For a disk store, also shows the model of each namespace and when it was last used. Only reads,
    so it is safe while servers write to the store.
    """
    _commands_for(place).show(place, blocks=blocks, as_json=as_json)


@app.command("check", epilog="Example: penstock store check /var/cache/penstock --repair")
def check_store(
    place: Place,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Remove damaged blocks, so that they are not used again."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check a store: read every block and verify its checksum.

    Exits with 0 if the store is sound, 1 if damage was found (even if it was repaired), 2 if the
    store cannot be read. Without --repair it only reads. Stop the servers that use a disk store
    before you repair it. In a remote store, only values written with the secret in
    PENSTOCK_REMOTE_SECRET can be verified.
    """
    _commands_for(place).check(place, repair=repair, as_json=as_json)


@app.command("clear", epilog="Example: penstock store clear /var/cache/penstock --yes")
def clear_store(
    place: Place,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Clear only this namespace: the 32 digits that `penstock store ls` shows.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete everything in a store, even if it is damaged or of another version.

    Deletes only Penstock's own files, or in a remote store the values whose names begin with
    penstock/1/. Refuses while a server has the disk store open.
    """
    if as_json and not yes:
        raise ConfigError("--json cannot ask for confirmation: expected --yes with it; add --yes")
    _commands_for(place).clear(place, namespace=namespace, yes=yes, as_json=as_json)


def _commands_for(place: str) -> ModuleType:
    # Imported here: each brings libraries that the other commands do not need.
    if "://" in place:
        from penstock.commands import remote_store

        return remote_store
    from penstock.commands import disk_store

    return disk_store
