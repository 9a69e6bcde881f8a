"""Real servers on loopback, for tests and benchmarks. Each keeps its port through a restart."""

from __future__ import annotations

import os


def is_skipped(why_not: str | None) -> bool:
    """Whether tests of a server that cannot be had are passed over; the gate allows none."""
    return why_not is not None and not os.environ.get("REQUIRE_SERVERS")
