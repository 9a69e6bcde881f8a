"""Audits under a small vLLM (see `vllm_model`): faults are found, and nothing else is disturbed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from connectors.memory_model import BLOCK_TOKENS, Silent
from connectors.pool_model import Request
from connectors.test_sides import live
from connectors.vllm_model import Vllm
from tools import TIMEOUT_SECONDS

from penstock.audits.auditor import Auditor
from penstock.audits.findings import AuditCheck
from penstock.audits.quarantine import quarantine_files
from penstock.connectors.vllm.auditing import open_auditor
from penstock.transfer.io import MoveResult
from penstock.types import KEY_BYTES, Direction, Slot, Tier, Transfer, Verdict

Models = Callable[..., Vllm]
PROMPT = list(range(1, 23))  # five full blocks, and two tokens


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """Makes models in which every request is audited; each must close cleanly."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[Vllm] = []

    def make(*, disk: bool = False, **options: Any) -> Vllm:
        options = {"is_caching": False, "num_host": 200, "audit_share": 1.0, **options}
        made.append(Vllm(tmp_path / "kv" if disk else None, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
        model.audit()


def ask(vllm: Vllm, prompt: list[int] = PROMPT, max_tokens: int = 1) -> Request:
    """One request, from beginning to end, with its audit; the model checks the answer."""
    request = vllm.add(prompt, max_tokens)
    rest(vllm)
    return request


def rest(vllm: Vllm) -> None:
    """Until nothing moves and nothing is audited any more."""
    ends = time.monotonic() + TIMEOUT_SECONDS
    vllm.flush()
    while vllm.side._audits.is_busy:
        assert time.monotonic() < ends, "an audit never ends"
        vllm.step()
        vllm.flush()
    vllm.check()
    assert vllm.offloader.num_pinned == 0


def loaded(vllm: Vllm, request: Request) -> dict[str, int]:
    answer = vllm.answers[request.request_id]
    found: dict[str, int] = {} if answer is None else answer["penstock"]["loaded_tokens"]
    return found


def auditor(vllm: Vllm) -> Auditor:
    assert vllm.auditor is not None
    return vllm.auditor


def compute_nothing(vllm: Vllm) -> None:
    """Let requests be loaded: what is audited then is the load."""
    vllm.side._audits.draws = lambda *_: False  # type: ignore[method-assign]


def slots_of(vllm: Vllm, request: Request) -> list[Slot]:
    """Where DRAM keeps the request's full blocks, as the seals tell."""
    assert request.chain is not None
    held = {
        bytes(vllm.host.seals[KEY_BYTES * slot : KEY_BYTES * (slot + 1)]): Slot(slot)
        for slot in range(vllm.host.num_slots)
    }
    return [held[key] for key in request.chain.keys if key in held]


def spoil(vllm: Vllm, slot: Slot) -> None:
    """A block has been stored with other bytes from the beginning: nothing else shows it."""
    size = vllm.host.block_bytes
    before = bytes(vllm.host.view(slot)[:size])
    vllm.host.view(slot)[:size] = bytes(byte ^ 0x5A for byte in before)


def wrong_loads(vllm: Vllm, change: Callable[[Transfer], Transfer]) -> None:
    """Loads are carried out otherwise than ordered, and nobody is told."""
    for mover in vllm.movers:
        inner = mover._inner
        real = inner.move

        def move(transfer: Transfer, real: Callable[[Transfer], MoveResult] = real) -> MoveResult:
            if transfer.direction is not Direction.LOAD:
                return real(transfer)
            real(change(transfer))
            return MoveResult([Verdict.OK] * len(transfer.keys))

        inner.move = move  # type: ignore[method-assign]


def restored_elsewhere(transfer: Transfer) -> Transfer:
    return replace(transfer, target_slots=transfer.target_slots[::-1])


def last_not_restored(transfer: Transfer) -> Transfer:
    return replace(
        transfer,
        keys=transfer.keys[:-1],
        source_slots=transfer.source_slots[:-1],
        target_slots=transfer.target_slots[:-1],
    )


def not_restored(transfer: Transfer) -> Transfer:
    return replace(transfer, keys=(), source_slots=(), target_slots=())


def start_and_abort_when_loaded(vllm: Vllm, prompt: list[int] = PROMPT) -> None:
    """The model would stop at the first step that computes from wrong blocks."""
    vllm._check_loaded = lambda _: None  # type: ignore[method-assign]
    request = vllm.add(prompt, 1)
    ends = time.monotonic() + TIMEOUT_SECONDS
    while request.request_id not in vllm._arrived:
        assert time.monotonic() < ends, "a load never ends"
        vllm.step()
    vllm.abort(request)
    rest(vllm)
    del vllm._check_loaded  # type: ignore[method-assign]


# All is right.


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"overlaps": True}, {"num_drafts": 2}])
def test_what_is_right_passes(models: Models, options: dict[str, Any]) -> None:
    vllm = models(disk=True, **options)
    first = ask(vllm)
    second = ask(vllm, [*PROMPT, 7, 8, 9], 5)
    assert loaded(vllm, second) == {}, "what is audited is computed"
    assert second.num_output == 5
    vllm.offloader.empty_host()
    third = ask(vllm)  # what is compared comes from the disk
    assert third.all_token_ids == first.all_token_ids
    assert vllm.seen["audits: computed"] == 2
    compute_nothing(vllm)
    assert loaded(vllm, ask(vllm)) == {"host": 5 * BLOCK_TOKENS}
    assert vllm.seen["audits: read_back"] == 1
    assert auditor(vllm).findings == []
    assert vllm.seen["quarantined"] == 0


