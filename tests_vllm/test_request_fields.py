"""Every field of vLLM's requests is known to `penstock serve`: used, ignored, or refused.

A field that vLLM adds must not be ignored by chance, because it may change the answer.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server.schema import ChatRequest, CompletionRequest

# Older versions of vLLM have them elsewhere.
chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")

# They concern how KV, encodings of images or expert choices travel, not what is answered.
HARMLESS = {
    "ec_transfer_params",
    "kv_transfer_params",
    "return_mm_kwargs",
    "routed_experts_prompt_start",
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChatRequest, chat.ChatCompletionRequest),
        (CompletionRequest, completion.CompletionRequest),
    ],
    ids=["chat", "completions"],
)
def test_no_field_of_vllm_is_unknown(ours: Any, theirs: Any) -> None:
    assert set(theirs.model_fields) - set(ours.model_fields) <= HARMLESS
