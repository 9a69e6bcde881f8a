"""Hints in `kv_transfer_params`, under a small vLLM (see `vllm_model`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connectors.memory_model import BLOCK_TOKENS
from connectors.pool_model import Request
from connectors.vllm_model import Vllm

from penstock.connectors.vllm.request_hints import TransferParamHints
from penstock.hints import NO_HINTS, Hints

Models = Callable[..., Vllm]
PROMPT = list(range(1, 23))  # five full blocks, and two tokens


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    made: list[Vllm] = []

    def make(*, disk: bool = False, **options: Any) -> Vllm:
        options = {"is_caching": False, "num_host": 24, "num_disk": 400, **options}
        made.append(Vllm(tmp_path / "kv" if disk else None, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
        model.audit()


def ask(vllm: Vllm, prompt: Sequence[int] = PROMPT, hints: Any = None, **fields: Any) -> Request:
    params = None if hints is None else {"penstock": hints, "do_remote_prefill": False}
    request = vllm.add(prompt, 1, kv_transfer_params=params, **fields)
    vllm.flush()
    vllm.side.check()
    return request


def loaded(vllm: Vllm, request: Request) -> dict[str, int]:
    answer = vllm.answers[request.request_id]
    found: dict[str, int] = {} if answer is None else answer["penstock"]["loaded_tokens"]
    return found


def flood(vllm: Vllm) -> None:
    for number in range(12):
        ask(vllm, [(number * 7 + place * place) % 50 for place in range(17)])


ALL = 5 * BLOCK_TOKENS


def test_a_retained_session_is_loaded_from_dram_and_another_is_not(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm, hints={"session": "agent", "retain_seconds": 60})
    other = [*reversed(PROMPT)]
    ask(vllm, other)
    flood(vllm)
    assert vllm.offloader.num_retained == 5
    assert loaded(vllm, ask(vllm)) == {"host": ALL}
    assert loaded(vllm, ask(vllm, other)) == {"disk": ALL}


def test_after_its_time_or_its_release_it_is_as_any_other(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm, hints={"session": "agent", "retain_seconds": 60})
    vllm.clock.advance(61.0)
    vllm.step()
    assert vllm.offloader.num_retained == 0
    ask(vllm, hints={"session": "agent", "retain_seconds": 60})
    assert vllm.offloader.num_retained == 5
    ask(vllm, hints={"session": "agent", "on_end": "release"}, cache_salt="another")
    assert vllm.offloader.num_retained == 5, "a salt has sessions of its own"
    ask(vllm, hints={"session": "agent", "on_end": "release"})
    assert vllm.offloader.num_retained == 0
    flood(vllm)
    assert loaded(vllm, ask(vllm)) == {"disk": ALL}


def test_a_request_can_have_the_next_session_brought_up(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm, hints={"session": "agent"})
    flood(vllm)
    ask(vllm, [30] * 6, hints={"prefetch": ["agent", "nobody"]})
    assert not vllm.offloader.is_prefetching
    assert loaded(vllm, ask(vllm)) == {"host": ALL}


def test_what_is_demoted_goes_first(models: Models) -> None:
    vllm = models(disk=True, num_host=24)
    keep, once = [*reversed(PROMPT)], PROMPT
    ask(vllm, keep)
    ask(vllm, once, hints={"on_end": "demote"})
    for number in range(4):  # sixteen blocks: with what is kept, DRAM is full
        ask(vllm, [40 + number] * 17)
    assert loaded(vllm, ask(vllm, keep)) == {"host": ALL}
    assert "disk" in loaded(vllm, ask(vllm, once))


def test_a_reset_forgets_sessions_too(models: Models) -> None:
    vllm = models()
    ask(vllm, hints={"session": "agent", "retain_seconds": 60})
    assert vllm.reset()
    assert vllm.offloader.num_retained == 0
    assert loaded(vllm, ask(vllm, hints={"prefetch": ["agent"]})) == {}


@pytest.mark.parametrize(
    "wrong", ["retain", {"sesion": "x"}, {"retain_seconds": -1}, {"on_end": 7}, {3: 4}, [1]]
)
def test_wrong_hints_are_ignored_with_one_warning(
    wrong: Any, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = models()
    with caplog.at_level(logging.WARNING, "penstock"):
        ask(vllm, hints=wrong)
        assert loaded(vllm, ask(vllm, hints=wrong)) == {"host": ALL}
    (record,) = caplog.records
    assert "expected" in record.getMessage()
    assert vllm.offloader.num_retained == 0


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, "text", {"penstock": None}])
def test_a_request_without_hints_has_none(params: Any) -> None:
    reader = TransferParamHints()
    assert reader.of(SimpleNamespace(kv_transfer_params=params)) is NO_HINTS
    assert reader.of(SimpleNamespace()) is NO_HINTS
    given = SimpleNamespace(kv_transfer_params={"penstock": {"session": "a"}})
    assert reader.of(given) == Hints("a")


def envelope(*actions: tuple[str, Any]) -> SimpleNamespace:
    told = [SimpleNamespace(action_type=kind, payload=payload) for kind, payload in actions]
    return SimpleNamespace(kv_hints=SimpleNamespace(actions=told))


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([("penstock", {"session": "a"})], Hints(session="a")),
        (
            [("retain", {"session": "a", "retain_seconds": 60})],
            Hints(session="a", retain_seconds=60),
        ),
        ([("prefetch", {"sessions": ["b", "c"]})], Hints(prefetch=("b", "c"))),
        ([("prefetch", {"session": "b"})], Hints(prefetch=("b",))),
        ([("demote", {"session": "a"})], Hints(session="a", on_end="demote")),
        ([("release", {"session": "a"})], Hints(session="a", on_end="release")),
        ([("penstock", {"session": "a"}), ("route", 7)], Hints(session="a")),
        ([("route", {"worker": 3})], Hints()),
        ([], Hints()),
    ],
)
def test_actions_of_vllms_own_hints_are_read(
    actions: list[tuple[str, Any]], expected: Hints
) -> None:
    assert TransferParamHints().of(envelope(*actions)) == expected


@pytest.mark.parametrize(
    "action", [("retain", 7), ("prefetch", {"worker": 3}), ("demote", {"sesion": "a"})]
)
def test_an_action_that_cannot_be_read_is_ignored(
    action: tuple[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert TransferParamHints().of(envelope(action)) == Hints()
    assert "are ignored" in caplog.text


def test_our_own_words_win() -> None:
    request = envelope(("retain", {"session": "a", "retain_seconds": 60}))
    request.kv_transfer_params = {"penstock": {"retain_seconds": 5}}
    assert TransferParamHints().of(request) == Hints(session="a", retain_seconds=5)
