"""Parses the URL of a Redis: its address, the login, and whether it is one server or many."""

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
from redis.exceptions import RedisError
from redis.retry import Retry

from penstock.errors import ConfigError

# These have no type annotations.
_Sentinel: Any = redis.sentinel.Sentinel
_ClusterNode: Any = redis.cluster.ClusterNode


def connector(url: str, timeout_seconds: float) -> Callable[[], Redis | RedisCluster]:
    # No retries or backoff: redis-py must not wait longer than the timeout. RESP2 replies only.
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
        pool.connection_class(**pool.connection_kwargs)  # checks the options without connecting
    except (ValueError, TypeError, RedisError):
        raise _unreadable("redis://host:6379/0") from None
    return lambda: Redis.from_pool(pool)


def _unreadable(expected: str) -> ConfigError:
    # Without the library's message, which may contain a part of the password.
    return ConfigError(
        f"the remote URL cannot be read: expected {expected}, ports from 1 to 65535, and after "
        'the "?" only options of redis-py'
    )


def _check_options(login: dict[str, Any]) -> None:
    try:
        Redis(**login)  # does not connect
    except (ValueError, TypeError, RedisError):
        raise _unreadable("host:port,host:port and valid options") from None


def _sentinel(scheme: str, rest: str, options: dict[str, Any]) -> Callable[[], Redis]:
    login, hosts, path = _parts(rest)
    service, _, number = path.partition("/")
    if not service or not (number or "0").isdigit():
        raise ConfigError(
            "the remote URL has no service name: expected redis+sentinel://host:26379/mymaster/0"
        )
    is_tls = scheme.startswith("rediss")
    guards: dict[str, Any] = {"socket_timeout": options["socket_timeout"], "ssl": is_tls}
    guards |= {name: value for name, value in login.items() if name.startswith("ssl_")}
    for name in ("username", "password"):  # of the Sentinels themselves
        if f"sentinel_{name}" in login:
            guards[name] = login.pop(f"sentinel_{name}")
    login = {**login, "db": int(number or 0), "ssl": is_tls}
    _check_options(login)
    _check_options(guards)

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
    _check_options(login)
    options = {name: value for name, value in options.items() if name != "retry"}

    def connect() -> RedisCluster:
        nodes = [_ClusterNode(host, port or 6379) for host, port in hosts]
        return RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 0), **login, **options)

    return connect


def _parts(rest: str) -> tuple[dict[str, Any], list[tuple[str, int | None]], str]:
    """Login and options, hosts and path of a URL with several hosts."""
    rest, _, query = rest.partition("?")
    netloc, _, path = rest.partition("/")
    who, _, where = netloc.rpartition("@")
    name, _, password = who.partition(":")
    login: dict[str, Any] = {}
    if who:
        login = {"username": unquote(name) or None, "password": unquote(password) or None}
    login |= {key: values[-1] for key, values in parse_qs(query).items()}
    try:
        places = [urlsplit(f"//{place}") for place in where.split(",")]
        hosts = [(place.hostname or "", place.port) for place in places]
    except ValueError:
        raise _unreadable("host:port,host:port") from None
    if not all(host for host, _ in hosts):
        raise ConfigError("the remote URL has no host: expected host:port,host:port")
    return login, hosts, path