def test_a_share_is_audited_and_the_rest_is_loaded(models: Models) -> None:
    vllm = models(audit_share=0.5)
    ask(vllm)
    results = Counter(bool(loaded(vllm, ask(vllm))) for _ in range(40))
    assert results[True] == 40 - vllm.seen["audits: computed"]
    assert results[False] == vllm.seen["audits: computed"]
    assert 0 < vllm.seen["audits: read_back"] < results[True]


def test_the_copies_for_an_audit_leave_nothing_behind(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm)
    num_blocks = vllm.offloader.num_blocks
    ask(vllm)
    compute_nothing(vllm)
    ask(vllm)
    assert vllm.seen["audits: computed"] == vllm.seen["audits: read_back"] == 1
    assert vllm.offloader.num_blocks == num_blocks


@pytest.mark.parametrize("options", [{}, {"overlaps": True, "num_workers": 2}, {"num_drafts": 2}])
def test_whatever_happens_what_is_right_passes(models: Models, options: dict[str, Any]) -> None:
    """Preemptions, aborts, damaged disks, copies that fail, resets."""
    seen: Counter[str] = Counter()
    for seed in range(2):
        # Of all requests that would load, half are computed: both checks are at work.
        vllm = models(disk=seed == 0, seed=seed, is_caching=True, audit_share=0.5, **options)
        live(vllm, seed, 300, harm=seed == 0)
        rest(vllm)
        assert auditor(vllm).findings == []
        seen += vllm.seen
    for name in ("audits: computed", "audits: read_back", "preempted", "aborted", "resets"):
        assert seen[name], f"the test hardly tests: {sorted(seen.items())}"


@pytest.mark.parametrize("what", ["abort", "preempt", "reset"])
def test_an_audited_request_that_is_interrupted_holds_nothing(models: Models, what: str) -> None:
    vllm = models(disk=True, budget=8)
    ask(vllm)
    request = vllm.add(PROMPT, 3)
    vllm.step()
    assert vllm.side._audits.is_busy
    assert request.status == "running"
    if what == "abort":
        vllm.abort(request)
    elif what == "preempt":
        vllm.preempts_next = True
    else:
        assert vllm.reset()
    rest(vllm)
    assert request.status == "ended"
    assert auditor(vllm).findings == []
    assert vllm.seen["audits: computed"] == (0 if what == "reset" else 1)


