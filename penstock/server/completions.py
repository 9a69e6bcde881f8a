"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from starlette.responses import Response

from penstock.engine.anywhere.pieces import PromptPiece, PromptTokens
from penstock.server.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    KvTransferParams,
)
from penstock.server.generation import Generation, prompt_cut, sampling_params
from penstock.server.logprobs import completion_logprobs
from penstock.server.schema import CompletionRequest, SegmentedPrompt
from penstock.server.sse import EventStream
from penstock.server.structure import answer_structure, structure_field
from penstock.types import Origin

if TYPE_CHECKING:
    from penstock.engine.service import Delta
    from penstock.server.backend import Serving

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completions:
    """Generates the continuations of one or more prompts."""

    OPERATION = "text_completion"  # OpenTelemetry's name for it

    def __init__(self, request: CompletionRequest, serving: Serving) -> None:
        """Raises ApiError for whatever can be refused before the prompt is tokenized."""
        self._request = request
        self._serving = serving
        max_new = request.max_tokens or _DEFAULT_MAX_TOKENS
        self._cut = prompt_cut(request, max_new, serving.max_tokens)
        self._params = sampling_params(
            request,
            max_tokens=max_new,
            logprobs=request.logprobs,
            mending=serving.mending,
            structure=answer_structure(request),
        )
        self._echoes: list[str] = []  # one per prompt
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.check_name(request.model),
            "system_fingerprint": serving.fingerprint,
        }

    async def start(self, tenant: str, origin: Origin) -> Generation:
        prompts = []
        special = self._request.add_special_tokens
        for prompt in self._prompts():
            if isinstance(prompt, list):
                ids = prompt if self._cut is None else self._cut.of(prompt)
                prompts.append(PromptTokens(ids))
                pieces = [PromptPiece(ids)]
            else:
                pieces = (
                    self._serving.prompts.split(prompt)
                    if isinstance(prompt, str)
                    else prompt.pieces()
                )
                prompts.append(
                    await self._serving.prompts.encode(
                        pieces,
                        add_special_tokens=True if special is None else special,
                        cut=self._cut,
                    )
                )
            self._echoes.append(await self._text(pieces) if self._request.echo else "")
        return await Generation.start(
            self._serving,
            prompts,
            self._params,
            tenant=tenant,
            origin=origin,
            priority=self._request.priority or 0,
            structure_field=structure_field(self._request),
        )

    async def whole(self, generation: Generation) -> Response:
        choices = [
            CompletionChoice(
                index=index,
                text=self._echo(index) + "".join(delta.text for delta in deltas),
                logprobs=self._logprobs(deltas, 0),
                finish_reason=deltas[-1].finish_reason,  # type: ignore[arg-type]  # checked
            )
            for index, deltas in enumerate(await generation.gather())
        ]
        answer = Completion(choices=choices, usage=generation.usage(), **self._head)
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    def handed_over(self, generation: Generation, params: KvTransferParams) -> Response:
        """The answer without text: another server generates it."""
        choices = [
            CompletionChoice(
                index=index, text=self._echo(index), logprobs=None, finish_reason="length"
            )
            for index in range(len(self._echoes) * self._params.n)
        ]
        answer = Completion(
            choices=choices, usage=generation.usage(), kv_transfer_params=params, **self._head
        )
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    def stream(self, generation: Generation) -> Response:
        return EventStream(self._chunks(generation), generation.close)

    async def _chunks(self, generation: Generation) -> AsyncGenerator[Completion, None]:
        options = self._request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        usage: dict[str, Any] = {"usage": None} if with_usage else {}
        num_choices = len(self._echoes) * self._params.n
        text_offsets = [0] * num_choices

        def chunk(index: int, text: str, **fields: Any) -> Completion:
            choice = CompletionChoice(
                index=index, text=text, **{"logprobs": None, "finish_reason": None, **fields}
            )
            return Completion(choices=[choice], **usage, **self._head)

        if self._request.echo:
            for index in range(num_choices):
                yield chunk(index, self._echo(index))
        async with aclosing(generation.pieces()) as pieces:
            async for index, delta in pieces:
                logprobs = self._logprobs([delta], text_offsets[index])
                if logprobs is not None:
                    text_offsets[index] += len(logprobs.tokens[0])
                if delta.text or logprobs is not None or delta.finish_reason is not None:
                    yield chunk(
                        index, delta.text, logprobs=logprobs, finish_reason=delta.finish_reason
                    )
        if with_usage:
            yield Completion(choices=[], usage=generation.usage(), **self._head)

    def _prompts(self) -> list[str | list[int] | SegmentedPrompt]:
        prompt = self._request.prompt
        if isinstance(prompt, str | SegmentedPrompt):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return cast("list[str | list[int] | SegmentedPrompt]", prompt)

    async def _text(self, pieces: Sequence[PromptPiece]) -> str:
        return "".join(
            [
                content if isinstance(content, str) else await self._serving.prompts.decode(content)
                for content, _ in pieces
            ]
        )

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._params.n]

    def _logprobs(self, deltas: list[Delta], text_offset: int) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        samples = [delta.sampled for delta in deltas]
        return completion_logprobs(samples, self._serving.prompts, text_offset)
