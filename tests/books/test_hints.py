"""What may be said of KV, which session it reaches, and what becomes of the blocks it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from stack_rig import Rig as Stack
from tools import TIMEOUT_SECONDS, Rig, keys_of

from penstock.books.audit import audit
from penstock.books.prefetches import Prefetches
from penstock.books.sessions import Chain, Sessions
from penstock.errors import BookError, ConfigError
from penstock.events import Event, Prefetched, TicketDone
from penstock.hints import NO_HINTS, Hint, Hints
from penstock.types import NO_PARENTS, BlockKey, Slot, Tier, Verdict

K = [BlockKey(bytes([number]) * 32) for number in range(64)]


# Their words.


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"session": ""}, "a session name"),
        ({"session": "x" * 257}, "1 to 256 characters"),
        ({"session": 7}, "a session name"),
        ({"retain_seconds": 0}, "up to 86400 seconds"),
        ({"retain_seconds": 86401}, "up to 86400 seconds"),
        ({"retain_seconds": float("nan")}, "up to 86400 seconds"),
        ({"retain_seconds": "300"}, "up to 86400 seconds"),
        ({"retain_seconds": True}, "up to 86400 seconds"),
        ({"on_end": "forget"}, "keep, demote, release"),
        ({"on_end": []}, "keep, demote, release"),
        ({"on_end": "release"}, "the session to release"),
        ({"on_end": "demote", "retain_seconds": 3}, "keep, since retain_seconds is given"),
        ({"prefetch": "one"}, "a list of session names"),
        ({"prefetch": ["x"] * 17}, "at most 16 sessions"),
        ({"prefetch": [""]}, "a session name"),
        ({"retain": 300}, "some of session, retain_seconds, on_end, prefetch"),
        ({1: 2}, "some of session"),
        ("retain", "some of session"),
        ([], "some of session"),
    ],
)
def test_wrong_hints_are_refused_with_a_sentence(wrong: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*;") as refused:
        Hints.of(wrong)
    assert says in str(refused.value)


def test_right_ones_are_taken_as_they_are() -> None:
    assert Hints.of(None) is NO_HINTS
    hints = Hints.of({"session": "a", "retain_seconds": 300, "prefetch": ["b"]})
    assert hints == Hints("a", 300, "keep", ("b",))
    assert Hints.of(hints) is hints


@pytest.mark.parametrize(
    "wrong",
    [
        {"action": "forget"},
        {"action": "retain"},
        {"action": "retain", "retain_seconds": 0},
        {"action": "release", "retain_seconds": 3},
        {"action": "demote", "retain_seconds": 3},
        {"action": "demote", "session": ""},
    ],
)
def test_a_wrong_hint_between_requests_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected .*;"):
        Hint(**wrong)


# Sessions.


class Told:
    """Tiers that write down what they are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def retain(self, keys: Sequence[BlockKey], seconds: float, name: str) -> int:
        self.asked.append(("retain", list(keys), seconds, name))
        return len(keys)

    def release(self, name: str) -> int:
        self.asked.append(("release", name))
        return 1

    def demote(self, keys: Sequence[BlockKey]) -> int:
        self.asked.append(("demote", list(keys)))
        return len(keys)

    def prefetch(
        self,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        retain_seconds: float | None = None,
        name: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> int:
        self.asked.append(("prefetch", list(keys), tenant, retain_seconds))
        self.parents = dict(parents)
        return len(keys)


def test_hints_reach_the_blocks_of_a_sessions_latest_request() -> None:
    tiers = Told()
    sessions = Sessions(tiers)
    sessions.ended(Hints("a"), [Chain(K[:2], 0)])
    sessions.ended(Hints("a"), [Chain(K[:4], 2)])
    assert tiers.asked == []
    assert sessions.apply(Hint("retain", "a", 5.0)) == 4
    assert sessions.apply(Hint("prefetch", "a")) == 4
    assert sessions.apply(Hint("prefetch", "nobody")) == 0
    assert sessions.began(Hints(prefetch=("a", "nobody"))) == 4
    assert tiers.asked[0][:3] == ("retain", K[:4], 5.0)
    assert tiers.asked[1] == ("prefetch", K[:4], "", None)


def test_tenants_do_not_reach_each_others_sessions() -> None:
    tiers = Told()
    sessions = Sessions(tiers)
    names = [("a", "b"), ("", "b"), ("a", ""), ("a b", "b"), ("'a' 'b'", "b"), ("a'", "' 'b")]
    for tenant, session in names:
        sessions.ended(Hints(session or None, 5.0), [Chain(K[:1], 0)], tenant)
    retained_as = [asked[3] for asked in tiers.asked]
    assert len(set(retained_as)) == len(names)
    tiers.asked.clear()
    assert sessions.apply(Hint("demote", "b"), tenant="another") == 0
    assert ("demote", K[:1]) not in tiers.asked


def test_a_demoted_session_leaves_alone_what_was_there_before_it() -> None:
    tiers = Told()
    sessions = Sessions(tiers)
    sessions.ended(Hints("a"), [Chain(K[:4], 2)])  # a template of two blocks
    sessions.ended(Hints("a", on_end="demote"), [Chain(K[:6], 4)])
    assert tiers.asked[-1] == ("demote", K[2:6])
    sessions.ended(Hints(on_end="demote"), [Chain(K[:5], 3)])
    assert tiers.asked[-1] == ("demote", K[3:5])
    assert sessions.apply(Hint("demote"), [Chain(K[:5])]) == 5, "who names a prefix means all of it"


def test_a_prefix_is_released_under_the_name_under_which_it_was_retained() -> None:
    tiers = Told()
    sessions = Sessions(tiers)
    sessions.apply(Hint("retain", None, 5.0), [Chain(K[:3])])
    sessions.apply(Hint("release"), [Chain(K[:3])])
    assert tiers.asked[0][3] == tiers.asked[1][1]
    assert sessions.apply(Hint("retain", None, 5.0)) == 0


SEGMENTED = [Chain(K[:3]), Chain(K[10:14]), Chain(K[20:22])]


def test_a_prompt_with_segments_has_several_chains() -> None:
    tiers = Told()
    sessions = Sessions(tiers)
    keys = [*K[:3], *K[10:14], *K[20:22]]
    assert sessions.apply(Hint("retain", None, 5.0), SEGMENTED) == 9
    sessions.apply(Hint("release"), SEGMENTED)
    sessions.apply(Hint("release"), SEGMENTED[:2])
    sessions.apply(Hint("demote"), SEGMENTED)
    names = [tiers.asked[0][3], *(asked[1] for asked in tiers.asked[1:4])]
    assert names[0] == names[1] == names[3] != names[2]
    assert tiers.asked[0][:3] == ("retain", keys, 5.0)
    assert tiers.asked[4] == ("demote", keys)
    sessions.apply(Hint("prefetch"), SEGMENTED)
    assert tiers.asked[5] == ("prefetch", keys, "", None)
    assert tiers.parents == {3: None, 7: None}


def test_a_segment_that_begins_another_is_named_once() -> None:
    tiers = Told()
    sessions = Sessions(tiers)
    sessions.apply(
        Hint("prefetch"), [Chain(K[:2]), Chain(K[10:12]), Chain(K[5:7]), Chain(K[10:14])]
    )
    assert tiers.asked[0][1] == [*K[:2], *K[10:12], *K[5:7], *K[12:14]]
    assert tiers.parents == {2: None, 4: None, 6: K[11]}


def test_a_demoted_session_leaves_alone_segments_that_were_there_before_it() -> None:
    tiers = Told()
    sessions = Sessions(tiers)
    first = [Chain(K[:4], 1), Chain(K[10:14], 4), Chain(K[20:24], 1)]
    sessions.ended(Hints("a"), first)
    sessions.check()
    assert sessions._num_keys == 12
    later = [Chain(K[:6], 6), Chain(K[20:24], 4), Chain(K[10:14], 4), Chain(K[30:32])]
    sessions.ended(Hints("a", on_end="demote"), later)
    assert tiers.asked[-1] == ("demote", [*K[1:6], *K[21:24], *K[30:32]])
    sessions.ended(Hints("a"), [])
    assert sessions.apply(Hint("retain", "a", 5.0)) == 16, "it was aborted before it started"


def test_what_is_remembered_of_sessions_is_bounded() -> None:
    sessions = Sessions(Told(), max_keys=10)
    for number in range(30):
        sessions.ended(Hints(f"s{number % 7}"), [Chain(K[: number % 12], 0)])
        sessions.check()
    assert len(sessions) <= 10
    sessions._num_keys += 1
    with pytest.raises(BookError):
        sessions.check()
    sessions.clear()
    sessions.check()


# Prefetches, in the books.


def on_disk(num_keys: int, num_host: int = 16) -> tuple[Stack, Prefetches]:
    rig = Stack(num_host=num_host, num_disk=64)
    for key in K[:num_keys]:
        rig.save(key)
        rig.run()
    rig.stack.empty_host()
    return rig, Prefetches(rig.stack)


def run(rig: Stack, prefetches: Prefetches) -> tuple[int, int]:
    """Until nothing is left to fetch: how many blocks came, and how many did not."""
    num_came = num_lost = 0
    while prefetches:
        prefetches.advance(rig.now)
        for done in rig.run():
            settled = prefetches.settle(done, rig.now)
            assert settled is not None
            num_came, num_lost = num_came + settled[0], num_lost + settled[1]
    audit(rig.stack)
    assert len(rig.stack.pins) == 0
    return num_came, num_lost


def test_a_prefetch_brings_blocks_up_and_holds_none_of_them() -> None:
    rig, prefetches = on_disk(8, num_host=32)
    assert prefetches.ask(K[:10], 5.0) == 8
    assert run(rig, prefetches) == (8, 0)
    assert rig.stack.match(K[:8]).num_from(Tier.HOST) == 8
    assert rig.host.num_leased == 0
    assert prefetches.ask(K[:8], 5.0) == 0, "they are there"
    assert not prefetches


def test_a_prefetch_takes_a_share_of_host_at_most_and_stops_at_a_gap() -> None:
    rig, prefetches = on_disk(12, num_host=16)
    assert prefetches.ask(K[:12], 5.0) == 4
    assert run(rig, prefetches) == (4, 0)
    assert rig.stack.match(K[:12]).runs[0] == (Tier.HOST, 4)
    assert prefetches.ask([K[40], *K[4:8]], 5.0) == 0


def test_a_long_prefetch_goes_a_few_blocks_at_a_time() -> None:
    rig, prefetches = on_disk(60, num_host=256)
    assert prefetches.ask(K[:60], 5.0) == 60
    assert prefetches.advance(0.0)
    flying = sum(len(transfer.keys) for transfer in rig.transfers())
    assert flying == 32
    assert not prefetches.advance(0.0)


def test_a_prefetch_ends_with_the_first_block_that_does_not_come() -> None:
    rig, prefetches = on_disk(60, num_host=256)
    prefetches.ask(K[:60], 5.0)
    prefetches.advance(0.0)
    for transfer in rig.transfers():
        rig.settle(transfer, *(Verdict.FAILED,) * len(transfer.keys))
    (done,) = rig.stack.tickets.take_dones()
    assert prefetches.settle(done, 0.0) == (0, 32)
    assert not prefetches
    audit(rig.stack)


def test_what_comes_is_retained_where_that_was_asked() -> None:
    rig, prefetches = on_disk(4)
    prefetches.ask(K[:4], 5.0, retain=("a", 10.0))
    run(rig, prefetches)
    assert len(rig.stack.retention) == 4
    rig.stack.tick(10.0)
    assert len(rig.stack.retention) == 0


def test_each_chain_of_a_prefetch_has_a_leading_part_within_one_budget() -> None:
    rig, prefetches = on_disk(12, num_host=16)
    keys = [*K[:2], K[40], K[3], *K[4:10]]  # the second chain has a gap
    assert prefetches.ask(keys, 5.0, parents={2: None, 4: K[3]}) == 4
    assert run(rig, prefetches) == (4, 0)
    assert rig.stack.match(K[:2]).num_from(Tier.HOST) == 2
    assert rig.stack.match(K[4:6]).num_from(Tier.HOST) == 2


def test_a_prefetch_survives_parents_that_make_no_sense() -> None:
    rig, prefetches = on_disk(4)
    assert prefetches.ask(K[:4], 5.0, parents={-3: K[1], 0: K[9], 4: None, 99: None}) == 4
    assert prefetches.ask([], 5.0, parents={1: None}) == 0
    assert run(rig, prefetches) == (4, 0)


def test_prefetches_are_bounded_and_others_dones_are_not_theirs() -> None:
    rig, prefetches = on_disk(4)
    asked = [prefetches.ask(K[:4], 5.0) for _ in range(70)]
    assert asked[63:65] == [4, 0]
    rig.load(K[5])
    (done,) = rig.stack.tickets.take_dones()
    assert prefetches.settle(done, 0.0) is None
    prefetches.clear()
    assert not prefetches


# Through the façade, with a real disk.


def small(rigs: Callable[..., Rig], path: Path, **options: Any) -> Rig:
    return rigs(path, num_host=40, num_disk=400, **options)


def test_a_retained_prompt_is_loaded_from_dram_after_a_flood(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = small(rigs, tmp_path)
    keys = keys_of(8)
    rig.save(keys)
    assert rig.offloader.retain(keys, 60.0, "a") == 8
    for number in range(8):
        save(rig, keys_of(16, f"flood {number}"))
    assert rig.offloader.match(keys).num_from(Tier.HOST) == 8
    rig.clock.advance(60.0)
    rig.offloader.step()
    assert rig.offloader.num_retained == 0
    for number in range(8):
        save(rig, keys_of(16, f"more {number}"))
    assert rig.offloader.match(keys).num_from(Tier.DISK) == 8
    assert rig.load(keys) == [Verdict.OK] * 8


def save(rig: Rig, keys: Sequence[BlockKey]) -> None:
    """As `Rig.save`, which wants no lease to be left."""
    places = [Slot(index) for index in range(len(keys))]
    rig.offloader.wait([rig.offloader.save(keys, places)], TIMEOUT_SECONDS)
    assert rig.offloader.drain(TIMEOUT_SECONDS)
    rig.offloader.check()


def test_a_prefetched_prompt_is_loaded_from_dram_and_not_from_disk(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    seen: list[Event] = []
    rig = small(rigs, tmp_path, observers=[seen.append])
    keys = keys_of(10)
    rig.save(keys)
    rig.offloader.empty_host()
    seen.clear()
    assert rig.offloader.prefetch(keys) == 10
    assert rig.offloader.is_moving
    assert rig.offloader.drain(TIMEOUT_SECONDS)
    assert rig.offloader.step() == [], "nobody is told"
    assert not rig.offloader.is_prefetching
    assert [event for event in seen if isinstance(event, Prefetched)] == [Prefetched(10, 0)]
    assert not any(isinstance(event, TicketDone) for event in seen)
    assert set(rig.load_done(keys).sources) == {Tier.HOST}
    assert rig.gauge("penstock_prefetched_blocks_total", result="ok") == 10


def test_a_prefetch_from_a_disk_that_fails_costs_nothing_but_the_try(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = small(rigs, tmp_path)
    keys = keys_of(4)
    rig.save(keys)
    rig.offloader.empty_host()
    rig.slab.write_bytes(b"\0" * rig.slab.stat().st_size)
    rig.offloader.prefetch(keys)
    rig.settle()
    assert not rig.offloader.is_prefetching
    assert rig.gauge("penstock_prefetched_blocks_total", result="lost") == 4
    assert rig.load(keys) == [Verdict.MISSING] * 4
    rig.prove_sound(keys)


def test_closing_does_not_wait_for_prefetches(rigs: Callable[..., Rig], tmp_path: Path) -> None:
    rig = small(rigs, tmp_path)
    keys = keys_of(10)
    rig.save(keys)
    rig.offloader.empty_host()
    for _ in range(5):
        rig.offloader.prefetch(keys)
    rig.close()
    assert not rig.offloader.is_prefetching
