"""Show the results: tables for the terminal, and a page with charts and explanations."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anywhere import Anywhere
from charts import draw_first_token, draw_restart, draw_sessions, times
from first_token import NAMES, NUM_LOADS, FirstToken
from restart import Reply, Restart
from rich import box
from rich.table import Table
from sessions import Run, Shape

from penstock.units import counted

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Penstock: what offloading gained on this machine</title>
<style>
 :root {{ color-scheme: light dark; --ink: #1c2330; --paper: #fff; --line: #d5d9e0;
         --faint: #5d6675 }}
 @media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e9ef; --paper: #14181f; --line: #333b48; --faint: #9aa3b2 }} }}
 body {{ font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto;
        padding: 0 1rem; color: var(--ink); background: var(--paper) }}
 h2 {{ margin: 2.5rem 0 .5rem; font-size: 1.2rem }}
 img {{ width: 100%; height: auto; display: block }}
 table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 }}
 th, td {{ padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
          text-align: right }}
 th:first-child, td:first-child {{ text-align: left }}
 .verdict {{ font-weight: 600 }} .faint {{ color: var(--faint) }}
 .warning {{ border-left: 4px solid #c2703d; padding-left: .8rem }}
</style></head><body>
<h1>What offloading gained on this machine</h1>
<p><span class="verdict">{verdict}.</span> {claim}</p>
{notes}
{sections}
<p class="faint">{machine}</p>
</body></html>
"""
_CLAIM = (
    "Whether KV was loaded or computed, every answer is the same, token for token. Only reuse "
    "anywhere, at the end, is lossy."
)


@dataclass(frozen=True, slots=True)
class Found:
    """All results of the demo."""

    first_token: Sequence[FirstToken]
    shape: Shape
    off: Run
    on: Run
    restart: Restart
    anywhere: Anywhere
    token_bytes: int
    verdict: str
    identical: bool
    notes: Sequence[str]  # warnings: what was shortened, and how busy the machine was
    machine: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A table, for both the terminal and the page."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def rich(self) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD, title=self.title, title_justify="left", title_style="bold"
        )
        for index, header in enumerate(self.headers):
            table.add_column(header, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(header)}</th>" for header in self.headers)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def first_token_rows(rows: Sequence[FirstToken]) -> Rows:
    def cells() -> Iterator[tuple[str, ...]]:
        for row in rows:
            loaded = row.bytes_per_second
            yield (
                f"{row.num_tokens:,}",
                NAMES[row.source].removeprefix("loaded "),
                f"{row.seconds:.3f} s",
                "" if loaded is None else times(row.times_faster),
                "" if loaded is None else f"{row.num_loaded:,}",
                "" if loaded is None else f"{row.num_bytes / 1e6:,.0f} MB",
                "" if loaded is None else f"{loaded / 1e9:.2f} GB/s",
            )

    headers = ("tokens", "KV", "first token", "faster", "loaded", "bytes", "load rate")
    return Rows("First token: recomputed or loaded", headers, list(cells()))


def session_rows(shape: Shape, off: Run, on: Run) -> Rows:
    forms: Sequence[tuple[str, Callable[[Run], str]]] = (
        ("seconds", lambda run: f"{run.seconds:.1f}"),
        ("CPU seconds", lambda run: f"{run.processor_seconds:.1f}"),
        ("tokens per second, prompts and answers", lambda run: f"{run.tokens_per_second:.0f}"),
        ("first token of a later turn, mean", lambda run: f"{run.first_token_seconds:.1f} s"),
        ("preemptions", lambda run: f"{run.num_preemptions}"),
        ("tokens recomputed", lambda run: f"{run.num_recomputed:,}"),
        ("  in a later turn", lambda run: f"{run.num_again_next_turn:,}"),
        ("  after a preemption", lambda run: f"{run.num_again_preempted:,}"),
        ("tokens loaded instead", lambda run: f"{run.num_loaded:,}"),
    )
    rows = [(name, form(off), form(on)) for name, form in forms]
    title = f"{shape.num_sessions} sessions of {shape.num_turns} turns in a pool for "
    return Rows(f"{title}{shape.num_held}", ("", "offloading off", "offloading on"), rows)


def restart_rows(restart: Restart) -> Rows:
    first, resumed = restart.first, restart.resumed
    rows = [
        ("turn 1, first server", f"{first.first_token_seconds:.2f} s", *_cached(first)),
        ("turn 2, second server", f"{resumed.first_token_seconds:.2f} s", *_cached(resumed)),
        (
            "turn 2, an engine without tiers",
            f"{restart.computed_seconds:.2f} s",
            f"{resumed.num_prompt:,}",
            "0",
        ),
    ]
    headers = ("", "first token", "prompt tokens", "cached tokens")
    return Rows("Killed with kill -9 and restarted", headers, rows)


def anywhere_rows(found: Anywhere) -> Rows:
    rows = [
        ("computed, exact", f"{found.computed_seconds:.3f} s", "", "", ""),
        (
            "reused anywhere, lossy",
            f"{found.reused_seconds:.3f} s",
            times(found.computed_seconds / found.reused_seconds),
            f"{found.num_reused:,}",
            f"{found.num_mended:,}",
        ),
    ]
    headers = ("", "first token", "faster", "tokens reused", "mended")
    return Rows(_anywhere_title(found), headers, rows)


