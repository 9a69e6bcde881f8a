"""What a GPU does in a step in which the CPU attends to some cold blocks (see `cold_threads`).

In each layer it writes the queries to pinned DRAM, asks, and later waits for the answer and copies
the results to where the parts of the device's own attention are. `numbers` describe the step:

    step | num_parts | num_rows | rows whose queries are needed | pairs of numbers per part

A pair is the place of a part's result, and the task whose result belongs there. A task covers
several parts: the others get a result without weight, task -1.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_HEADER = tl.constexpr(3)
_NO_SCORE = tl.constexpr(-1e30)  # finite: the difference of two infinities is not a number
_LOG2_E = 1.4426950408889634


@triton.jit
def _pull(staged, sent, num_rows_at_most, num_programs, WIDTH: tl.constexpr):  # noqa: N803
    source = staged.to(tl.pointer_type(tl.int64))
    size = _HEADER + num_rows_at_most + 2 * tl.load(source + 1)
    for start in range(tl.program_id(0) * WIDTH, size, num_programs * WIDTH):
        places = start + tl.arange(0, WIDTH)
        inside = places < size
        tl.store(sent + places, tl.load(source + places, mask=inside), mask=inside)


@triton.jit
def _hand_over(
    query,
    numbers,
    target,  # the address of [rows, heads, DIM], float32, in pinned DRAM
    factor,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_PAD: tl.constexpr,  # noqa: N803
):
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_PAD)
    is_dim = dims < DIM
    if tl.program_id(0) < tl.load(numbers + 2):
        row = tl.load(numbers + _HEADER + tl.program_id(0))
        q = tl.load(query + row * row_stride + head * head_stride + dims, mask=is_dim, other=0.0)
        there = target.to(tl.pointer_type(tl.float32)) + (row * HEADS + head) * DIM + dims
        tl.store(there, q.to(tl.float32) * factor, mask=is_dim)


@triton.jit
def _ask(asked, numbers):
    # The kernel before has written the queries: whoever sees the number must see them too.
    if tl.load(numbers + 1) > 0:
        word = asked.to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(word, tl.load(numbers), sem="release", scope="sys")


@triton.jit(do_not_specialize=["max_looks"])
def _await(done, gave_up, numbers, max_looks):
    step = tl.load(numbers)
    if tl.load(numbers + 1) > 0:
        word = done.to(tl.pointer_type(tl.int64))
        failed = gave_up.to(tl.pointer_type(tl.int64))
        # After one answer that did not come, the step is lost: wait for no other.
        looks = tl.where(tl.load(failed, volatile=True) == step, max_looks, 0)
        found = tl.load(word, volatile=True)
        while (found < step) & (looks < max_looks):
            found = tl.load(word, volatile=True)
            looks += 1
        if found < step:
            tl.store(failed, step)


@triton.jit
def _collect(
    numbers,
    largest_there,  # addresses of what the threads left in pinned DRAM
    totals_there,
    sums_there,
    largest,
    totals,
    sums,
    num_rows_at_most,
    num_programs,
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_PAD: tl.constexpr,  # noqa: N803
):
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_PAD)
    is_dim = dims < DIM
    pairs = numbers + _HEADER + num_rows_at_most
    for part in range(tl.program_id(0), tl.load(numbers + 1).to(tl.int32), num_programs):
        at = tl.load(pairs + 2 * part) * HEADS + head
        task = tl.load(pairs + 2 * part + 1)
        has = task >= 0
        there = tl.where(has, task, 0) * HEADS + head
        most = tl.load(largest_there.to(tl.pointer_type(tl.float32)) + there, volatile=True)
        total = tl.load(totals_there.to(tl.pointer_type(tl.float32)) + there, volatile=True)
        row = tl.load(
            sums_there.to(tl.pointer_type(tl.float32)) + there * DIM + dims,
            mask=dims < tl.where(has, DIM, 0),
            other=0.0,
            volatile=True,
        )
        tl.store(largest + at, tl.where(has, most, _NO_SCORE))
        tl.store(totals + at, tl.where(has, total, 0.0))
        tl.store(sums + at * DIM + dims, row, mask=is_dim)


def pull_numbers(staged: int, sent: Any, max_rows: int) -> None:
    """Read a step's numbers from pinned DRAM, as `attention.triton.pull_plan` does."""
    num_programs = 8
    _pull[(num_programs,)](staged, sent, max_rows, num_programs, WIDTH=256)


def ask(query: Any, numbers: Any, queries: int, asked: int, scale: float) -> None:
    """Write the queries [rows, heads, dim] to the address `queries` and ask for a layer."""
    rows, heads, dim = query.shape
    _hand_over[(rows, heads)](
        query,
        numbers,
        queries,
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        HEADS=heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        num_warps=1,
    )
    _ask[(1,)](asked, numbers, num_warps=1)


def await_answer(numbers: Any, done: int, gave_up: int, max_looks: int) -> None:
    """Wait for the layer's results. After `max_looks` the step is marked as failed."""
    _await[(1,)](done, gave_up, numbers, max_looks, num_warps=1)


def collect(
    numbers: Any,
    there: tuple[int, int, int],
    room: Any,
    max_rows: int,
    num_programs: int,
) -> None:
    """Copy results to the parts in `room` (see `PartRoom`).

    `there`: addresses of the threads' largest scores, totals and sums.
    """
    _, heads, dim = room.sums.shape
    _collect[(num_programs, heads)](
        numbers,
        *there,
        room.largest,
        room.totals,
        room.sums,
        max_rows,
        num_programs,
        HEADS=heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        num_warps=1,
    )
