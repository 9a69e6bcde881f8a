"""An answer reaches whoever is still sending: what comes is taken first, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.server import middleware
from penstock.server.middleware import OuterMiddleware

PIECE = b"y" * 1000


async def _refuse(_scope: Any, _receive: Any, send: Any) -> None:
    """As for a missing key: whatever is in the body, nobody wants it."""
    await send({"type": "http.response.start", "status": 401, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


def _what_happens(messages: Iterable[dict[str, Any]], **headers: str) -> list[str]:
    """In order; who asks for more than there is, waits."""
    happened: list[str] = []
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        message = next(coming, None)
        if message is None:
            await asyncio.Event().wait()
        assert message is not None
        happened.append("taken")
        return message

    async def send(message: dict[str, Any]) -> None:
        happened.append(message["type"].removeprefix("http.response."))

    scope = {
        "type": "http",
        "headers": [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()],
    }
    asyncio.run(OuterMiddleware(_refuse)(scope, receive, send))  # type: ignore[arg-type]
    return happened


def _piece(*, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": PIECE, "more_body": not is_last}


@pytest.mark.parametrize(
    "headers", [{"content_length": "3000"}, {"transfer_encoding": "chunked"}], ids=str
)
def test_the_rest_is_taken_before_the_answer(headers: dict[str, str]) -> None:
    pieces = [_piece(), _piece(), _piece(is_last=True)]
    assert _what_happens(pieces, **headers) == ["taken"] * 3 + ["start", "body"]


def test_who_leaves_is_not_waited_for() -> None:
    leaving = [_piece(), {"type": "http.disconnect"}]
    assert _what_happens(leaving, content_length="3000") == ["taken"] * 2 + ["start", "body"]


def test_who_stalls_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_LEFTOVER_SECONDS", 0.01)
    assert _what_happens([_piece()], content_length="3000") == ["taken", "start", "body"]


def test_who_never_ends_is_answered() -> None:
    happened = _what_happens((_piece() for _ in range(10**6)), transfer_encoding="chunked")
    assert happened[-2:] == ["start", "body"]
    assert happened.count("taken") <= middleware._LEFTOVER_BYTES / len(PIECE) + 1


@pytest.mark.parametrize(
    "headers",
    [{}, {"content_length": "0"}, {"content_length": "9", "expect": "100-continue"}],
    ids=str,
)
def test_who_sends_nothing_is_answered_at_once(headers: dict[str, str]) -> None:
    assert _what_happens([], **headers) == ["start", "body"]
