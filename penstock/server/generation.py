"""The sequences of one HTTP request: submitted, read and cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.engine.anywhere.pieces import PromptTokens
from penstock.engine.params import SamplingParams
from penstock.engine.structure import StructuredOutputsParams, UnusableStructure
from penstock.errors import PenstockError
from penstock.server.answers import PromptTokensDetails, Usage
from penstock.server.errors import ApiError, from_engine
from penstock.server.prompts import Cut
from penstock.server.schema import GenerationRequest
from penstock.types import NO_ORIGIN, Origin

if TYPE_CHECKING:
    from penstock.engine.service import Delta, Stream
    from penstock.server.backend import Serving, Spoken

# Fields that are passed to the engine unchanged.
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
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    mending: Mapping[str, object],
    structure: StructuredOutputsParams | None = None,
    shows_special: bool = False,
) -> SamplingParams:
    """`mending`: of requests that do not ask for another. `shows_special`: special tokens are part
    of the text, as in vLLM whatever the request says: without them there would be no calls. Raises
    ApiError if fields contradict each other."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAMPLING}
    given["structured_outputs"] = structure
    if shows_special:
        given["skip_special_tokens"] = False
    if request.logit_bias is not None:
        given["logit_bias"] = {int(name): bias for name, bias in request.logit_bias.items()}
    if request.kv_residency is not None:
        given["kv_residency"] = request.kv_residency.model_dump()
    given["kv_mending"] = {**mending, **(request.kv_mending or {})}
    transfer = request.kv_transfer_params
    if transfer is not None and transfer.do_remote_prefill:
        given["awaits_prefill"] = True
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
    """How `truncate_prompt_tokens` shortens a prompt. Raises ApiError if it exceeds the context.

    -1 means as much as fits into `max_tokens` together with an answer of `max_new` tokens.
    """
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return None
    if wanted > max_tokens - 1:
        raise ApiError(
            400,
            f"truncate_prompt_tokens is {wanted}: expected at most {max_tokens - 1}, the model's "
            "context minus one token for the answer; lower it, or use -1 for as much as fits.",
            param="truncate_prompt_tokens",
        )
    if wanted < 0:
        wanted = max(1, max_tokens - max(1, max_new or 1))
    # As in vLLM: with a side given, special tokens are cut like all others.
    side = request.truncation_side
    return Cut(wanted, keeps_end=side != "right", keeps_special=side is None)


class OutputPiece(NamedTuple):
    choice: int  # n per prompt, in the order of the prompts
    delta: Delta


class Generation:
    def __init__(
        self, streams: Sequence[Stream], prompts: Sequence[PromptTokens], n: int, spoken: Spoken
    ) -> None:
        self._streams = streams
        self._spoken = spoken
        self._n = n
        self._num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._num_new_tokens = 0
        self._num_cached = [0] * len(streams)
        self._num_lossy = [0] * len(streams)
        self._num_reused = [0] * len(streams)
        self._num_mended = [0] * len(streams)

    @classmethod
    async def start(
        cls,
        serving: Serving,
        prompts: Sequence[PromptTokens],
        params: SamplingParams,
        *,
        tenant: str,
        priority: int,
        origin: Origin = NO_ORIGIN,
        structure_field: str | None = None,
    ) -> Generation:
        """Queue all prompts. Raises ApiError; then none is queued.

        `structure_field`: says what the answers must look like.
        """
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
            for prompt in prompts:
                stream = await serving.service.submit(
                    prompt.ids,
                    params,
                    tenant=tenant,
                    priority=priority,
                    origin=origin,
                    segments=prompt.segments,
                )
                streams.append(stream)
        except UnusableStructure as error:
            _close(streams)
            raise ApiError(400, str(error), param=structure_field) from None
        except PenstockError as error:
            _close(streams)
            raise from_engine(error) from None
        except BaseException:
            _close(streams)
            raise
        return cls(streams, prompts, params.n, serving.spoken)

    @property
    def request_ids(self) -> list[str]:
        """The engine's ids of the sequences."""
        return [name for stream in self._streams for name in stream.request_ids]

    async def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """The output of all sequences as it is generated. Raises ApiError if the engine stops."""
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
        """The whole output of each sequence, once all have ended."""
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
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(self._num_cached),
                reused_tokens=sum(self._num_reused),
                mended_tokens=sum(self._num_mended),
                lossy_tokens=sum(self._num_lossy),
            ),
        )

    def close(self) -> None:
        """Cancel the sequences that have not finished."""
        _close(self._streams)

    def _count(self, piece: OutputPiece) -> None:
        self._num_new_tokens += 1
        self._spoken.num_tokens += 1
        prompt, index = divmod(piece.choice, self._n)
        self._num_lossy[prompt] = max(self._num_lossy[prompt], piece.delta.num_lossy_tokens)
        if index == 0:  # the other n - 1 reuse what the first has computed
            self._num_cached[prompt] = piece.delta.num_cached_tokens
            self._num_reused[prompt] = piece.delta.num_reused_tokens
            self._num_mended[prompt] = piece.delta.num_mended_tokens


def _close(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.close()
