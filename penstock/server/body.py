"""Reads and validates a request's body. Its size is bounded while it is read.

Only the first error is reported: a list of a million wrong items has a million errors.
"""

from __future__ import annotations

import asyncio
import difflib
import reprlib
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from penstock.server.body_limits import check_structure
from penstock.server.errors import ApiError
from penstock.server.unknown_fields import field_names
from penstock.units import KiB, format_bytes

READ_SECONDS = 120.0
_JSON = "application/json"
_LARGE_BYTES = 64 * KiB
# One thread, so that only one large body at a time takes the memory of parsing.
_LARGE_BODIES = ThreadPoolExecutor(1, "penstock-bodies")
_NEEDS_NO_INPUT = ("json_invalid", "refused", "extra_forbidden", "missing", "too_long", "too_short")
_Model = TypeVar("_Model", bound=BaseModel)


async def read_body(request: Request, model: type[_Model], max_bytes: int) -> _Model:
    """The body as a `model`. Raises ApiError if it is invalid."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON:
        # Also keeps web pages out: a browser sends JSON to another site only after a preflight.
        raise ApiError(
            415,
            f"the Content-Type is {kind[:80] or 'none'!r}: expected {_JSON}; set it.",
        )
    try:
        async with asyncio.timeout(READ_SECONDS):
            data = await _read_bytes(request, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {READ_SECONDS:.0f} s; send it again."
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early; send it again.") from None
    if len(data) < _LARGE_BYTES:
        return parse_body(data, model)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_LARGE_BODIES, parse_body, data, model)


def parse_body(data: bytes, model: type[_Model]) -> _Model:
    """Raises ApiError for the first error. Slow for large bodies, which are parsed on a thread."""
    check_structure(data)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise _explain(error, model) from None


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(
        413,
        f"the body is larger than {format_bytes(max_bytes)}; send less, or start the server with "
        "a larger --max-body-bytes.",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > 2 * max_bytes:
        raise too_large
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            chunks.append(chunk)
            continue
        chunks.clear()
        # Discard a little more first: a client that is cut off while it sends sees no response.
        if num_bytes > 2 * max_bytes:
            break
    if num_bytes > max_bytes:
        raise too_large
    return b"".join(chunks)


def _explain(error: ValidationError, model: type[BaseModel]) -> ApiError:
    # Without the input, which may be the whole body and is not shown for most errors.
    detail = error.errors(include_url=False, include_input=False)[0]
    context, kind = detail.get("ctx", {}), detail["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({context['error']}); correct it.")
    param = _path(detail)
    if kind == "refused":
        param = context["param"] or param
        return ApiError(400, context["text"], param=param, code=context["code"])
    if kind == "extra_forbidden":
        name = str(detail["loc"][-1])[:80]
        close = difflib.get_close_matches(name, list(field_names(model)), n=1)
        advice = f"did you mean {close[0]}?" if close else "leave it out."
        message = f"Unrecognized request argument supplied: {param!r}; {advice}"
        return ApiError(400, message, param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is missing; add it.", param=param, code="missing_parameter")
    expected = detail["msg"].replace("Input should be", "expected")
    what = param or "the body"
    if kind in _NEEDS_NO_INPUT:
        return ApiError(400, f"{what}: {expected}; correct it.", param=param)
    shown = reprlib.repr(error.errors(include_url=False)[0]["input"])
    return ApiError(400, f"{what} is {shown}: {expected}; correct it.", param=param)


def _path(detail: ErrorDetails) -> str | None:
    """The field's path, such as messages[0].content. Branches of unions are left out."""
    path = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() or detail["type"] == "extra_forbidden":
            path += f".{part[:80]}" if path else part[:80]
    return path or None
