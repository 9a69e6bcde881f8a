"""POST /v1/penstock/hints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.engine.anywhere.pieces import PromptTokens
from penstock.errors import PenstockError
from penstock.server.answers import HintAnswer
from penstock.server.errors import from_engine
from penstock.server.prompts import ChatStyle
from penstock.server.schema import HintRequest, SegmentedPrompt

if TYPE_CHECKING:
    from penstock.server.backend import Serving


async def follow_hint(body: HintRequest, serving: Serving, tenant: str) -> HintAnswer:
    serving.check_name(body.model)
    tokens = PromptTokens([])
    if isinstance(body.prompt, SegmentedPrompt):
        tokens = await serving.prompts.encode(body.prompt.pieces())
    elif isinstance(body.prompt, str):
        tokens = await serving.prompts.encode(body.prompt)
    elif body.prompt is not None:
        tokens = PromptTokens(body.prompt)
    elif body.messages is not None:
        messages = [message.plain() for message in body.messages]
        style = ChatStyle(
            template_values=body.chat_template_kwargs or {},
            tools=[tool.plain() for tool in body.tools or ()],
        )
        tokens = await serving.prompts.encode_chat(messages, style)
    try:
        num_blocks = await serving.service.hint(
            body.plain(), tokens.ids, tenant=tenant, segments=tokens.segments
        )
    except PenstockError as error:
        raise from_engine(error) from None
    return HintAnswer(
        object="penstock.hint",
        action=body.action,
        blocks=num_blocks,
        tokens=num_blocks * serving.service.engine.block_tokens,
    )
