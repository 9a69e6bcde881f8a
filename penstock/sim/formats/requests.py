"""Requests as JSON lines, as a gateway or a script may log them.

    {"timestamp": 12.5, "prompt_token_ids": [1, 15, 9], "output_token_ids": [4, 2]}
    {"timestamp": "2025-01-31T12:00:00Z", "prompt": "Once upon", "output_length": 64}
    {"arrival_time": 3, "messages": [{"role": "user", "content": "Hi"}], "session_id": "a"}

Token ids are hashed in blocks, as the server does. In a text, words stand for tokens: equal
prefixes are found, and token counts are estimates. Times are seconds or dates, in order of arrival.
"""

from __future__ import annotations

from typing import Any

from penstock.sim.formats.entries import ArrivalOrder, Entry, entries
from penstock.sim.formats.lines import TraceFile
from penstock.sim.formats.naming import DEFAULT_BLOCK_TOKENS, ChainNames, pseudo_tokens
from penstock.sim.formats.prompts import Exchange, messages_text, tokens_of
from penstock.sim.trace import Trace, TraceRequest

_TIMES = ("arrival_seconds", "arrival_time", "timestamp", "time", "ts")
_PROMPT_IDS = ("prompt_token_ids", "input_ids", "input_tok_ids", "prompt_ids")
_PROMPT_TEXTS = ("prompt", "text")
_OUTPUT_IDS = ("output_token_ids", "output_ids", "output_tok_ids")
_OUTPUT_TEXTS = ("output", "response", "completion")
_OUTPUT_COUNTS = ("output_length", "output_len", "output_tokens", "completion_tokens")
_SESSIONS = ("session", "session_id", "conversation_id", "user")


def recognises(fields: dict[str, Any]) -> bool:
    has_prompt = any(name in fields for name in (*_PROMPT_IDS, *_PROMPT_TEXTS, "messages"))
    return has_prompt and any(name in fields for name in _TIMES)


def read(file: TraceFile, block_tokens: int | None) -> Trace:
    block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS
    names = ChainNames(block_tokens)
    requests: list[TraceRequest] = []
    arrivals = ArrivalOrder()
    for entry in entries(file):
        name = entry.first_of(*_TIMES)
        if name is None:
            raise entry.fault(f"there is no time: expected one of {', '.join(_TIMES)}.")
        arrival = arrivals.add(entry, name, entry.moment(name))
        named = entry.first_of(*_SESSIONS)
        session = "" if named is None else str(entry.fields[named])
        exchange = Exchange(_prompt(entry), *_output(entry))
        requests.append(exchange.request(entry, names, arrival, session))
    return Trace(file.name, block_tokens, tuple(requests))


def _prompt(entry: Entry) -> Any:
    if name := entry.first_of(*_PROMPT_IDS):
        return entry.ids(name, what="token ids")
    if name := entry.first_of(*_PROMPT_TEXTS):
        return tokens_of(entry, name, is_text=isinstance(entry.fields[name], str))
    if entry.first_of("messages"):
        return pseudo_tokens(messages_text(entry, "messages"))
    raise entry.fault(
        f"there is no prompt: expected {' or '.join(_PROMPT_IDS[:2])} with token ids, or "
        f"{', '.join(_PROMPT_TEXTS)} or messages with text."
    )


def _output(entry: Entry) -> tuple[Any, int]:
    """The answer's tokens, if known, and their number."""
    if name := entry.first_of(*_OUTPUT_IDS):
        ids = entry.ids(name, what="token ids")
        return ids, len(ids)
    if name := entry.first_of(*_OUTPUT_COUNTS):
        return (), entry.count(name)
    if name := entry.first_of(*_OUTPUT_TEXTS):
        tokens = pseudo_tokens(entry.text(name))
        return tokens, len(tokens)
    return (), 1
