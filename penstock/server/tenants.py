"""Whose cache a request may find. Two tenants never share a block, and so learn nothing of each
other from what is cached and what is not.

The first of these that is given names the tenant: the header X-Penstock-Tenant, which a gateway
can set for all its clients, the field prompt_cache_key, the field user. The same name from two
places is two tenants, so that no client takes the place of one that a gateway has named.
"""

from __future__ import annotations

from starlette.requests import Request

from penstock.server.errors import ApiError
from penstock.server.schema import TenantFields

HEADER = "X-Penstock-Tenant"
MAX_CHARS = 256


def tenant_of(request: Request, body: TenantFields) -> str:
    """The salt of the request's keys; "" is the tenant of all who give no name."""
    for source, name in (
        (HEADER, request.headers.get(HEADER)),
        ("prompt_cache_key", body.prompt_cache_key),
        ("user", body.user),
    ):
        if not name:
            continue
        if len(name) > MAX_CHARS:
            raise ApiError(
                400,
                f"{source} has {len(name)} characters: expected at most {MAX_CHARS}; shorten it.",
                param=source,
            )
        return f"{source}:{name}"
    return ""
