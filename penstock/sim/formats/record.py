"""Our own record: written by `penstock serve --record`, or by `write_trace` from any trace.

    {"penstock_record": 1, "block_tokens": 64, "model": "smollm2-135m", "started_seconds":
     1754308301.02, "settings": {…}}
    {"arrival_seconds": 0.52, "input_tokens": 130, "output_tokens": 40, "prompt_blocks":
     ["9f…", "07…"], "output_blocks": ["c4…"], "session": "51d0…", "hit_tokens": {"device": 64},
     "first_token_seconds": 0.03, "total_seconds": 0.81, "finish_reason": "stop"}

A prompt with segments that may be reused anywhere (docs/anywhere.md) has two more fields:

    "segments": [{"start": 70, "blocks": ["aa…"], "link_tokens": 32}], "plain_blocks": ["9f…", …]

Its `prompt_blocks` depend on the segments; `plain_blocks` are those of the same tokens without
marks. A segment's `blocks` are those of its tokens alone. `link_tokens` or `blend_share` say how it
is mended.

A block's name has 32 hexadecimal digits, or 64 if it is not shortened. Requests are written when
they end, so they are sorted here. A server that appends to the file writes another header: from
there on, times count from that server's start, and no name equals an earlier one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from blake3 import blake3

from penstock.errors import TraceError
from penstock.sim.formats.entries import MAX_BLOCK_TOKENS, Entry, entries
from penstock.sim.formats.lines import TraceFile
from penstock.sim.trace import Trace, TraceRequest, TraceSegment
from penstock.types import KEY_BYTES, BlockKey, Tier

VERSION = 1
NAME_BYTES = 16  # of a name that a server writes


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request and its measured outcome, which only a server's record has."""

    request: TraceRequest
    hit_tokens: Mapping[Tier, int] = field(default_factory=dict)  # prompt tokens found in each tier
    first_token_seconds: float | None = None  # since its arrival
    total_seconds: float | None = None
    finish_reason: str = ""
    num_reused_tokens: int = 0  # of segments, whose KV was used where they stand
    num_mended_tokens: int = 0  # of the same segments, computed


@dataclass(frozen=True, slots=True)
class TraceRecord:
    name: str
    block_tokens: int
    model: str
    settings: Mapping[str, Any]  # the server's, under its own names
    requests: tuple[RecordedRequest, ...]  # in order of arrival

    @property
    def trace(self) -> Trace:
        return Trace(self.name, self.block_tokens, tuple(each.request for each in self.requests))


def recognises(fields: dict[str, Any]) -> bool:
    return "penstock_record" in fields


def read(file: TraceFile, block_tokens: int | None) -> Trace:
    trace = _read(file).trace
    if block_tokens not in (None, trace.block_tokens):
        raise file.fault_of_all(
            f"block_tokens is {block_tokens}, but the record's blocks have {trace.block_tokens} "
            "tokens and cannot be split differently: leave block_tokens out."
        )
    return trace


def read_record(path: Path) -> TraceRecord:
    """Read a record with the outcome of each request. Raises TraceError."""
    record = _read(TraceFile(path))
    if not record.requests:
        raise TraceError(f"{path}: it contains no request: expected at least one.")
    return record


def heading(
    block_tokens: int, *, model: str = "", started_seconds: float = 0.0, settings: object = None
) -> str:
    fields = {
        "penstock_record": VERSION,
        "block_tokens": block_tokens,
        "model": model,
        "started_seconds": started_seconds,
        "settings": settings or {},
    }
    return json.dumps(fields) + "\n"


