"""The commands, one file each. This file has what they share: output as JSON or tables, progress.

Rich is imported only where it is used, because importing it slows the start of a command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]

Tick = Callable[[str, float], None]
"""Called with the current activity and the completed share, 0 to 1."""


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def stdout_console() -> Console:
    from rich.console import Console

    # Values are names, paths and numbers, which must not be read as markup or coloured.
    return Console(highlight=False, markup=False)


def new_table(*headers: str, title: str | None = None) -> Table:
    """Return a table in our style. The first column has the name of the row."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False
    )
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index == 0 else "right", overflow="fold")
    return table


def print_fields(title: str, rows: Iterable[tuple[str, RenderableType]]) -> None:
    """Print a title, then one line per field with its name and value."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", value)
    console = stdout_console()
    console.print(Text(title, style="bold"))
    console.print(table)


@contextmanager
def progress_bar() -> Iterator[Tick]:
    """Show a progress bar on stderr while the block runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _doing, _share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda doing, share: progress.update(task, description=doing, completed=share)
