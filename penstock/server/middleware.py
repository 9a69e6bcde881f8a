"""The outermost layer: request ids, a response for every failure, and security headers.

Failures are logged as places in the code, without values, to keep prompts out of the log.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
import uuid
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.access import Access
from penstock.server.errors import internal, stopped

log = logging.getLogger("penstock.server")

HEADER = "X-Request-Id"
# Data is never interpreted as a page, and no other site may embed or read it.
SAFETY = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_LEFTOVER_BYTES = 1 << 20
_LEFTOVER_SECONDS = 1.0


class OuterMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(HEADER, ""))
        access = Access(scope, request_id)
        scope.setdefault("state", {}).update(request_id=request_id, access=access)
        started = False
        body = _Body(scope, receive)

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                await body.drain()
                started = True
                access.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                for name, value in SAFETY.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, body.receive, send_with_id)
        except asyncio.CancelledError:
            if started:
                raise
            # The server is stopping; uvicorn would answer in plain text.
            body.give_up()
            await stopped().response()(scope, receive, send_with_id)
        except Exception as error:
            places = "".join(traceback.format_tb(error.__traceback__))
            log.error("request %s failed with %s at\n%s", request_id, type(error).__name__, places)
            if started:
                # Break the connection: a clean end would make half a response look complete.
                raise ConnectionError("the response was cut off") from None
            await internal().response()(scope, receive, send_with_id)
        finally:
            access.write()


class _Body:
    """The request's body. The response waits until the body is read, within limits: closing a
    connection with unread bytes resets it, and the client may lose the response."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        self._receive = receive
        # With "Expect: 100-continue" the client has sent nothing yet.
        self._is_coming = "expect" not in headers and (
            headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        )

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_coming = message["type"] == "http.request" and message.get("more_body", False)
        return message

    def give_up(self) -> None:
        """Do not wait for the rest of the body."""
        self._is_coming = False

    async def drain(self) -> None:
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEFTOVER_SECONDS):
                while self._is_coming and num_bytes < _LEFTOVER_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))


def _request_id(given: str) -> str:
    return given if _SAFE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
