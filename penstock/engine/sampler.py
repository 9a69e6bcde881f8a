"""Choose the next token of each sequence from its logits.

Each random row is drawn separately, from its own copy of the logits with its own generator, so that
the rest of the batch cannot change it. Probabilities are converted to integers before they are
summed: the sum of integers does not depend on the order, the sum of floats on a device does.

Nothing here waits for a GPU before the tokens are read: work of a size that only the device knows
would, so it is done on all of the vocabulary there.

As in vLLM the order is logit_bias, penalties, grammar, temperature, min_p, top_k, top_p. Log
probabilities are those of the model's logits, before any of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from penstock.engine.grammar import Grammar
from penstock.engine.params import SamplingParams
from penstock.errors import BookError
from penstock.units import counted

# Integer weights sum to about this. At 2**50 a double still scales a draw without rounding it up.
_ONE = float(2**50)
# Below this the division would overflow; the choice is greedy long before.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """How one row of the logits is sampled."""

    params: SamplingParams
    generator: torch.Generator | None = None  # on the CPU; None uses torch's global generator
    prior_ids: Sequence[int] = ()  # prompt and output: repetition_penalty counts both
    num_prompt_tokens: int = 0  # presence_penalty and frequency_penalty count only the output
    banned_ids: Sequence[int] = ()  # never chosen, such as end tokens before min_tokens
    grammar: Grammar | None = None  # decides which tokens may come next


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token. `logprob` and `rank` are None unless log probabilities were requested."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None  # 1 is the most likely token
    top: list[tuple[int, float]] = field(default_factory=list)  # most likely first, ties by id


def make_generator(seed: int | None, request_index: int = 0) -> torch.Generator:
    """The generator of one sequence; `request_index` distinguishes the n sequences of a request.

    The same arguments always give the same random numbers, except that seed None is random.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
        return generator
    # Hashed, so that index 1 of seed 7 is not index 0 of seed 8.
    name = f"{seed}/{request_index}".encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return generator.manual_seed(int.from_bytes(digest, "little"))


Post = Callable[[Tensor], Callable[[], list[int]]]
"""Starts copying numbers from the device. The function it returns waits for them.

The tokens come first, in the order of the rows.
"""


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """One token per row. The logits are not changed; the rows' generators advance."""
    return begin_sampling(logits, rows)()


def begin_sampling(
    logits: Tensor, rows: Sequence[SamplerRow], post: Post = lambda numbers: numbers.tolist
) -> Callable[[], list[Sampled]]:
    """Like `sample`, in two parts: queue what can be queued now, and return a function that
    waits for the tokens."""
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise BookError(
            f"logits have shape {tuple(logits.shape)} for {counted(len(rows), 'row')}: expected "
            "[rows, vocabulary], one row for each sequence"
        )
    if not rows:
        return list
    plain = [_is_plain(row) for row in rows]
    if any(plain):
        chosen = logits.argmax(dim=-1)
    else:
        chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for index, row in enumerate(rows):
        if not plain[index]:
            chosen[index] = _choose(logits[index], row)
    described = [
        _described(logits[index], chosen[index], row.params.logprobs)
        for index, row in enumerate(rows)
        if row.params.logprobs is not None
    ]
    read = post(torch.cat([chosen, *described]) if described else chosen)

    def finish() -> list[Sampled]:
        numbers = read()  # the only place that waits for the device
        rest = iter(numbers[len(rows) :])
        return [
            Sampled(token_id)
            if row.params.logprobs is None
            else _sampled(token_id, rest, min(row.params.logprobs, logits.shape[1]))
            for token_id, row in zip(numbers[: len(rows)], rows, strict=True)
        ]

    return finish


def _is_plain(row: SamplerRow) -> bool:
    params = row.params
    if row.grammar is not None:
        return False
    return params.greedy and not params.penalised and not params.logit_bias and not row.banned_ids


def _own(row: Tensor) -> Tensor:
    # A copy has the same alignment in every batch, so reductions over it round the same way.
    return row.to(torch.float32, copy=True)


def _choose(logits: Tensor, row: SamplerRow) -> Tensor:
    scores = _own(logits)
    if row.params.logit_bias:
        ids, biases = zip(*row.params.biases, strict=True)
        # Each id occurs once, so the result does not depend on the device's order of additions.
        scores[_indices(ids, scores)] += _sent(torch.tensor(biases), scores)
    if row.params.penalised:
        _penalise(scores, row)
    if row.grammar is not None:
        row.grammar.mask(scores, row.banned_ids)
    elif row.banned_ids:
        scores.index_fill_(0, _indices(row.banned_ids, scores), -torch.inf)
    if row.params.greedy:
        return scores.argmax()
    return _draw(scores, row.params, row.generator)


