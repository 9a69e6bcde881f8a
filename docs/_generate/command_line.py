"""Generate the command-line page from the Typer app: every command with its options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import markup
import typer

from penstock import cli

_HEAD = """# The command line

Every command of `penstock` with its options, generated from the program. `penstock COMMAND --help`
prints the same in a terminal. With `--json`, most commands print only JSON on stdout.

"""


def page() -> str:
    root = typer.main.get_command(cli.app)
    commands = list(_commands(root, "penstock"))
    lines = [_HEAD, *_exit_codes(), "## Commands", ""]
    rows = [
        (f"[`{name}`](#{_anchor(name)})", markup.cell(_first_paragraph(command)))
        for name, command, _ in commands
    ]
    lines += markup.table(("command", "what it does"), rows)
    for name, command, context in commands:
        lines += [f"## `{name}` {{ #{_anchor(name)} }}", "", *_command(command, context)]
    return "\n".join(lines)


def _commands(group: Any, name: str, parent: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Yield every command that is not a group, by its full name, in the order of `--help`."""
    context = group.context_class(group, info_name=name, parent=parent)
    for word, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            for full_name, *rest in _commands(command, word, context):
                yield (f"{name} {full_name}", *rest)
        else:
            own = command.context_class(command, info_name=word, parent=context)
            yield f"{name} {word}", command, own


def _command(command: Any, context: Any) -> list[str]:
    lines = ["```text", command.get_usage(context).removeprefix("Usage: "), "```", ""]
    lines += [markup.prose(command.help or ""), ""]
    panels: dict[str, list[tuple[str, str, str]]] = {}
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if record is None or "--help" in option.opts:
            continue
        is_argument = option.param_type_name == "argument"
        panel = getattr(option, "rich_help_panel", None) or (
            "Arguments" if is_argument else "Options"
        )
        panels.setdefault(panel, []).append(_row(*record, is_argument=is_argument))
    for panel, rows in panels.items():
        lines += [f"**{panel}**", "", *markup.table(("", "", "default and limits"), rows)]
    if command.epilog:
        examples = re.findall(r"Example: (.*)", command.epilog)
        lines += ["```sh", *examples, "```", ""]
    return lines


def _row(names: str, text: str, *, is_argument: bool) -> tuple[str, str, str]:
    """Split off what Typer appends to the help text: `[default: 8000; 0<=x<=65535]`."""
    match = re.fullmatch(r"(.*?)(?:\s*\[([^\[\]]*(?:\[[^\]]*\])?[^\[\]]*)\])?", text, re.DOTALL)
    help_text, extra = (match[1], match[2] or "") if match else (text, "")
    if is_argument:
        names = names.split(" <")[0]
    parts = [_limit(part) for part in extra.split("; ") if part]
    return markup.code(names), markup.cell(help_text), ", ".join(parts)


def _limit(part: str) -> str:
    kind, _, value = part.partition(": ")
    match kind:
        case "default":
            return markup.code(value)
        case "env var":
            return f"environment: {markup.code(value)}"
    bounds = part.replace("<=x<=", " to ").replace("x>=", "at least ").replace("x<=", "at most ")
    return markup.cell(bounds)


def _exit_codes() -> list[str]:
    rows = re.findall(r"^(\d+)\s+(.*)$", cli.__doc__ or "", re.MULTILINE)
    assert rows, "the docstring of penstock/cli.py no longer lists the exit codes"
    return markup.table(("exit code", ""), [(code, markup.cell(text)) for code, text in rows])


def _first_paragraph(command: Any) -> str:
    return (command.help or "").split("\n\n")[0]


def _anchor(name: str) -> str:
    return name.removeprefix("penstock ").replace(" ", "-")
