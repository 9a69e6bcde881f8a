"""Reuse anywhere over HTTP: what clients may mark, what they are told, and what is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server.running import TIMEOUT_SECONDS, Client, Local, Spawned

from penstock import LLM, SamplingParams
from penstock.engine.params import MENDING_MODES

MARK = {"reuse": "anywhere"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RIVER = "A penstock carries water from the reservoir to the turbine, and a gate closes it. " * 9
SEA = "Ships cross the sea — from Ålesund to 大阪 — with <|im_end|> letters and parcels 📦. " * 6
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def part(text: str, mark: object = None) -> dict[str, Any]:
    plain = {"type": "text", "text": text}
    return plain if mark is None else {**plain, "penstock": mark}


def user(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def segmented(*segments: Any) -> dict[str, Any]:
    return {"segments": list(segments)}


def doc(text: str) -> dict[str, Any]:
    return {"text": text, "penstock": MARK}


def post(client: Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refusal(client: Client, path: str, **body: Any) -> str:
    answer = client.post(path, json={**GREEDY, **body})
    assert answer.status_code == 400, answer.text
    client.check_serves()
    return str(answer.json()["error"]["message"])


def details(answer: dict[str, Any]) -> tuple[int, int]:
    found = answer["usage"]["prompt_tokens_details"]
    assert all(type(value) is int for value in found.values())
    return found["reused_tokens"], found["mended_tokens"]


def num_reused(num_tokens: int, num_mended: int = 64) -> int:
    return num_tokens // 16 * 16 - num_mended


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(
        str(tiny), kv_offloading_size=0, device_kv_gib=0.02, block_tokens=16, dtype="float32"
    ) as made:
        yield made


class Asking:
    """What the engine answers to token ids with bounds, without any of the code under test."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.tokenizer = llm.engine.loaded.tokenizer
        self._num = 0

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def chat_ids(self, parts: list[str], marked: list[int]) -> tuple[list[int], Any]:
        content = "".join(f"@@{n}@@" if n in marked else each for n, each in enumerate(parts))
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return self.split(text, {f"@@{n}@@": parts[n] for n in marked})

    def split(self, text: str, documents: dict[str, str]) -> tuple[list[int], Any]:
        ids: list[int] = []
        bounds = []
        for mark, document in documents.items():
            before, text = text.split(mark)
            ids += self.ids(before)
            bounds.append((len(ids), len(ids) + len(self.ids(document))))
            ids += self.ids(document)
        return ids + self.ids(text), bounds

    def answer(self, ids: list[int], bounds: Any, mending: Any = None) -> list[str]:
        self._num += 1
        params = SamplingParams(
            temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, kv_mending=mending
        )
        self.engine.add(f"asked-{self._num}", ids, params, segments=bounds)
        logprobs = []
        while self.engine.has_work:
            logprobs += [f"{step.sampled.logprob:.4f}" for step in self.engine.step()]
        return logprobs


@pytest.fixture
def asking(llm: LLM) -> Asking:
    llm.engine.pool.forget()
    return Asking(llm)


def chat_logprobs(answer: dict[str, Any]) -> list[str]:
    return [f"{each['logprob']:.4f}" for each in answer["choices"][0]["logprobs"]["content"]]


def text_logprobs(answer: dict[str, Any]) -> list[str]:
    return [f"{each:.4f}" for each in answer["choices"][0]["logprobs"]["token_logprobs"]]


@pytest.mark.parametrize(
    ("parts", "marked"),
    [
        (["Read: ", RIVER, "What is it?"], [1]),
        ([RIVER, "What is it?"], [0]),
        (["Read this: ", SEA], [1]),
        ([RIVER], [0]),
        (["One: ", SEA, RIVER, "Which?"], [1, 2]),
    ],
    ids=["middle", "first", "last", "only", "two"],
)
@pytest.mark.parametrize("mode", MENDING_MODES)
def test_a_chat_is_answered_as_by_the_engine(
    local: Callable[..., Local], asking: Asking, parts: list[str], marked: list[int], mode: str
) -> None:
    ids, bounds = asking.chat_ids(parts, marked)
    mending = {"mode": mode}
    messages = user(*(part(t, MARK if n in marked else None) for n, t in enumerate(parts)))
    with local().client() as client:
        assert post(client, "/tokenize", messages=messages)["tokens"] == ids
        answer = post(client, CHAT, messages=messages, logprobs=True, kv_mending=mending)
    assert chat_logprobs(answer) == asking.answer(ids, bounds, mending)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    reused, mended = details(answer)
    assert reused > 64
    assert mode == "none" or mended > 0
    assert chat_logprobs(answer) != asking.answer(ids, ()), "the test cannot tell them apart"


