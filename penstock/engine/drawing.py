"""Draw a token from each row of scores, by temperature, min_p, top_k and top_p.

Probabilities are converted to integers before they are summed: the sum of integers does not depend
on the order, the sum of floats on a device does. So a row's token depends on that row alone, and a
GPU may draw for many rows at once. A CPU gets them one by one: there, what the exponential of a
number is may depend on the number's place in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.params import SamplingParams
from penstock.engine.sending import sent

# The likeliest token's weight. The sum of 2**18 of them is still an int64.
_ONE = float(2**44)
# Beyond these the division would overflow, or no longer be one; the choice is greedy, or as good as
# uniform, long before.
_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e30


class DrawnRow(NamedTuple):
    """What a row is drawn by."""

    params: SamplingParams
    generator: torch.Generator | None  # on the CPU; None uses torch's global generator


def draw(scores: Tensor, rows: Sequence[DrawnRow]) -> Tensor:
    """One token per row. The scores [rows, vocabulary], in float32, are used up."""
    size = scores.shape[1]
    numbers = torch.tensor([_numbers(row, size) for row in rows], dtype=torch.float64)
    temperatures, least_shares, top_ks, top_ps, draws = sent(numbers, scores).unbind(1)
    weights = weigh(scores, temperatures.float())
    if any(row.params.min_p > 0 for row in rows):
        least = (weights.amax(1).double() * least_shares).ceil().long()
        weights = torch.where(weights >= least[:, None], weights, 0)
    if scores.is_cuda:
        from penstock.engine.drawing_triton import pick_rows

        picked: Tensor = pick_rows(weights, top_ks, top_ps, draws)
        return picked
    return torch.stack([pick(*row) for row in zip(weights, top_ks, top_ps, draws, strict=True)])


def _numbers(row: DrawnRow, size: int) -> list[float]:
    params = row.params
    return [
        min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE),
        params.min_p,
        params.top_k if 0 < params.top_k < size else size,
        params.top_p,
        float(torch.rand((), dtype=torch.float64, generator=row.generator)),
    ]


def weigh(scores: Tensor, temperatures: Tensor) -> Tensor:
    """How likely each token is, as integers in proportion. The scores are used up."""
    # Broken weights give NaN: even then the token must be one of the vocabulary.
    # One that is banned has -inf, which no temperature makes likely.
    most = torch.finfo(scores.dtype).max
    scores.nan_to_num_(nan=-torch.inf, posinf=most, neginf=-torch.inf)
    # Subtract the maximum first, or a small temperature could make it infinite.
    scores.sub_(scores.amax(1, keepdim=True)).div_(temperatures[:, None])
    return scores.exp_().nan_to_num_(nan=1.0).double().mul_(_ONE).round_().long()


def pick(weights: Tensor, top_k: Tensor, top_p: Tensor, draw: Tensor) -> Tensor:
    """The token of one row on a CPU. `drawing_triton` is the same on a GPU."""
    if top_k < weights.numel():
        weights = _only(weights, top(weights, int(top_k)))
    if top_p < 1:
        weights = _only(weights, nucleus(weights, float(top_p)))
    sums = weights.cumsum(0)
    place = torch.minimum((sums[-1].double() * draw).long(), sums[-1] - 1)
    return torch.searchsorted(sums, place, right=True)


def _only(weights: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(weights).index_copy_(0, ids, weights[ids])


def top(values: Tensor, count: int) -> Tensor:
    """The indices of the largest values, largest first; of equal values, the lower index first."""
    # Faster than to sort them all. topk does not define which of several equal values it takes.
    least = torch.topk(values, count).values[-1]
    found = torch.nonzero(values >= least).flatten()
    order = torch.sort(values[found], descending=True, stable=True).indices
    return found[order[:count]]


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """The indices of the fewest weights that add up to top_p of the total, largest first."""
    total = weights.sum().double()
    # All weights below this add up to less than 1 - top_p; leaving them out makes sorting cheap.
    least = (total * ((1 - top_p) / weights.numel())).long()
    found = torch.nonzero(weights >= least).flatten()
    ranked, order = torch.sort(weights[found], descending=True, stable=True)
    before = ranked.cumsum(0) - ranked
    return found[order[before < (total * top_p).ceil().long()]]
