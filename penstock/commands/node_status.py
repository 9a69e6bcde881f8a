"""`penstock node-status`: what a running node holds, and who uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.commands import JsonFlag, new_table, print_fields, print_json, stdout_console
from penstock.commands.config import ConfigFile
from penstock.commands.node import Socket, find_socket
from penstock.config import load_config
from penstock.errors import PenstockError
from penstock.units import format_bytes, format_seconds, printable

EXAMPLE = "Example: penstock node-status --socket /run/penstock/node.sock --json"

_TIMEOUT_SECONDS = 10.0


class NodeSilent(PenstockError):
    """A node is not there, or does not answer."""


def node_status(
    socket: Socket = None,
    config: ConfigFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a node's models, their DRAM and blocks, and the engines that use them."""
    path = find_socket(socket, load_config(config))
    facts = _ask(path)
    if as_json:
        print_json({"socket": str(path), **facts})
        return
    dram, free, prepared = (int(facts[f"{of}_bytes"]) for of in ("dram", "free", "prepared"))
    rows = [
        ("version", f"{facts['version']} (protocol {facts['protocol']})"),
        ("process", f"{facts['pid']}, running for {format_seconds(float(facts['seconds']))}"),
        ("DRAM", f"{format_bytes(dram)}, of which no model has {format_bytes(free)}"),
        ("clients", str(facts["num_clients"])),
    ]
    if prepared < dram:
        rows.insert(3, ("allocated", f"{format_bytes(prepared)} so far"))
    print_fields(f"unix://{path}", rows)
    models = facts["models"]
    if not models:
        return
    table = new_table("model", "namespace", "DRAM", "blocks", "room for", "pinned", "clients")
    for model in models:
        table.add_row(
            printable(model["model"]),
            model["namespace"][:8],
            format_bytes(model["dram_bytes"]),
            f"{model['blocks'] - model['free_blocks']:,}",
            f"{model['blocks']:,}",
            f"{model['pinned']:,}",
            ", ".join(_names(model["clients"])) or "none",
        )
    stdout_console().print(table)


def _names(clients: list[str]) -> list[str]:
    return [printable(name) or "unnamed" for name in clients]


def _ask(path: Path) -> dict[str, Any]:
    from penstock.node.connection import ask_description, connect
    from penstock.node.wire import WireError

    try:
        channel = connect(path, _TIMEOUT_SECONDS)
    except PermissionError:
        raise NodeSilent(
            f"this user may not use the node at {path}: expected its user or its group; run as its "
            "user, or start the node with --group."
        ) from None
    except OSError as error:
        raise NodeSilent(
            f"no node is listening at {path} ({error.strerror or error}): expected one; start it "
            "with `penstock node`, or choose another with --socket."
        ) from None
    try:
        return ask_description(channel, _TIMEOUT_SECONDS)
    except WireError as error:
        raise NodeSilent(
            f"the node at {path} gives no description: {error}; look at its log, or restart it."
        ) from None
    finally:
        channel.close()