def request_line(recorded: RecordedRequest, name: Callable[[BlockKey], str] = bytes.hex) -> str:
    """One request as a line, with the names of its blocks."""
    request = recorded.request
    fields: dict[str, Any] = {
        "arrival_seconds": request.arrival_seconds,
        "input_tokens": request.num_input_tokens,
        "output_tokens": request.num_output_tokens,
        "prompt_blocks": list(map(name, request.prompt_blocks)),
        "output_blocks": list(map(name, request.output_blocks)),
        "session": request.session,
    }
    if request.segments:
        fields["segments"] = [_segment_fields(each, name) for each in request.segments]
        fields["plain_blocks"] = list(map(name, request.plain_blocks))
    if recorded.total_seconds is not None:
        fields["hit_tokens"] = {tier.label: num for tier, num in recorded.hit_tokens.items()}
        if recorded.first_token_seconds is not None:
            fields["first_token_seconds"] = recorded.first_token_seconds
        fields["total_seconds"] = recorded.total_seconds
        fields["finish_reason"] = recorded.finish_reason
        if request.segments:
            fields["reused_tokens"] = recorded.num_reused_tokens
            fields["mended_tokens"] = recorded.num_mended_tokens
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _segment_fields(segment: TraceSegment, name: Callable[[BlockKey], str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"start": segment.start, "blocks": list(map(name, segment.blocks))}
    if segment.num_first_tokens:
        fields["link_tokens"] = segment.num_first_tokens
    if segment.blend_share:
        fields["blend_share"] = segment.blend_share
    return fields


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as a record, gzipped if the name ends in .gz. An existing file is replaced."""
    with cast("IO[bytes]", gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb")) as f:
        f.write(heading(trace.block_tokens, model=trace.name).encode())
        for request in trace.requests:
            f.write(request_line(RecordedRequest(request)).encode())


class _Names(dict[str, BlockKey]):
    """Keys by name; equal names share one key. Raises ValueError for an invalid name."""

    def __missing__(self, text: str) -> BlockKey:
        raw = bytes.fromhex(text)
        if len(raw) == NAME_BYTES:
            raw = blake3(raw).digest()
        if len(raw) != KEY_BYTES:
            raise ValueError(text)
        self[text] = name = BlockKey(raw)
        return name


def _read(file: TraceFile) -> TraceRecord:
    block_tokens, started, model = 0, 0.0, ""
    settings: Mapping[str, Any] = {}
    offset = 0.0
    names = _Names()
    found: list[RecordedRequest] = []
    for entry in entries(file):
        if "penstock_record" not in entry.fields:
            if not block_tokens:
                raise entry.fault(
                    "expected a header with `penstock_record` before the first request."
                )
            found.append(_request(entry, names, offset, block_tokens))
            continue
        again = _block_tokens(entry)
        if block_tokens and again != block_tokens:
            raise entry.fault(
                f"from here on blocks have {again} tokens, before {block_tokens}: expected one "
                "size per file; split the file here."
            )
        begin = entry.duration("started_seconds")
        if not block_tokens:
            started, model = begin, str(entry.fields.get("model", ""))
            settings = entry.inner("settings").fields if entry.first_of("settings") else {}
        offset, block_tokens = max(0.0, begin - started), again
    found.sort(key=lambda each: each.request.arrival_seconds)
    return TraceRecord(file.name, block_tokens, model, settings, tuple(found))


def _block_tokens(entry: Entry) -> int:
    version = entry.fields["penstock_record"]
    if version != VERSION:
        raise entry.fault(
            f"the record has version {version!r}: expected {VERSION}; read it with the version of "
            "Penstock that wrote it."
        )
    block_tokens = entry.count("block_tokens")
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise entry.fault(f"`block_tokens` is {block_tokens}: expected 1 to {MAX_BLOCK_TOKENS}.")
    return block_tokens


def _request(entry: Entry, names: _Names, offset: float, block_tokens: int) -> RecordedRequest:
    segments = _segments(entry, names, block_tokens) if "segments" in entry.fields else ()
    request = TraceRequest(
        entry.duration("arrival_seconds") + offset,
        entry.count("input_tokens"),
        entry.count("output_tokens"),
        _blocks(entry, "prompt_blocks", names),
        _blocks(entry, "output_blocks", names) if "output_blocks" in entry.fields else (),
        entry.text("session") if "session" in entry.fields else "",
        segments,
        _blocks(entry, "plain_blocks", names) if segments else (),
    )
    if "total_seconds" not in entry.fields:
        return RecordedRequest(request)
    has_first = entry.first_of("first_token_seconds") is not None
    return RecordedRequest(
        request,
        _hits(entry),
        entry.duration("first_token_seconds") if has_first else None,
        entry.duration("total_seconds"),
        entry.text("finish_reason") if "finish_reason" in entry.fields else "",
        entry.count("reused_tokens") if "reused_tokens" in entry.fields else 0,
        entry.count("mended_tokens") if "mended_tokens" in entry.fields else 0,
    )


def _segments(entry: Entry, names: _Names, block_tokens: int) -> tuple[TraceSegment, ...]:
    given = entry.require("segments", "a list of segments")
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise entry.fault("`segments`: expected a list of objects with `start` and `blocks`.")
    before = 1
    found = []
    for fields in given:
        inner = Entry(entry.file, entry.number, fields)
        share = fields.get("blend_share", 0.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise entry.fault(f"`blend_share` is {share!r}: expected a number from 0 to 1.")
        num_first = inner.count("link_tokens") if "link_tokens" in fields else 0
        segment = TraceSegment(
            inner.count("start"), _blocks(inner, "blocks", names), num_first, float(share)
        )
        num_tokens = len(segment.blocks) * block_tokens
        if segment.start < before or segment.start + num_tokens >= entry.count("input_tokens"):
            raise entry.fault(
                f"a segment has {num_tokens} tokens from {segment.start} on: expected segments in "
                "order, that do not overlap, after the prompt's first token and before its last."
            )
        if num_first >= num_tokens:
            raise entry.fault(
                f"`link_tokens` is {num_first} for a segment of {num_tokens} tokens: expected "
                "fewer; leave out segments of which nothing is reused."
            )
        before = segment.start + num_tokens
        found.append(segment)
    return tuple(found)


def _blocks(entry: Entry, name: str, names: _Names) -> tuple[BlockKey, ...]:
    value = entry.require(name, "a list of names")
    try:
        if isinstance(value, list):
            return tuple([names[text] for text in value])
    except (TypeError, ValueError):
        pass
    raise entry.fault(f"`{name}`: expected a list of names of 32 or 64 hexadecimal digits.")


def _hits(entry: Entry) -> dict[Tier, int]:
    if "hit_tokens" not in entry.fields:
        return {}
    given = entry.inner("hit_tokens")
    known = {tier.label: tier for tier in Tier}
    if unknown := given.fields.keys() - known.keys():
        raise entry.fault(f"`hit_tokens` names {min(unknown)!r}: expected {', '.join(known)}.")
    return {known[label]: given.count(label) for label in given.fields}
