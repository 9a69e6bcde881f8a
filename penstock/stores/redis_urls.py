"""What a URL says of a Redis: where it is, who we are, and whether it is one server or many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis.cluster
import redis.sentinel
from redis import Redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.retry import Retry

from penstock.errors import ConfigError

# These carry no types.
_Sentinel: Any = redis.sentinel.Sentinel
_ClusterNode: Any = redis.cluster.ClusterNode


def connector(url: str, timeout_seconds: float) -> Callable[[], Redis | RedisCluster]:
    # Nothing here may wait on its own account, or come back with more than it was asked for.
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "client_name": "penstock",
    }
    scheme, _, rest = url.partition("://")
    scheme = scheme.replace("valkey", "redis")
    kind = scheme.partition("+")[2]
    if kind == "sentinel":
        return _sentinel(scheme, rest, options)
    if kind == "cluster":
        return _cluster(scheme, rest, options)
    try:
        pool = ConnectionPool.from_url(f"{scheme}://{rest}", **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the remote URL cannot be read ({error}): expected redis://host:6379/0"
        ) from None
    return lambda: Redis.from_pool(pool)


def _sentinel(scheme: str, rest: str, options: dict[str, Any]) -> Callable[[], Redis]:
    login, hosts, path = _parts(rest)
    service, _, number = path.partition("/")
    if not service or not (number or "0").isdigit():
        raise ConfigError(
            "the remote URL names no service: expected redis+sentinel://host:26379/mymaster/0"
        )
    is_tls = scheme.startswith("rediss")
    guards: dict[str, Any] = {"socket_timeout": options["socket_timeout"], "ssl": is_tls}
    guards |= {name: value for name, value in login.items() if name.startswith("ssl_")}
    for name in ("username", "password"):  # the Sentinels' own
        if f"sentinel_{name}" in login:
            guards[name] = login.pop(f"sentinel_{name}")
    login = {**login, "db": int(number or 0), "ssl": is_tls}

    def connect() -> Redis:
        places = [(host, port or 26379) for host, port in hosts]
        master: Redis = _Sentinel(places, sentinel_kwargs=guards, **options).master_for(
            service, **login
        )
        return master

    return connect


def _cluster(scheme: str, rest: str, options: dict[str, Any]) -> Callable[[], RedisCluster]:
    login, hosts, _ = _parts(rest)
    if scheme.startswith("rediss"):
        login = {**login, "ssl": True}
    options = {name: value for name, value in options.items() if name != "retry"}

    def connect() -> RedisCluster:
        nodes = [_ClusterNode(host, port or 6379) for host, port in hosts]
        return RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 0), **login, **options)

    return connect


def _parts(rest: str) -> tuple[dict[str, Any], list[tuple[str, int | None]], str]:
    """Who, where and what of a URL with several hosts."""
    netloc, _, path = rest.partition("/")
    who, _, where = netloc.rpartition("@")
    name, _, password = who.partition(":")
    login: dict[str, Any] = {}
    if who:
        login = {"username": unquote(name) or None, "password": unquote(password) or None}
    path, _, query = path.partition("?")
    login |= {key: values[-1] for key, values in parse_qs(query).items()}
    try:
        places = [urlsplit(f"//{place}") for place in where.split(",")]
        hosts = [(place.hostname or "", place.port) for place in places]
    except ValueError as error:
        raise ConfigError(
            f"the remote URL cannot be read ({error}): expected host:port,host:port"
        ) from None
    if not all(host for host, _ in hosts):
        raise ConfigError("the remote URL names no host: expected host:port,host:port")
    return login, hosts, path
