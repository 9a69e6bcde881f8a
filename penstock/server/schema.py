"""The requests: OpenAI's fields and vLLM's extensions.

A field is used; or ignored, because it does not change answers (`Ignored`); or refused, because it
would change answers and is not supported (`Refused`). Unknown fields are ignored, as in vLLM, and
logged (`unknown_fields`). In objects that only Penstock has, unknown fields are refused. Types are
strict: "1" is not a number, and 1 is not true.

Every list is bounded and fails at its first error, so that the cost of a body is bounded.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.engine.anywhere.pieces import REUSE_ANYWHERE, PromptPiece
from penstock.engine.params import MAX_BIASES, MAX_LOGPROBS, Mending
from penstock.engine.structure import MAX_CHOICES as MAX_CHOICE_TEXTS
from penstock.errors import ConfigError
from penstock.hints import (
    ACTIONS,
    MAX_NAME_CHARS,
    MAX_PREFETCHED_SESSIONS,
    MAX_RETAIN_SECONDS,
    ON_END,
    Hint,
    Hints,
)
from penstock.server.body_limits import MAX_VALUES

MAX_CHOICES = 128
MAX_MESSAGES = 1 << 14
MAX_SALT_CHARS = 1024  # vLLM's
_MAX_PARTS = 1 << 14
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_MAX_ID_DIGITS = 10
_MAX_TEMPLATE_VALUES = 256
# Parameters of transformers' apply_chat_template, and the variables it sets in a template.
RESERVED_TEMPLATE_NAMES = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "self", "kwargs"),
    )
)
MAX_TOOLS = 512
_MAX_TOOL_CALLS = 1024  # of a message
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMATS = ("text", "json_object", "json_schema")


def _refused(
    message: str, param: str | None = None, code: str | None = None
) -> PydanticCustomError:
    """An error whose message is shown unchanged."""
    context = {"text": message, "param": param, "code": code}
    return PydanticCustomError("refused", "{text}", context)


def _unsupported(message: str, param: str | None = None) -> PydanticCustomError:
    return _refused(message, param, "unsupported_parameter")


def _refuse_unless_empty(value: object, info: ValidationInfo) -> object:
    if value is None or value is False or value in ("", [], {}):
        return value
    raise _unsupported(f"{info.field_name} is not supported by this server; leave it out.")


def _expected(text: str) -> WrapValidator:
    """One message for a union, instead of an error from each of its branches."""

    def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_input=False):
                if detail["type"] == "refused":
                    raise _refused(detail["ctx"]["text"], code=detail["ctx"]["code"]) from None
                if detail["type"] == "extra_forbidden":
                    name = str(detail["loc"][-1])[:80]
                    raise _refused(
                        f"Unrecognized request argument supplied: {name!r}; leave it out.",
                        code="unknown_parameter",
                    ) from None
            raise PydanticCustomError("shape", "expected {text}", {"text": text}) from None

    return WrapValidator(validate)


Ignored = Annotated[Any, Field(description="Accepted and ignored.")]
Refused = Annotated[
    Any,
    AfterValidator(_refuse_unless_empty),
    WithJsonSchema({"type": "null", "description": "Not supported."}),
]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_StopText = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
_Stop = Annotated[
    _StopText | Annotated[list[_StopText], Field(max_length=_MAX_STOPS, fail_fast=True)] | None,
    _expected(
        f"a string or a list of up to {_MAX_STOPS} strings, none of them empty or longer than "
        f"{_MAX_STOP_CHARS} characters"
    ),
]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_VALUES, fail_fast=True)]


def _check_bias(given: dict[str, float]) -> dict[str, float]:
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) <= _MAX_ID_DIGITS):
            raise _refused(
                f"logit_bias has the key {name[:40]!r}: expected a token id as a decimal "
                "number; correct it."
            )
    return given


_Bias = Annotated[
    dict[str, float],
    Field(max_length=MAX_BIASES, fail_fast=True),
    AfterValidator(_check_bias),
]


class _Open(BaseModel):
    """For OpenAI's objects, which may have fields that we do not know."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class _Strict(BaseModel):
    """For Penstock's own objects: unknown fields are refused, as they must be misspelt."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def _check_reuse(value: object) -> object:
    if value is not None and value != REUSE_ANYWHERE:
        raise _refused(
            f'reuse is {reprlib.repr(value)}: expected "{REUSE_ANYWHERE}"; correct it, or leave it '
            "out."
        )
    return value


class ReuseMark(_Strict):
    """How the KV of a text may be used again: see docs/anywhere.md."""

    reuse: Annotated[
        Any,
        AfterValidator(_check_reuse),
        WithJsonSchema({"enum": [REUSE_ANYWHERE, None]}),
    ] = None

    @property
    def is_anywhere(self) -> bool:
        return self.reuse is not None


class PromptSegment(_Strict):
    """A text or token ids, which may be reused anywhere."""

    text: str | None = None
    token_ids: Annotated[list[_TokenId], Field(max_length=MAX_VALUES, fail_fast=True)] | None = None
    penstock: ReuseMark | None = None

    @model_validator(mode="after")
    def _check_together(self) -> PromptSegment:
        if (self.text is None) == (self.token_ids is None):
            raise _refused("a segment of the prompt has text and token_ids, or neither: give one.")
        return self

    def piece(self) -> PromptPiece:
        content = (self.token_ids or []) if self.text is None else self.text
        return PromptPiece(content, self.penstock is not None and self.penstock.is_anywhere)


class SegmentedPrompt(_Strict):
    """A prompt in segments, some of which may be reused anywhere."""

    segments: Annotated[
        list[str | _TokenIds | PromptSegment],
        Field(min_length=1, max_length=_MAX_PARTS, fail_fast=True),
    ]

    def pieces(self) -> list[PromptPiece]:
        return [
            segment.piece() if isinstance(segment, PromptSegment) else PromptPiece(segment)
            for segment in self.segments
        ]


_Prompts = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
Prompt = Annotated[
    str
    | _TokenIds
    | SegmentedPrompt
    | Annotated[list[str | SegmentedPrompt], _Prompts]
    | Annotated[list[_TokenIds], _Prompts],
    _expected(
        'a string, a list of token ids, an object {"segments": [...]} with texts, lists of token '
        'ids and objects {"text": "...", "penstock": {"reuse": "anywhere"}}, or a list of up to '
        f"{MAX_CHOICES} strings and such objects, or lists of token ids"
    ),
]


def _must_hold(make: Callable[[], object], param: str | None) -> None:
    """Report what the engine's own checks refuse to the client."""
    try:
        make()
    except ConfigError as error:
        raise _refused(f"{error}.", param) from None


