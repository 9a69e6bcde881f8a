"""The same documents in another order: computed, and reused anywhere, which is lossy."""

from __future__ import annotations

import time
from dataclasses import dataclass

from stage import Stage

from penstock.engine.engine import Engine
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request

_BLOCK_TOKENS = 32
_NUM_ANSWER = 8
_QUESTION_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Anywhere:
    """Documents in a new order. Their KV is in device memory, from prompts in other orders."""

    num_documents: int
    num_tokens: int  # of the prompt
    computed_seconds: float  # to the first token, if nothing is marked
    reused_seconds: float  # to the first token, if the documents are marked
    num_reused: int
    num_mended: int
    num_equal: int  # tokens at the beginning of both answers that are equal
    num_answer: int


def compare(stage: Stage, num_documents: int, document_tokens: int) -> Anywhere:
    documents = [stage.writer.document(800 + n, document_tokens) for n in range(num_documents)]
    text = stage.writer.document(700, _QUESTION_TOKENS)
    num_tokens = num_documents * document_tokens + 2 * _QUESTION_TOKENS
    with stage.engine(4 * num_tokens, _BLOCK_TOKENS) as engine:
        _ask(engine, text, documents, is_marked=True)  # computes the documents, each alone
        with stage.screen.progress("the same documents in another order") as tick:
            tick(0.2, "computed")
            computed = _ask(engine, text, documents[::-1], is_marked=False)
            tick(0.8, "reused")
            reused = _ask(engine, text, documents[::-1], is_marked=True)
    pairs = zip(computed.output_ids, reused.output_ids, strict=False)
    differs = [first != second for first, second in pairs]
    return Anywhere(
        num_documents,
        len(computed.prompt_ids),
        _first_token_seconds(computed),
        _first_token_seconds(reused),
        reused.num_reused_tokens,
        reused.num_mended_tokens,
        (*differs, True).index(True),
        len(computed.output_ids),
    )


def _ask(
    engine: Engine, text: list[int], documents: list[list[int]], *, is_marked: bool
) -> Request:
    ids, segments = list(text), []
    for document in documents:
        segments.append((len(ids), len(ids) + len(document)))
        ids += document
    params = SamplingParams(temperature=0, max_tokens=_NUM_ANSWER, ignore_eos=True)
    name = f"{time.monotonic_ns()}"
    marked = segments if is_marked else []
    request = engine.add(name, ids + text, params, segments=marked)
    while engine.has_work:
        engine.step()
    return request


def _first_token_seconds(request: Request) -> float:
    assert request.first_token_time is not None
    return request.first_token_time - request.arrival
