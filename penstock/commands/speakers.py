"""What `penstock chat` talks to: a server, or the embedded engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import PenstockError
from penstock.watch.http import RequestFailed, parse_url, read_body, read_lines, request

if TYPE_CHECKING:
    import httpx

    from penstock.engine.llm import LLM

_TIMEOUT_SECONDS = 600.0  # without a token: a request may wait in a long queue
_MAX_BYTES = 16 << 20  # of an error, or of the list of models
Messages = Sequence[dict[str, str]]
OnText = Callable[[str], None]


class ChatFailed(PenstockError):
    """The server could not be reached, or refused."""


@dataclass(frozen=True, slots=True)
class Wishes:
    max_tokens: int
    temperature: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class Figures:
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int


class Speaker(Protocol):
    name: str

    def answer(self, messages: Messages, wishes: Wishes, on_text: OnText) -> Figures:
        """Generate an answer and pass it on in pieces. Ctrl-C stops it."""
        ...


class Embedded:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name = llm.engine.loaded.name

    def answer(self, messages: Messages, wishes: Wishes, on_text: OnText) -> Figures:
        from penstock.engine.params import SamplingParams

        params = SamplingParams(
            max_tokens=wishes.max_tokens, temperature=wishes.temperature, seed=wishes.seed
        )
        (output,) = self._llm.chat(messages, params, on_text=lambda _, text: on_text(text))
        return Figures(
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            len(output.outputs[0].token_ids),
        )


class Remote:
    """A server with OpenAI's API."""

    def __init__(self, url: str, api_key: str | None, model: str | None = None) -> None:
        """Asks the server for its model if none is named. Raises ChatFailed or ConfigError."""
        parts = parse_url(url)
        path = parts.path.rstrip("/")
        self._url = parts._replace(path=path if path.endswith("/v1") else f"{path}/v1", query="")
        self._api_key = api_key
        self.name = model or self._first_model()

    def answer(self, messages: Messages, wishes: Wishes, on_text: OnText) -> Figures:
        body = {
            "model": self.name,
            "messages": list(messages),
            "max_tokens": wishes.max_tokens,
            "temperature": wishes.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if wishes.seed is not None:
            body["seed"] = wishes.seed
        usage: dict[str, Any] = {}
        for event in self._events("/chat/completions", body):
            if event.get("error"):
                raise ChatFailed(f"the server stopped in mid-answer: {_message(event)}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    on_text(text)
        details = usage.get("prompt_tokens_details") or {}
        return Figures(
            usage.get("prompt_tokens", 0),
            details.get("cached_tokens", 0),
            usage.get("completion_tokens", 0),
        )

    def _first_model(self) -> str:
        with self._ask("GET", "/models") as response:
            try:
                return str(json.loads(read_body(response, _MAX_BYTES))["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatFailed(
                    f"{self._url.geturl()} does not list its models as OpenAI's API does; check "
                    "the URL, or name the model"
                ) from None

    def _events(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        with self._ask("POST", path, body) as response:
            try:
                for line in read_lines(response):
                    data = line.strip().removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield json.loads(data)
            except ValueError:
                raise ChatFailed("the answer was cut off (it is not JSON)") from None
        raise ChatFailed("the answer was cut off before its end")

    @contextmanager
    def _ask(self, method: str, path: str, body: object = None) -> Iterator[httpx.Response]:
        url = self._url._replace(path=self._url.path + path)
        has_answered = False
        try:
            with request(
                method, url, timeout_seconds=_TIMEOUT_SECONDS, api_key=self._api_key, body=body
            ) as response:
                if response.status_code != 200:
                    text = _message(read_body(response, _MAX_BYTES))
                    raise ChatFailed(f"the server answers {response.status_code}: {text}")
                has_answered = True
                yield response
        except RequestFailed as error:
            if has_answered:
                raise ChatFailed(f"the answer was cut off ({error})") from None
            raise ChatFailed(f"{self._url.geturl()} does not answer: {error}") from None


def _message(answer: bytes | dict[str, Any]) -> str:
    """The message of an error response, or the beginning of its text if it has another format."""
    try:
        fields = answer if isinstance(answer, dict) else json.loads(answer)
        return str(fields["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return repr(answer[:200]) if isinstance(answer, bytes) else "no reason given"