def test_after_a_preemption_a_request_is_loaded(models: Models) -> None:
    vllm = models(budget=8)
    ask(vllm)
    request = vllm.add(PROMPT, 3, num_preemptions=0)
    vllm.step()
    request.num_preemptions = 1
    vllm.preempts_next = True
    rest(vllm)
    assert loaded(vllm, request) == {"host": 5 * BLOCK_TOKENS}


def test_a_reset_ends_audits_without_a_result(models: Models) -> None:
    """Weights that were replaced in place give other KV, which is no fault."""
    vllm = models()
    slots = slots_of(vllm, ask(vllm))
    for slot in slots:
        spoil(vllm, slot)
    for mover in vllm.movers:
        mover.saves_gate.clear()
    request = vllm.add(PROMPT, 3)
    vllm.step()
    assert vllm.side._audits.is_busy
    assert vllm.reset()
    for mover in vllm.movers:
        mover.saves_gate.set()
    rest(vllm)
    assert request.num_output == 3
    assert auditor(vllm).findings == []
    assert vllm.seen["audits: computed"] == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_closing_in_the_middle_of_an_audit(models: Models, num_steps: int) -> None:
    vllm = models(disk=True, budget=8)
    ask(vllm)
    vllm.offloader.empty_host()
    for mover in vllm.movers:
        mover.saves_gate.clear()
    vllm.add(PROMPT, 3)
    vllm.step()
    assert vllm.side._audits.is_busy
    for _ in range(num_steps):
        vllm.step()
    vllm.close()
    assert not vllm.side._audits.is_busy


@pytest.mark.parametrize("options", [{}, {"overlaps": True}])
def test_a_whole_prompt_is_read_back_before_its_last_token_is_computed_again(
    models: Models, options: dict[str, Any]
) -> None:
    vllm = models(**options)
    ask(vllm, PROMPT[:20])
    compute_nothing(vllm)
    assert loaded(vllm, ask(vllm, PROMPT[:20])) == {"host": 20}
    assert vllm.seen["whole prompts loaded"] == vllm.seen["audits: read_back"] == 1
    assert auditor(vllm).findings == []


def test_a_vllm_that_saves_nothing_only_reads_back(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm)
    vllm.close()
    other = models(disk=True, may_save=False, truth=vllm.truth)
    assert loaded(other, ask(other)) == {"disk": 5 * BLOCK_TOKENS}
    assert other.seen["audits: read_back"] == 1


def test_without_a_layout_nothing_is_audited(models: Models) -> None:
    from penstock.audits.layout import BlockLayout
    from penstock.config import Config

    vllm = models(audit_share=0)
    layouts = [BlockLayout(())]
    made = open_auditor(
        vllm.offloader, Config(), vllm.namespace, layouts, share=1.0, block_bytes=64
    )
    assert made is None


# Something is wrong.


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"overlaps": True}])
@pytest.mark.parametrize("index", [0, 3, 4])
def test_a_block_stored_wrong_is_found(models: Models, index: int, options: dict[str, Any]) -> None:
    vllm = models(**options)
    first = ask(vllm)
    spoil(vllm, slots_of(vllm, first)[index])
    second = ask(vllm)
    assert second.all_token_ids == first.all_token_ids
    found = auditor(vllm).findings
    assert {(each.check, each.index) for each in found} == {(AuditCheck.COMPUTED, index)}
    assert vllm.seen["failed audits: computed"] == vllm.seen["quarantined"] == 1