def _anywhere_title(found: Anywhere) -> str:
    return f"{found.num_documents} documents in another order, {found.num_tokens:,} tokens (lossy)"


def _on_anywhere(found: Anywhere) -> str:
    return (
        f"{found.num_documents} documents have stood in an earlier prompt. Now they come in "
        "another order: their KV is no prefix, so usually all of it is computed again. If the "
        "documents are marked, their KV is used where they stand, and only the first tokens of "
        "each, and what is not a document, are computed. This is lossy: a document's KV does not "
        f"know what stands before it. Here the first {found.num_equal} of {found.num_answer} "
        "tokens of the answers are equal. It is done only where a request asks for it: see "
        "docs/anywhere.md."
    )


def _cached(reply: Reply) -> tuple[str, str]:
    return f"{reply.num_prompt:,}", f"{reply.num_cached:,}"


def write_page(found: Found, out: Path) -> Path:
    """Draw the charts and write the page that shows them."""
    sections = [
        _section("first_token", draw_first_token(found.first_token, out), _on_first_token(found))
        + first_token_rows(found.first_token).html(),
        _section(
            "sessions", draw_sessions(found.shape, found.off, found.on, out), _on_sessions(found)
        )
        + session_rows(found.shape, found.off, found.on).html(),
        _section("restart", draw_restart(found.restart, out), _on_restart(found))
        + restart_rows(found.restart).html(),
        f"<h2>{html.escape(_anywhere_title(found.anywhere))}</h2>\n"
        f"<p>{html.escape(_on_anywhere(found.anywhere))}</p>\n"
        + anywhere_rows(found.anywhere).html(),
    ]
    page = out / "report.html"
    page.write_text(
        PAGE.format(
            verdict=html.escape(found.verdict),
            claim=_CLAIM if found.identical else "",
            notes="".join(f'<p class="warning">{html.escape(note)}</p>' for note in found.notes),
            sections="\n".join(sections),
            machine=html.escape(found.machine),
        )
    )
    return page


def _section(name: str, title: str, text: str) -> str:
    return (
        f"<h2>{html.escape(title)}</h2>\n<picture>"
        f'<source srcset="{name}-dark.png" media="(prefers-color-scheme: dark)">'
        f'<img src="{name}.png" alt="{html.escape(title)}"></picture>\n<p>{html.escape(text)}</p>\n'
    )


def _on_first_token(found: Found) -> str:
    return (
        "Each prompt is first computed from scratch while its KV is saved. Then it is sent again "
        "with an empty device pool, so that its KV is loaded from DRAM; then with DRAM emptied "
        "too, so that it is loaded from disk, bypassing the page cache if the file system allows "
        "it. After a load only the prompt's last token is computed, to get the first token of the "
        f"answer. For loads, the median of {NUM_LOADS} is shown. The KV of one token has "
        f"{found.token_bytes:,} bytes. On this machine the device is the CPU, and its pool is in "
        "DRAM too; with a GPU there is a link between them."
    )


def _on_sessions(found: Found) -> str:
    shape = found.shape
    return (
        f"{shape.num_sessions} conversations of {shape.num_turns} turns: a first prompt of "
        f"{shape.num_opening} tokens, answers of up to {shape.num_answer}, growing to about "
        f"{shape.num_longest} tokens. The device pool holds {shape.pool_tokens} tokens, or "
        f"{counted(shape.num_held, 'conversation')}. In every round all {shape.num_sessions} send "
        "a turn at once. Without offloading, the KV of a returning or preempted conversation is "
        "gone, and it is recomputed from the start. With offloading, only new tokens and partial "
        "blocks are computed. The sizes depend on this machine's speed. The two runs alternate, "
        "round by round, so that other work on the machine affects both."
    )


def _on_restart(found: Found) -> str:
    restart = found.restart
    return (
        f"penstock serve answers a turn of {restart.first.num_prompt:,} tokens and is killed with "
        f"kill -9 after {restart.num_words_before_kill} pieces of the next answer. A second "
        f"server on the same directory, ready {restart.start_seconds[1]:.1f} s after its start, "
        f"gets that turn again and finds {restart.resumed.num_cached:,} of "
        f"{restart.resumed.num_prompt:,} tokens on disk. Times are measured by the client, over "
        "HTTP; the last bar is the same prompt in an engine without tiers, in the same process."
    )


def as_results(found: Found) -> dict[str, Any]:
    """The results as plain values, for JSON."""

    def run(which: Run) -> dict[str, Any]:
        more = ("num_recomputed", "tokens_per_second")
        return asdict(which) | {name: getattr(which, name) for name in more}

    return {
        "machine": found.machine,
        "notes": list(found.notes),
        "first_token": [asdict(row) for row in found.first_token],
        "sessions": {
            "shape": asdict(found.shape),
            "off": run(found.off),
            "on": run(found.on),
        },
        "restart": asdict(found.restart),
        "anywhere": asdict(found.anywhere),
    }