def _one_of(*words: str, advice: str) -> Any:
    """A string that must be one of `words`; `advice` ends the error message."""

    def check(word: str) -> str:
        if word not in words:
            known = " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
            raise _unsupported(f"{word[:40]!r} is not supported: expected {known}; {advice}.")
        return word

    return Annotated[
        str, AfterValidator(check), WithJsonSchema({"type": "string", "enum": list(words)})
    ]


if TYPE_CHECKING:
    _Role = str
    _Text = str
    _OnEnd = str
    _Action = str
    _Side = str
    _Format = str
    _Function = str
else:
    _Role = _one_of(*_ROLES, advice="correct it")
    _Format = _one_of(*_FORMATS, advice="this model reads and writes text only")
    _Function = _one_of("function", advice="other kinds of tools are not supported")
    _Text = _one_of("text", advice="this model reads and writes text only")
    _OnEnd = _one_of(*ON_END, advice="see docs/hints.md")
    _Action = _one_of(*ACTIONS, advice="see docs/hints.md")
    _Side = _one_of("left", "right", advice="left keeps the end of the prompt, right its beginning")


class StreamOptions(_Open):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


def _check_template_values(given: dict[str, Any]) -> dict[str, Any]:
    reserved = sorted(RESERVED_TEMPLATE_NAMES & set(given))
    if reserved:
        raise _refused(
            f"chat_template_kwargs has {reserved[0]!r}, which is reserved: expected variables of "
            "the template; leave it out."
        )
    return given


_TemplateValues = Annotated[
    dict[str, Any],
    Field(max_length=_MAX_TEMPLATE_VALUES, fail_fast=True),
    AfterValidator(_check_template_values),
]


class Residency(_Strict):
    """Where this request's KV should be while it runs. Defaults are the server's settings."""

    prefix_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    tail_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    device_tokens: _Count | None = None
    never_cold: bool = False


def _check_mending(given: dict[str, Any]) -> dict[str, Any]:
    _must_hold(lambda: Mending.of(given), "kv_mending")
    return given


_Mending = Annotated[
    dict[str, Any],
    AfterValidator(_check_mending),
    Field(description="How segments that are reused anywhere are mended: see docs/anywhere.md."),
]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
_RetainSeconds = Annotated[float, Field(gt=0, le=MAX_RETAIN_SECONDS)]


class RequestHints(_Strict):
    """What the client knows about the future use of this request's KV: see docs/hints.md."""

    session: _Name | None = None
    retain_seconds: _RetainSeconds | None = None
    on_end: _OnEnd = "keep"
    prefetch: (
        Annotated[list[_Name], Field(max_length=MAX_PREFETCHED_SESSIONS, fail_fast=True)] | None
    ) = None

    @model_validator(mode="after")
    def _check_together(self) -> RequestHints:
        _must_hold(self.plain, "penstock")
        return self

    def plain(self) -> Hints:
        return Hints(self.session, self.retain_seconds, self.on_end, self.prefetch or ())


