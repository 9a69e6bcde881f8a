"""Whose turn it is: start-time fair queueing between tenants. Pure.

Each request is stamped when it comes. A tenant's stamps advance by the work it asks for, so one
that queues a hundred prompts stands a hundred prompts behind, while another's first stands in
front. A tenant that was away starts at the present: nobody saves up turns.
"""

from __future__ import annotations


class FairQueue:
    def __init__(self) -> None:
        self._now = 0.0  # the stamp of the latest request to have started
        self._ends: dict[str, float] = {}

    def stamp(self, tenant: str, work: float) -> float:
        """A new request's place in the order: lower comes first."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + work
        return start

    def started(self, stamp: float) -> None:
        """A request of this stamp runs. Tenants that have caught up need not be remembered."""
        if stamp > self._now:
            self._now = stamp
            self._ends = {name: end for name, end in self._ends.items() if end > stamp}
