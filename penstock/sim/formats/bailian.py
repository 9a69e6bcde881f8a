"""The traces of Alibaba's Bailian (KVCache Cache in the Wild, ATC'25): as Mooncake's, with turns.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "turn": 2,
     "output_length": 132, "type": "text", "hash_ids": [1089, 1090, 1091]}

Seconds, blocks of 16 tokens. An id stands for its block alone, so that ids are chained here. A
conversation's session is the chat it began with; a chat without a parent has -1.
"""

from __future__ import annotations

from typing import Any

from penstock.sim.formats.entries import Entry, entries
from penstock.sim.formats.lines import Arrivals, TraceFile
from penstock.sim.formats.mooncake import block_ids
from penstock.sim.formats.naming import ChainNames
from penstock.sim.trace import Trace, TraceRequest

BLOCK_TOKENS = 16


def recognises(fields: dict[str, Any]) -> bool:
    return "hash_ids" in fields and "chat_id" in fields


def read(file: TraceFile, block_tokens: int | None) -> Trace:
    block_tokens = block_tokens or BLOCK_TOKENS
    names = ChainNames(1)  # an id takes the place of a block's tokens
    roots: dict[int, int] = {}  # by chat, the one it began with
    requests: list[TraceRequest] = []
    arrivals = Arrivals(file)
    for entry in entries(file):
        arrival = arrivals.add(entry.number, "`timestamp`", entry.seconds("timestamp"))
        ids = block_ids(entry, block_tokens)
        try:
            prompt_blocks, _ = names.of(ids)
        except ValueError:
            raise entry.fault("`hash_ids`: expected whole numbers from 0 to 4294967295.") from None
        requests.append(
            TraceRequest(
                arrival,
                entry.count("input_length"),
                entry.count("output_length"),
                prompt_blocks,
                session=str(_root(entry, roots)),
            )
        )
    return Trace(file.name, block_tokens, tuple(requests))


def _root(entry: Entry, roots: dict[int, int]) -> int:
    chat, parent = entry.fields.get("chat_id"), entry.fields.get("parent_chat_id", -1)
    if type(chat) is not int or type(parent) is not int:
        raise entry.fault("`chat_id` and `parent_chat_id`: expected whole numbers.")
    roots[chat] = roots.get(parent, chat if parent < 0 else parent)
    return roots[chat]
