"""Whose turn it is: start-time fair queueing between tenants. Pure.

Each request takes a turn when it comes, and stands behind the work its tenant has asked for: one
that queues a hundred prompts stands a hundred prompts behind, while another's first stands in
front. A tenant that was away starts at the present: nobody saves up turns.

What was asked for and not done is given back. A request that is aborted while it waits, or that
ends long before its `max_tokens`, moves its tenant's later ones forward, though never before those
that have started.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class QueuePlace:
    """One request's place in the order: the lower stamp comes first."""

    tenant: str = ""
    work: float = 0.0  # asked for; once it has ended, done
    arrived: float = 0.0  # the present when it came: it never stands before that
    stamp: float = 0.0
    has_started: bool = False

    @property
    def end(self) -> float:
        """Where the tenant's next one stands."""
        return self.stamp + self.work


class FairQueue:
    def __init__(self) -> None:
        self._now = 0.0  # the stamp of the latest request to have started
        # By tenant, in the order in which they came: those that wait, and those that have started
        # and still count because their work lies ahead of the present.
        self._turns: dict[str, list[QueuePlace]] = {}
        self._stale: set[str] = set()  # tenants whose stamps are later than they need be

    def join(self, tenant: str, work: float) -> QueuePlace:
        """A new request's turn."""
        turns = self._turns.setdefault(tenant, [])
        stamp = max(self._now, turns[-1].end if turns else 0.0)
        turn = QueuePlace(tenant, work, self._now, stamp)
        turns.append(turn)
        return turn

    def started(self, turn: QueuePlace) -> None:
        """A request runs. Tenants that have caught up need not be remembered."""
        turn.has_started = True
        self._now = max(self._now, turn.stamp)
        for tenant in list(self._turns):
            self._forget_past(tenant)

    def ended(self, turn: QueuePlace, work_done: float) -> None:
        """A request has ended or was given up, whether it had started or not."""
        turns = self._turns.get(turn.tenant, [])
        if turn not in turns:
            return  # the present has passed it
        if turn.has_started:
            turn.work = min(turn.work, work_done)
        else:
            turns.remove(turn)
        self._stale.add(turn.tenant)
        self._forget_past(turn.tenant)

    def refresh(self) -> bool:
        """Move turns forward by the work that was given back. True: stamps have changed.

        With a single tenant there is nobody to overtake, and nothing is done.
        """
        if not self._stale or len(self._turns) < 2:
            return False
        has_changed = False
        for tenant in self._stale:
            end = 0.0
            for turn in self._turns[tenant]:
                stamp = min(turn.stamp, max(turn.arrived, end, self._now))
                has_changed |= stamp != turn.stamp
                turn.stamp = stamp
                end = turn.end
        self._stale.clear()
        return has_changed

    def _forget_past(self, tenant: str) -> None:
        turns = self._turns[tenant]
        while turns and turns[0].has_started and turns[0].end <= self._now:
            del turns[0]
        if not turns:
            del self._turns[tenant]
            self._stale.discard(tenant)
