"""Whom `penstock chat` talks to: a server by its URL, or the embedded engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, urlsplit

from penstock.config.urls import shown_value, without_password
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

_SECONDS = 600.0  # without a token; a long queue is no failure
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
        """Tell the answer as it comes. Ctrl-C stops it, wherever it comes from."""
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
    """Any server of OpenAI's API. Needs nothing but Python."""

    def __init__(self, url: str, api_key: str | None, model: str | None = None) -> None:
        """Asks the server for its model where none is named; raises NoAnswer or ConfigError."""
        self._url = _parse(url)
        self._shown = without_password(self._url.geturl())
        # Close: then whoever stops reading an answer has hung up, and the server stops as well.
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
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
        for event in self._events("POST", "/chat/completions", body):
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
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatFailed(
                    f"{self._shown} does not list its models as OpenAI's API does; check "
                    "the URL, or name the model"
                ) from None

    def _events(self, method: str, path: str, body: object) -> Iterator[dict[str, Any]]:
        with self._ask(method, path, body) as response:
            try:
                for line in response:
                    data = line.strip().removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield json.loads(data)
            except (OSError, HTTPException, ValueError) as error:
                raise ChatFailed(f"the answer was cut off ({type(error).__name__})") from None
        raise ChatFailed("the answer was cut off before its end")

    def _ask(self, method: str, path: str, body: object = None) -> HTTPResponse:
        is_https = self._url.scheme == "https"
        kind = HTTPSConnection if is_https else HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=_SECONDS)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._url.path + path, data, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            answer = response.read(1 << 20)
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ChatFailed(f"{self._shown} does not answer: {reason}") from None
        raise ChatFailed(f"the server answers {response.status}: {_message(answer)}")


def _parse(url: str) -> SplitResult:
    advice = "expected one such as http://127.0.0.1:8000; correct it"
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(f"the URL is {shown_value(url)}: {advice}")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/v1") else f"{path}/v1", query="")


def _message(answer: bytes | dict[str, Any]) -> str:
    """What an error's envelope says, or the beginning of whatever came in its place."""
    try:
        fields = answer if isinstance(answer, dict) else json.loads(answer)
        return str(fields["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return repr(answer[:200]) if isinstance(answer, bytes) else "no reason given"
