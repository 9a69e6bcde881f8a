"""Traces of Alibaba's Bailian (KVCache Cache in the Wild, ATC'25): like Mooncake's, with turns.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "turn": 2,
     "output_length": 132, "type": "text", "hash_ids": [1089, 1090, 1091]}

Times are in seconds, blocks have 16 tokens. An id stands for its block alone, not for the prefix,
so ids are chained here. A conversation's session is its first chat; `parent_chat_id` is -1 there.
"""

from __future__ import annotations

from typing import Any

from penstock.sim.formats.entries import ArrivalOrder, Entry, entries
from penstock.sim.formats.lines import TraceFile
from penstock.sim.formats.mooncake import block_ids
from penstock.sim.formats.naming import ChainNames
from penstock.sim.trace import Trace, TraceRequest

BLOCK_TOKENS = 16


def recognises(fields: dict[str, Any]) -> bool:
    return "hash_ids" in fields and "chat_id" in fields


def read(file: TraceFile, block_tokens: int | None) -> Trace:
    block_tokens = block_tokens or BLOCK_TOKENS
    names = ChainNames(1)  # one id stands for all tokens of a block
    roots: dict[int, int] = {}  # the first chat of each chat's conversation
    requests: list[TraceRequest] = []
    arrivals = ArrivalOrder()
    for entry in entries(file):
        arrival = arrivals.add(entry, "timestamp", entry.seconds("timestamp"))
        ids = block_ids(entry, block_tokens)
        try:
            prompt_blocks, _ = names.of(ids)
        except ValueError:
            raise entry.fault("`hash_ids`: expected integers from 0 to 4294967295.") from None
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
        raise entry.fault("`chat_id` and `parent_chat_id`: expected integers.")
    roots[chat] = roots.get(parent, chat if parent < 0 else parent)
    return roots[chat]
