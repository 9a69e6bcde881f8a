"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from penstock.server.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    KvTransferParams,
)
from penstock.server.generation import Generation, prompt_cut, sampling_params
from penstock.server.logprobs import chat_logprobs
from penstock.server.prompts import ChatStyle
from penstock.server.schema import ChatFields, ChatRequest
from penstock.server.sse import EventStream
from penstock.server.structure import structure_field
from penstock.server.tools.answer import AnswerReader, chat_delta, whole_message
from penstock.server.tools.use import chat_structure, tool_use
from penstock.types import Origin

if TYPE_CHECKING:
    from penstock.engine.sampler import Sampled
    from penstock.engine.service import Delta
    from penstock.server.backend import Serving


def chat_style(request: ChatFields) -> ChatStyle:
    goes_on = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    return ChatStyle(
        add_generation_prompt=not goes_on if begins is None else begins,
        continue_final_message=goes_on,
        template_values=request.chat_template_kwargs or {},
        tools=[tool.plain() for tool in request.tools or ()],
    )


class ChatAnswer:
    """Generates the next message of a conversation, or `n` alternatives."""

    OPERATION = "chat"  # OpenTelemetry's name for it

    def __init__(self, request: ChatRequest, serving: Serving) -> None:
        """Raises ApiError for whatever can be refused before the prompt is tokenized."""
        self._request = request
        self._serving = serving
        self._use = tool_use(request, serving.prompts)
        max_new = request.max_completion_tokens or request.max_tokens
        self._cut = prompt_cut(request, max_new, serving.max_tokens)
        self._params = sampling_params(
            request,
            max_tokens=max_new,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            mending=serving.mending,
            structure=chat_structure(request, self._use),
            shows_special=self._use is not None and self._use.shows_special,
        )
        must_call = self._use is not None and self._use.must_call
        self._structure_field = "tools" if must_call else structure_field(request)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": serving.check_name(request.model),
            "system_fingerprint": serving.fingerprint,
        }

    async def start(self, tenant: str, origin: Origin) -> Generation:
        messages = [message.plain() for message in self._request.messages]
        tokens = await self._serving.prompts.encode_chat(
            messages,
            chat_style(self._request),
            add_special_tokens=bool(self._request.add_special_tokens),
            cut=self._cut,
        )
        return await Generation.start(
            self._serving,
            [tokens],
            self._params,
            tenant=tenant,
            origin=origin,
            priority=self._request.priority or 0,
            structure_field=self._structure_field,
        )

    async def whole(self, generation: Generation) -> Response:
        choices = [
            self._choice(index, deltas) for index, deltas in enumerate(await generation.gather())
        ]
        answer = ChatCompletion(
            object="chat.completion", choices=choices, usage=generation.usage(), **self._head
        )
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    def _choice(self, index: int, deltas: Sequence[Delta]) -> ChatChoice:
        reader = AnswerReader(self._use)
        found = reader.feed("".join(delta.text for delta in deltas)) + reader.finish()
        return ChatChoice(
            index=index,
            message=whole_message(found),
            logprobs=self._logprobs([delta.sampled for delta in deltas]),
            finish_reason=reader.finish_reason(deltas[-1].finish_reason),  # type: ignore[arg-type]
        )

    def handed_over(self, generation: Generation, params: KvTransferParams) -> Response:
        """The answer without text: another server generates it."""
        message = ChatMessage(role="assistant", content="", refusal=None)
        choices = [
            ChatChoice(index=index, message=message, logprobs=None, finish_reason="length")
            for index in range(self._params.n)
        ]
        answer = ChatCompletion(
            object="chat.completion",
            choices=choices,
            usage=generation.usage(),
            kv_transfer_params=params,
            **self._head,
        )
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    def stream(self, generation: Generation) -> Response:
        return EventStream(self._chunks(generation), generation.close)

    async def _chunks(self, generation: Generation) -> AsyncGenerator[ChatChunk, None]:
        options = self._request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        usage: dict[str, Any] = {"usage": None} if with_usage else {}

        def chunk(index: int, delta: ChatDelta, **fields: Any) -> ChatChunk:
            choice = ChatChunkChoice(
                index=index, delta=delta, **{"logprobs": None, "finish_reason": None, **fields}
            )
            return ChatChunk(
                object="chat.completion.chunk", choices=[choice], **usage, **self._head
            )

        readers = [AnswerReader(self._use) for _ in range(self._params.n)]
        for index in range(self._params.n):
            yield chunk(index, ChatDelta(role="assistant", content=""))
        async with aclosing(generation.pieces()) as pieces:
            async for index, delta in pieces:
                reader = readers[index]
                found = reader.feed(delta.text)
                if delta.finish_reason is not None:
                    found += reader.finish()
                if not found and self._request.logprobs:
                    found = [""]
                for number, part in enumerate(found):
                    logprobs = None if number else self._logprobs([delta.sampled])
                    yield chunk(index, chat_delta(part), logprobs=logprobs)
                if delta.finish_reason is not None:
                    reason = reader.finish_reason(delta.finish_reason)
                    yield chunk(index, ChatDelta(), finish_reason=reason)
        if with_usage:
            yield ChatChunk(
                object="chat.completion.chunk",
                choices=[],
                usage=generation.usage(),
                **self._head,
            )

    def _logprobs(self, samples: Sequence[Sampled]) -> ChatLogprobs | None:
        return chat_logprobs(samples, self._serving.prompts) if self._request.logprobs else None
