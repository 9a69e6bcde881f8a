"""Which requests are audited, and the keys of their computed blocks meanwhile. Pure."""

from __future__ import annotations

from blake3 import blake3

from penstock.types import BlockKey

_DOMAIN = b"penstock audit 1"
_BITS = 53


class AuditSample:
    """Draws a share of requests. With the same salt, the same requests are drawn."""

    def __init__(self, share: float, salt: bytes) -> None:
        self._threshold = share * (1 << _BITS)
        self._salt = salt
        self._count = 0

    def draws(self, first_key: BlockKey) -> bool:
        """Whether to audit the next request. A popular prompt is drawn sometimes, not always."""
        self._count += 1
        digest = blake3(self._salt + self._count.to_bytes(8, "little") + first_key).digest()
        number: int = int.from_bytes(digest[:8], "little") >> (64 - _BITS)
        return number < self._threshold


def audit_key(key: BlockKey, number: int) -> BlockKey:
    """The key of a copy of a block for one audit.

    It includes the audit's number, so that what an earlier audit left behind is never compared.
    """
    return BlockKey(blake3(_DOMAIN + number.to_bytes(8, "little") + key).digest())


def spread(num_blocks: int, num_wanted: int) -> list[int]:
    """Up to `num_wanted` of `num_blocks` positions: the first, the last, and evenly between."""
    if num_wanted >= num_blocks:
        return list(range(num_blocks))
    if num_wanted <= 1:
        return [num_blocks - 1] if num_wanted else []
    step = (num_blocks - 1) / (num_wanted - 1)
    return [round(number * step) for number in range(num_wanted)]