def test_segments_of_a_completion(local: Callable[..., Local], asking: Asking) -> None:
    ids, bounds = asking.split("Read: @1@ and @2@ Now?", {"@1@": RIVER, "@2@": SEA})
    with local().client() as client:
        for prompt in (
            segmented("Read: ", doc(RIVER), " and", " ", doc(SEA), doc(""), " Now?"),
            [segmented("Read: ", doc(RIVER), " and ", doc(SEA), {"text": " Now?"})],
            segmented(
                asking.ids("Read: "),
                {"token_ids": asking.ids(RIVER), "penstock": MARK},
                *(" and ", doc(SEA), asking.ids(" Now?")),
            ),
        ):
            answer = post(client, COMPLETIONS, prompt=prompt, logprobs=0, echo=None)
            assert text_logprobs(answer) == asking.answer(ids, bounds)
            assert answer["usage"]["prompt_tokens"] == len(ids)
        echoed = post(client, COMPLETIONS, prompt=prompt, echo=True)["choices"][0]["text"]
        assert echoed.startswith(f"Read: {RIVER} and {SEA} Now?")


def test_several_prompts_and_answers(client: Client, asking: Asking) -> None:
    body = {
        "prompt": [segmented("Say: ", doc(RIVER), "?"), "plain", segmented("And ", doc(SEA), "?")],
        "cache_salt": "several",
        "n": 2,
    }
    expected = [
        asking.split("Say: @@?", {"@@": RIVER}),
        (asking.ids("plain"), []),
        asking.split("And @@?", {"@@": SEA}),
    ]
    answer = post(client, COMPLETIONS, **body)
    assert len(answer["choices"]) == 6
    assert answer["usage"]["prompt_tokens"] == sum(len(ids) for ids, _ in expected)
    wanted = sum(num_reused(end - start) for _, bounds in expected for start, end in bounds)
    assert details(answer) == (wanted, 128)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[::2] == texts[1::2]
    for number, prompt in enumerate(body["prompt"]):  # type: ignore[arg-type]
        alone = post(client, COMPLETIONS, prompt=prompt, cache_salt="alone")
        assert alone["choices"][0]["text"] == texts[2 * number]


def test_nothing_marked_means_nothing_new(client: Client, asking: Asking) -> None:
    """Neither tokens nor answers change: parts become one text before it is tokenized."""
    text = "Reservoirs are fu"
    rest = "ll of water. " * 20
    template = asking.tokenizer.apply_chat_template
    whole = template([{"role": "user", "content": text + rest}], tokenize=False)
    for parts in ([part(text + rest)], [part(text), part(rest, {})], [part(text), part(rest)]):
        body = {"messages": user(*parts), "add_generation_prompt": False}
        assert post(client, "/tokenize", **body)["tokens"] == asking.ids(whole)
    answer = post(client, CHAT, messages=user(part(text + rest)), cache_salt="nothing")
    assert details(answer) == (0, 0)
    answer = post(client, COMPLETIONS, prompt=segmented(text, rest), cache_salt="nothing")
    assert answer["usage"]["prompt_tokens"] == len(asking.ids(text + rest))
    assert details(answer) == (0, 0)
    short = post(client, CHAT, messages=user(part("short", MARK), part(rest)))
    assert details(short) == (0, 0), "too short to be worth it"


def test_a_stream_tells_what_was_reused(client: Client) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "stream"}
    for path, body in (
        (CHAT, {"messages": user(part("Read "), part(RIVER, MARK), part("?"))}),
        (COMPLETIONS, {"prompt": segmented("Read on ", doc(RIVER), "!")}),
    ):
        lines = client.post(path, json={**GREEDY, **body, **asked}).text.split("\n\n")
        last = json.loads(lines[-3].removeprefix("data: "))
        reused, mended = details(last)
        assert reused > 64
        assert mended == 64


