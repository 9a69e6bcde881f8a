"""What a request may do with its tools, in the format of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.structure import StructuredOutputsParams
from penstock.errors import ConfigError
from penstock.server.errors import ApiError
from penstock.server.prompts import Prompts
from penstock.server.schema import ChatRequest
from penstock.server.structure import answer_structure
from penstock.server.tools.calls import CallParser
from penstock.server.tools.formats import MAX_CALLS, ToolFormat
from penstock.server.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    form: ToolFormat
    tools: tuple[Tool, ...]  # that may be called
    must_call: bool
    is_named: bool
    max_calls: int | None
    special_id: Callable[[str], int | None]

    @property
    def shows_special(self) -> bool:
        """Whether calls contain special tokens, which a text usually leaves out."""
        return any(self.special_id(mark) is not None for mark in self.form.marks)

    def parser(self) -> CallParser:
        return CallParser(self.form, self.tools, self.max_calls)

    def structure(self, answer: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """What an answer must look like: calls, if there must be some, or else `answer` too.

        Raises ApiError.
        """
        if not self.must_call and answer is None:
            return None
        try:
            calls = self.form.grammar(self.tools, self.max_calls or MAX_CALLS, self.special_id)
        except ConfigError as error:
            raise ApiError(400, f"{error}.", param="tools") from None
        if self.must_call:
            return self._checked(f"start: calls\n{calls}")
        assert answer is not None
        kind, text, options = answer.source
        if kind != "json":
            raise ApiError(
                400,
                "tools and structured_outputs are given together: expected a JSON schema beside "
                'tools, or a tool_choice of "none"; leave one of them out.',
                param="structured_outputs",
            )
        schema = json.dumps({**json.loads(text), "x-guidance": json.loads(options)})
        return self._checked(f"start: calls | answer\n{calls}\nanswer: %json {schema}")

    def _checked(self, grammar: str) -> StructuredOutputsParams:
        try:
            return StructuredOutputsParams(grammar=grammar)
        except ConfigError:
            raise ApiError(
                400,
                f"the schemas of the tools have {len(grammar)} characters, more than a grammar may "
                'have; send fewer tools, or a tool_choice of "auto".',
                param="tools",
            ) from None

    @property
    def finish_reason(self) -> str:
        """Of an answer that ends with calls. As at OpenAI, a named tool's is "stop"."""
        return "stop" if self.is_named else "tool_calls"


def tool_use(request: ChatRequest, prompts: Prompts) -> ToolUse | None:
    """None if the answer can have no calls. Raises ApiError if the model cannot call tools."""
    if not request.tools or request.tool_choice == "none":
        return None
    if not prompts.has_tools:
        raise ApiError(
            400,
            "tools are not supported by this model's chat template; leave them out, set "
            'tool_choice to "none", or start the server with a --chat-template that has tools.',
            param="tools",
            code="unsupported_parameter",
        )
    if prompts.tool_format is None:
        raise ApiError(
            400,
            "it is not known how this model writes tool calls; start the server with "
            "--tool-call-parser, or leave tools out.",
            param="tools",
            code="unsupported_parameter",
        )
    tools = tuple(
        Tool(each.function.name, each.function.parameters or {}, bool(each.function.strict))
        for each in request.tools
    )
    named = request.named_tool
    return ToolUse(
        prompts.tool_format,
        tools if named is None else tuple(tool for tool in tools if tool.name == named)[:1],
        named is not None or request.tool_choice == "required",
        named is not None,
        1 if named is not None or request.parallel_tool_calls is False else None,
        prompts.special_id,
    )


def chat_structure(request: ChatRequest, use: ToolUse | None) -> StructuredOutputsParams | None:
    """What the answer must look like. Raises ApiError."""
    answer = answer_structure(request)
    return answer if use is None else use.structure(answer)
