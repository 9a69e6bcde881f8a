"""The audit in real vLLM: silent as long as all is right, and each planted fault is found.

Faults are planted while KV is saved or loaded, in this process, where the engine runs. Then all is
right again: what vLLM computes is compared with what was stored wrong.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import group_models
import pytest
from conftest import Faults, Tokens, Vllm, transfer
from group_models import MODELS, VOCABULARY

from penstock.audits.auditor import Auditor
from penstock.audits.findings import AuditCheck
from penstock.connectors.vllm import identity
from penstock.connectors.vllm.auditing import RequestAudits
from penstock.connectors.vllm.checkpoints import RequestCheckpoints
from penstock.groups.kinds import Group, Kind
from penstock.transfer.io import MoveResult
from penstock.transfer.paged import PagedMover
from penstock.types import Direction, Slot, Transfer, Verdict

PATIENCE_SECONDS = 60.0


class Audited:
    """An engine of which every request is audited."""

    def __init__(self, name: str, models: Path, faults: Faults) -> None:
        self.name, self.unit = name, MODELS[name].block_tokens
        self._faults = faults
        made = transfer(kv_offloading_size=0.25, always_load=True, audit_share=1.0)
        given = {"max_model_len": 1024} | group_models.options(name, models)
        # This process made the model's files, before it started the engine.
        with patch.object(identity, "process_start", time.time):
            self.vllm = Vllm(in_process=True, kv_transfer_config=made, **given)

    @property
    def connector(self) -> Any:
        core = self.vllm.llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector

    @property
    def side(self) -> Any:
        side = self.connector._scheduler.side
        assert side is not None, "an error has ended the connector"
        return side

    @property
    def auditor(self) -> Auditor:
        found: Auditor = self.side._audits._auditor
        return found

    def anew(self) -> None:
        """Both sides of the connector begin anew, with empty tiers and no quarantine."""
        self._faults.new_round()
        self.ask([prompt(3, 99)])
        self.rest()
        self.vllm.forget()

    def ask(self, prompts: list[Tokens], num: int = 6) -> list[Tokens]:
        return self.vllm.answers(prompts, num, detokenize=False)

    def again(self, prompts: list[Tokens], num: int = 6) -> list[Tokens]:
        """Ask for what only Penstock has."""
        self.vllm.forget()
        answers = self.ask(prompts, num)
        self.rest()
        return answers

    def rest(self) -> None:
        """Until all saves and audits have ended: vLLM has to step for that."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while self.side._audits.is_busy or self.side.has_pending_work:
            assert time.monotonic() < ends, "an audit never ends"
            self.vllm.run_for(0.02)
        self.side.check()
        assert self.side._offloader.num_pinned == 0

    def metric(self, name: str) -> float:
        """Of vLLM's /metrics, summed over all labels and all engines so far."""
        from prometheus_client import REGISTRY

        self.ask([prompt(3, 98)], 1)  # vLLM collects events with its steps
        samples = (each for family in REGISTRY.collect() for each in family.samples)
        return sum(each.value for each in samples if each.name == name)

    def close(self) -> None:
        self.vllm.close()


def prompt(num: int, seed: int) -> Tokens:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY - 12) for _ in range(num)]


@pytest.fixture(scope="module", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(folder))
        yield folder / "penstock"


@pytest.fixture(scope="module", params=["llama", "gemma3", "granite4"])
def engine(request: pytest.FixtureRequest, models: Path, faults: Faults) -> Iterator[Audited]:
    faults.set()
    made = Audited(request.param, models, faults)
    yield made
    made.close()


def lengths(engine: Audited) -> list[int]:
    return [3 * engine.unit + 5, 4 * engine.unit, 2 * engine.unit + 17]


def test_a_clean_engine_finds_nothing(engine: Audited) -> None:
    failures = engine.metric("penstock_audit_failures_total")
    before = engine.metric("penstock_audited_requests_total")
    prompts = [prompt(num, seed) for seed, num in enumerate(lengths(engine))]
    cold = engine.ask(prompts)
    engine.rest()
    # All at once, one by one, and behind a prefix that vLLM has itself.
    assert engine.again(prompts) == cold
    for each, expected in zip(prompts, cold, strict=True):
        assert engine.again([each]) == [expected]
    engine.again([prompts[1][: engine.unit + 1]])
    assert engine.ask([prompts[1]]) == [cold[1]]
    engine.rest()
    with patch.object(RequestAudits, "draws", lambda *_: False):  # loaded, and read back
        assert engine.again(prompts) == cold
        assert engine.again(prompts[1:2]) == cold[1:2]
    assert engine.metric("penstock_audited_requests_total") >= before + 6
    assert engine.metric("penstock_audit_failures_total") == failures
    assert engine.auditor.findings == []
    assert not engine.auditor.is_quarantined


def test_every_group_is_compared(engine: Audited) -> None:
    for group, layout in zip(engine.side._groups, engine.auditor._layouts, strict=True):
        assert layout.stretches, f"nothing of group {group.index} is compared"
        assert all(stretch.num_bytes for stretch in layout.stretches)
        assert layout.num_bytes <= engine.side._requests.block_bytes


# Faults.

Fault = Callable[[Audited], AbstractContextManager[Any]]
_move = PagedMover.move


def _moved(direction: Direction, change: Callable[[PagedMover, Transfer], Any]) -> Any:
    def move(self: PagedMover, order: Transfer) -> MoveResult:
        if order.direction is not direction:
            return _move(self, order)
        found: MoveResult = change(self, order)
        return found

    return patch.object(PagedMover, "move", move)


