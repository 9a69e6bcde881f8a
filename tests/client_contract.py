"""What every client of a remote store owes, whatever it talks to. Each test file subclasses it."""

from __future__ import annotations

import os
import threading

import pytest

from penstock.errors import Corrupt, Missing
from penstock.stores.envelope import HEAD_BYTES
from penstock.stores.remote import Client, Item

BODY_BYTES = 300_000  # more than a socket takes at once


def item(name: str, body: bytes | None = None, num_bytes: int = BODY_BYTES) -> Item:
    """A value to put, or, without a body, one to get."""
    head = os.urandom(HEAD_BYTES) if body is not None else bytes(HEAD_BYTES)
    return Item(name, memoryview(bytearray(head)), memoryview(bytearray(body or bytes(num_bytes))))


def items(names: list[str], num_bytes: int = BODY_BYTES) -> list[Item]:
    return [item(name, os.urandom(num_bytes)) for name in names]


class ClientContract:
    """A subclass gives a `client` fixture: a fresh client of a store that keeps what it is told.

    Names are unique to a test by its `prefix`, so that a store may be shared by many.
    """

    @pytest.fixture
    def client(self) -> Client:
        raise NotImplementedError

    @pytest.fixture
    def prefix(self) -> str:
        return f"penstock/1/{os.urandom(8).hex()}/"

    def test_what_was_put_comes_back_bit_for_bit(self, client: Client, prefix: str) -> None:
        put = items([f"{prefix}{i}" for i in range(9)])
        assert client.put(put, None) == [None] * 9
        got = [item(i.name) for i in put]
        assert client.get(got) == [None] * 9
        assert [bytes(i.head) for i in got] == [bytes(i.head) for i in put]
        assert [bytes(i.body) for i in got] == [bytes(i.body) for i in put]

    def test_a_value_may_be_put_again(self, client: Client, prefix: str) -> None:
        """A damaged value is replaced by a sound one under the same name."""
        client.put(items([f"{prefix}a"]), None)
        newer = items([f"{prefix}a"])
        assert client.put(newer, None) == [None]
        got = item(f"{prefix}a")
        assert client.get([got]) == [None]
        assert bytes(got.body) == bytes(newer[0].body)

    def test_what_is_not_there_is_missing_and_harms_no_other(
        self, client: Client, prefix: str
    ) -> None:
        (held,) = put = items([f"{prefix}held"])
        client.put(put, None)
        got = [item(f"{prefix}no"), item(held.name), item(f"{prefix}nor")]
        answers = client.get(got)
        assert [type(answer) for answer in answers] == [Missing, type(None), Missing]
        assert bytes(got[1].body) == bytes(held.body)

    @pytest.mark.parametrize("num_bytes", [1, BODY_BYTES - 1, BODY_BYTES + 1, 2 * BODY_BYTES])
    def test_a_value_of_another_length_is_corrupt_and_harms_no_other(
        self, client: Client, prefix: str, num_bytes: int
    ) -> None:
        wrong = item(f"{prefix}wrong", os.urandom(num_bytes))
        (held,) = put = items([f"{prefix}held"])
        assert client.put([wrong], None) == [None]
        assert client.put(put, None) == [None]
        got = [item(wrong.name), item(held.name)]
        answers = client.get(got)
        assert isinstance(answers[0], Corrupt)
        assert answers[1] is None
        assert bytes(got[1].body) == bytes(held.body)

    def test_existence_of_many_is_told_in_order(self, client: Client, prefix: str) -> None:
        names = [f"{prefix}{i}" for i in range(300)]
        client.put(items(names[::7], 100), None)
        assert client.exists(names) == [i % 7 == 0 for i in range(300)]
        assert client.exists([]) == []

    def test_what_is_removed_is_gone(self, client: Client, prefix: str) -> None:
        names = [f"{prefix}{i}" for i in range(3)]
        client.put(items(names, 100), None)
        client.remove([names[1], f"{prefix}never was"])
        assert client.exists(names) == [True, False, True]

    def test_values_are_listed_by_prefix_with_their_size(self, client: Client, prefix: str) -> None:
        names = [f"{prefix}{i:03}" for i in range(20)]
        client.put(items(names, 100), None)
        client.put(items([f"penstock/1/other-{os.urandom(4).hex()}/x"], 100), None)
        listed = [value for page in client.find(prefix) for value in page]
        assert sorted(value.name for value in listed) == names
        assert {value.num_bytes for value in listed} == {HEAD_BYTES + 100}

    def test_threads_do_not_mix_their_values(self, client: Client, prefix: str) -> None:
        wrong: list[str] = []

        def work(number: int) -> None:
            for turn in range(5):
                put = items([f"{prefix}{number}-{turn}-{i}" for i in range(4)])
                got = [item(i.name) for i in put]
                answers = [*client.put(put, None), *client.get(got)]
                same = [bytes(i.body) for i in put] == [bytes(i.body) for i in got]
                if any(answers) or not same:
                    wrong.append(f"{number}: {answers}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
