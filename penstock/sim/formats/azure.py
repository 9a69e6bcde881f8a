"""Azure's LLM inference traces of 2023 and 2024: arrival times and lengths, no content.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

Because the content is unknown, every request gets unique blocks and there are no hits. Such a trace
shows load, queueing and how many sessions fit, but not the benefit of a cache.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from penstock.sim.formats.entries import ArrivalOrder, Entry
from penstock.sim.formats.lines import TraceFile
from penstock.sim.formats.naming import own_names
from penstock.sim.trace import Trace, TraceRequest
from penstock.units import counted

BLOCK_TOKENS = 128  # any value works: no two blocks are equal
_COLUMNS = (
    ("timestamp",),
    ("contexttokens", "prompttokens", "inputtokens"),
    ("generatedtokens", "outputtokens", "completiontokens"),
)
_EXPECTED = "TIMESTAMP, ContextTokens (or PromptTokens) and GeneratedTokens (or OutputTokens)"


def recognises(head: list[str]) -> bool:
    return _places(_split(head[0])) is not None


def read(file: TraceFile, block_tokens: int | None) -> Trace:
    block_tokens = block_tokens or BLOCK_TOKENS
    requests: list[TraceRequest] = []
    arrivals = ArrivalOrder()
    for entry in _rows(file):
        arrival = arrivals.add(entry, "TIMESTAMP", entry.moment("TIMESTAMP"))
        num_input, num_output = entry.count("ContextTokens"), entry.count("GeneratedTokens")
        num_prompt = num_input // block_tokens
        num_blocks = max(num_prompt, (num_input + num_output - 1) // block_tokens)
        names = own_names("azure", entry.number, num_blocks)
        requests.append(
            TraceRequest(arrival, num_input, num_output, names[:num_prompt], names[num_prompt:])
        )
    return Trace(file.name, block_tokens, tuple(requests))


def _rows(file: TraceFile) -> Iterator[Entry]:
    places: tuple[int, ...] | None = None
    for line in file.lines():
        cells = _split(line.text)
        if places is None:
            places = _places(cells)
            if places is None:
                raise file.fault(line.number, f"expected a header with the columns {_EXPECTED}.")
            continue
        if len(cells) <= max(places):
            columns = f"only {counted(len(cells), 'column')}"
            why = "the last line is cut off" if line.is_cut else columns
            raise file.fault(line.number, f"{why}: expected {_EXPECTED}.")
        when, num_input, num_output = (cells[place] for place in places)
        tokens = {"ContextTokens": _number(num_input), "GeneratedTokens": _number(num_output)}
        yield Entry(file, line.number, {"TIMESTAMP": when, **tokens})


def _split(text: str) -> list[str]:
    return next(csv.reader([text]), [])


def _places(cells: list[str]) -> tuple[int, ...] | None:
    """The positions of the columns; None if one is missing."""
    known = ["".join(cell.split()).replace("_", "").lower() for cell in cells]
    found = [
        next((known.index(name) for name in names if name in known), None) for names in _COLUMNS
    ]
    places = tuple(place for place in found if place is not None)
    return places if len(places) == len(_COLUMNS) else None


def _number(cell: str) -> int | str:
    try:
        return int(cell)
    except ValueError:
        return cell