def test_the_story_and_the_metrics_tell_it(local: Callable[..., Local]) -> None:
    with local().client() as client:
        body = {**GREEDY, "messages": user(part("Read "), part(RIVER, MARK), part("Now!"))}
        answer = client.post(CHAT, json=body, headers={"X-Request-Id": "told"})
        reused, mended = details(answer.json())
        (story,) = client.get("/v1/penstock/requests/told").json()["sequences"]
        assert (story["reused_tokens"], story["mended_tokens"]) == (reused, mended)
        name = "penstock_segment_tokens_total"
        assert client.metric(name, kind="reused") == reused > 0
        assert client.metric(name, kind="mended") == mended == 64
        sources = "penstock_prompt_tokens_total"
        assert client.metric(sources, source="reused") == reused
        num_prompt = answer.json()["usage"]["prompt_tokens"]
        assert client.metric(sources, source="computed") >= num_prompt - reused
        client.wait_idle()


def test_mending_of_a_request_and_of_the_server(local: Callable[..., Local]) -> None:
    messages = user(part("Read "), part(RIVER, MARK), part("?"))
    with local(mending={"mode": "none"}).client() as client:
        reused, mended = details(post(client, CHAT, messages=messages))
        assert mended == 0
        salt = {"cache_salt": "link"}
        given = {"mode": "link", "link_tokens": 16}
        assert details(post(client, CHAT, messages=messages, kv_mending=given, **salt)) == (
            reused - 16,
            16,
        )


@pytest.mark.parametrize(
    ("mending", "words"),
    [
        ({"mode": "glue"}, "kv_mending.mode is 'glue': expected one of link"),
        ({"mode": None}, "kv_mending.mode"),
        ({"link_tokens": 0}, "expected an integer from 1 to 4096"),
        ({"link_tokens": "32"}, "expected an integer from 1 to 4096"),
        ({"link_tokens": True}, "expected an integer from 1 to 4096"),
        ({"links": 3}, "expected a mapping with any of mode, link_tokens"),
        ("link", "kv_mending"),
        ([], "kv_mending"),
    ],
    ids=repr,
)
def test_wrong_mending_is_refused(client: Client, mending: Any, words: str) -> None:
    for path, body in ((CHAT, {"messages": user(part("Hi"))}), (COMPLETIONS, {"prompt": "Hi"})):
        assert words in refusal(client, path, kv_mending=mending, **body)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"reuse": "somewhere"}, "reuse is 'somewhere': expected \"anywhere\""),
        ({"reuse": True}, 'reuse is True: expected "anywhere"'),
        ({"reuse": ["anywhere"]}, 'expected "anywhere"'),
        ({"reuse": "anywhere", "resue": 1}, "'resue'"),
        ("anywhere", "expected"),
    ],
    ids=repr,
)
def test_wrong_marks_are_refused(client: Client, mark: Any, words: str) -> None:
    assert words in refusal(client, CHAT, messages=user(part(RIVER, mark)))
    prompt = segmented("a", {"text": RIVER, "penstock": mark})
    assert words in refusal(client, COMPLETIONS, prompt=prompt)
    assert words in refusal(client, COMPLETIONS, prompt=["a", prompt])


@pytest.mark.parametrize(
    "prompt",
    [
        *(segmented(), {}, {"segments": "text"}, {"segments": None}, segmented(None)),
        *(segmented({"text": 1}), segmented({}), segmented([]), segmented("")),
        *(segmented(doc("")), segmented("a", {"txt": "b"}), segmented([-1]), segmented([10**9])),
        *(segmented(segmented("a")), [segmented("a"), {}], {"segments": ["a"], "x": 1}),
        *([[segmented("a")]], [segmented("a"), 1], segmented(["a"])),
    ],
    ids=repr,
)
def test_wrong_segments_are_refused(client: Client, prompt: Any) -> None:
    assert refusal(client, COMPLETIONS, prompt=prompt)


