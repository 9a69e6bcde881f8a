"""The auditor with tiers that do as they are told: it ends every audit, and holds nothing after."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from penstock.audits.auditor import AuditBlock, AuditLimits, Auditor
from penstock.audits.findings import AuditSubject
from penstock.audits.layout import DIM, HEAD, KV, TOKEN, BlockLayout, Stretch
from penstock.audits.quarantine import Quarantine, quarantine_files
from penstock.audits.sample import AuditSample
from penstock.audits.tolerance import Tolerance
from penstock.events import Audited, AuditFailed, Event, Quarantined
from penstock.types import BlockKey, Direction, Done, Slot, TicketId, Tier, Verdict

ATTENTION = BlockLayout.uniform(["0", "1"], "float32", (2, 4, 2, 8), (KV, TOKEN, HEAD, DIM))
STATE = BlockLayout((Stretch("ssm", 0, "float32", (64,)),))
BLOCK_BYTES = ATTENTION.num_bytes
KEYS = [BlockKey(bytes([number]) * 32) for number in range(20)]
BLOCKS = [AuditBlock(key, number) for number, key in enumerate(KEYS)]


class FakeTiers:
    """HOST as a dict. Loads and saves end when the test says so."""

    def __init__(self) -> None:
        self.device: dict[Slot, bytes] = {}
        self.memory: dict[Slot, bytes] = {}
        self.slot_of: dict[BlockKey, Slot] = {}
        self.pins: Counter[Slot] = Counter()
        self.open: dict[TicketId, tuple[Direction, tuple[BlockKey, ...]]] = {}
        self.is_full = False
        self.is_quarantined = False
        self._numbers = count(1)

    def store(self, key: BlockKey, content: bytes) -> None:
        slot = Slot(next(self._numbers))
        self.slot_of[key], self.memory[slot] = slot, content

    def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        *,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
    ) -> TicketId:
        assert set(into) == {None}
        ticket = TicketId(next(self._numbers))
        self.open[ticket] = (Direction.LOAD, tuple(keys))
        return ticket

    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        *,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
        write_down: bool,
    ) -> TicketId:
        assert not write_down
        assert not set(keys) & set(KEYS), "an audit's block is saved under its own key"
        if not self.is_full:
            for key, slot in zip(keys, source, strict=True):
                self.store(key, self.device[slot])
        ticket = TicketId(next(self._numbers))
        self.open[ticket] = (Direction.SAVE, tuple(keys))
        return ticket

    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        slots = [self.slot_of.get(key) for key in keys]
        self.pins.update(slot for slot in slots if slot is not None)
        return slots

    def unpin(self, slots: Sequence[Slot]) -> None:
        self.pins.subtract(slots)
        assert all(number >= 0 for number in self.pins.values())

    def discard(self, keys: Sequence[BlockKey]) -> int:
        return sum(self.slot_of.pop(key, None) is not None for key in keys)

    def quarantine(self) -> None:
        self.is_quarantined = True

    def end(self, ticket: TicketId) -> Done:
        direction, keys = self.open.pop(ticket)
        pins = tuple(self.pin(keys)) if direction is Direction.LOAD else ()
        verdicts = tuple(Verdict.OK if key in self.slot_of else Verdict.MISSING for key in keys)
        sources = tuple(Tier.DISK if key in self.slot_of else None for key in keys)
        return Done(ticket, direction, keys, verdicts, sources, 0.0, pins)


class Rig:
    def __init__(self, folder: Path, *, max_blocks: int = 20) -> None:
        self.tiers = FakeTiers()
        self.events: list[Event] = []
        self.num_failures = 0
        self.auditor = Auditor(
            self.tiers,
            lambda slot: memoryview(self.tiers.memory[slot]),
            [ATTENTION, STATE],
            [Tolerance(ATTENTION), Tolerance(STATE)],
            sample=AuditSample(1.0, b""),
            limits=AuditLimits(max_audits=2, max_blocks=max_blocks),
            subject=AuditSubject("a-model", "ab" * 32, 4),
            quarantine=Quarantine(b"\xab" * 32, folder),
            observers=[self.events.append],
            on_failure=self._failed,
        )

    def _failed(self) -> None:
        assert self.tiers.is_quarantined
        self.num_failures += 1

    def settle_all(self) -> None:
        for ticket in list(self.tiers.open):
            assert self.auditor.settle(self.tiers.end(ticket))
        self.auditor.wait(30)
        self.auditor.poll()

    def is_clean(self) -> bool:
        left = set(self.tiers.slot_of) - set(KEYS)
        return not (self.auditor.is_busy or any(self.tiers.pins.values()) or left)


def content(number: int, *, wrong: bool = False) -> bytes:
    values = np.random.default_rng(number).standard_normal(BLOCK_BYTES // 4).astype(np.float32)
    if wrong:
        values[-16:] += 1  # layer 1, V
    return values.tobytes()


def compute(rig: Rig, request_id: str, *numbers: int) -> None:
    slots = [Slot(number) for number in numbers]
    for number, slot in zip(numbers, slots, strict=True):
        rig.tiers.device[slot] = content(number)
    rig.auditor.save(request_id, [KEYS[number] for number in numbers], slots)


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_clean_request(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for number in range(5):
        rig.tiers.store(KEYS[number], content(number))
    rig.auditor.begin("a", BLOCKS[:5])
    assert rig.auditor.is_under_audit(KEYS[4])
    assert not rig.auditor.is_under_audit(KEYS[5])
    compute(rig, "a", 0, 1, 2)
    rig.settle_all()
    assert rig.auditor.is_busy
    compute(rig, "a", 3, 4, 5)  # one more than was stored
    assert not rig.auditor.is_under_audit(KEYS[4])
    rig.settle_all()
    assert rig.events == [Audited("computed", 5)]
    assert rig.is_clean()
    assert quarantine_files(tmp_path) == []


def test_a_wrong_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path)
    for number in range(3):
        rig.tiers.store(KEYS[number], content(number, wrong=number == 1))
    rig.auditor.begin("a", BLOCKS[:3])
    compute(rig, "a", 0, 1, 2)
    with caplog.at_level(logging.ERROR):
        rig.settle_all()
    (path,) = quarantine_files(tmp_path)
    assert rig.events == [
        Audited("computed", 3),
        AuditFailed("computed", "layer 1, V, head 1"),
        Quarantined(str(path)),
    ]
    assert rig.num_failures == 1
    assert rig.is_clean()
    assert str(path) in caplog.text
    assert "delete this file" in caplog.text
    report = json.loads(path.read_text())
    assert report["model"] == "a-model"
    (finding,) = report["findings"]
    assert finding.pop("difference") > 0.1
    assert finding == {
        "check": "computed",
        "layer": "1",
        "part": "V",
        "head": 1,
        "group": 0,
        "block": 1,
        "key": KEYS[1].hex(),
        "tolerance": 0.02,
        "tier": "disk",
    }
    assert not rig.auditor.draws(KEYS[0])
    rig.auditor.begin("b", BLOCKS[:3])
    assert not rig.auditor.is_busy


def test_a_request_that_leaves_is_compared_as_far_as_it_came(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for number in range(4):
        rig.tiers.store(KEYS[number], content(number))
    rig.auditor.begin("a", BLOCKS[:4])
    compute(rig, "a", 0, 1)
    rig.auditor.left("a")
    rig.settle_all()
    assert rig.events == [Audited("computed", 2)]
    assert rig.is_clean()
    rig.auditor.begin("b", BLOCKS[:4])
    rig.auditor.left("b")  # computed nothing
    rig.settle_all()
    assert len(rig.events) == 1
    assert rig.is_clean()


@pytest.mark.parametrize("what", ["stored is lost", "no room in HOST"])
def test_an_audit_that_cannot_compare_ends_without_a_result(tmp_path: Path, what: str) -> None:
    rig = Rig(tmp_path)
    if what != "stored is lost":
        rig.tiers.store(KEYS[0], content(0))
        rig.tiers.is_full = True
    rig.auditor.begin("a", BLOCKS[:1])
    compute(rig, "a", 0)
    rig.settle_all()
    assert rig.events == []
    assert rig.is_clean()


def test_it_is_bounded(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_blocks=3)
    for number in range(20):
        rig.tiers.store(KEYS[number], content(number))
    for name in ("a", "b", "c"):
        rig.auditor.begin(name, BLOCKS)
    assert [rig.auditor.awaits(name) for name in ("a", "b", "c")] == [True, True, False]
    assert not rig.auditor.draws(KEYS[0])
    assert rig.auditor.read_back(BLOCKS, [Slot(number) for number in range(20)]) is None
    for name in ("a", "b", "c"):
        compute(rig, name, *range(20))
    rig.settle_all()
    assert rig.events == [Audited("computed", 3)] * 2
    assert rig.is_clean()


def test_blocks_that_were_loaded_are_the_same_bit_by_bit(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for number in range(3):
        rig.tiers.store(KEYS[number], content(number))
        rig.tiers.device[Slot(number)] = content(number)
    slots = [Slot(number) for number in range(3)]
    begun = rig.auditor.read_back(BLOCKS[:3], slots, [Tier.HOST] * 3)
    assert begun is not None
    assert begun.slots == slots
    rig.settle_all()
    assert rig.events == [Audited("read_back", 3)]
    changed = bytearray(content(2))
    changed[5] ^= 1  # far below any tolerance
    rig.tiers.device[Slot(2)] = bytes(changed)
    rig.auditor.read_back(BLOCKS[:3], slots, [Tier.HOST] * 3)
    rig.settle_all()
    assert AuditFailed("read_back", "layer 0, K, head 0") in rig.events
    assert rig.is_clean()


def test_blocks_that_are_no_longer_in_host_are_not_read_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.auditor.read_back(BLOCKS[:2], [Slot(0), Slot(1)]) is None
    assert rig.is_clean()


def test_each_group_has_its_own_layout(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.tiers.store(KEYS[0], content(0))
    rig.tiers.store(KEYS[1], content(1, wrong=True))  # beyond what a state block uses
    rig.auditor.begin("a", [BLOCKS[0], AuditBlock(KEYS[1], 1, group=1)])
    compute(rig, "a", 0, 1)
    rig.settle_all()
    assert rig.events == [Audited("computed", 2)]
    rig.tiers.store(KEYS[1], content(2))
    rig.auditor.begin("a", [AuditBlock(KEYS[1], 1, group=1)])
    compute(rig, "a", 1)
    rig.settle_all()
    assert AuditFailed("computed", "layer ssm") in rig.events


def test_a_done_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    done = Done(TicketId(999), Direction.SAVE, (KEYS[0],), (Verdict.OK,), (None,), 0.0)
    assert not rig.auditor.settle(done)


def test_after_a_reset_nothing_is_known(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.tiers.store(KEYS[0], content(0))
    rig.auditor.begin("a", BLOCKS[:1])
    compute(rig, "a", 0)
    rig.auditor.reset()
    assert not rig.auditor.is_busy
    rig.auditor.left("a")
    rig.auditor.poll()
    rig.auditor.begin("a", BLOCKS[:1])
    assert rig.auditor.is_busy


def test_a_quarantine_is_found_again(tmp_path: Path, state_home: Path) -> None:
    quarantine = Quarantine(b"\x01" * 32, tmp_path / "kv")
    assert quarantine.find() is None
    path = quarantine.impose({"findings": []})
    assert path is not None
    assert quarantine.find() == path
    assert Quarantine(b"\x01" * 32, tmp_path / "kv").find() == path
    assert Quarantine(b"\x02" * 32, tmp_path / "kv").find() is None
    path.write_text("not JSON")  # that it is there is enough
    assert Quarantine(b"\x01" * 32, tmp_path / "kv").find() == path


def test_if_the_disk_cannot_be_written_the_state_folder_is_used(
    tmp_path: Path, state_home: Path
) -> None:
    (tmp_path / "kv").write_text("a file, not a folder")
    quarantine = Quarantine(b"\x01" * 32, tmp_path / "kv")
    path = quarantine.impose({})
    assert path is not None
    assert path.parent == state_home / "penstock"
    assert quarantine.find() == path


def test_if_nothing_can_be_written_the_process_is_in_quarantine_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    rig = Rig(tmp_path / "file")
    rig.tiers.store(KEYS[0], content(0, wrong=True))
    rig.auditor.begin("a", BLOCKS[:1])
    compute(rig, "a", 0)
    rig.settle_all()
    assert rig.tiers.is_quarantined
    assert Quarantined("") in rig.events
    assert "could not be written" in caplog.text
