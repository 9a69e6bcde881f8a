"""Which tenant a request belongs to. Tenants never share blocks, so they cannot learn about each
other from what is cached.

A tenant is named by the header X-Penstock-Tenant, which a gateway can set for its clients, or, if
the operator allows it, by the field `user`. The same name from the two sources means two tenants,
so that a client cannot impersonate a tenant of the gateway. `cache_salt` divides a tenant further.
`prompt_cache_key` does not name a tenant: it is meant to find more, not less.
"""

from __future__ import annotations

from enum import StrEnum

from starlette.requests import Request

from penstock.kv_events.salts import with_salt
from penstock.server.errors import ApiError
from penstock.server.schema import TenantFields

HEADER = "X-Penstock-Tenant"
MAX_CHARS = 256


class TenantSource(StrEnum):
    """What names the tenant."""

    HEADER = "header"
    USER = "user"  # the header, or else the field `user`


def tenant_of(
    request: Request, body: TenantFields, source: TenantSource = TenantSource.HEADER
) -> str:
    """The salt of the request's keys; "" for all requests without a tenant."""
    names = set(request.headers.getlist(HEADER))
    if len(names) > 1:  # one may be the client's, one the gateway's
        raise ApiError(
            400,
            f"{HEADER} is given {len(names)} times with different names: expected one; make the "
            "gateway replace the header of clients instead of adding its own.",
            param=HEADER,
        )
    tenant = _name(HEADER, next(iter(names), None))
    if not tenant and source is TenantSource.USER:
        tenant = _name("user", body.user)
    if body.cache_salt is None:
        return tenant
    return with_salt(tenant, body.cache_salt)


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
