"""One file a command; here, what they share: JSON or a table on stdout, progress on stderr.

Rich is imported where something is drawn, so that a command that draws nothing starts faster.
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

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")
]

Tick = Callable[[str, float], None]
"""What is going on, and the share of the whole that is done, 0 to 1."""


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def stdout_console() -> Console:
    from rich.console import Console

    # Values are names, paths and numbers: nothing in them is markup, and none wants colouring.
    return Console(highlight=False, markup=False)


def new_table(*headers: str, title: str | None = None) -> Table:
    """A table in the house style; the first column is the name of the row."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False
    )
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index == 0 else "right", overflow="fold")
    return table


def print_fields(title: str, rows: Iterable[tuple[str, RenderableType]]) -> None:
    """A title, and below it a line a field: its name and its value."""
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
    """A bar on stderr while the block runs, gone after it; nothing where stderr is no terminal."""
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
