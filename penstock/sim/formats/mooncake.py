"""Mooncake's traces (FAST'25): blocks identified by number.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

Times are in milliseconds, blocks have 512 tokens. Equal ids mean an equal prefix up to that block.
The last id stands for the rest of the prompt, a partial block. Published hit rates count all ids,
so it is treated as a full block.
"""

from __future__ import annotations

from typing import Any

from penstock.sim.formats.entries import ArrivalOrder, Entry, entries
from penstock.sim.formats.lines import TraceFile
from penstock.sim.formats.naming import NumberNames
from penstock.sim.trace import Trace, TraceRequest

BLOCK_TOKENS = 512


def recognises(fields: dict[str, Any]) -> bool:
    return "hash_ids" in fields and "chat_id" not in fields


def read(file: TraceFile, block_tokens: int | None) -> Trace:
    block_tokens = block_tokens or BLOCK_TOKENS
    names = NumberNames("mooncake")
    requests: list[TraceRequest] = []
    arrivals = ArrivalOrder()
    for entry in entries(file):
        moment = entry.seconds("timestamp", ticks_per_second=1000)
        arrival = arrivals.add(entry, "timestamp", moment)
        ids = block_ids(entry, block_tokens)
        requests.append(
            TraceRequest(
                arrival,
                entry.count("input_length"),
                entry.count("output_length"),
                tuple([names[number] for number in ids]),
            )
        )
    return Trace(file.name, block_tokens, tuple(requests))


def block_ids(entry: Entry, block_tokens: int) -> list[int]:
    """The ids of the prompt's blocks, with or without one for a partial block at the end."""
    num_input, ids = entry.count("input_length"), entry.ids("hash_ids")
    if not num_input // block_tokens <= len(ids) <= -(-num_input // block_tokens):
        raise entry.fault(
            f"{len(ids)} `hash_ids` for {num_input} tokens: expected one for every {block_tokens}; "
            "if the trace has blocks of another size, give it as block_tokens."
        )
    return ids
