"""Server-sent events, and clients that hang up before the response ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.access import access_of
from penstock.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client hung up before the response ended."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do the work; if the client hangs up, cancel it and raise ClientGone. Read the body first."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        watching.cancel()
        # Await the cancellation, so that the work has released everything.
        await asyncio.wait({working, watching})
        if not working.cancelled():
            working.exception()  # retrieved: else asyncio logs a warning


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ByteStream(Response):
    """A stream of server-sent events, as bytes. `close` is always called at the end."""

    media_type = "text/event-stream"

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], close: Callable[[], None] = lambda: None
    ) -> None:
        # Keep proxies from buffering the stream until its end.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._write(send))
        except ClientGone:
            if (access := access_of(scope)) is not None:
                access.is_gone = True
            return
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        start = "http.response.start"
        await send({"type": start, "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(ByteStream):
    """OpenAI's format: only the data of each event, then [DONE]."""

    def __init__(self, events: AsyncGenerator[BaseModel, None], close: Callable[[], None]) -> None:
        super().__init__(_until_done(events), close)


async def _until_done(events: AsyncGenerator[BaseModel, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for event in events:
                yield f"data: {event.model_dump_json(exclude_unset=True)}\n\n".encode()
        yield DONE
    except ApiError as error:  # too late for a status: sent in place of the next event
        yield f"data: {error.envelope()}\n\n".encode()
