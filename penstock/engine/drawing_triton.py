"""The draw of a token on a GPU (see `drawing`), for all rows at once, without sorting.

What is kept is described by two numbers: all weights above a cut, and so many of those equal to it,
the first ones. The cut is found by halving the range in which it can be.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_BLOCK = 8192
_NUM_WARPS = 16


@triton.jit
def _above(weights, size, cut, BLOCK: tl.constexpr):  # noqa: N803
    """How many weights are above the cut, and their sum."""
    count = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, size, BLOCK):
        places = first + tl.arange(0, BLOCK)
        weight = tl.load(weights + places, mask=places < size, other=0)
        is_above = weight > cut
        count += is_above.to(tl.int64)
        total += tl.where(is_above, weight, 0)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def _pick(
    weights,  # [rows, size]
    top_ks,  # [rows], these three as doubles
    top_ps,
    draws,
    stride,  # of these three
    picked,  # [rows]
    size,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    mine = weights + row * size
    top_k = tl.load(top_ks + row * stride).to(tl.int64)
    top_p = tl.load(top_ps + row * stride)
    drawn = tl.load(draws + row * stride)
    most = tl.zeros([BLOCK], tl.int64)
    sums = tl.zeros([BLOCK], tl.int64)
    for first in range(0, size, BLOCK):
        places = first + tl.arange(0, BLOCK)
        weight = tl.load(mine + places, mask=places < size, other=0)
        most = tl.maximum(most, weight)
        sums += weight
    largest = tl.max(most, 0)
    total = tl.sum(sums, 0)
    cut = total * 0
    ties = total * 0
    if top_k < size:
        # The lowest cut that fewer than top_k are above.
        high = largest
        while cut < high:
            middle = (cut + high) // 2
            count, _ = _above(mine, size, middle, BLOCK)
            if count < top_k:
                high = middle
            else:
                cut = middle + 1
        count, above = _above(mine, size, cut, BLOCK)
        ties = top_k - count
        # If the cut is 0, there may be fewer ties than that; they weigh nothing.
        total = above + ties * cut
    if top_p < 1:
        share = total.to(tl.float64) * top_p
        target = share.to(tl.int64)
        if target.to(tl.float64) < share:
            target += 1
        target = tl.minimum(target, total)
        # The lowest cut above which less than the target remains. What is at most so large that
        # all of it together may go is below that cut.
        cut = tl.maximum(cut, (total - target) // size)
        high = largest
        while cut < high:
            middle = (cut + high) // 2
            _, above = _above(mine, size, middle, BLOCK)
            if above < target:
                high = middle
            else:
                cut = middle + 1
        _, above = _above(mine, size, cut, BLOCK)
        ties = (target - above + cut - 1) // tl.maximum(cut, 1)
        total = above + ties * cut
    place = tl.minimum((total.to(tl.float64) * drawn).to(tl.int64), total - 1)
    found = tl.zeros([BLOCK], tl.int64)
    passed = total * 0
    passed_ties = total * 0
    for first in range(0, size, BLOCK):
        places = first + tl.arange(0, BLOCK)
        weight = tl.load(mine + places, mask=places < size, other=0)
        is_tie = ((weight == cut) & (places < size)).to(tl.int64)
        number = passed_ties + tl.cumsum(is_tie, 0)
        weight = tl.where((weight > cut) | ((is_tie > 0) & (number <= ties)), weight, 0)
        found += ((passed + tl.cumsum(weight, 0) <= place) & (places < size)).to(tl.int64)
        passed += tl.sum(weight, 0)
        passed_ties += tl.sum(is_tie, 0)
    tl.store(picked + row, tl.sum(found, 0))


def pick_rows(weights: Any, top_ks: Any, top_ps: Any, draws: Any) -> Any:
    """The token of each row of weights [rows, vocabulary]."""
    num_rows, size = weights.shape
    picked = weights.new_empty(num_rows)
    _pick[(num_rows,)](
        weights,
        top_ks,
        top_ps,
        draws,
        draws.stride(0),
        picked,
        size,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        num_warps=_NUM_WARPS,
    )
    return picked
