from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from penstock.engine.detokenize import MAX_WAITING_TOKENS, Detokenizer
from penstock.engine.params import SamplingParams
from penstock.errors import BookError

slow = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
IM_END = 2


@pytest.fixture(scope="session")
def bytes_of(tokenizer: Any) -> dict[int, int]:
    """Every token that is one byte: byte -> token id."""
    found = {}
    for byte in range(256):
        (char,) = _byte_char(byte)
        found[byte] = tokenizer.convert_tokens_to_ids(char)
    return {byte: token_id for byte, token_id in found.items() if token_id is not None}


def _byte_char(byte: int) -> str:
    """The letter that stands for a byte in a byte-level vocabulary (as in GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [each for each in range(256) if each not in shown]
    return chr(byte) if byte in shown else chr(256 + hidden.index(byte))


def pieces(tokenizer: Any, ids: list[int], prompt: list[int] | None = None, **wishes: Any) -> Any:
    detokenizer = Detokenizer(tokenizer, prompt or [], SamplingParams(max_tokens=None, **wishes))
    found = [detokenizer.append(token_id) for token_id in ids]
    found.append(detokenizer.finish())
    assert detokenizer.text == "".join(found)
    assert detokenizer.finish() == ""
    return found, detokenizer.stopped_by


def plain(tokenizer: Any, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By the book: the stop string that is complete first, and of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    "text",
    [
        "hello , world .",
        "  two  spaces ",
        "你好，世界",
        "😀👩‍👩‍👧🏳️‍🌈",
        "naïve e\u0301",
        "\ufffd",
        "a\ufffdb",
        "ᚠ𐍈\U0010ffff",
    ],
)
def test_characters_come_whole(tokenizer: Any, text: str) -> None:
    found, _ = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


def test_a_character_waits_for_its_last_token_only(tokenizer: Any) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    found, _ = pieces(tokenizer, ids)
    assert found == [""] * (len(ids) - 1) + ["😀", ""]


def test_half_a_character_at_the_end_is_flushed(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("ok"), *tokenizer.encode("😀")[:1]]
    found, _ = pieces(tokenizer, ids)
    assert found[-1] == "\ufffd"
    assert "".join(found) == plain(tokenizer, ids)


@slow
@given(text=st.text(max_size=60))
@example("�" * 40)
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    found, stopped_by = pieces(tokenizer, ids)
    # Not the text itself: the vocabulary lacks a few bytes of rare planes.
    assert "".join(found) == plain(tokenizer, ids)
    assert stopped_by is None


@slow
@given(ids=st.lists(st.integers(0, 49_151), max_size=60))
def test_any_tokens_decode_as_at_once(tokenizer: Any, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)[0]) == plain(tokenizer, ids)
    whole = tokenizer.decode(ids)
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)[0]) == whole


@slow
@given(data=st.binary(max_size=80))
@example(b"\x80" * 50)
@example(b"\xf0\x9f\x98" * 20)
@example(b"\x80" * MAX_WAITING_TOKENS + "你好".encode())
@example(b"\x80" * (MAX_WAITING_TOKENS - 1) + "😀x".encode())
@example(b"\x80" * (MAX_WAITING_TOKENS - 2) + "😀".encode() + b"\x80")
@example(b"\x80" * (MAX_WAITING_TOKENS - 3) + "😀\ufffd".encode() + b"\xe4\xbd")
def test_any_bytes_decode_as_at_once(tokenizer: Any, bytes_of: dict[int, int], data: bytes) -> None:
    ids = [bytes_of[byte] for byte in data if byte in bytes_of]
    assert "".join(pieces(tokenizer, ids)[0]) == plain(tokenizer, ids)


def test_bytes_that_are_no_text_wait_only_so_long(tokenizer: Any, bytes_of: dict[int, int]) -> None:
    found, _ = pieces(tokenizer, [bytes_of[0x80]] * 100)
    silence = 0
    for piece in found:
        silence = 0 if piece else silence + 1
        assert silence < MAX_WAITING_TOKENS


@pytest.mark.parametrize("text", ["word " * 300, "你好" * 300, "�" * 600])
def test_each_token_costs_the_same(tokenizer: Any, text: str) -> None:
    longest = 0

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **kwargs: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode(ids, **kwargs)

    # With special and unknown tokens between, which must not pile up either.
    ids = [x for token_id in tokenizer.encode(text) for x in (token_id, IM_END, 60_000)]
    found, _ = pieces(Counting(), ids)
    assert "".join(found) == text
    assert longest <= 2 * MAX_WAITING_TOKENS


@slow
@given(
    text=st.text(alphabet="ab", max_size=30) | st.text(alphabet="a你😀 \n", max_size=30),
    stops=st.lists(
        st.text(alphabet="ab", min_size=1, max_size=5)
        | st.text(alphabet="a你😀 \n", min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    one_byte_each=st.booleans(),
)
@example("aab", ["aab", "ab"], True)
@example("abcabd", ["abcabd"], False)
@example("xabcd", ["abcde", "bc"], False)
def test_text_is_cut_before_the_first_stop_string(
    tokenizer: Any, bytes_of: dict[int, int], text: str, stops: list[str], one_byte_each: bool
) -> None:
    ids = [bytes_of[b] for b in text.encode()] if one_byte_each else tokenizer.encode(text)
    found, stopped_by = pieces(tokenizer, ids, stop=stops)
    expected, by = cut(plain(tokenizer, ids), stops)
    assert ("".join(found), stopped_by) == (expected, by)
    if len(stops) == 1:
        assert "".join(found) == text.partition(stops[0])[0]


@slow
@given(text=st.text(min_size=1, max_size=60), seed=st.integers(0, 1000))
def test_any_part_of_any_text_stops_it(tokenizer: Any, text: str, seed: int) -> None:
    ids = tokenizer.encode(text)
    text = plain(tokenizer, ids)
    assume(text)  # some bytes are not in the vocabulary
    start = random.Random(seed).randrange(len(text))
    stop = text[start : start + random.Random(seed).randint(1, 8)]
    found, stopped_by = pieces(tokenizer, ids, stop=stop)
    assert ("".join(found), stopped_by) == (text[: text.index(stop)], stop)


def test_the_start_of_a_stop_string_is_held_until_decided(
    tokenizer: Any, bytes_of: dict[int, int]
) -> None:
    def spelt(text: str) -> list[int]:
        return [bytes_of[byte] for byte in text.encode()]

    found, stopped_by = pieces(tokenizer, spelt("aENxEND!"), stop="END")
    assert found == ["a", "", "", "ENx", "", "", "", "", ""]
    assert stopped_by == "END"
    found, stopped_by = pieces(tokenizer, spelt("aEN"), stop="END")
    assert found == ["a", "", "", "EN"]
    assert stopped_by is None


def test_a_stop_string_that_is_shown_ends_the_text_and_holds_nothing_back(
    tokenizer: Any, bytes_of: dict[int, int]
) -> None:
    ids = [bytes_of[byte] for byte in b"aENxEND!"]
    found, stopped_by = pieces(tokenizer, ids, stop="END", include_stop_str_in_output=True)
    assert found == ["a", "E", "N", "x", "E", "N", "D", "", ""]
    assert stopped_by == "END"


def test_a_stop_string_inside_the_flush_still_cuts(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("ok"), *tokenizer.encode("😀")[:1]]
    found, stopped_by = pieces(tokenizer, ids, stop="\ufffd")
    assert ("".join(found), stopped_by) == ("ok", "\ufffd")


def test_stop_strings_within_min_tokens_do_not_count(
    tokenizer: Any, bytes_of: dict[int, int]
) -> None:
    ids = [bytes_of[byte] for byte in b"abxabyab"]
    found, stopped_by = pieces(tokenizer, ids, stop="ab", min_tokens=2)
    assert ("".join(found), stopped_by) == ("abx", "ab")
    found, _ = pieces(tokenizer, ids, stop="ab", min_tokens=3)
    assert "".join(found) == "abx"
    found, _ = pieces(tokenizer, ids, stop="ab", min_tokens=5)
    assert "".join(found) == "abxaby"
    found, stopped_by = pieces(tokenizer, ids, stop="ab", min_tokens=8)
    assert ("".join(found), stopped_by) == ("abxabyab", None)


def test_special_tokens_show_only_when_asked(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("a"), IM_END, *tokenizer.encode("b")]
    assert "".join(pieces(tokenizer, ids)[0]) == "ab"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)[0]) == "a<|im_end|>b"


def test_a_special_token_does_not_tear_a_character(tokenizer: Any) -> None:
    first, *rest = tokenizer.encode("😀")
    found, _ = pieces(tokenizer, [first, IM_END, *rest])
    assert "".join(found) == "😀"


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Any) -> None:
    ids = tokenizer.encode("hello world")
    assert "".join(pieces(tokenizer, [60_000, ids[0], 49_152, *ids[1:]])[0]) == "hello world"


@slow
@given(prompt=st.text(max_size=20), text=st.text(max_size=20))
def test_the_prompt_is_context_and_never_output(tokenizer: Any, prompt: str, text: str) -> None:
    ids = tokenizer.encode(text)
    found, _ = pieces(tokenizer, ids, tokenizer.encode(prompt))
    assert "".join(found) == plain(tokenizer, ids)


def test_a_character_the_prompt_began_is_the_outputs(tokenizer: Any) -> None:
    first, *rest = tokenizer.encode("😀")
    assert "".join(pieces(tokenizer, [*rest, *tokenizer.encode("x")], [first])[0]) == "😀x"
    # Left half by both, it is the prompt's.
    assert "".join(pieces(tokenizer, tokenizer.encode("x"), [first])[0]) == "x"
    assert "".join(pieces(tokenizer, [], [first])[0]) == ""


def test_after_a_stop_there_is_silence_and_after_finish_an_error(tokenizer: Any) -> None:
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop="a"))
    assert [detokenizer.append(a[0]), detokenizer.append(b[0]), detokenizer.finish()] == [""] * 3
    with pytest.raises(BookError, match=r"after finish\(\)"):
        detokenizer.append(b[0])


def test_a_tokenizer_that_decodes_its_own_way_is_asked(tokenizer: Any) -> None:
    class Louder(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    ids = tokenizer.encode("a quiet word")
    louder = Louder(tokenizer_object=tokenizer.backend_tokenizer)
    assert "".join(pieces(tokenizer, ids)[0]) == "a quiet word"
    assert "".join(pieces(louder, ids)[0]) == "A QUIET WORD"
