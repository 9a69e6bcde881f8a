"""The engine's side of the audit: which requests are audited, and which device blocks it holds."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.audits.auditor import AuditBlock, Auditor, AuditSave
from penstock.costs.choose import LoadChoice
from penstock.engine.admit import Choose
from penstock.engine.blocks import BlockPool
from penstock.engine.request import Request
from penstock.types import BlockKey, Done, Match, Slot, TicketId, Tier


class EngineAudits:
    def __init__(self, auditor: Auditor, pool: BlockPool) -> None:
        self._auditor = auditor
        self._pool = pool
        self._saving: dict[TicketId, list[Slot]] = {}  # device blocks that an audit's save reads

    @property
    def is_moving(self) -> bool:
        """Whether device blocks are held for saves."""
        return bool(self._saving)

    @property
    def is_busy(self) -> bool:
        return self._auditor.is_busy

    def choosing(self, request: Request, choose: Choose) -> Choose:
        """Wrap `choose`: if the request is audited, nothing is loaded for it.

        Prompts with segments are not audited: what is computed without them differs.
        """
        if request.segments:
            return choose

        def choose_or_audit(match: Match, num_past: int) -> LoadChoice:
            choice = choose(match, num_past)
            num_blocks = choice.num_blocks + choice.num_two_ended
            if not num_blocks or request.num_preemptions:
                return choice
            if request.num_audited is None:  # a request that finds no room is planned again
                is_drawn = self._auditor.draws(request.chain.keys[0])
                request.num_audited = num_blocks if is_drawn else 0
            if not request.num_audited:
                return choice
            request.num_audited = num_blocks
            return LoadChoice(0, choice.load_seconds, choice.compute_seconds)

        return choose_or_audit

    def start(self, request: Request, num_shared: int) -> None:
        """A request starts after `num_shared` blocks. If it is audited, it computes the rest."""
        if not request.num_audited or request.num_preemptions:
            return
        end = num_shared + request.num_audited
        self._auditor.begin(
            request.id, _blocks(request, range(num_shared, end)), tenant=request.tenant
        )

    def keeps_from_tiers(self, key: BlockKey) -> bool:
        return self._auditor.is_under_audit(key)

    def computed(self, request: Request, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """A request has completed these blocks."""
        if self._auditor.awaits(request.id):
            self._hold(self._auditor.save(request.id, keys, slots))

    def loaded(
        self,
        request: Request,
        start: int,
        slots: Sequence[Slot | None],
        sources: Sequence[Tier | None],
    ) -> None:
        """Blocks from the `start`-th on were loaded into device slots. None: it stayed in HOST."""
        at = [number for number, slot in enumerate(slots) if slot is not None]
        self._hold(
            self._auditor.read_back(
                _blocks(request, [start + number for number in at]),
                [slot for slot in slots if slot is not None],
                [sources[number] for number in at] if sources else (),
                tenant=request.tenant,
            )
        )

    def left(self, request: Request) -> None:
        """A request releases its device blocks."""
        self._auditor.left(request.id)

    def settle(self, done: Done) -> bool:
        """Finish an audit's load or save. False if it was neither."""
        if not self._auditor.settle(done):
            return False
        self._pool.release(self._saving.pop(done.ticket, ()))
        return True

    def poll(self) -> None:
        """Act on what was compared. May preempt all requests, if an audit has failed."""
        self._auditor.poll()

    def wait(self, timeout_seconds: float) -> None:
        self._auditor.wait(timeout_seconds)

    def reset(self) -> None:
        """Forget all audits. Afterwards no thread reads HOST."""
        self._auditor.reset()

    def _hold(self, begun: AuditSave | None) -> None:
        if begun is not None:
            self._pool.hold(begun.slots)
            self._saving[begun.ticket] = begun.slots


def _blocks(request: Request, indices: Sequence[int]) -> list[AuditBlock]:
    chain = request.chain
    return [AuditBlock(chain.keys[at], at, chain.key_before(at)) for at in indices]
