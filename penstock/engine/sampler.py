"""Choose the next token of each sequence from its logits.

The rest of the batch cannot change a row's token: each has its own generator, and `drawing` keeps
rows apart.

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

from penstock.engine.drawing import DrawnRow, draw, top
from penstock.engine.grammar import Grammar
from penstock.engine.params import SamplingParams
from penstock.engine.sending import sent
from penstock.errors import BookError
from penstock.units import counted

# Tokens are drawn for so many rows at once that their scores are at most so many numbers: drawing
# takes 20 bytes for each on the device.
_MAX_DRAWN = 2**23


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
    for indices in _alike(rows, plain, logits):
        tokens = _choose(_own(logits, indices), [rows[index] for index in indices])
        if len(indices) == len(rows):
            chosen = tokens
        else:
            chosen[_indices(indices, logits)] = tokens
    described = [
        _described(_own(logits, [index])[0], chosen[index], row.params.logprobs)
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


def _alike(
    rows: Sequence[SamplerRow], plain: Sequence[bool], logits: Tensor
) -> Iterator[tuple[int, ...]]:
    """The rows that need more than the likeliest token, in groups that are chosen together."""
    count = _num_at_once(logits)
    for greedy in (True, False):
        indices = (
            index
            for index, row in enumerate(rows)
            if not plain[index] and row.params.greedy is greedy
        )
        while group := tuple(islice(indices, count)):
            yield group


def _num_at_once(logits: Tensor) -> int:
    return max(1, _MAX_DRAWN // logits.shape[1]) if logits.is_cuda else 1


def _own(logits: Tensor, indices: Sequence[int]) -> Tensor:
    # A copy has the same alignment in every batch, so reductions over a row round the same way.
    if len(indices) == len(logits):
        return logits.to(torch.float32, copy=True)
    if len(indices) == 1:
        return logits[indices[0], None].to(torch.float32, copy=True)
    return logits[_indices(indices, logits)].to(torch.float32)


def _choose(scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """The tokens of rows that are all greedy, or all drawn."""
    for row, own in zip(rows, scores, strict=True):
        _edit(own, row)
    if rows[0].params.greedy:
        return scores.argmax(dim=-1)
    return draw(scores, [DrawnRow(row.params, row.generator) for row in rows])


def _edit(scores: Tensor, row: SamplerRow) -> None:
    if row.params.logit_bias:
        ids, biases = zip(*row.params.biases, strict=True)
        # Each id occurs once, so the result does not depend on the device's order of additions.
        scores[_indices(ids, scores)] += sent(torch.tensor(biases), scores)
    if row.params.penalised:
        _penalise(scores, row)
    if row.grammar is not None:
        row.grammar.mask(scores, row.banned_ids)
    elif row.banned_ids:
        scores.index_fill_(0, _indices(row.banned_ids, scores), -torch.inf)


def _indices(ids: Sequence[int], like: Tensor) -> Tensor:
    return sent(torch.tensor(list(ids), dtype=torch.int64), like)


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


def _is_queued(values: Tensor) -> bool:
    """Whether work on them is queued: then its sizes must not depend on their content."""
    return values.is_cuda


def _top(values: Tensor, count: int) -> Tensor:
    if _is_queued(values):
        return torch.sort(values, descending=True, stable=True).indices[:count]
    return top(values, count)


def _described(logits: Tensor, token_id: Tensor, count: int) -> Tensor:
    """What `_sampled` reads, as integers: they come back in one piece with the tokens."""
    logprobs = torch.log_softmax(logits, dim=-1)
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
