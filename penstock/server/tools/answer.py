"""An answer in OpenAI's format, with the tool calls that it contains."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.server.answers import (
    CalledFunction,
    CalledFunctionDelta,
    ChatDelta,
    ChatMessage,
    ToolCall,
    ToolCallDelta,
)
from penstock.server.tools.calls import CallDelta, Delta
from penstock.server.tools.use import ToolUse


class AnswerReader:
    """Divides the text of one answer into content and calls, while it is generated."""

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._parser = None if use is None else use.parser()

    def feed(self, text: str) -> list[Delta]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [text] if text else []

    def finish(self) -> list[Delta]:
        return [] if self._parser is None else self._parser.finish()

    def finish_reason(self, reason: str | None) -> str | None:
        """After `finish`. A stop string within a call is the end of an answer, not of a call."""
        parser = self._parser
        if reason == "stop" and parser is not None and parser.num_calls and not parser.is_in_call:
            assert self._use is not None
            return self._use.finish_reason
        return reason


def whole_message(deltas: Sequence[Delta]) -> ChatMessage:
    content: list[str] = []
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        if not isinstance(delta, CallDelta):
            content.append(delta)
        elif delta.index in calls:
            calls[delta.index].function.arguments += delta.arguments
        else:
            function = CalledFunction(name=delta.name or "", arguments=delta.arguments)
            calls[delta.index] = ToolCall(id=delta.id or "", type="function", function=function)
    text = "".join(content)
    if not calls:
        return ChatMessage(role="assistant", content=text, refusal=None)
    return ChatMessage(
        role="assistant", content=text or None, refusal=None, tool_calls=list(calls.values())
    )


def chat_delta(delta: Delta) -> ChatDelta:
    if not isinstance(delta, CallDelta):
        return ChatDelta(content=delta)
    if delta.name is None:
        call = ToolCallDelta(
            index=delta.index, function=CalledFunctionDelta(arguments=delta.arguments)
        )
    else:
        function = CalledFunctionDelta(name=delta.name, arguments=delta.arguments)
        call = ToolCallDelta(index=delta.index, id=delta.id, type="function", function=function)
    return ChatDelta(tool_calls=[call])