def test_blocks_of_other_tokens_on_disk_are_found(models: Models) -> None:
    vllm = models(disk=True)
    vllm.truth.check = lambda *_: None  # type: ignore[method-assign]
    for mover in vllm.movers:
        real = mover._inner.move
        mover._inner.move = lambda order, real=real: real(  # type: ignore[method-assign]
            replace(order, source_slots=order.source_slots[::-1])
        )
    first = ask(vllm)
    vllm.offloader.empty_host()
    for mover in vllm.movers:
        del mover._inner.move
    assert ask(vllm).all_token_ids == first.all_token_ids
    found = auditor(vllm).findings
    assert {each.index for each in found} == {0, 1, 3, 4}, "the one in the middle is right"
    assert {each.source for each in found} == {Tier.DISK}


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"overlaps": True}])
@pytest.mark.parametrize("change", [restored_elsewhere, last_not_restored, not_restored])
def test_a_block_loaded_wrong_is_found(
    models: Models, change: Callable[[Transfer], Transfer], options: dict[str, Any]
) -> None:
    vllm = models(**options)
    ask(vllm)
    compute_nothing(vllm)
    wrong_loads(vllm, change)
    start_and_abort_when_loaded(vllm)
    found = auditor(vllm).findings
    assert found
    assert {each.check for each in found} == {AuditCheck.READ_BACK}
    assert vllm.seen["failed audits: read_back"] == 1
    ask(vllm)


def test_the_model_would_notice_a_block_loaded_wrong(models: Models) -> None:
    vllm = models(audit_share=0)
    ask(vllm)
    wrong_loads(vllm, restored_elsewhere)
    vllm.add(PROMPT, 1)
    with pytest.raises(Silent):
        vllm.run()


def fail(vllm: Vllm) -> None:
    first = ask(vllm)
    spoil(vllm, slots_of(vllm, first)[2])
    ask(vllm)
    assert auditor(vllm).is_quarantined


def test_after_a_failure_nothing_is_loaded_and_nothing_is_stored(
    models: Models, tmp_path: Path
) -> None:
    vllm = models(disk=True)
    fail(vllm)
    (report,) = quarantine_files(tmp_path / "kv")
    told = json.loads(report.read_text())
    assert told["model"] == "model"
    assert {(each["block"], each["tier"]) for each in told["findings"]} == {(2, "host")}
    num_blocks = vllm.offloader.num_blocks
    for prompt in (PROMPT, [*PROMPT, 1, 2, 3], list(range(30, 46))):
        for _ in range(2):
            assert loaded(vllm, ask(vllm, prompt, 3)) == {}
    assert vllm.seen["blocks loaded"] == vllm.seen["blocks from disk"] == 0
    vllm.close()

    again = models(disk=True, audit_share=0, truth=vllm.truth)
    assert again.seen["quarantined"] == 1
    for _ in range(2):
        assert loaded(again, ask(again)) == {}
    assert again.seen["blocks loaded"] == 0
    assert again.offloader.is_quarantined
    again.close()
    assert num_blocks

    report.unlink()
    later = models(disk=True, truth=vllm.truth, audit_share=0)
    assert loaded(later, ask(later)) == {"disk": 5 * BLOCK_TOKENS}, "and then it is offered again"


def test_what_was_offered_before_a_failure_is_not_loaded(models: Models) -> None:
    vllm = models(disk=True, audit_share=0)
    ask(vllm)
    vllm.offloader.empty_host()
    allocated = vllm.side.allocated

    def too_late(*args: Any) -> None:
        vllm.offloader.quarantine()
        allocated(*args)

    vllm.side.allocated = too_late  # type: ignore[method-assign]
    assert loaded(vllm, ask(vllm)) == {}
    assert vllm.seen["loads"] == 1
    assert vllm.seen["blocks loaded"] == 0


def test_with_dram_only_a_restart_ends_the_quarantine(models: Models, tmp_path: Path) -> None:
    vllm = models()
    fail(vllm)
    assert len(quarantine_files(tmp_path / "state" / "penstock")) == 1
    again = models()
    ask(again)
    assert again.seen["quarantined"] == 0
    assert not again.offloader.is_quarantined
