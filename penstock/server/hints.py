"""POST /v1/penstock/hints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.server.answers import HintAnswer
from penstock.server.errors import from_engine
from penstock.server.schema import HintRequest

if TYPE_CHECKING:
    from penstock.server.backend import Serving


async def follow_hint(body: HintRequest, serving: Serving, tenant: str) -> HintAnswer:
    serving.check_name(body.model)
    ids: list[int] = []
    if isinstance(body.prompt, str):
        ids = (await serving.prompts.encode(body.prompt)).ids
    elif body.prompt is not None:
        ids = body.prompt
    elif body.messages is not None:
        messages = [message.plain() for message in body.messages]
        ids = (await serving.prompts.encode_chat(messages)).ids
    try:
        num_blocks = await serving.service.hint(body.plain(), ids, tenant=tenant)
    except PenstockError as error:
        raise from_engine(error) from None
    return HintAnswer(
        object="penstock.hint",
        action=body.action,
        blocks=num_blocks,
        tokens=num_blocks * serving.service.engine.block_tokens,
    )