def shifted_block(_: Audited) -> Any:
    """Each block is saved from the place of the one after it."""

    def change(mover: PagedMover, order: Transfer) -> MoveResult:
        slots = order.source_slots
        last = mover._part.device.num_blocks - 1
        others = tuple(Slot(min(slot + 1, last)) for slot in slots)
        return _move(mover, replace(order, source_slots=others))

    return _moved(Direction.SAVE, change)


def other_tokens(_: Audited) -> Any:
    """The blocks of other tokens are saved under these keys."""

    def change(mover: PagedMover, order: Transfer) -> MoveResult:
        return _move(mover, replace(order, source_slots=order.source_slots[::-1]))

    return _moved(Direction.SAVE, change)


def lost_layer(engine: Audited) -> Any:
    """One layer of each block is not saved."""

    def change(mover: PagedMover, order: Transfer) -> MoveResult:
        result = _move(mover, order)
        stretch = engine.auditor._layouts[0].stretches[-1]
        for slot in order.target_slots:
            view = mover._part.host.view(slot)
            view[stretch.offset : stretch.offset + stretch.num_bytes] = bytes(stretch.num_bytes)
        return result

    return _moved(Direction.SAVE, change)


def nothing_saved(_: Audited) -> Any:
    return _moved(Direction.SAVE, lambda _, order: MoveResult([Verdict.OK] * len(order.keys)))


@contextmanager
def other_rope(engine: Audited) -> Iterator[None]:
    """All positions are one further than they are."""

    def roll(by: int) -> None:
        runner = engine.vllm.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        tables = {
            id(module.cos_sin_cache): module.cos_sin_cache
            for module in runner.model.modules()
            if getattr(module, "cos_sin_cache", None) is not None
        }
        assert tables
        for table in tables.values():
            table.copy_(table.roll(by, 0))

    roll(-1)
    try:
        yield
    finally:
        roll(1)


@contextmanager
def stale_checkpoint(_: Audited) -> Iterator[None]:
    """Windows are saved from blocks that have moved on, and states from those of others."""
    real = RequestCheckpoints._blocks

    def blocks(self: Any, group: Group, *rest: Any) -> Any:
        found = real(self, group, *rest)
        if not found:
            return found
        if group.kind is Kind.STATE:
            return [Slot(1 if found[0] != 1 else 2)]
        return found[1:] + found[:1]

    with patch.object(RequestCheckpoints, "_blocks", blocks):
        yield


COMPUTED: dict[str, tuple[Fault, set[str]]] = {
    "a block shifted": (shifted_block, {"llama", "gemma3", "granite4"}),
    "other tokens": (other_tokens, {"llama", "gemma3", "granite4"}),
    "a layer lost": (lost_layer, {"llama", "gemma3", "granite4"}),
    "nothing saved": (nothing_saved, {"llama", "gemma3", "granite4"}),
    "another rope": (other_rope, {"llama", "gemma3"}),
    "a stale window or state": (stale_checkpoint, {"gemma3", "granite4"}),
}


@pytest.mark.parametrize("fault", COMPUTED)
def test_what_was_stored_wrong_is_found(engine: Audited, fault: str, state_folder: Path) -> None:
    plant, names = COMPUTED[fault]
    if engine.name not in names:
        pytest.skip("this model has no such fault")
    engine.anew()
    asked = prompt(lengths(engine)[0], 50)
    with plant(engine):
        engine.ask([asked])
        engine.rest()
    failures = engine.metric("penstock_audit_failures_total")
    audited = engine.again([asked])
    check_found(engine, AuditCheck.COMPUTED, state_folder)
    if fault == "another rope":  # which does not change V before the second layer
        first = [each.difference for each in engine.auditor.findings]
        assert {each.part for each in first if each.layer.startswith("model.layers.0.")} == {"K"}
    assert engine.metric("penstock_audit_failures_total") > failures
    assert engine.metric("penstock_quarantined")
    assert engine.again([asked]) == audited, "what is audited is computed"


def unrestored(_: Audited) -> Any:
    """Nothing is copied to the device, and nobody is told."""
    return _moved(Direction.LOAD, lambda _, order: MoveResult([Verdict.OK] * len(order.keys)))


def misplaced(_: Audited) -> Any:
    def change(mover: PagedMover, order: Transfer) -> MoveResult:
        return _move(mover, replace(order, target_slots=order.target_slots[::-1]))

    return _moved(Direction.LOAD, change)


def one_not_restored(_: Audited) -> Any:
    """The last block that a load brings is of the last group."""

    def change(mover: PagedMover, order: Transfer) -> MoveResult:
        fewer = replace(
            order,
            keys=order.keys[:-1],
            source_slots=order.source_slots[:-1],
            target_slots=order.target_slots[:-1],
        )
        return MoveResult([*_move(mover, fewer).verdicts, Verdict.OK])

    return _moved(Direction.LOAD, change)


@pytest.mark.parametrize("plant", [unrestored, misplaced, one_not_restored])
def test_what_was_loaded_wrong_is_found(engine: Audited, plant: Fault, state_folder: Path) -> None:
    engine.anew()
    asked = prompt(lengths(engine)[0], 60)
    cold = engine.ask([asked])
    engine.rest()
    with plant(engine), patch.object(RequestAudits, "draws", lambda *_: False):
        engine.again([asked])
    check_found(engine, AuditCheck.READ_BACK, state_folder)
    engine.vllm.forget()
    assert engine.again([asked]) == cold


def check_found(engine: Audited, check: AuditCheck, state_folder: Path) -> None:
    found = engine.auditor.findings
    assert found
    assert {each.check for each in found} == {check}
    assert engine.side._offloader.is_quarantined
    (report,) = state_folder.glob("quarantine-*.json")
    assert json.loads(report.read_text())["findings"]
    report.unlink()
