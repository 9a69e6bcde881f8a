"""Health: when to stop using a failing tier, and for how long. Pure: time is an argument."""

from __future__ import annotations

MAX_FAULTS = 4
MIN_REST_SECONDS = 1.0
MAX_REST_SECONDS = 60.0


class Health:
    """Rests a tier after several faults in a row. A fault right after a rest doubles the next rest.

    A rest ends by time alone, so that every tier is tried again.
    """

    def __init__(self) -> None:
        self._num_faults = 0
        self._rest_seconds = MIN_REST_SECONDS
        self._rests_until: float | None = None
        self._in_trouble = False  # from a first rest until the next success

    @property
    def resting(self) -> bool:
        return self._rests_until is not None

    def fault(self, now: float) -> float:
        """Count a fault. Returns the length of the rest it starts in seconds, or 0."""
        self._num_faults += 1
        if self.resting or self._num_faults < MAX_FAULTS:
            return 0.0
        self._in_trouble = True
        rest = self._rest_seconds
        self._rests_until = now + rest
        self._rest_seconds = min(2 * rest, MAX_REST_SECONDS)
        return rest

    def well(self) -> bool:
        """Count a success. Returns whether the tier had been resting since its last success."""
        was_in_trouble, self._in_trouble = self._in_trouble, False
        self._num_faults = 0
        self._rest_seconds = MIN_REST_SECONDS
        self._rests_until = None
        return was_in_trouble

    def tick(self, now: float) -> None:
        """End a rest whose time is up. The next fault starts a longer one."""
        if self._rests_until is not None and now >= self._rests_until:
            self._rests_until = None
            self._num_faults = MAX_FAULTS - 1