class KvTransfer(_Open):
    """Prefill apart from decode, in the fields that vLLM's routers use: see docs/disaggregation.md.

    Routers fill in many more fields. None of them is needed here, because blocks are found by the
    tokens of the prompt.
    """

    do_remote_decode: bool | None = None  # only compute the prompt: another server goes on
    do_remote_prefill: bool | None = None  # another server computes the prompt


_Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]


class TenantFields(BaseModel):
    """Fields that select the tenant: see tenants.py."""

    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: _Salt | None = None


_Schema = Annotated[
    str | dict[str, Any] | bool, _expected("a JSON schema, as an object or as its text")
]
_Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True)]


class JsonSchema(_Open):
    """OpenAI's wrapping of a schema."""

    name: str | None = None
    description: Ignored = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Open):
    type: _Format
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _refused(
                "response_format.json_schema and the type json_schema need each other: expected "
                '{"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}; correct it.',
                "response_format",
            )
        return self


class StructuredOutputs(_Open):
    """vLLM's words for what the answer must look like."""

    json_: Annotated[_Schema | None, Field(alias="json", serialization_alias="json")] = None
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Refused = None


class GenerationRequest(TenantFields, _Open):
    """The fields that chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: _Int64 | None = None
    stop: _Stop = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=128, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: _Bias | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    truncation_side: _Side | None = None
    add_special_tokens: bool | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    kv_residency: Residency | None = None
    kv_mending: _Mending | None = None
    penstock: RequestHints | None = None
    kv_transfer_params: KvTransfer | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    request_id: Ignored = None
    session_id: Ignored = None
    stream_interval: Ignored = None
    spaces_between_special_tokens: Ignored = None
    length_penalty: Ignored = None

    use_beam_search: Refused = None
    allowed_token_ids: Refused = None
    bad_words: Refused = None
    repetition_detection: Refused = None
    thinking_token_budget: Refused = None
    vllm_xargs: Refused = None
    watermarking: Refused = None
    prompt_logprobs: Refused = None
    logprob_token_ids: Refused = None
    return_token_ids: Refused = None
    return_token_offsets: Refused = None
    return_tokens_as_token_ids: Refused = None
    return_hidden_states: Refused = None
    mm_payload: Refused = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _refused(
                "stream_options requires stream=true; set it, or leave stream_options out.",
                "stream_options",
            )
        return self


class TextPart(BaseModel):
    # Clients add fields such as cache_control, which are ignored.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: _Text
    text: str
    penstock: ReuseMark | None = None

    @property
    def is_reusable(self) -> bool:
        return self.penstock is not None and self.penstock.is_anywhere


class FunctionOfCall(_Open):
    name: str
    arguments: Annotated[
        str | dict[str, Any] | None, _expected("JSON, as its text or as an object")
    ] = None


class MessageToolCall(_Open):
    """A call that an earlier answer made."""

    id: str | None = None
    type: _Function = "function"
    function: FunctionOfCall

    def plain(self) -> dict[str, Any]:
        """In the form that chat templates expect: the arguments as an object, if they are one."""
        arguments: Any = self.function.arguments or "{}"
        if isinstance(arguments, str):
            read = _read_json(arguments)
            arguments = read if isinstance(read, dict) else arguments
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


def _read_json(text: str) -> Any:
    """None if it is none: a model may have written anything, and is sent it back."""
    try:
        read = json.loads(text)
        if "\\ud" in text.lower():  # half a character can be escaped, but has no tokens
            whole = json.dumps(read, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
            read = json.loads(whole.decode("utf-16-le", "replace"))
        return read
    except (ValueError, RecursionError):
        return None


class ToolFunction(_Open):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(_Open):
    type: _Function
    function: ToolFunction

    def plain(self) -> dict[str, Any]:
        """As the client sent it, for chat templates."""
        return self.model_dump(exclude_unset=True)


_Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]


class Message(_Open):
    role: _Role
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=_MAX_PARTS, fail_fast=True)] | None,
        _expected(f"a string or a list of up to {_MAX_PARTS} parts of type text"),
    ] = None
    name: str | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Refused = None
    function_call: Refused = None
    tool_call_id: str | None = None
    tool_calls: (
        Annotated[list[MessageToolCall], Field(max_length=_MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None

    def plain(self) -> dict[str, Any]:
        """The message in the form that chat templates expect; its content may be pieces."""
        content: str | list[PromptPiece] | None
        if isinstance(self.content, list):
            content = [PromptPiece(part.text, part.is_reusable) for part in self.content]
        else:
            content = self.content
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        return plain


_Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatFields(_Open):
    """Fields that control how a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: _TemplateValues | None = None
    tools: _Tools | None = None
    chat_template: Refused = None
    documents: Refused = None

    def _check_style(self, messages: list[Message]) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise _refused(
                "continue_final_message and add_generation_prompt are both true: expected at most "
                "one of them; leave the other out.",
                "continue_final_message",
            )
        if self.continue_final_message and messages[-1].role != "assistant":
            raise _refused(
                "continue_final_message is true, but the last message is not the assistant's: "
                "expected the beginning of its answer; add it, or leave the field out.",
                "continue_final_message",
            )


