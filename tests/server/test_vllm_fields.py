"""vLLM's extensions of OpenAI's requests, sent by the official client: they do here what they do
there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server.running import MAX_TOKENS, Client, Local
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from penstock import __version__
from penstock.commands.serve import _read_template
from penstock.errors import ConfigError
from penstock.server.prompts import Cut, Prompts

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def ai(server: Local) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def tokens_of(client: Client, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    ids: list[int] = client.post("/tokenize", json=body).json()["tokens"]
    return ids


def prompt_tokens(answer: Any) -> int:
    assert answer.usage is not None
    return int(answer.usage.prompt_tokens)


# logit_bias.


def test_a_bias_makes_a_token_certain_or_impossible(ai: openai.OpenAI, client: Client) -> None:
    plain = ai.completions.create(prompt="One two", **GREEDY).choices[0].text
    (wanted,) = tokens_of(client, " water")
    for temperature in (0, 1):
        wishes = {**GREEDY, "temperature": temperature, "logit_bias": {str(wanted): 100}}
        forced = ai.completions.create(prompt="One two", **wishes)
        assert forced.choices[0].text == " water" * 6
    banned = {str(token): -100.0 for token in tokens_of(client, plain)}
    other = ai.completions.create(prompt="One two", **GREEDY, logit_bias=banned)  # type: ignore[arg-type]
    assert not set(tokens_of(client, other.choices[0].text)) & {int(name) for name in banned}
    # Beyond 100 is as 100, and what was asked about probabilities is of the model's own.
    wishes = {**GREEDY, "logprobs": 1}
    before = ai.completions.create(prompt="One two", **wishes)
    after = ai.completions.create(prompt="One two", **wishes, logit_bias={str(wanted): 100000})
    assert after.choices[0].text == " water" * 6
    assert before.choices[0].logprobs is not None
    assert after.choices[0].logprobs is not None
    top = [choice.logprobs.top_logprobs for choice in (*before.choices, *after.choices)]  # type: ignore[union-attr]
    assert top[0] is not None
    assert top[1] is not None
    (most,) = top[0][0].items()
    assert most in top[1][0].items()
    assert ai.completions.create(prompt="One two", **GREEDY).choices[0].text == plain


# Stop strings.


def test_what_stops_may_be_shown(ai: openai.OpenAI, client: Client) -> None:
    whole = ai.completions.create(prompt="One two", **GREEDY).choices[0].text
    ids = tokens_of(client, whole)
    stop = whole[len(whole) // 2 :][:3]
    cut = whole[: whole.index(stop)]
    shown = {"include_stop_str_in_output": True}
    for stream in (False, True):

        def text(stream: bool = stream, **extra: Any) -> str:
            body = {**GREEDY, "prompt": "One two", "stream": stream, "extra_body": extra}
            if not stream:
                return str(ai.completions.create(**body).choices[0].text)
            return "".join(chunk.choices[0].text for chunk in ai.completions.create(**body))

        assert text(stop=[stop]) == cut
        assert text(stop=[stop], **shown) == cut + stop
        assert text(stop_token_ids=[ids[0]]) == ""
        assert text(stop_token_ids=[ids[0]], **shown) == whole[: len(text(max_tokens=1))]


# Prompts.


def test_a_prompt_is_cut(ai: openai.OpenAI, client: Client) -> None:
    long = "one two three four five six seven eight " * 200
    ids = tokens_of(client, long)
    assert len(ids) > MAX_TOKENS
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ai.completions.create(prompt=long, **GREEDY)

    def ask(prompt: Any, **extra: Any) -> Any:
        return ai.completions.create(prompt=prompt, **GREEDY, extra_body=extra)

    for extra, kept in (
        ({"truncate_prompt_tokens": 20}, ids[-20:]),
        ({"truncate_prompt_tokens": 20, "truncation_side": "left"}, ids[-20:]),
        ({"truncate_prompt_tokens": 20, "truncation_side": "right"}, ids[:20]),
        ({"truncate_prompt_tokens": -1}, ids[-(MAX_TOKENS - 6) :]),
    ):
        wanted = ask(kept)
        for prompt in (long, ids):
            cut = ask(prompt, **extra)
            assert prompt_tokens(cut) == len(kept)
            assert cut.choices[0].text == wanted.choices[0].text
    assert prompt_tokens(ask("One two", truncate_prompt_tokens=20)) == len(
        tokens_of(client, "One two")
    )
    with pytest.raises(openai.BadRequestError, match="empty"):
        ask(long, truncate_prompt_tokens=0)
    chat = ai.chat.completions.create(
        messages=[{"role": "user", "content": long}],
        **GREEDY,
        extra_body={"truncate_prompt_tokens": 50},
    )
    assert prompt_tokens(chat) == 50
    endless = "word " * 2_000_000
    assert prompt_tokens(ask(endless, truncate_prompt_tokens=30)) == 30


def test_a_text_that_is_cut_keeps_what_begins_it(tiny: Path) -> None:
    """As vLLM does it where no side is named: Llama's models want their first token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "one two three four five six seven eight " * 20
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    begin = next(i for i in range(1, 1000) if i not in plain)
    name = tokenizer.convert_ids_to_tokens(begin)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, begin)]
    )
    prompts = Prompts(tokenizer, 512)

    def ids(text: str, cut: Cut | None = None, *, special: bool = True) -> list[int]:
        return asyncio.run(prompts.encode(text, add_special_tokens=special, cut=cut)).ids

    assert ids(text) == [begin, *plain]
    default = Cut(20, keeps_special=True)
    assert ids(text, default) == [begin, *plain[-19:]]
    assert ids(text, default, special=False) == plain[-20:]
    assert ids(text, Cut(20)) == plain[-20:]
    assert ids(text, Cut(20, keeps_end=False)) == [begin, *plain[:19]]
    assert ids(text, Cut(1, keeps_special=True)) == plain[-1:]
    assert ids(text) == [begin, *plain], "a cut changes nothing for the next"
    prompts.close()


