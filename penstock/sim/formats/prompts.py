"""Prompts and answers in a request log: token ids, text, or only their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.sim.formats.entries import Entry
from penstock.sim.formats.naming import ChainNames, pseudo_tokens
from penstock.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its answer. For texts, the ids are stand-ins (see `pseudo_tokens`)."""

    prompt: Sequence[int]
    output: Sequence[int] = ()  # empty if not known
    num_output: int = 1  # number of output tokens, if `output` is not known; at least 1

    def request(
        self, entry: Entry, names: ChainNames, arrival_seconds: float, session: str = ""
    ) -> TraceRequest:
        try:
            prompt_blocks, output_blocks = names.of(self.prompt, self.output)
        except ValueError as error:
            raise entry.fault(f"{error}.") from None
        return TraceRequest(
            arrival_seconds,
            len(self.prompt),
            max(self.num_output, len(self.output)),
            prompt_blocks,
            output_blocks,
            session,
        )


def tokens_of(entry: Entry, name: str, *, is_text: bool) -> Sequence[int]:
    return pseudo_tokens(entry.text(name)) if is_text else entry.ids(name, what="token ids")


def messages_text(entry: Entry, name: str) -> str:
    """A conversation as one text. After more turns, the text starts with this one."""
    messages = entry.require(name, "a list of messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise entry.fault(f"`{name}`: expected a list of messages with `role` and `content`.")
    return "\n".join(f"{each.get('role', '')} {_content(each)}" for each in messages)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # content parts, as in OpenAI's API
        parts = (part.get("text") for part in content if isinstance(part, dict))
        content = " ".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