def test_too_many_segments_are_refused(client: Client) -> None:
    prompt = segmented(*[doc("a")] * 300, *[doc("")] * 3000)  # empty ones count nothing
    assert post(client, COMPLETIONS, prompt=prompt)["usage"]["prompt_tokens"] == 300
    words = refusal(client, COMPLETIONS, prompt=segmented(*[doc("a")] * 1025))
    assert "1025 segments" in words
    messages = user(*[part("a", MARK)] * 1025)
    for more in ({}, {"truncate_prompt_tokens": 9}):
        assert "1025 segments" in refusal(client, CHAT, messages=messages, **more)
    assert "1025 segments" in refusal(client, "/tokenize", messages=messages)


def test_a_prompt_that_is_cut(client: Client, asking: Asking) -> None:
    """A segment that loses its beginning is computed; one that loses its end is still found."""
    prompt = segmented(doc(SEA), "and ", doc(RIVER), "?")
    ids, bounds = asking.split("@1@and @2@?", {"@1@": SEA, "@2@": RIVER})
    num_kept = len(ids) - bounds[0][0] - 5
    cut = {"truncate_prompt_tokens": num_kept, "cache_salt": "cut"}
    answer = post(client, COMPLETIONS, prompt=prompt, logprobs=0, **cut)
    assert answer["usage"]["prompt_tokens"] == num_kept
    start, end = (each - (len(ids) - num_kept) for each in bounds[1])
    assert text_logprobs(answer) == asking.answer(ids[-num_kept:], [(start, end)])
    cut |= {"truncate_prompt_tokens": bounds[1][0] + 110, "truncation_side": "right"}
    answer = post(client, COMPLETIONS, prompt=prompt, logprobs=0, **cut)
    kept = ids[: bounds[1][0] + 110]
    first = bounds[0]
    assert text_logprobs(answer) == asking.answer(kept, [first, (bounds[1][0], len(kept))])
    whole = "x " * 40_000
    for side in ("left", "right", None):
        cut = {"truncate_prompt_tokens": 200, "truncation_side": side, "cache_salt": "long"}
        answer = post(client, COMPLETIONS, prompt=segmented("a", doc(whole), "b"), **cut)
        assert answer["usage"]["prompt_tokens"] == 200
    words = refusal(client, COMPLETIONS, prompt=segmented("a", doc(whole * 9), "b"))
    assert "maximum context length" in words


TRIMMING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LAST_ONLY = "{{ messages[-1].content }}"


def test_a_template_that_trims(local: Callable[..., Local], asking: Asking) -> None:
    text = f"  {RIVER}\n\n"
    with local(chat_template=TRIMMING).client() as client:
        messages = user(part("  Read: "), part(text, MARK))
        answer = post(client, CHAT, messages=messages, logprobs=True)
        ids, bounds = asking.split("[user] Read: @@\n[assistant]", {"@@": text})
        assert chat_logprobs(answer) == asking.answer(ids, bounds)
        messages = user(part(text, MARK), part("  Now answer.  "))
        expected, _ = asking.split("[user] @@  Now answer.\n[assistant]", {"@@": text})
        assert post(client, "/tokenize", messages=messages)["tokens"] == expected


def test_a_template_that_drops_a_marked_part(local: Callable[..., Local], asking: Asking) -> None:
    """The conversation is plain then: tokens as without marks, and nothing is reused."""
    messages = [*user(part(RIVER, MARK)), *user(part("Read "), part(SEA, MARK))]
    with local(chat_template=LAST_ONLY).client() as client:
        answer = post(client, CHAT, messages=messages)
        assert answer["usage"]["prompt_tokens"] == len(asking.ids("Read " + SEA))
        assert details(answer) == (0, 0)
        assert details(post(client, CHAT, messages=messages[1:], cache_salt="kept"))[0] > 0


