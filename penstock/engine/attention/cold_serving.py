"""The loop of a thread that attends to cold blocks for a GPU, compiled by numba.

Threads and GPU talk through words in pinned DRAM, `WORD` apart so that none share a cache line:

    asked[layer]  the GPU writes a step's number when the layer's queries are in place
    done[layer]   the last thread to finish writes it when all results of the layer are in place

The engine's thread opens a step by its number when its tasks are in place, and opens the next one
only when no thread is inside. Tasks are taken in turn, so a thread that wakes late or is paused
delays nobody else. Python's lock is not held, and nothing here calls CUDA.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from penstock.compiling import compiled
from penstock.engine.attention.cold_numba import FAST, attend

WORD = 8  # numbers between two words: a cache line of 64 bytes
# Words that only the threads and the engine's thread use. Then `next` and `finished` of each layer.
OPEN, CANCELLED, STOP, INSIDE, NUM_TASKS, CONTROL_WORDS = range(6)

_SPINS = 20_000  # about 5 ms, then sleep between looks
_IDLE_LOOKS = 500  # about 0.1 s, then return to Python
_LOOK_MICROSECONDS = 100

_types: Any = types  # untyped
_yield = _types.ExternalFunction("sched_yield", _types.intc())
_usleep = _types.ExternalFunction("usleep", _types.intc(_types.uintc))
_clock_gettime = _types.ExternalFunction("clock_gettime", _types.intc(_types.intc, _types.intp))
_MONOTONIC = 1


@compiled(nogil=True)
def _seconds(clock: Any) -> Any:
    """`clock`: room for what the system answers."""
    _clock_gettime(_MONOTONIC, clock.ctypes.data)
    return float(clock[0]) + clock[1] * 1e-9


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(ir.IntType(64)))


@numba.extending.intrinsic
def _load(_context: Any, address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = _word(builder, arguments[0])
        return builder.load_atomic(pointer, "seq_cst", 8, typ=ir.IntType(64))

    return types.int64(types.int64), generate


@numba.extending.intrinsic
def _store(_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@numba.extending.intrinsic
def _add(_context: Any, address: Any, value: Any) -> Any:
    """Add and return the number before."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@compiled(nogil=True)
def load_word(address: int) -> int:
    return _load(address)  # type: ignore[call-arg]


@compiled(nogil=True)
def store_word(address: int, value: int) -> None:
    _store(address, value)  # type: ignore[call-arg]


# mypy takes them for the functions that make them.
_read_word: Any = _load
_write_word: Any = _store
_add_to_word: Any = _add


@compiled(nogil=True)
def _pause(looks: int) -> None:
    if looks < _SPINS:
        _yield()
    else:
        _usleep(np.uint32(_LOOK_MICROSECONDS))


@cache
def make_serve(kv_heads: int, group: int, dim: int, block_tokens: int) -> Any:
    """The compiled loop for models of this shape."""

    # Only numbers come from outside, or numba could not find its cached code again.
    @compiled(fastmath=FAST, nogil=True)
    def serve(
        control: int,  # the address of the threads' own words
        asked: int,  # addresses of the words that the GPU shares
        done: int,
        num_layers: int,
        item_bytes: int,
        form: Any,
        tasks: Any,  # [tasks, 3]: a row of `queries`, the first of its blocks, the first of others
        blocks: Any,  # addresses
        queries: Any,  # [rows, heads, dim]
        largest: Any,  # [tasks, heads]
        totals: Any,  # [tasks, heads]
        sums: Any,  # [tasks, heads, dim]
        times: Any,  # [layers, 2]: when the threads began and ended
        wide: Any,  # scratch of this thread, as the other two
        scores: Any,
        clock: Any,
    ) -> None:
        """Work on steps until none has been open for a while, or the engine's thread says stop."""
        word = 8 * WORD
        next_task = control + CONTROL_WORDS * word
        finished = next_task + num_layers * word
        last = 0
        looks = 0
        while looks < _SPINS + _IDLE_LOOKS and _read_word(control + STOP * word) == 0:
            step = _read_word(control + OPEN * word)
            if step == last or step == 0:
                looks += 1
                _pause(looks)
                continue
            looks = 0
            _add_to_word(control + INSIDE * word, 1)
            if _read_word(control + OPEN * word) == step:  # else it has been closed in between
                num_tasks = _read_word(control + NUM_TASKS * word)
                for layer in range(num_layers):
                    waits = 0
                    ends = False
                    while _read_word(asked + layer * word) < step:
                        ends = (
                            _read_word(control + CANCELLED * word) >= step
                            or _read_word(control + STOP * word) != 0
                        )
                        if ends:
                            break
                        waits += 1
                        _pause(waits)
                    while not ends:
                        task = _add_to_word(next_task + layer * word, 1)
                        if task >= num_tasks:
                            break
                        if task == 0:
                            times[layer, 0] = _seconds(clock)
                        row, first, end = tasks[task]
                        attend(
                            queries[row],
                            blocks[first:end],
                            layer,
                            item_bytes,
                            form,
                            wide,
                            scores,
                            largest[task],
                            totals[task],
                            sums[task],
                            kv_heads,
                            group,
                            dim,
                            block_tokens,
                        )
                        if _add_to_word(finished + layer * word, 1) + 1 == num_tasks:
                            times[layer, 1] = _seconds(clock)
                            _write_word(done + layer * word, step)
                    if ends:
                        break
                last = step
            _add_to_word(control + INSIDE * word, -1)

    return serve
