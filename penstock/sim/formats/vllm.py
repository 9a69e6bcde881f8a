"""vLLM's log as it is printed, or as JSON lines with a `message`.

    DEBUG 02-13 11:33:33 [logger.py:41] Request a-1 details: prompt: 'Hi', prompt_token_ids: [1,
    15], prompt_embeds shape: None.                                      (one line; after 0.11.0)
    INFO 10-01 18:43:27 logger.py:36] Received request a-1: prompt: 'Hi', params: SamplingParams(
    …), prompt_token_ids: [1, 15], lora_request: None.                     (one line; before that)
    INFO 02-13 11:33:35 [logger.py:70] Generated response a-1: output: 'Ho', output_token_ids: [9],
    finish_reason: stop                                                                 (one line)

It needs `--enable-log-requests --enable-log-outputs`, after 0.11.0 also `VLLM_LOGGING_LEVEL=DEBUG`,
and no `--max-log-len`. Its times are in whole seconds. An answer that is not logged counts as one
token.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock.sim.formats.entries import Entry, parse_moment
from penstock.sim.formats.lines import TraceFile, TraceLine
from penstock.sim.formats.naming import DEFAULT_BLOCK_TOKENS, ChainNames, pseudo_tokens
from penstock.sim.formats.prompts import Exchange
from penstock.sim.trace import Trace

_PROMPT = re.compile(r"(?:Received request|Request) (?P<id>\S+?)(?: details)?: prompt: ")
_PROMPT_IDS = re.compile(r", prompt[_ ]token[_ ]ids: (\[[0-9, ]*\]|None)[,.]")
_PROMPT_TEXT = re.compile(
    r": prompt: (?P<text>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"), (?:pa|pr)"
)
_OUTPUT = re.compile(r"Generated response (?P<id>\S+?)(?: \(streaming (?:delta|complete)\))?: ")
_OUTPUT_IDS = re.compile(r", output_token_ids: (\[[0-9, ]*\]|None), finish_reason: ")
_TIME = re.compile(r"\b[A-Z]+ (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))? ")
_JSON_TIMES = ("timestamp", "asctime", "time", "@timestamp", "ts", "created")
_YEAR = 2024  # the log has no year; in a leap year every date is valid
_YEAR_SECONDS = 366 * 86400.0
_NEW_YEAR_SECONDS = 180 * 86400  # if time goes back by more than this, a new year has begun

_ADVICE = (
    "expected lines with the prompts' token ids: run vLLM with --enable-log-requests "
    "--enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG."
)


@dataclass(slots=True)
class _Logged:
    number: int
    moment: float
    prompt: list[int]
    output: list[int] = field(default_factory=list)


def recognises(head: list[str]) -> bool:
    return any(_PROMPT.search(line) or "Received request " in line for line in head)


def read(file: TraceFile, block_tokens: int | None) -> Trace:
    block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS
    logged: dict[str, _Logged] = {}
    latest = float("-inf")
    years = 0.0
    for line in file.lines():
        stamp, message = _unwrap(line)
        if found := _PROMPT.search(message):
            moment = _moment(file, line, stamp, message[: found.start()]) + years
            if moment < latest - _NEW_YEAR_SECONDS and stamp is None:
                years, moment = years + _YEAR_SECONDS, moment + _YEAR_SECONDS
            if moment < latest:
                raise file.fault(
                    line.number,
                    f"the time goes back by {latest - moment:.0f} s: expected the log of one "
                    "server in its original order; sort the lines by time.",
                )
            latest = moment
            prompt = _prompt(file, line, message)
            logged.setdefault(found["id"], _Logged(line.number, moment, prompt))
        elif found := _OUTPUT.search(message):
            request = logged.get(found["id"])
            ids = _last_ids(_OUTPUT_IDS, message)
            if request is not None and ids is not None:
                request.output += ids  # a streamed response is logged in several parts
    if not logged:
        raise file.fault_of_all(f"this vLLM log contains no request: {_ADVICE}")
    names = ChainNames(block_tokens)
    first = next(iter(logged.values())).moment
    requests = [
        Exchange(each.prompt, each.output).request(
            Entry(file, each.number, {}), names, each.moment - first
        )
        for each in logged.values()
    ]
    return Trace(file.name, block_tokens, tuple(requests))


def _unwrap(line: TraceLine) -> tuple[Any, str]:
    """The time in a JSON line, if any, and the log message."""
    if line.text.startswith("{"):
        try:
            fields = json.loads(line.text)
        except (ValueError, RecursionError):
            return None, line.text
        message = fields.get("message", fields.get("msg", ""))
        stamp = next((fields[name] for name in _JSON_TIMES if name in fields), None)
        return stamp, message if isinstance(message, str) else ""
    return None, line.text


def _moment(file: TraceFile, line: TraceLine, stamp: Any, before: str) -> float:
    if type(stamp) in (int, float):
        return float(stamp)
    if isinstance(stamp, str):
        try:
            return parse_moment(stamp.replace(",", "."))
        except ValueError:
            raise file.fault(
                line.number, f"the time {stamp[:40]!r} is not valid: expected ISO 8601."
            ) from None
    found = _TIME.search(before)
    if found is None:
        raise file.fault(line.number, "there is no time: expected one such as INFO 02-13 11:33:33.")
    month, day, hour, minute, second = map(int, found.groups()[:5])
    try:
        moment = datetime(_YEAR, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        raise file.fault(
            line.number, f"the time {found[0].strip()!r} is not valid: expected month-day."
        ) from None
    return moment.timestamp() + float(f"0.{found[6] or 0}")


def _prompt(file: TraceFile, line: TraceLine, message: str) -> list[int]:
    ids = _last_ids(_PROMPT_IDS, message)
    if ids is not None:
        return ids
    found = _PROMPT_TEXT.search(message)
    text = ast.literal_eval(found["text"]) if found is not None else None
    if not isinstance(text, str):
        raise file.fault(line.number, f"the request has neither token ids nor text: {_ADVICE}")
    return pseudo_tokens(text)


def _last_ids(pattern: re.Pattern[str], message: str) -> list[int] | None:
    """The ids of the last match: a prompt may itself quote a log."""
    found = pattern.findall(message)
    if not found or found[-1] == "None":
        return None
    ids: list[int] = json.loads(found[-1])
    return ids
