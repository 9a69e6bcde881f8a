"""`penstock store`: look into a disk store or a remote one, audit it, empty it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.commands import JsonFlag

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
    """Show what a disk store or a remote one holds, by namespace.

    A folder also tells for which model each namespace is and when it was last used. Reads only,
    also while servers write to it.
    """
    if _is_url(place):
        from penstock.commands import remote_store

        remote_store.list_remote(place, names=blocks, as_json=as_json)
        return
    from penstock.commands import local_store

    local_store.list_local(Path(place), blocks=blocks, as_json=as_json)


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
    from penstock.commands import local_store

    local_store.check_local(Path(place), repair=repair, as_json=as_json)


@app.command("clear", epilog="Example: penstock store clear /var/cache/penstock --yes")
def clear_store(
    place: Place,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Only this namespace: the 32 digits that store ls shows.",
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
    from penstock.commands import local_store

    local_store.clear_local(Path(place), namespace=namespace, yes=yes, as_json=as_json)


def _is_url(place: str) -> bool:
    return "://" in place
