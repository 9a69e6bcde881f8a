"""Which blocks of windows and states are saved, from the tables that vLLM has at a step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.connectors.vllm.auditing import RequestAudits
from penstock.connectors.vllm.checkpoints import RequestCheckpoints
from penstock.connectors.vllm.identity import RequestKeys
from penstock.connectors.vllm.tracked import Tracked
from penstock.groups.boundaries import Reason
from penstock.groups.kinds import Group, Groups, Kind
from penstock.keys import Namespace
from penstock.types import BlockKey, TicketId

FULL = Group(0, Kind.FULL, 4)
WINDOW = Group(1, Kind.WINDOW, 4, 5)
STATE = Group(1, Kind.STATE, 4)
SPACE = Namespace("m", "w", "d", "l", block_tokens=4)
TICKET = TicketId(7)


class Saved:
    """Stands for the tiers: remembers what is saved and offered."""

    def __init__(self) -> None:
        self.slots: list[list[int]] = []
        self.offered: list[tuple[int, str]] = []

    def save(self, keys: Sequence[BlockKey], slots: Sequence[int], **_: Any) -> TicketId:
        assert len(keys) == len(slots)
        self.slots.append(list(slots))
        return TICKET

    def offer(self, keys: Sequence[BlockKey], *, tenant: str, parents: Any) -> None:
        self.offered.append((len(keys), tenant))

    def keep_together(self, keys: Sequence[BlockKey]) -> None:
        pass

    supersede = keep_together


def checkpoints(groups: Groups, **options: Any) -> tuple[RequestCheckpoints, Saved]:
    saved = Saved()
    requests: Any = SimpleNamespace(groups=groups, is_named=lambda _: True, block_bytes=1)
    boundaries: Any = SimpleNamespace(saved=lambda *_: None, gone=lambda _: None)
    tiers: Any = saved
    audits = RequestAudits(None, requests)
    return RequestCheckpoints(tiers, requests, boundaries, True, audits, **options), saved


def request(groups: Groups, num_prompt: int, num_tokens: int, num_computed: int) -> Tracked:
    found = SimpleNamespace(
        request_id="r",
        num_prompt_tokens=num_prompt,
        all_token_ids=list(range(num_tokens)),
        num_tokens=num_tokens,
        cache_salt="mine",
    )
    keys = RequestKeys(SPACE, found, groups=groups)
    tracked = Tracked(found, keys, [[], []], [0, 0])
    tracked.num_computed = num_computed
    return tracked


STATES = Groups((FULL, STATE))
WINDOWS = Groups((FULL, WINDOW))


@pytest.mark.parametrize("before", [4, 5, 8])
def test_a_state_is_taken_from_a_table_only_where_a_step_begins_or_ends(before: int) -> None:
    saves, saved = checkpoints(STATES)
    tracked = request(STATES, 3, 10, num_computed=10)
    tracked.num_checked = 4
    saves.save_computed(tracked, before, lambda _: [(), (1, 2, 3)], {})
    assert saved.slots == ([[2]] if before == 8 else [])


@pytest.mark.parametrize("states_lag", [False, True])
@pytest.mark.parametrize("num_prompt", [8, 7])
def test_an_answers_state_is_not_taken_where_stages_are_late(
    num_prompt: int, states_lag: bool
) -> None:
    saves, saved = checkpoints(STATES, has_drafts=True, states_lag=states_lag)
    tracked = request(STATES, num_prompt, 9, num_computed=9)
    tracked.num_checked = 4
    saves.save_computed(tracked, 7, lambda _: [(), (1, 2, 3)], {(1, 8): 5})
    assert saved.slots == ([] if states_lag and num_prompt == 7 else [[5]])


def test_of_an_answer_computed_again_only_the_last_checkpoint_is_saved() -> None:
    saves, saved = checkpoints(WINDOWS)
    tracked = request(WINDOWS, 9, 30, num_computed=29)
    tracked.boundaries = {4: Reason.TURN, 8: Reason.PROMPT_END}
    table = list(range(1, 9))
    saves.save_computed(tracked, 0, lambda _: [(), table], {})
    assert saved.slots == [[1], [2], [7]], "planned ones, and that at 28"


def test_if_the_last_is_gone_the_one_before_it_is_saved() -> None:
    saves, saved = checkpoints(WINDOWS)
    tracked = request(WINDOWS, 9, 30, num_computed=29)
    saves.save_computed(tracked, 0, lambda _: [(), [1, 2, 3, 4, 5, 6, 0, 0]], {})
    assert saved.slots == [[6]]


def test_a_checkpoint_that_ends_after_its_request_belongs_to_its_tenant() -> None:
    saves, saved = checkpoints(WINDOWS)
    tracked = request(WINDOWS, 3, 10, num_computed=9)
    saves.save_computed(tracked, 8, lambda _: [(), [1, 2, 3]], {})
    saves.finished(tracked)
    assert saved.offered == [(1, "salt mine")]
    assert tracked.last_checkpoint
    keys = tracked.last_checkpoint
    done: Any = SimpleNamespace(ticket=TICKET, ok=True, keys=keys)
    saves.ended(done)
    saves.ended(done)
    assert saved.offered[1:] == [(1, "salt mine")], "once"
