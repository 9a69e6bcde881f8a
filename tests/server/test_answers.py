"""The shapes of the answers, with the official client and a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server.running import TIMEOUT_SECONDS, Client, Local

from penstock.engine.sampler import Sampled
from penstock.server.logprobs import chat_logprobs

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def ai(server: Local) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=TIMEOUT_SECONDS
    ) as client:
        yield client


def events_of(client: Client, path: str, **body: Any) -> list[Any]:
    """The events of a stream, word for word as they go over the wire."""
    answer = client.post(path, json={**GREEDY, **body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == ""
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_events_of_a_chat(client: Client) -> None:
    events = events_of(client, "/v1/chat/completions", messages=QUESTION)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(list(choice["delta"]) == ["content"] for choice in choices[1:-1])
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all("usage" not in event for event in events)
    (head,) = {
        tuple((name, event[name]) for name in ("id", "object", "created", "model"))
        for event in events
    }
    assert head[0][1].startswith("chatcmpl-")
    options = {"include_usage": True, "include_obfuscation": False}
    *events, last = events_of(
        client, "/v1/chat/completions", messages=QUESTION, stream_options=options
    )
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8


def test_the_events_of_a_completion(client: Client) -> None:
    events = events_of(client, "/v1/completions", prompt="Hello", echo=True)
    assert events[0]["choices"][0]["text"] == "Hello"
    assert all(event["object"] == "text_completion" for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]


def test_completions_of_texts_and_ids(ai: openai.OpenAI) -> None:
    prompts = ["One, two, three,", "A B C D"]
    several = ai.completions.create(prompt=prompts, n=2, **GREEDY)
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    streamed = [""] * 4
    for chunk in ai.completions.create(prompt=prompts, n=2, stream=True, **GREEDY):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    echoed = ai.completions.create(prompt=prompts[0], echo=True, **GREEDY)
    assert echoed.choices[0].text == prompts[0] + texts[0]
    ids = [4272, 28, 827]
    of_ids = ai.completions.create(prompt=ids, echo=True, **GREEDY)
    both = ai.completions.create(prompt=[ids, ids], **GREEDY)
    assert of_ids.usage is not None
    assert both.usage is not None
    assert (of_ids.usage.prompt_tokens, both.usage.prompt_tokens) == (3, 6)
    assert both.choices[0].text == both.choices[1].text
    assert of_ids.choices[0].text.endswith(both.choices[0].text)


def test_several_samples_are_reproducible_and_differ(ai: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"model": "tiny", "n": 2, "seed": 7, "max_tokens": 6}

    def ask() -> list[str | None]:
        answer = ai.chat.completions.create(messages=QUESTION, **wishes)
        return [choice.message.content for choice in answer.choices]

    texts = ask()
    assert texts == ask()
    assert texts[0] != texts[1]
    streamed, num_roles = ["", ""], [0, 0]
    for chunk in ai.chat.completions.create(messages=QUESTION, stream=True, **wishes):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        num_roles[choice.index] += choice.delta.role is not None
    assert streamed == texts
    assert num_roles == [1, 1]


def test_logprobs_of_a_stream_are_those_of_the_whole(ai: openai.OpenAI) -> None:
    wishes = {**GREEDY, "logprobs": True, "top_logprobs": 2, "messages": QUESTION}
    whole = ai.chat.completions.create(**wishes).choices[0].logprobs
    assert whole is not None
    streamed = [
        token
        for chunk in ai.chat.completions.create(stream=True, **wishes)
        if (logprobs := chunk.choices[0].logprobs) is not None
        for token in logprobs.content or ()
    ]
    assert streamed == whole.content
    for token in whole.content or ():
        assert (token.bytes is None) == ("\ufffd" in token.token)
        assert token.bytes is None or bytes(token.bytes).decode() == token.token
    bare = ai.chat.completions.create(**{**wishes, "top_logprobs": None}).choices[0].logprobs
    assert bare is not None
    assert all(token.top_logprobs == [] for token in bare.content or ())


def test_logprobs_of_a_completion(ai: openai.OpenAI) -> None:
    wishes = {**GREEDY, "logprobs": 2, "prompt": "One, two, three,"}
    choice = ai.completions.create(**wishes).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
    assert "".join(tokens) == choice.text
    assert all(
        choice.text.startswith(token, offset) for token, offset in zip(tokens, offsets, strict=True)
    )
    assert all(len(top) <= 2 for top in logprobs.top_logprobs or ())
    streamed = [c.choices[0].logprobs for c in ai.completions.create(stream=True, **wishes)]
    assert [o for part in streamed if part for o in part.text_offset or ()] == offsets


def test_a_character_of_several_tokens_has_no_bytes_of_its_own(server: Local) -> None:
    """U+FFFD would hide which bytes they were."""
    assert server.serving is not None
    prompts = server.serving.prompts
    ids = asyncio.run(prompts.encode("Two:日本")).ids
    samples = [Sampled(token_id, -1.0, 1, [(token_id, -1.0)]) for token_id in ids]
    entries = chat_logprobs(samples, prompts).content
    assert [entry.token for entry in entries] == ["Two", ":", "\ufffd", "\ufffd", "本"]
    wholes = [None if entry.bytes is None else bytes(entry.bytes).decode() for entry in entries]
    assert wholes == ["Two", ":", None, None, "本"]
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in entries)


def test_fields_beyond_openais(client: Client) -> None:
    body = {"prompt": "One", "temperature": 0, "max_tokens": 6}

    def ask(**fields: Any) -> tuple[str, str]:
        answer = client.post("/v1/completions", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice["text"], choice["finish_reason"]

    plain, _ = ask()
    assert ask(top_k=1, temperature=1.5)[0] == plain
    assert ask(min_p=1.0, temperature=1.5)[0] == plain
    assert ask(repetition_penalty=0.01)[0] != plain
    assert ask(frequency_penalty=2, presence_penalty=2, priority=-3, min_tokens=2)[1] == "length"
    first = client.post("/v1/completions", json={**body, "logprobs": 0}).json()
    assert first["choices"][0]["logprobs"]["top_logprobs"] == [{}] * 6
    assert ask(ignore_eos=True, skip_special_tokens=False)[1] == "length"


def test_max_tokens_is_what_fits_where_none_is_given(client: Client) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 512
    usage = client.post("/v1/completions", json={"prompt": "Hello"}).json()["usage"]
    assert usage["completion_tokens"] == 16
