"""Auditor: collects what an audit compares, compares it on a thread, and acts on the result.

Two checks, each for a share of requests:

- Computed. A request that would have been loaded is computed instead (`draws`, `begin`). The stored
  blocks are brought into HOST and pinned there. The computed ones are saved to HOST under keys of
  their own (`save`), and the two are compared, within a tolerance. This finds stored KV that is not
  what this model computes for these tokens, whatever the reason.
- Read back. Blocks that were loaded are saved again from the device (`read_back`), and must be
  the stored ones bit for bit. This finds blocks that were not restored, or in the wrong place.

An audit compares few blocks and few audits run at a time; further requests are not audited. It
never delays a request by more than the computation itself. Anything that goes wrong with an audit
itself (no room in HOST, a block that is lost meanwhile) ends it without a result.

The client calls everything from the thread that owns the tiers. It must pass each `Done` of the
tiers to `settle`, hold the device slots of a save until then, and call `poll` often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.audits.findings import (
    AuditCheck,
    AuditSubject,
    BlockPair,
    Comparison,
    Finding,
    compare_computed,
    compare_read_back,
)
from penstock.audits.layout import BlockLayout
from penstock.audits.quarantine import Quarantine
from penstock.audits.sample import AuditSample, audit_key, spread
from penstock.audits.tolerance import Tolerance
from penstock.events import Audited, AuditFailed, Observer, Quarantined, tell
from penstock.types import BlockKey, Done, Slot, TicketId, Tier

log = logging.getLogger(__name__)

_MAX_REPORTED = 100  # findings in a report
_MAX_AUDITS = 2
_MAX_AUDIT_BYTES = 32 << 20


class AuditTiers(Protocol):
    """The part of `Offloader` that audits use."""

    def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Slot | None],
        *,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
    ) -> TicketId: ...
    def save(
        self,
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        *,
        tenant: str,
        parents: Mapping[int, BlockKey | None],
        write_down: bool,
    ) -> TicketId: ...
    def pin(self, keys: Sequence[BlockKey]) -> list[Slot | None]: ...
    def unpin(self, slots: Sequence[Slot]) -> None: ...
    def discard(self, keys: Sequence[BlockKey]) -> int: ...
    def quarantine(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AuditBlock:
    """A block of a request that would be, or was, loaded."""

    key: BlockKey
    index: int  # position in the prompt, in blocks
    parent: BlockKey | None = None
    group: int = 0


class AuditSave(NamedTuple):
    """A save that an audit has begun. The slots must not change until its `Done`."""

    ticket: TicketId
    slots: list[Slot]


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """How much audits may use at a time."""

    max_audits: int = _MAX_AUDITS
    max_blocks: int = 8  # per audit; twice as many slots of HOST

    @classmethod
    def within(cls, num_host_blocks: int, block_bytes: int) -> AuditLimits:
        """32 MiB per audit, but at most 1/8 of HOST for all. An audit keeps each block twice."""
        share = num_host_blocks // (8 * 2 * _MAX_AUDITS)
        return cls(max_blocks=max(1, min(share, _MAX_AUDIT_BYTES // (2 * block_bytes))))


@dataclass(slots=True, eq=False)
class _Audit:
    number: int
    check: AuditCheck
    blocks: dict[BlockKey, AuditBlock]
    tenant: str
    load: TicketId | None = None  # of the stored blocks, until it has ended
    saves: set[TicketId] = field(default_factory=set)  # of the fresh blocks
    # Keys whose fresh block is still to be saved.
    awaited: set[BlockKey] = field(default_factory=set)
    sources: dict[BlockKey, Tier] = field(default_factory=dict)
    stored: dict[BlockKey, Slot] = field(default_factory=dict)  # pinned in HOST
    fresh: dict[BlockKey, Slot] = field(default_factory=dict)  # pinned in HOST
    saved: list[BlockKey] = field(default_factory=list)  # audit keys, to be discarded
    comparing: Future[Comparison] | None = None
    is_void: bool = False  # the result does not count

    @property
    def is_complete(self) -> bool:
        return self.load is None and not self.saves and not self.awaited


class Auditor:
    def __init__(
        self,
        tiers: AuditTiers,
        view: Callable[[Slot], memoryview],
        layouts: Sequence[BlockLayout],
        tolerances: Sequence[Tolerance],
        *,
        sample: AuditSample,
        limits: AuditLimits,
        subject: AuditSubject,
        quarantine: Quarantine,
        observers: Iterable[Observer] = (),
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`view` gives the memory of a slot of HOST. Layouts and tolerances are by group.

        `on_failure` is called once, after the tiers were quarantined: blocks on the device that
        were loaded must not be used any more.
        """
        self._tiers = tiers
        self._view = view
        self._layouts = layouts
        self._tolerances = tolerances
        self._sample = sample
        self._limits = limits
        self._subject = subject
        self._quarantine = quarantine
        self._observers = list(observers)
        self._on_failure = on_failure
        self._threads: ThreadPoolExecutor | None = None
        self._number = 0
        self._audits: list[_Audit] = []
        self._by_request: dict[str, _Audit] = {}
        self._by_ticket: dict[TicketId, _Audit] = {}
        self.is_quarantined = False
        self.findings: list[Finding] = []

    @property
    def is_busy(self) -> bool:
        """Whether an audit is under way. If so, the client must keep calling `poll`."""
        return bool(self._audits)

    def draws(self, first_key: BlockKey) -> bool:
        """Whether to audit a request. Ask once per request, in the order of their start.

        False if too many audits are under way.
        """
        is_drawn = self._sample.draws(first_key)
        return is_drawn and self._has_room

    # The stored blocks of a request that is computed instead.

    def begin(self, request_id: str, blocks: Sequence[AuditBlock], *, tenant: str = "") -> None:
        """Audit a request that would load these blocks, and computes them from now on."""
        if not blocks or not self._has_room or request_id in self._by_request:
            return
        audit = self._open(AuditCheck.COMPUTED, blocks, tenant)
        audit.awaited = set(audit.blocks)
        self._by_request[request_id] = audit
        chosen = list(audit.blocks.values())
        audit.load = self._tiers.load(
            [block.key for block in chosen],
            [None] * len(chosen),
            tenant=tenant,
            parents={at: block.parent for at, block in enumerate(chosen)},
        )
        self._by_ticket[audit.load] = audit

    def awaits(self, request_id: str) -> bool:
        return request_id in self._by_request

    def is_under_audit(self, key: BlockKey) -> bool:
        """Whether the block must not be saved under its own key now.

        Until the stored block is pinned, a computed one could take its place in HOST.
        """
        return any(audit.load is not None and key in audit.blocks for audit in self._audits)

    def save(
        self, request_id: str, keys: Sequence[BlockKey], slots: Sequence[Slot]
    ) -> AuditSave | None:
        """A request has computed these blocks: save those that are audited."""
        audit = self._by_request.get(request_id)
        if audit is None:
            return None
        wanted = {key: slot for key, slot in zip(keys, slots, strict=True) if key in audit.awaited}
        audit.awaited.difference_update(wanted)
        begun = self._save(audit, wanted) if wanted else None
        if not audit.awaited:
            del self._by_request[request_id]
        return begun

    def left(self, request_id: str) -> None:
        """A request has ended or gave up its blocks. What it has computed is compared."""
        audit = self._by_request.pop(request_id, None)
        if audit is not None:
            audit.awaited.clear()
            self._advance(audit)

    # Blocks that were loaded.

    def read_back(
        self,
        blocks: Sequence[AuditBlock],
        slots: Sequence[Slot],
        sources: Sequence[Tier | None] = (),
        *,
        tenant: str = "",
    ) -> AuditSave | None:
        """Compare blocks that were loaded into these device slots with the stored ones.

        None if they are not audited.
        """
        if not blocks or not self.draws(blocks[0].key):
            return None
        slot_of = dict(zip((block.key for block in blocks), slots, strict=True))
        source_of = dict(zip((block.key for block in blocks), sources, strict=False))
        audit = self._open(AuditCheck.READ_BACK, blocks, tenant)
        keys = list(audit.blocks)
        pins = self._tiers.pin(keys)  # a load passes through HOST, so most are there
        audit.stored = {key: pin for key, pin in zip(keys, pins, strict=True) if pin is not None}
        for key in audit.stored:
            if (source := source_of.get(key)) is not None:
                audit.sources[key] = source
        wanted = {key: slot_of[key] for key in audit.stored}
        begun = self._save(audit, wanted) if wanted else None
        self._advance(audit)
        return begun

    # Progress.

    def settle(self, done: Done) -> bool:
        """Note a `Done`. True if it belongs to an audit, so that no other part expects it."""
        audit = self._by_ticket.pop(done.ticket, None)
        if audit is None:
            return False
        if done.ticket == audit.load:
            audit.load = None
            for key, source, pin in zip(
                done.keys, done.sources, done.pins or (None,) * len(done.keys), strict=True
            ):
                if pin is not None:
                    audit.stored[key] = pin
                if source is not None:
                    audit.sources[key] = source
        else:
            audit.saves.discard(done.ticket)
            own = {audit_key(key, audit.number): key for key in audit.blocks}
            for key, pin in zip(done.keys, self._tiers.pin(done.keys), strict=True):
                if pin is not None:
                    audit.fresh[own[key]] = pin
        self._advance(audit)
        return True

    def poll(self) -> None:
        """Act on comparisons that have ended."""
        if not self._audits:
            return
        for audit in [each for each in self._audits if each.comparing is not None]:
            assert audit.comparing is not None
            if audit.comparing.done():
                self._conclude(audit, audit.comparing)

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the comparisons that are running, for tests and for closing."""
        for audit in self._audits:
            if audit.comparing is not None:
                audit.comparing.exception(timeout_seconds)

    def void(self) -> None:
        """End all audits without a result, because the model itself has changed.

        Unlike after `reset`, their loads and saves must still be settled.
        """
        self._by_request.clear()
        for audit in list(self._audits):
            audit.is_void = True
            audit.awaited.clear()
            self._advance(audit)

    def reset(self) -> None:
        """Forget all audits, because the client or the tiers have lost their books.

        Removes no pins. When it returns, no thread reads HOST.
        """
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        self._audits, self._by_request, self._by_ticket = [], {}, {}

    @property
    def _has_room(self) -> bool:
        return not self.is_quarantined and len(self._audits) < self._limits.max_audits

    def _open(self, check: AuditCheck, blocks: Sequence[AuditBlock], tenant: str) -> _Audit:
        self._number += 1
        at = spread(len(blocks), self._limits.max_blocks)
        audit = _Audit(self._number, check, {blocks[p].key: blocks[p] for p in at}, tenant)
        self._audits.append(audit)
        return audit

    def _save(self, audit: _Audit, wanted: Mapping[BlockKey, Slot]) -> AuditSave:
        keys = [audit_key(key, audit.number) for key in wanted]
        audit.saved += keys
        ticket = self._tiers.save(
            keys,
            list(wanted.values()),
            tenant=audit.tenant,
            parents=dict.fromkeys(range(len(keys)), None),
            write_down=False,
        )
        audit.saves.add(ticket)
        self._by_ticket[ticket] = audit
        return AuditSave(ticket, list(wanted.values()))

    def _advance(self, audit: _Audit) -> None:
        """Compare once everything is there; end an audit that has nothing to compare."""
        if not audit.is_complete or audit.comparing is not None or audit not in self._audits:
            return
        keys = [key for key in audit.blocks if key in audit.stored and key in audit.fresh]
        if not keys or audit.is_void:
            self._release(audit)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="penstock-audit")
        audit.comparing = self._threads.submit(self._compare, audit, keys)

    def _compare(self, audit: _Audit, keys: Sequence[BlockKey]) -> Comparison:
        """On a thread: blocks that HOST holds packed are unpacked here. They are pinned."""
        pairs = [
            BlockPair(
                key,
                audit.blocks[key].index,
                audit.blocks[key].group,
                audit.sources.get(key),
                self._view(audit.stored[key]),
                self._view(audit.fresh[key]),
            )
            for key in keys
        ]
        if audit.check is AuditCheck.READ_BACK:
            return compare_read_back(pairs, self._layouts)
        return compare_computed(pairs, self._layouts, self._tolerances)

    def _conclude(self, audit: _Audit, comparing: Future[Comparison]) -> None:
        self._release(audit)
        if audit.is_void:
            return
        error = comparing.exception()
        if error is not None:
            log.error("an audit could not compare its blocks", exc_info=error)
            return
        result = comparing.result()
        tell(self._observers, [Audited(audit.check.value, result.num_blocks)])
        for group, differences in result.clean:
            self._tolerances[group].learn(differences)
        if result.findings:
            self._fail(result)

    def _release(self, audit: _Audit) -> None:
        self._audits.remove(audit)
        self._tiers.unpin([*audit.stored.values(), *audit.fresh.values()])
        self._tiers.discard(audit.saved)

    def _fail(self, result: Comparison) -> None:
        self.findings += result.findings[: _MAX_REPORTED - len(self.findings)]
        worst = max(result.findings, key=lambda each: each.difference.value)
        tell(self._observers, [AuditFailed(worst.check.value, worst.difference.place)])
        path = self._quarantine.impose(self._report())
        if self.is_quarantined:
            return
        self.is_quarantined = True
        log.error("%s", self._sentence(worst, path))
        self._tiers.quarantine()
        tell(self._observers, [Quarantined("" if path is None else str(path))])
        self._on_failure()

    def _report(self) -> dict[str, object]:
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self._subject.model,
            "namespace": self._subject.namespace,
            "block_tokens": self._subject.block_tokens,
            "findings": [finding.describe() for finding in self.findings],
        }

    def _sentence(self, worst: Finding, path: Path | None) -> str:
        where = "" if worst.source is None else f" from {worst.source.name}"
        what = (
            f"stored KV{where} is not what {self._subject.model} computes"
            if worst.check is AuditCheck.COMPUTED
            else f"KV loaded{where} is not on the device as it is stored"
        )
        return (
            f"AUDIT FAILED: {what}: block {worst.index}, {worst.difference.place} differs by "
            f"{worst.difference.value:.3g} (tolerance {worst.limit:.3g}). No stored KV is used or "
            "written any more; requests are computed, and answers stay right. " + advice(path)
        )


def advice(path: Path | None) -> str:
    """What to do about a quarantine."""
    if path is None:
        return (
            "The report could not be written, so the quarantine ends with this process. Clear the "
            "stores, and report this as a bug."
        )
    return (
        f"The report is {path}. Find the cause (was something changed that the model's name and "
        "weights do not show?), clear the disk folder and the remote store, then delete this file "
        "and restart. If nothing was changed, please report it as a bug."
    )
