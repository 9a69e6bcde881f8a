"""Which blocks does a store hold? Asked in stretches, answered once, whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from hypothesis import given
from hypothesis import strategies as st
from tools import TIMEOUT_SECONDS, keys_of

from penstock.errors import StoreError
from penstock.transfer.asking import Asker, Exists
from penstock.types import Answer, BlockKey, LookupId, Question, Tier

KEYS = keys_of(1500)


def ask(exists: Exists, keys: Sequence[BlockKey]) -> Answer:
    answers: SimpleQueue[Answer] = SimpleQueue()
    asker = Asker(exists, answers.put)
    asker.ask(Question(LookupId(7), Tier.REMOTE, tuple(keys)))
    answer = answers.get(timeout=TIMEOUT_SECONDS)
    asker.close()
    return answer


@given(num_asked=st.integers(1, 1500), num_held=st.integers(0, 1500))
def test_the_leading_blocks_that_are_held_are_found(num_asked: int, num_held: int) -> None:
    held = set(KEYS[:num_held])
    asked: list[BlockKey] = []

    def exists(keys: Sequence[BlockKey], limit: int) -> list[bool]:
        asked.extend(keys[:limit])
        return [key in held for key in keys[:limit]]

    answer = ask(exists, KEYS[:num_asked])
    assert answer.lookup_id == 7
    assert not answer.error
    assert sum(answer.present) == min(num_asked, num_held)
    assert list(answer.present) == [key in held for key in KEYS[: len(answer.present)]]
    assert asked == KEYS[: len(asked)], "each is asked for once"
    assert len(asked) <= max(32, 5 * num_held), "what is new costs little"


def test_whatever_goes_wrong_is_an_answer() -> None:
    for error in (StoreError("it is away"), RuntimeError("a bug")):

        def exists(keys: Sequence[BlockKey], limit: int, error: Exception = error) -> list[bool]:
            raise error

        answer = ask(exists, KEYS[:3])
        assert answer.present == ()
        assert str(error) in answer.error


def test_what_was_said_before_it_failed_is_kept() -> None:
    def exists(keys: Sequence[BlockKey], limit: int) -> list[bool]:
        if keys[0] != KEYS[0]:
            raise StoreError("it went away")
        return [True] * limit

    answer = ask(exists, KEYS[:100])
    assert answer.present == (True,) * 32
    assert answer.error == "it went away"
