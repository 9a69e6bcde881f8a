"""Whose cache a request may find. Two tenants never share a block, and so learn nothing of each
other from what is cached and what is not.

A tenant is named by the header X-Penstock-Tenant, which a gateway can set for all its clients, or,
where the operator says so, by the field `user`. The same name from two places is two tenants, so
that no client takes the place of one that a gateway has named. `cache_salt` divides a tenant
further. `prompt_cache_key` names no tenant: it is there to find more, not less.
"""

from __future__ import annotations

from enum import StrEnum

from starlette.requests import Request

from penstock.server.errors import ApiError
from penstock.server.schema import TenantFields

HEADER = "X-Penstock-Tenant"
MAX_CHARS = 256


class TenantSource(StrEnum):
    """What may name a tenant."""

    HEADER = "header"
    USER = "user"  # the header, or else the field `user`


def tenant_of(
    request: Request, body: TenantFields, source: TenantSource = TenantSource.HEADER
) -> str:
    """The salt of the request's keys; "" is the tenant of all who give no name."""
    names = set(request.headers.getlist(HEADER))
    if len(names) > 1:  # a client's own beside a gateway's: nobody can tell which is which
        raise ApiError(
            400,
            f"{HEADER} is given {len(names)} times with different names: expected one; have the "
            "gateway replace what clients send, and not add to it.",
            param=HEADER,
        )
    tenant = _name(HEADER, next(iter(names), None))
    if not tenant and source is TenantSource.USER:
        tenant = _name("user", body.user)
    if body.cache_salt is None:
        return tenant
    # The length keeps a name that ends like a salt apart from one that has it.
    return f"{len(tenant)}:{tenant} cache_salt:{body.cache_salt}"


def _name(source: str, name: str | None) -> str:
    if not name:
        return ""
    if len(name) > MAX_CHARS:
        raise ApiError(
            400,
            f"{source} has {len(name)} characters: expected at most {MAX_CHARS}; shorten it.",
            param=source,
        )
    return f"{source}:{name}"
