"""The sequences of one HTTP request: submitted together, read as they come, given up together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.engine.params import SamplingParams
from penstock.errors import PenstockError
from penstock.server.answers import PromptTokensDetails, Usage
from penstock.server.errors import ApiError, from_engine
from penstock.server.prompts import Cut
from penstock.server.schema import GenerationRequest
from penstock.types import NO_ORIGIN, Origin

if TYPE_CHECKING:
    from penstock.engine.service import Delta, Stream
    from penstock.server.backend import Serving, Spoken

# Fields that mean here what they mean to the engine.
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def sampling_params(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Raises ApiError where fields that are right one by one do not go together."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAMPLING}
    if request.logit_bias is not None:
        given["logit_bias"] = {int(name): bias for name, bias in request.logit_bias.items()}
    if request.kv_residency is not None:
        given["kv_residency"] = request.kv_residency.model_dump()
    if request.penstock is not None:
        given["kv_hints"] = request.penstock.plain()
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            **{name: value for name, value in given.items() if value is not None},
        )
    except PenstockError as error:
        raise from_engine(error) from None


def prompt_cut(request: GenerationRequest, max_new: int | None, max_tokens: int) -> Cut | None:
    """What is kept of a prompt, as `truncate_prompt_tokens` says; raises ApiError for too much.

    -1 stands for what fits the context of `max_tokens` beside an answer of `max_new`.
    """
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return None
    if wanted > max_tokens - 1:
        raise ApiError(
            400,
            f"truncate_prompt_tokens is {wanted}: expected at most {max_tokens - 1}, which is the "
            "model's context less one token for the answer; lower it, or give -1 for what fits.",
            param="truncate_prompt_tokens",
        )
    if wanted < 0:
        wanted = max(1, max_tokens - max(1, max_new or 1))
    # As in vLLM, who names a side has just that: the first or the last tokens of all.
    side = request.truncation_side
    return Cut(wanted, keeps_end=side != "right", keeps_special=side is None)


class OutputPiece(NamedTuple):
    choice: int  # prompts in their order, and of each its n sequences
    delta: Delta


class Generation:
    def __init__(
        self, streams: Sequence[Stream], prompts: Sequence[list[int]], n: int, spoken: Spoken
    ) -> None:
        self._streams = streams
        self._spoken = spoken
        self._n = n
        self._num_prompt_tokens = sum(len(ids) for ids in prompts)
        self._num_new_tokens = 0
        self._num_cached = [0] * len(streams)

    @classmethod
    async def start(
        cls,
        serving: Serving,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        tenant: str,
        priority: int,
        origin: Origin = NO_ORIGIN,
    ) -> Generation:
        """Queue every prompt, or none: raises ApiError, and then nothing is left behind."""
        num_choices = len(prompts) * params.n
        if num_choices > serving.max_choices:
            raise ApiError(
                400,
                f"the request asks for {num_choices} sequences: expected at most "
                f"{serving.max_choices} in one request; lower n, or give fewer prompts.",
                param="n",
            )
        streams: list[Stream] = []
        try:
            for ids in prompts:
                stream = await serving.service.submit(
                    ids, params, tenant=tenant, priority=priority, origin=origin
                )
                streams.append(stream)
        except PenstockError as error:
            _close(streams)
            raise from_engine(error) from None
        except BaseException:
            _close(streams)
            raise
        return cls(streams, prompts, params.n, serving.spoken)

    @property
    def request_ids(self) -> list[str]:
        """What the engine calls its sequences."""
        return [name for stream in self._streams for name in stream.request_ids]

    async def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """What each sequence says, as it comes. Raises ApiError if the engine stops."""
        arrived: asyncio.Queue[OutputPiece | PenstockError | None] = asyncio.Queue()

        async def pump(number: int, stream: Stream) -> None:
            try:
                async for delta in stream:
                    arrived.put_nowait(OutputPiece(number * self._n + delta.index, delta))
                arrived.put_nowait(None)
            except PenstockError as error:
                arrived.put_nowait(error)

        pumps = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(self._streams)]
        num_open = len(pumps)
        try:
            while num_open:
                piece = await arrived.get()
                if piece is None:
                    num_open -= 1
                elif isinstance(piece, PenstockError):
                    raise from_engine(piece)
                else:
                    self._count(piece)
                    yield piece
        finally:
            for task in pumps:
                task.cancel()

    async def gather(self) -> list[list[Delta]]:
        """All that each sequence has said, once every one has ended."""
        gathered: list[list[Delta]] = [[] for _ in range(len(self._streams) * self._n)]
        async with aclosing(self.pieces()) as pieces:
            async for choice, delta in pieces:
                gathered[choice].append(delta)
        return gathered

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_new_tokens,
            total_tokens=self._num_prompt_tokens + self._num_new_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached)),
        )

    def close(self) -> None:
        """Give up what has not finished."""
        _close(self._streams)

    def _count(self, piece: OutputPiece) -> None:
        self._num_new_tokens += 1
        self._spoken.num_tokens += 1
        prompt, index = divmod(piece.choice, self._n)
        if index == 0:  # the others of the n find what the first has computed
            self._num_cached[prompt] = piece.delta.num_cached_tokens


def _close(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.close()
