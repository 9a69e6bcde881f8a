"""Read trace files: Mooncake, Azure, Bailian, request logs of vLLM and SGLang, and our record."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.sim.formats import azure, bailian, mooncake, record, requests, sglang, vllm
from penstock.sim.formats.entries import MAX_BLOCK_TOKENS
from penstock.sim.formats.lines import TraceFile
from penstock.sim.formats.record import RecordedRequest, TraceRecord, read_record, write_trace
from penstock.sim.trace import Trace

__all__ = ["FORMATS", "RecordedRequest", "TraceRecord", "read_record", "read_trace", "write_trace"]


@dataclass(frozen=True, slots=True)
class Format:
    description: str
    recognises: Callable[[list[str]], bool]  # given the file's first lines
    read: Callable[[TraceFile, int | None], Trace]


def _by_fields(recognises: Callable[[dict[str, Any]], bool]) -> Callable[[list[str]], bool]:
    """A check of the first line, which must be a JSON object."""

    def look(head: list[str]) -> bool:
        try:
            fields = json.loads(head[0])
        except (ValueError, RecursionError):
            return False
        return isinstance(fields, dict) and recognises(fields)

    return look


# Tried in this order.
FORMATS: dict[str, Format] = {
    "record": Format(
        "what `penstock serve --record` writes", _by_fields(record.recognises), record.read
    ),
    "mooncake": Format(
        "Mooncake's JSON lines: hash_ids of 512 tokens, times in milliseconds",
        _by_fields(mooncake.recognises),
        mooncake.read,
    ),
    "bailian": Format(
        "Alibaba's Bailian JSON lines: hash_ids of 16 tokens, times in seconds",
        _by_fields(bailian.recognises),
        bailian.read,
    ),
    "sglang": Format(
        "SGLang's request log in JSON, or its per-request metrics file",
        _by_fields(sglang.recognises),
        sglang.read,
    ),
    "requests": Format(
        "JSON lines with a time and either token ids or text",
        _by_fields(requests.recognises),
        requests.read,
    ),
    "azure": Format(
        "Azure's CSV: times and lengths but no content, so there are no hits",
        azure.recognises,
        azure.read,
    ),
    "vllm": Format("vLLM's log with --enable-log-requests", vllm.recognises, vllm.read),
}


def read_trace(path: Path, *, format: str | None = None, block_tokens: int | None = None) -> Trace:
    """Read a trace, plain or gzipped. Unless `format` is given, it is detected from the content.

    `block_tokens` overrides the format's default. Raises TraceError with file and line if the file
    is not valid.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"there is no trace format {format!r}: expected {', '.join(FORMATS)}.")
    if block_tokens is not None and not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ConfigError(f"block_tokens is {block_tokens}: expected 1 to {MAX_BLOCK_TOKENS}.")
    file = TraceFile(Path(path))
    head = file.head()
    if not head:
        raise file.fault_of_all("it is empty: expected at least one request.")
    chosen = FORMATS[format] if format is not None else _recognise(file, head)
    trace = chosen.read(file, block_tokens)
    if not trace.requests:
        raise file.fault_of_all("it contains no request: expected at least one.")
    return trace


def _recognise(file: TraceFile, head: list[str]) -> Format:
    for format in FORMATS.values():
        if format.recognises(head):
            return format
    raise file.fault(
        1,
        f"this is not a trace in a known format: expected one of {', '.join(FORMATS)}; give the "
        "format to see what is wrong.",
    )
