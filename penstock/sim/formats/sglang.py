"""SGLang's request log in JSON, and its per-request metrics file.

    {"timestamp": "2025-08-04T11:51:41.02", "event": "request.received", "rid": "a",
     "obj": {"text": null, "input_ids": [1, 15], …}}
    {"timestamp": "2025-08-04T11:51:43.31", "event": "request.finished", "rid": "a",
     "obj": {…}, "out": {"output_ids": [9], "meta_info": {"completion_tokens": 1, …}}}
    {"request_parameters": "{\\"rid\\": \\"a\\", \\"input_ids\\": [1, 15]}", "completion_tokens": 1,
     "e2e_latency": 2.3, "request_received_ts": 1754308301.02, …}

The first two come from `--log-requests --log-requests-level 3 --log-requests-format json`, the
third from `--export-metrics-to-file`. Requests are written when they end, so they are sorted here.
SGLang's dumps are not supported: they are pickles, which can run code when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.sim.formats.entries import Entry, entries
from penstock.sim.formats.lines import TraceFile
from penstock.sim.formats.naming import DEFAULT_BLOCK_TOKENS, ChainNames, pseudo_tokens
from penstock.sim.formats.prompts import Exchange
from penstock.sim.trace import Trace

_ADVICE = (
    "expected input_ids or text; log with --log-requests-level 3, which omits and truncates "
    "nothing."
)


class _Found(NamedTuple):
    moment: float
    entry: Entry
    exchange: Exchange
    session: str


def recognises(fields: dict[str, Any]) -> bool:
    return "request_parameters" in fields or ("event" in fields and "rid" in fields)


def read(file: TraceFile, block_tokens: int | None) -> Trace:
    block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS
    names = ChainNames(block_tokens)
    requests = [
        found.exchange.request(found.entry, names, found.moment, found.session)
        for found in _found(file)
    ]
    requests.sort(key=lambda request: request.arrival_seconds)
    first = requests[0].arrival_seconds if requests else 0.0
    since_first = (replace(r, arrival_seconds=r.arrival_seconds - first) for r in requests)
    return Trace(file.name, block_tokens, tuple(since_first))


def _found(file: TraceFile) -> Iterator[_Found]:
    open_requests: dict[str, _Found] = {}  # received, but no end logged yet
    for entry in entries(file):
        if "request_parameters" in entry.fields:
            if not _is_health_check(entry.fields.get("request_parameters")):
                yield _from_metrics(entry)
            continue
        event, rid = entry.fields.get("event"), entry.fields.get("rid")
        if not isinstance(rid, str) or _is_health_check(rid):
            continue  # a batch: its requests are logged one by one when they end
        if event == "request.received":
            moment = entry.moment("timestamp")
            open_requests[rid] = _from_event(entry, moment, with_output=False)
        elif event == "request.finished":
            received = open_requests.pop(rid, None)
            moment = _start_of(entry) if received is None else received.moment
            yield _from_event(entry, moment, with_output=True)
    yield from open_requests.values()


def _from_event(entry: Entry, moment: float, *, with_output: bool) -> _Found:
    sent = entry.inner("obj")
    output: list[int] = []
    num_output = 1
    if with_output and isinstance(entry.fields.get("out"), dict):
        out = entry.inner("out")
        if out.first_of("output_ids"):
            output = out.ids("output_ids", what="token ids")
        meta = out.inner("meta_info") if out.first_of("meta_info") else None
        if meta is not None and meta.first_of("completion_tokens"):
            num_output = meta.count("completion_tokens")
    prompt, is_text = _prompt(sent)
    # The answer's ids cannot continue a prompt that is known only as text.
    exchange = Exchange(prompt, () if is_text else output, max(num_output, len(output)))
    return _Found(moment, entry, exchange, _session(sent))


def _from_metrics(entry: Entry) -> _Found:
    try:
        fields = json.loads(entry.text("request_parameters"))
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise entry.fault("`request_parameters`: expected a JSON object as text.")
    sent = Entry(entry.file, entry.number, fields)
    moment = entry.moment("request_received_ts")
    num_output = entry.count("completion_tokens")
    return _Found(moment, entry, Exchange(_prompt(sent)[0], (), num_output), _session(sent))


def _prompt(sent: Entry) -> tuple[list[int], bool]:
    if sent.first_of("input_ids"):
        return sent.ids("input_ids", what="token ids"), False
    if isinstance(sent.fields.get("text"), str):
        return pseudo_tokens(sent.fields["text"]), True
    raise sent.fault(f"the request has no prompt: {_ADVICE}")


def _start_of(entry: Entry) -> float:
    """The arrival time of a request of which only the end was logged."""
    out = entry.inner("out").inner("meta_info")
    if out.first_of("request_received_ts"):
        return out.moment("request_received_ts")
    return entry.moment("timestamp") - out.duration("e2e_latency")


def _session(sent: Entry) -> str:
    params = sent.fields.get("session_params")
    session = params.get("id") if isinstance(params, dict) else None
    return session if isinstance(session, str) else ""


def _is_health_check(text: object) -> bool:
    return isinstance(text, str) and "HEALTH_CHECK" in text