def test_a_separator(local: Callable[..., Local], asking: Asking) -> None:
    with local(segment_separator=" ## ").client() as client:
        ids, bounds = asking.split("Read: @1@@2@Now?", {"@1@": RIVER, "@2@": SEA})
        for prompt in (f"Read: ## {RIVER} ## {SEA} ## Now?",):
            prompt = prompt.replace("Read: ##", "Read:  ##")
            answer = post(client, COMPLETIONS, prompt=prompt, logprobs=0)
            assert text_logprobs(answer) == asking.answer(ids, bounds)
            echoed = post(client, COMPLETIONS, prompt=[prompt], echo=True)["choices"][0]["text"]
            assert echoed.startswith(f"Read: {RIVER}{SEA}Now?")
        ids, bounds = asking.chat_ids(["Read: ", RIVER, "Now?"], [1])
        for content in (
            f"Read:  ## {RIVER} ## Now?",
            [part(f"Read:  ## {RIVER} ## Now?")],
            [part("Read: "), part(f" ## {RIVER} ## Now?")],
        ):
            messages = [{"role": "user", "content": content}]
            answer = post(client, CHAT, messages=messages, logprobs=True)
            assert chat_logprobs(answer) == asking.answer(ids, bounds)
        # One separator separates nothing, and a marked text is taken as it is.
        answer = post(client, COMPLETIONS, prompt=f"Read ##  ## {RIVER}", cache_salt="one")
        assert details(answer) == (0, 0)
        prompt = segmented("a ## b ## c", doc(f"{RIVER} ## "))
        whole = asking.ids("a ## b ## c") + asking.ids(f"{RIVER} ## ")
        answer = post(client, COMPLETIONS, prompt=prompt, cache_salt="two")
        assert answer["usage"]["prompt_tokens"] == len(whole)
        for empty in (" ## ", " ##  ##  ## "):
            assert "empty" in refusal(client, COMPLETIONS, prompt=empty)


def test_tenants_do_not_share_segments(client: Client) -> None:
    """A segment that another tenant has computed is computed again, which only time tells."""
    body = {"messages": user(part("Read "), part(SEA, MARK), part("?"))}
    first, second = (post(client, CHAT, cache_salt=salt, **body) for salt in ("one", "two"))
    assert details(first) == details(second)
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


@pytest.fixture(scope="module")
def served(cache: Path) -> Iterator[Spawned]:
    spawned = Spawned(
        cache,
        *("--kv-offloading-size", 0.25, "--device-kv-gib", 0.1, "--block-tokens", 16),
        *("--dtype", "float32", "--segment-separator", " ## ", "--kv-mending", "link"),
    )
    spawned.wait_ready()
    yield spawned
    assert spawned.end(signal.SIGTERM) == 0, spawned.stderr
    assert "Paris" not in spawned.stderr


def test_the_official_client(served: Spawned) -> None:
    """A fact in a document that an earlier request has brought, at another place."""
    capital = "The capital of France is Paris, which lies on the river Seine. " * 16
    other = "Bees make honey from the nectar of flowers, and store it in combs of wax. " * 16
    question = "\nWhat is the capital of France?"
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS
    ) as ai:
        options: dict[str, Any] = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 8}

        def told(usage: Any) -> int:
            assert usage.prompt_tokens_details.mended_tokens >= 0
            return int(usage.prompt_tokens_details.reused_tokens)

        def ask(*documents: str) -> tuple[str, int]:
            marked = [part(document, MARK) for document in documents]
            answer = ai.chat.completions.create(
                messages=user(part("Read:\n"), *marked, part(question)), **options
            )
            return answer.choices[0].message.content or "", told(answer.usage)

        first, reused = ask(other, capital)
        assert "Paris" in first
        assert reused > 100
        second, again = ask(capital, other)
        assert "Paris" in second
        assert again == reused
        stream = ai.chat.completions.create(
            messages=user(part("Now read: "), part(capital, MARK), part(question)),
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"kv_mending": {"mode": "none"}},
            **options,
        )
        chunks = list(stream)
        assert chunks[-1].usage is not None
        assert told(chunks[-1].usage) > 64
        assert chunks[-1].usage.prompt_tokens_details.mended_tokens == 0  # type: ignore[union-attr]
        prompt: Any = {"segments": ["Read: ", doc(capital), question]}
        completion = ai.completions.create(prompt=prompt, **options)
        assert told(completion.usage) > 64
        separated = ai.completions.create(prompt=f"Read:  ## {capital} ## {question}", **options)
        assert separated.choices[0].text == completion.choices[0].text
        with pytest.raises(openai.BadRequestError, match="anywhere"):
            ai.chat.completions.create(messages=user(part("a", {"reuse": "here"})), **options)
        with pytest.raises(openai.BadRequestError, match="kv_mending"):
            ai.completions.create(prompt="a", extra_body={"kv_mending": {"mode": "x"}}, **options)
