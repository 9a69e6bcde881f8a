"""What separates the blocks of one tenant from another's: in keys, and as routers are told."""

from __future__ import annotations

_MARK = " cache_salt:"


def with_salt(tenant: str, cache_salt: str) -> str:
    """Divide a tenant further. The length distinguishes a name that ends like a salt."""
    return f"{len(tenant)}:{tenant}{_MARK}{cache_salt}"


def published_salt(tenant: str) -> str:
    """The salt that routers are told: a request's `cache_salt`, if nothing else names its tenant.

    A router knows the field `cache_salt` of a request, as it does with vLLM.
    """
    return tenant.removeprefix(f"0:{_MARK}")
