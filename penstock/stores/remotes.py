"""Opens the remote store that a URL names. A client library is imported only if it is needed."""

from __future__ import annotations

import mmap
from importlib import import_module
from typing import Any, NamedTuple, cast

from penstock.config import RemoteConfig
from penstock.config.urls import check_url, without_password
from penstock.errors import ConfigError
from penstock.install import not_installed
from penstock.machine import num_cores
from penstock.stores.envelope import Envelope
from penstock.stores.packs import PackedStore
from penstock.stores.remote import Client, RemoteStore
from penstock.types import BlockSpec


class _Kind(NamedTuple):
    module: str
    client: str
    extra: str  # the package extra that installs the library
    library: str
    schemes: tuple[str, ...]


_KINDS = (
    _Kind(
        "penstock.stores.redis",
        "RedisClient",
        "redis",
        "redis",
        (
            *("redis", "rediss", "valkey", "valkeys", "unix"),
            *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
            *("valkey+sentinel", "valkeys+sentinel", "valkey+cluster", "valkeys+cluster"),
        ),
    ),
    _Kind("penstock.stores.s3", "ObjectClient", "s3", "obstore", ("s3", "gs", "az", "file")),
    _Kind("penstock.stores.mooncake", "MooncakeClient", "mooncake", "mooncake", ("mooncake",)),
    _Kind("penstock.stores.memory", "open_shared", "", "", ("memory",)),  # for tests
)
_MOONCAKE_BATCH_BYTES = 128 << 20
SCHEMES = tuple(scheme for kind in _KINDS for scheme in kind.schemes)


def headroom_bytes(url: str | None) -> int:
    """Bytes to leave free after each block in DRAM, for a store that keeps the head there."""
    return mmap.PAGESIZE if url is not None and _is_mooncake(url) else 0


def batch_bytes(url: str) -> int | None:
    """The batch size with which a store is fastest; None for the default."""
    # Mooncake's library moves the parts of a batch in parallel, and starts slowly.
    return _MOONCAKE_BATCH_BYTES if _is_mooncake(url) else None


def threads_for(remote: RemoteConfig) -> int:
    """Threads for the remote tier. Clients mostly copy, so more threads than cores do not help."""
    num = min(4, num_cores())
    if remote.url is not None and _is_mooncake(remote.url):
        num = max(1, num // 2)  # its library has as many threads again
    return remote.threads or num


def _is_mooncake(url: str) -> bool:
    return url.lower().startswith("mooncake://")


def check_scheme(url: str) -> _Kind:
    """Raise ConfigError if the URL's scheme is unknown. Imports no client library."""
    check_url(url)
    scheme = url.partition("://")[0].lower()
    for kind in _KINDS:
        if scheme in kind.schemes:
            return kind
    raise ConfigError(
        f"remote.url is {without_password(url)!r}: expected one that begins with "
        f"{', '.join(f'{known}://' for known in SCHEMES)}."
    )


def open_client(url: str, timeout_seconds: float) -> Client:
    """Open a client, without connecting. Raises ConfigError if the URL is invalid."""
    kind = check_scheme(url)
    try:
        module = import_module(kind.module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != kind.library:
            raise
        raise not_installed([kind.library], kind.extra, "this remote.url") from None
    client: Client = getattr(module, kind.client)(url, timeout_seconds=timeout_seconds)
    return client


def open_remote(config: RemoteConfig, spec: BlockSpec, *, secret: bytes) -> RemoteStore:
    """Open the store that `config` names. Raises ConfigError, but not if the server is down."""
    assert config.url is not None
    envelope = Envelope(spec, secret=secret, encrypt=config.encrypt, ttl_seconds=config.ttl_seconds)
    client = open_client(config.url, config.timeout_seconds)
    make = PackedStore if hasattr(client, "put_packs") else RemoteStore
    return make(
        cast(Any, client),
        spec,
        envelope,
        ttl_seconds=config.ttl_seconds,
        read_only=config.read_only,
    )
