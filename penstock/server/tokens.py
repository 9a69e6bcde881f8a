"""POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.answers import Detokenized, Tokenized
from penstock.server.chat import chat_style
from penstock.server.errors import ApiError
from penstock.server.schema import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from penstock.server.backend import Serving


async def tokenize(body: TokenizeRequest, serving: Serving) -> Tokenized:
    serving.check_name(body.model)
    prompts = serving.prompts
    if body.messages is not None:
        messages = [message.plain() for message in body.messages]
        tokens = await prompts.encode_chat(
            messages, chat_style(body), add_special_tokens=bool(body.add_special_tokens)
        )
    else:
        special = body.add_special_tokens
        tokens = await prompts.encode(
            body.prompt or "", add_special_tokens=True if special is None else special
        )
    ids = tokens.ids
    return Tokenized(
        count=len(ids),
        max_model_len=serving.max_tokens,
        tokens=ids,
        token_strs=await prompts.token_names(ids) if body.return_token_strs else None,
    )


async def detokenize(body: DetokenizeRequest, serving: Serving) -> Detokenized:
    serving.check_name(body.model)
    vocab_size = serving.service.engine.loaded.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise ApiError(
            400,
            f"tokens has the id {max(body.tokens)}: expected 0 to {vocab_size - 1}, the ids of "
            "this model's tokenizer; correct it.",
            param="tokens",
        )
    return Detokenized(prompt=await serving.prompts.decode(body.tokens))