def _indices(ids: Sequence[int], like: Tensor) -> Tensor:
    return _sent(torch.tensor(list(ids), dtype=torch.int64), like)


def _sent(values: Tensor, like: Tensor) -> Tensor:
    if not like.is_cuda:
        return values
    return values.pin_memory().to(like.device, non_blocking=True)  # else it would wait


def _penalise(scores: Tensor, row: SamplerRow) -> None:
    params = row.params
    prior = _indices(row.prior_ids, scores)
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        # Makes a token less likely, whether its score is positive or negative.
        repeated = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores[prior] = repeated[prior]
    output = prior[row.num_prompt_tokens :]
    counts = torch.zeros_like(scores, dtype=torch.int64)
    counts.index_add_(0, output, torch.ones_like(output))
    scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _draw(scores: Tensor, params: SamplingParams, generator: torch.Generator | None) -> Tensor:
    # Broken weights give NaN: even then the token must be one of the vocabulary.
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.finfo(scores.dtype).max)
    # Subtract the maximum first, or a small temperature could make it infinite.
    scores = (scores - scores.max()) / max(params.temperature, _MIN_TEMPERATURE)
    weights = (torch.softmax(scores, dim=-1).nan_to_num(nan=1.0).double() * _ONE).round().long()
    if params.min_p > 0:
        least = (weights.max().double() * params.min_p).ceil().long()
        weights = torch.where(weights >= least, weights, 0)
    ids: Tensor | None = None
    if 0 < params.top_k < weights.numel():
        ids = _top(weights, params.top_k)
        weights = weights[ids]
    if params.top_p < 1:
        kept, weights = _nucleus(weights, params.top_p)
        ids = kept if ids is None else ids[kept]
    draw = float(torch.rand((), dtype=torch.float64, generator=generator))
    sums = weights.cumsum(0)
    place = torch.searchsorted(sums, (sums[-1].double() * draw).long(), right=True)
    return place if ids is None else ids.gather(0, place[None])[0]  # an index would be waited for


def _is_queued(values: Tensor) -> bool:
    """Whether work on them is queued: then its sizes must not depend on their content."""
    return values.is_cuda


def _top(values: Tensor, count: int) -> Tensor:
    """The indices of the largest values, largest first; of equal values, the lower index first."""
    if _is_queued(values):
        return torch.sort(values, descending=True, stable=True).indices[:count]
    # Faster than to sort them all. topk does not define which of several equal values it takes.
    least = torch.topk(values, count).values[-1]
    found = torch.nonzero(values >= least).flatten()
    order = torch.sort(values[found], descending=True, stable=True).indices
    return found[order[:count]]


def _nucleus(weights: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The indices of the fewest weights that add up to top_p of the total, and the weights.

    The largest come first. On a GPU others follow, with a weight of zero: they are never drawn.
    """
    total = weights.sum().double()
    if _is_queued(weights):
        ranked, order = torch.sort(weights, descending=True, stable=True)
        return order, torch.where(_is_kept(ranked, total, top_p), ranked, 0)
    # All weights below this add up to less than 1 - top_p; leaving them out makes sorting cheap.
    least = (total * ((1 - top_p) / weights.numel())).long()
    found = torch.nonzero(weights >= least).flatten()
    ranked, order = torch.sort(weights[found], descending=True, stable=True)
    is_kept = _is_kept(ranked, total, top_p)
    return found[order[is_kept]], ranked[is_kept]


def _is_kept(ranked: Tensor, total: Tensor, top_p: float) -> Tensor:
    before = ranked.cumsum(0) - ranked
    return before < (total * top_p).ceil().long()


def _described(logits: Tensor, token_id: Tensor, count: int) -> Tensor:
    """What `_sampled` reads, as integers: they come back in one piece with the tokens."""
    logprobs = torch.log_softmax(_own(logits), dim=-1)
    chosen = logprobs.gather(0, token_id[None])
    rank = 1 + (logprobs > chosen).sum(dim=0, keepdim=True)
    numbers = [_bits(chosen), rank]
    if count:
        ids = _top(logprobs, min(count, logprobs.numel()))
        numbers += [ids, _bits(logprobs[ids])]
    return torch.cat(numbers)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).long()


def _sampled(token_id: int, numbers: Iterator[int], count: int) -> Sampled:
    bits, rank = next(numbers), next(numbers)
    ids = list(islice(numbers, count))
    (logprob, *top) = np.array([bits, *islice(numbers, count)], np.int32).view(np.float32).tolist()
    return Sampled(token_id, logprob, rank, list(zip(ids, top, strict=True)))