class ChatRequest(GenerationRequest, ChatFields):
    messages: _Messages
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prediction: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    include_reasoning: Ignored = None
    separate_reasoning: Ignored = None
    stream_reasoning: Ignored = None

    audio: Refused = None
    echo: Refused = None
    functions: Refused = None
    modalities: Annotated[list[_Text], Field(max_length=16, fail_fast=True)] | None = None
    media_io_kwargs: Refused = None
    mm_processor_kwargs: Refused = None
    return_prompt_text: Refused = None
    moderation: Refused = None
    reasoning_effort: Refused = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    function_call: str | dict[str, Any] | None = None
    verbosity: Refused = None
    web_search_options: Refused = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        self._check_style(self.messages)
        self._check_tool_choice()
        if self.top_logprobs is not None and not self.logprobs:
            raise _refused(
                "top_logprobs requires logprobs=true; set it, or leave top_logprobs out.",
                "top_logprobs",
            )
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise _refused(
                "max_tokens and max_completion_tokens differ; give only one of them.", "max_tokens"
            )
        return self

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called."""
        if not isinstance(self.tool_choice, dict):
            return None
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else ""

    def _check_tool_choice(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        expected = (
            '"none", "auto", "required" or {"type": "function", "function": {"name": "…"}} with '
            "one of the tools"
        )
        choice = self.tool_choice
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise _refused(
                f"tool_choice is {reprlib.repr(choice)}: expected {expected}; correct it.",
                "tool_choice",
            )
        if choice is None or choice in ("none", "auto"):
            return
        if not names:
            raise _refused(
                "tool_choice asks for a call, but there are no tools; add them, or leave it out.",
                "tool_choice",
            )
        if self.named_tool is not None and self.named_tool not in names:
            raise _refused(
                f"tool_choice is {reprlib.repr(choice)}: expected {expected}; correct it.",
                "tool_choice",
            )


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: _Count | None = None
    suffix: Refused = None
    prompt_embeds: Refused = None

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _unsupported(
                "best_of differs from n, which is not supported; leave it out.",
                "best_of",
            )
        if self.echo and self.logprobs is not None:
            raise _unsupported(
                "echo together with logprobs is not supported, because the prompt's log "
                "probabilities are not computed; leave one of them out.",
                "echo",
            )
        return self


_HintedPrompt = Annotated[
    str | _TokenIds | SegmentedPrompt,
    _expected('a string, a list of token ids, or an object {"segments": [...]}'),
]


class HintRequest(TenantFields, _Strict):
    """A hint between requests, for a session or for the prefix of a prompt."""

    model: str | None = None
    action: _Action
    session: _Name | None = None
    prompt: _HintedPrompt | None = None
    messages: _Messages | None = None
    tools: _Tools | None = None  # of the chat: templates write them before its messages
    chat_template_kwargs: _TemplateValues | None = None
    retain_seconds: _RetainSeconds | None = None

    @model_validator(mode="after")
    def _check_together(self) -> HintRequest:
        given = [x for x in (self.session, self.prompt, self.messages) if x is not None]
        if len(given) != 1:
            raise _refused(
                f"{len(given)} of session, prompt and messages are given: expected exactly one, to "
                "say which KV the hint is for.",
                "session",
            )
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and self.messages is None:
                raise _refused(f"{name} requires messages; add them, or leave {name} out.", name)
        _must_hold(self.plain, None)
        return self

    def plain(self) -> Hint:
        return Hint(self.action, self.session, self.retain_seconds)


class TokenizeRequest(ChatFields):
    """The body of vLLM's /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _refused(
                "expected either prompt or messages, not both or neither.",
                "prompt",
            )
        if self.messages is not None:
            self._check_style(self.messages)
        return self


class DetokenizeRequest(_Open):
    """The body of vLLM's /detokenize."""

    model: str | None = None
    tokens: Annotated[list[_TokenId], Field(max_length=MAX_VALUES, fail_fast=True)]
