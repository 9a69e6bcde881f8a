"""Start-time fair queueing between tenants. Pure.

Each request gets a place when it arrives, after all the work that its tenant has queued. A tenant
that queues a hundred prompts waits for them, while another tenant's first prompt goes ahead. A
tenant that was idle starts at the present: unused time is not saved up.

Work that was requested and not done is given back. If a request is aborted while it waits, or ends
long before its `max_tokens`, its tenant's later requests move forward, but never before requests
that have started.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class QueuePlace:
    """One request's place in the queue. The lowest stamp is first."""

    tenant: str = ""
    work: float = 0.0  # in tokens: requested, and once it has ended, done
    arrived: float = 0.0  # the queue's time when it arrived, and the lowest stamp it can get
    stamp: float = 0.0
    has_started: bool = False

    @property
    def end(self) -> float:
        """The stamp of the tenant's next request."""
        return self.stamp + self.work


class FairQueue:
    def __init__(self) -> None:
        self._now = 0.0  # the stamp of the latest request to have started
        # By tenant, in order of arrival: requests that wait, and requests that have started and
        # whose work extends beyond the present.
        self._places: dict[str, list[QueuePlace]] = {}
        self._stale: set[str] = set()  # tenants whose stamps can move forward

    def join(self, tenant: str, work: float) -> QueuePlace:
        """Give a new request its place."""
        places = self._places.setdefault(tenant, [])
        stamp = max(self._now, places[-1].end if places else 0.0)
        place = QueuePlace(tenant, work, self._now, stamp)
        places.append(place)
        return place

    def started(self, place: QueuePlace) -> None:
        """A request has started. Tenants without work beyond the present are forgotten."""
        place.has_started = True
        self._now = max(self._now, place.stamp)
        for tenant in list(self._places):
            self._forget_past(tenant)

    def ended(self, place: QueuePlace, work_done: float) -> None:
        """A request has ended or was aborted, whether it had started or not."""
        places = self._places.get(place.tenant, [])
        if place not in places:
            return  # already in the past
        if place.has_started:
            place.work = min(place.work, work_done)
        else:
            places.remove(place)
        self._stale.add(place.tenant)
        self._forget_past(place.tenant)

    def refresh(self) -> bool:
        """Move places forward by the work that was given back. True if stamps have changed.

        With a single tenant the order cannot change, so nothing is done.
        """
        if not self._stale or len(self._places) < 2:
            return False
        has_changed = False
        for tenant in self._stale:
            end = 0.0
            for place in self._places[tenant]:
                stamp = min(place.stamp, max(place.arrived, end, self._now))
                has_changed |= stamp != place.stamp
                place.stamp = stamp
                end = place.end
        self._stale.clear()
        return has_changed

    def _forget_past(self, tenant: str) -> None:
        places = self._places[tenant]
        while places and places[0].has_started and places[0].end <= self._now:
            del places[0]
        if not places:
            del self._places[tenant]
            self._stale.discard(tenant)
