"""WriteGate: limits what is written to a lower tier, by use, per day and per tenant. Pure.

Flash wears out, and shared stores have other users, so operators can bound the writes. Without a
bound every block is accepted.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from penstock.types import BlockKey

DAY_SECONDS = 86_400.0

_MIN_TENANTS = 1024
_MAX_SEEN_ONCE = 1 << 17  # blocks remembered from their first use, about 20 MB


class ByteWindow:
    """Counts the bytes of the last `seconds`, with a resolution of 1/24."""

    _NUM_PARTS = 24

    def __init__(self, seconds: float) -> None:
        self._part_seconds = seconds / self._NUM_PARTS
        self._parts: deque[tuple[int, int]] = deque()  # number of the part, bytes
        self._num_bytes = 0

    def add(self, num_bytes: int, now: float) -> None:
        part = int(now // self._part_seconds)
        if self._parts and self._parts[-1][0] == part:
            _, already = self._parts.pop()
            self._parts.append((part, already + num_bytes))
        else:
            self._parts.append((part, num_bytes))
        self._num_bytes += num_bytes

    def total(self, now: float) -> int:
        oldest = int(now // self._part_seconds) - self._NUM_PARTS
        while self._parts and self._parts[0][0] < oldest:
            self._num_bytes -= self._parts.popleft()[1]
        return self._num_bytes


class WriteGate:
    """The gate of one tier. A refused block is offered again at its next use."""

    def __init__(
        self,
        block_bytes: int,
        *,
        from_second_use: bool = False,
        max_bytes_per_day: int | None = None,
        max_bytes_per_tenant: int | None = None,
        tenant_seconds: float = DAY_SECONDS,
    ) -> None:
        """A tenant's bytes count for `tenant_seconds`, as long as the store keeps them."""
        self._block_bytes = block_bytes
        self.from_second_use = from_second_use
        self._seen_once: OrderedDict[BlockKey, None] = OrderedDict()
        self._max_bytes_per_day = max_bytes_per_day
        self._day = ByteWindow(DAY_SECONDS)
        self._max_bytes_per_tenant = max_bytes_per_tenant
        self._tenant_seconds = tenant_seconds
        self._tenants: dict[str, ByteWindow] = {}
        self._prune_at = _MIN_TENANTS

    def is_worth_it(self, key: BlockKey) -> bool:
        """Count a use of a block that the tier lacks. Returns whether to write it now."""
        if not self.from_second_use:
            return True
        if key in self._seen_once:
            del self._seen_once[key]
            return True
        self._seen_once[key] = None
        if len(self._seen_once) > _MAX_SEEN_ONCE:
            self._seen_once.popitem(last=False)
        return False

    def refusal(self, tenant: str, now: float) -> str:
        """Why one more block may not be written now; empty if it may."""
        most = self._max_bytes_per_day
        if most is not None and self._day.total(now) + self._block_bytes > most:
            return "the day's write budget is spent"
        most = self._max_bytes_per_tenant
        if most is not None and self._of(tenant, now).total(now) + self._block_bytes > most:
            return "the tenant's budget is spent"
        return ""

    def charge(self, tenant: str, now: float) -> None:
        """Count a block that is about to be written, even if the write fails later."""
        if self._max_bytes_per_day is not None:
            self._day.add(self._block_bytes, now)
        if self._max_bytes_per_tenant is not None:
            self._of(tenant, now).add(self._block_bytes, now)

    def _of(self, tenant: str, now: float) -> ByteWindow:
        if tenant not in self._tenants:
            if len(self._tenants) >= self._prune_at:  # forget tenants without recent writes
                self._tenants = {n: w for n, w in self._tenants.items() if w.total(now)}
                self._prune_at = 2 * len(self._tenants) + _MIN_TENANTS
            self._tenants[tenant] = ByteWindow(self._tenant_seconds)
        return self._tenants[tenant]
