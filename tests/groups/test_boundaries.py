"""Which checkpoints are kept: some always, others while they prove their worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from penstock.groups.boundaries import SPECULATIVE, Boundaries, Reason
from penstock.groups.kinds import Group, Groups, Kind
from penstock.types import BlockKey

ALIGN = 16
STATE = Groups((Group(0, Kind.FULL, ALIGN), Group(1, Kind.STATE, ALIGN)))
PLAIN = Groups((Group(0, Kind.FULL, ALIGN),))
BYTES = 100  # of a checkpoint


def boundaries(
    *, budget: int = 1_000_000, every: int | None = None, groups: Groups = STATE
) -> Boundaries:
    return Boundaries(
        groups, checkpoint_bytes=lambda at: BYTES, budget_bytes=budget, every_tokens=every
    )


class Cache:
    """Keeps every block of the full groups, and the checkpoints that `Boundaries` chooses."""

    def __init__(self, chooser: Boundaries) -> None:
        self.chooser = chooser
        self._full: set[BlockKey] = set()
        self._checkpoints: set[BlockKey] = set()
        self.kept: Counter[Reason] = Counter()

    def ask(
        self, tokens: Sequence[object], turns: Sequence[int] = (), answer: Sequence[object] = ()
    ) -> int:
        """Answer a prompt; returns how many of its tokens were a hit."""
        keys = self._keys([*tokens, *answer])
        top = (len(tokens) - 1) // ALIGN
        shared = 0
        while shared < top and keys[shared] in self._full:
            shared += 1
        hit = max([0, *[n for n in range(1, shared + 1) if keys[n - 1] in self._checkpoints]])
        if hit:
            self.chooser.hit(keys[hit - 1])
        plan = self.chooser.plan(
            start=hit * ALIGN,
            num_prompt=len(tokens),
            turns=turns,
            junction=shared * ALIGN if shared > hit else None,
        )
        for at, reason in plan.items():
            self._save(keys[at // ALIGN - 1], reason)
        start = max([hit * ALIGN, *plan])
        num_computed = len(tokens) + len(answer) - 1
        end = self.chooser.answer_end(start=start, num_computed=num_computed)
        if answer and end is not None:
            self._save(keys[end // ALIGN - 1], Reason.ANSWER_END)
        self._full.update(keys)
        return hit * ALIGN

    def _save(self, key: BlockKey, reason: Reason) -> None:
        self.kept[reason] += 1
        self._checkpoints.add(key)
        self.chooser.saved(key, reason, BYTES)

    def _keys(self, tokens: Sequence[object]) -> list[BlockKey]:
        chain, keys = b"", []
        for start in range(0, len(tokens) - ALIGN + 1, ALIGN):
            chain = blake2b(chain + repr(tokens[start : start + ALIGN]).encode()).digest()[:32]
            keys.append(BlockKey(chain))
        return keys


def words(name: object, count: int) -> list[object]:
    return [(name, place) for place in range(count)]


# What is always kept.


def test_the_prompts_end_is_always_kept_and_rounded_down_to_a_boundary() -> None:
    assert boundaries().plan(start=0, num_prompt=100) == {96: Reason.PROMPT_END}
    # The last token is computed in any case, so a hit ends before it.
    assert boundaries().plan(start=0, num_prompt=96) == {80: Reason.PROMPT_END}
    assert boundaries().plan(start=80, num_prompt=96) == {}
    assert boundaries().plan(start=0, num_prompt=10) == {}


def test_junctions_and_hints_are_always_kept() -> None:
    plan = boundaries().plan(start=16, num_prompt=200, junction=70, hinted=[5, 16, 130, 500])
    assert plan == {64: Reason.JUNCTION, 128: Reason.HINT, 192: Reason.PROMPT_END}


def test_full_attention_needs_no_checkpoints() -> None:
    plain = boundaries(groups=PLAIN, every=32)
    assert plain.plan(start=0, num_prompt=200, turns=[50], junction=70, hinted=[100]) == {}
    assert plain.answer_end(start=0, num_computed=500) is None


def test_only_what_is_computed_can_be_kept() -> None:
    chooser = boundaries(every=16)
    plan = chooser.plan(start=64, num_prompt=100, turns=[30, 70], junction=40, hinted=[48])
    assert min(plan) > 64
    assert max(plan) == 96


# Workloads.


def test_a_shared_system_prompt_hits_from_the_third_prompt_on() -> None:
    cache = Cache(boundaries())
    system = words("system", 100)
    hits = [cache.ask([*system, *words(user, 50)]) for user in range(10)]
    assert hits[2:] == [96] * 8, "the second prompt finds where the two branch, and keeps it"
    assert cache.kept == {Reason.PROMPT_END: 10, Reason.JUNCTION: 1}


def test_with_known_turns_the_system_prompts_of_new_tenants_hit_at_once() -> None:
    cache = Cache(boundaries())
    late = []
    for tenant in range(60):
        system = words(f"tenant {tenant}", 100)
        hits = [cache.ask([*system, *words((tenant, u), 50)], turns=[100]) for u in range(4)]
        late.append(hits[1])
        assert hits[2:] == [96, 96]
    assert late[0] == late[-1] == 96
    assert late.count(96) > 50, "the first turn has proved its worth, so it is kept at once"


def test_a_second_turn_hits_the_answer_of_the_first() -> None:
    cache = Cache(boundaries())
    chat = words("first question", 60)
    answer = words("answer", 40)
    assert cache.ask(chat, answer=answer) == 0
    chat += [*answer, *words("second question", 30)]
    assert cache.ask(chat) == 96
    assert cache.ask(chat) == 128, "the same prompt again hits the prompt's end"


def test_a_workload_that_never_reuses_stops_paying() -> None:
    cache = Cache(boundaries(every=32))
    for number in range(400):
        cache.ask(words(number, 300), turns=[100, 200], answer=words("answer", 50))
    first = cache.kept.copy()
    for number in range(400, 800):
        cache.ask(words(number, 300), turns=[100, 200], answer=words("answer", 50))
    later = cache.kept - first
    assert later[Reason.PROMPT_END] == 400
    for reason in (Reason.ANSWER_END, Reason.FIRST_TURN, Reason.TURN, Reason.PERIODIC):
        assert later[reason] <= 400 // 8, "tried now and then, no more"


def test_periodic_ones_are_kept_while_they_are_used() -> None:
    """Prompts that are cut off anywhere: nothing but regular checkpoints can serve them."""
    cache = Cache(boundaries(every=64))
    hits = []
    for number in range(200):
        document = words(f"document {number}", 640)
        cache.ask(document)
        hits.append(cache.ask([*document[:300], *words(("other", number), 40)]))
    assert cache.kept[Reason.PERIODIC] > 200
    assert sum(hits[100:]) > 0.5 * 100 * 256


def test_the_budget_holds_for_each_reason() -> None:
    chooser = boundaries(budget=30 * BYTES, every=16)
    number = 0
    for _ in range(300):
        plan = chooser.plan(start=0, num_prompt=2000, turns=[100, 300, 500])
        for reason in plan.values():
            number += 1
            key = BlockKey(number.to_bytes(32, "big"))
            chooser.saved(key, reason, BYTES)
            for _ in range(3):  # all are used, so all would be worth it
                chooser.hit(key)
        assert all(chooser.held_bytes(reason) <= 10 * BYTES for reason in SPECULATIVE)
    assert [chooser.held_bytes(reason) for reason in SPECULATIVE] == [10 * BYTES] * 3


def test_periodic_ones_are_spread_over_the_prompt_if_the_budget_is_small() -> None:
    chooser = boundaries(budget=3 * 6 * BYTES, every=16)
    chooser.saved(BlockKey(bytes(32)), Reason.PERIODIC, 0)
    chooser.hit(BlockKey(bytes(32)))
    plan = chooser.plan(start=0, num_prompt=1000)
    regular = [at for at, reason in plan.items() if reason is Reason.PERIODIC]
    assert regular == [256, 512, 768]


def test_what_is_gone_frees_its_budget() -> None:
    chooser = boundaries(budget=3 * BYTES)
    key = BlockKey(bytes(32))
    chooser.saved(key, Reason.TURN, BYTES)
    chooser.saved(key, Reason.TURN, BYTES)
    assert chooser.held_bytes(Reason.TURN) == BYTES, "saved again is not kept twice"
    chooser.gone(key)
    chooser.gone(key)
    chooser.hit(key)
    assert chooser.held_bytes(Reason.TURN) == 0


def test_the_same_calls_give_the_same_answers() -> None:
    def run() -> list[dict[int, Reason]]:
        chooser = boundaries(every=48)
        return [
            chooser.plan(start=number % 50, num_prompt=100 + number, turns=[30, 60, 80])
            for number in range(100)
        ]

    assert run() == run()
