"""Server-sent events, and the client that may be gone before the answer is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
_Result = TypeVar("_Result")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do the work, or cancel it and raise ClientGone when the client hangs up. The body is read."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        watching.cancel()
        # Waited for, so that what the work holds is free when this returns.
        await asyncio.wait({working, watching})
        if not working.cancelled():
            working.exception()  # seen: asyncio complains of those nobody looked at


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Events as they come, then [DONE]; `close` is called whatever happened."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[BaseModel, None], close: Callable[[], None]) -> None:
        # Proxies that buffer would keep the tokens until the last has come.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._write(send))
        except ClientGone:
            return
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await write(f"data: {event.model_dump_json(exclude_unset=True)}\n\n".encode())
            await write(DONE)
        except ApiError as error:  # too late for a status: it goes where the next event would
            await write(f"data: {error.envelope()}\n\n".encode())
        await send({"type": "http.response.body", "body": b"", "more_body": False})