def rendered(client: Client, messages: list[Any], **fields: Any) -> str:
    answer = client.post("/tokenize", json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    back = client.post("/detokenize", json={"tokens": answer.json()["tokens"]})
    return str(back.json()["prompt"])


def test_an_answer_is_begun_or_gone_on_with(ai: openai.OpenAI, client: Client) -> None:
    start = {"role": "assistant", "content": "The capital of France is"}
    plain = rendered(client, HELLO)
    assert rendered(client, HELLO, add_generation_prompt=True) == plain
    without = rendered(client, HELLO, add_generation_prompt=False)
    assert plain.startswith(without)
    assert len(plain) > len(without)
    gone_on = rendered(client, [*HELLO, start], continue_final_message=True)
    assert gone_on.endswith("The capital of France is")
    assert (
        rendered(client, [*HELLO, start], continue_final_message=True, add_generation_prompt=False)
        == gone_on
    )
    for extra, text in (
        (
            {"add_generation_prompt": False},
            rendered(client, [*HELLO, start], add_generation_prompt=False),
        ),
        ({"continue_final_message": True}, gone_on),
    ):
        answer = ai.chat.completions.create(messages=[*HELLO, start], **GREEDY, extra_body=extra)
        ids = tokens_of(client, text)
        assert prompt_tokens(answer) == len(ids)
        same = ai.completions.create(prompt=ids, **GREEDY)
        assert answer.choices[0].message.content == same.choices[0].text


def test_a_template_gets_its_values(local: Callable[..., Local], tiny: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if thinks is defined and thinks %} I think{% endif %}"
    )
    server = local(chat_template=template)
    with server.client() as client:
        assert rendered(client, HELLO) == "Hello"
        values = {"chat_template_kwargs": {"thinks": True}}
        assert rendered(client, HELLO, **values) == "Hello I think"
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as ai:
            answer = ai.chat.completions.create(messages=HELLO, **GREEDY, extra_body=values)
            assert prompt_tokens(answer) == len(tokens_of(client, "Hello I think"))


def test_a_template_of_the_operators(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}\n")
    assert _read_template(str(path)) == "{{ messages[0].content }}\n"
    assert _read_template("{{ messages }}") == "{{ messages }}"
    for wrong in ("no-such.jinja", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"--chat-template .* cannot be read"):
            _read_template(wrong)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        _read_template(str(path))


def test_a_template_that_is_none_is_refused_before_anything_is_served(server: Local) -> None:
    assert server.serving is not None
    with pytest.raises(ConfigError, match="not a Jinja template"):
        Prompts(server.serving.prompts._tokenizer, 10, "{% for")


def test_a_shorter_context(local: Callable[..., Local], tiny: Path) -> None:
    server = local(max_model_len=64)
    with server.client() as client:
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        refused = client.post("/v1/completions", json={"prompt": [5] * 64})
        assert "maximum context length is 64 tokens" in refused.json()["error"]["message"]
        whole = client.post(
            "/v1/completions", json={"prompt": [5] * 60, "max_tokens": 99, "ignore_eos": True}
        )
        assert whole.json()["usage"]["total_tokens"] == 64
    too_long = Local(tiny, max_model_len=MAX_TOKENS + 1)
    too_long.start(wait=False)
    too_long.join()
    assert f"max_model_len is {MAX_TOKENS + 1}" in str(too_long.failure)


def test_a_pool_that_holds_less_than_the_model_reads(local: Callable[..., Local]) -> None:
    with local(device_kv_gib=0.00013).client() as client:
        error = client.post("/v1/completions", json={"prompt": [5] * 400}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is ")
        assert "However, you requested 416 tokens (400 in the prompt, 16 in" in error["message"]


# Endpoints.


def test_tokens_and_back(client: Client) -> None:
    text = "The river is low. \u00e9\u6c34"
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_TOKENS
    assert answer["token_strs"][0] == "The"
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    usage = client.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == answer["count"]
    assert client.post("/tokenize", json={"prompt": text}).json()["token_strs"] is None
    chat = client.post("/tokenize", json={"messages": HELLO, "model": "tiny"}).json()
    body = {"messages": HELLO, "max_tokens": 1}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == chat["count"]
    for wrong, status in (
        ({}, 400),
        ({"prompt": "x", "messages": HELLO}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": "x", "model": "other"}, 404),
    ):
        assert client.post("/tokenize", json=wrong).status_code == status


def test_who_asks_for_a_sign_of_life(client: Client) -> None:
    assert client.get("/version").json() == {"version": __version__}
    for method in ("GET", "POST"):
        assert client.request(method, "/ping").status_code == 200
    assert json.loads(client.get("/ping").text) == client.get("/health").json()
