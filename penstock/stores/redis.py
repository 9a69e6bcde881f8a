"""Redis and Valkey: a single server, with TLS, behind Sentinel, or a cluster.

    redis://user:password@host:6379/0      rediss:// with TLS; valkey:// and valkeys:// likewise
    unix:///run/redis.sock?db=0
    redis+sentinel://host:26379,host:26379/service/0?sentinel_password=...
    redis+cluster://host:6379,host:6379    rediss+cluster:// with TLS

redis-py makes the connections: logins, TLS, finding the master, and which node has which slot.
This file then sends and receives values on its sockets, because redis-py's own reader assembles
each value from pieces. Here the bytes go straight from the socket into the HOST slot.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from redis import Redis
from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.exceptions import RedisError

from penstock.errors import Full, Missing, StoreError
from penstock.stores.base import Answers
from penstock.stores.redis_urls import connector
from penstock.stores.remote import Client, Item, Listed, absent, wrong_size

_BUFFER_BYTES = 64 << 10
_MAX_LINE_BYTES = 64 << 10
_NAMES_AT_ONCE = 1024
_FULL = ("OOM", "MISCONF")  # no memory; Redis cannot write its disk
_MOVED = ("MOVED", "ASK", "CLUSTERDOWN", "READONLY")

# What may be raised if a connection breaks or cannot be made.
_BROKEN = (OSError, RedisError, EOFError, ValueError)


class RedisClient(Client):
    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Does not connect yet. Raises ConfigError if the URL is invalid."""
        self._timeout_seconds = timeout_seconds
        self._opening = threading.Lock()
        self._redis: Redis | RedisCluster | None = None
        self._connect = connector(url, timeout_seconds)

    def put(self, items: Sequence[Item], ttl_seconds: float | None) -> Answers:
        return self._each_node(items, lambda wire, part: _put(wire, part, ttl_seconds))

    def get(self, items: Sequence[Item]) -> Answers:
        return self._each_node(items, _get)

    def exists(self, names: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        empty = memoryview(b"")
        for start in range(0, len(names), _NAMES_AT_ONCE):
            items = [Item(name, empty, empty) for name in names[start : start + _NAMES_AT_ONCE]]
            for answer in self._each_node(items, _exists):
                if answer is not None and not isinstance(answer, Missing):
                    raise answer
                found.append(answer is None)
        return found

    def remove(self, names: Sequence[str]) -> None:
        empty = memoryview(b"")
        for answer in self._each_node([Item(name, empty, empty) for name in names], _remove):
            if answer is not None:
                raise answer

    def find(self, prefix: str) -> Iterator[list[Listed]]:
        try:
            opened: Any = self._open()
            page: list[bytes] = []
            for name in opened.scan_iter(match=_escape_pattern(prefix) + "*", count=_NAMES_AT_ONCE):
                page.append(name)
                if len(page) == _NAMES_AT_ONCE:
                    yield self._sizes(page)
                    page = []
            yield self._sizes(page)
        except _BROKEN as error:
            raise StoreError(_describe(error)) from None

    def close(self) -> None:
        with self._opening:
            opened, self._redis = self._redis, None
        if opened is not None:
            with suppress(*_BROKEN):
                opened.close()

    def _sizes(self, names: Sequence[bytes]) -> list[Listed]:
        opened: Any = self._open()
        pipeline = opened.pipeline(transaction=False)
        for name in names:
            pipeline.strlen(name)
        return [Listed(n.decode(), size) for n, size in zip(names, pipeline.execute(), strict=True)]

    def _open(self) -> Redis | RedisCluster:
        with self._opening:
            if self._redis is None:
                self._redis = self._connect()
            return self._redis

    def _each_node(
        self, items: Sequence[Item], run: Callable[[_Wire, Sequence[Item]], Answers]
    ) -> Answers:
        """Run a batch on the nodes that have its values. Returns errors block by block."""
        if not items:
            return []
        deadline = time.monotonic() + self._timeout_seconds
        answers: Answers = [None] * len(items)
        try:
            parts = self._by_pool([item.name for item in items])
        except _BROKEN as error:
            return [StoreError(_describe(error))] * len(items)
        for pool, positions in parts:
            part = [items[position] for position in positions]
            try:
                part_answers = _on_connection(pool, part, run, deadline)
            except _BROKEN as error:
                part_answers = [StoreError(_describe(error))] * len(part)
            for position, answer in zip(positions, part_answers, strict=True):
                answers[position] = answer
            if any(_is_moved(answer) for answer in part_answers):
                self.close()  # the next batch asks again which node has what
        return answers

    def _by_pool(self, names: Sequence[str]) -> list[tuple[ConnectionPool, list[int]]]:
        opened = self._open()
        if not isinstance(opened, RedisCluster):
            return [(opened.connection_pool, list(range(len(names))))]
        cluster: Any = opened
        parts: dict[str, tuple[ConnectionPool, list[int]]] = {}
        for position, name in enumerate(names):
            node = cluster.get_node_from_key(name)
            if node is None:
                raise OSError("no node of the cluster serves this name")
            pool = cluster.get_redis_connection(node).connection_pool
            parts.setdefault(node.name, (pool, []))[1].append(position)
        return list(parts.values())


class _Wire:
    """The socket of one connection, for one batch. Closed unless all replies are read."""

    def __init__(self, connection: Any, deadline: float) -> None:
        self._connection = connection
        if connection._sock is None:
            raise ConnectionResetError("the connection was closed before it was used")
        self._socket: socket.socket = connection._sock
        self._deadline = deadline
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # received but not used yet
        self.received = False

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send parts: small neighbors joined in one call, large ones without a copy."""
        small = bytearray()
        for part in parts:
            if len(part) <= _BUFFER_BYTES // 4:
                small += part
                continue
            if small:
                self._send(small)
                small = bytearray()
            self._send(part)
        if small:
            self._send(small)

    def line(self) -> bytes:
        """Read up to the end of the line."""
        line = b""
        while True:
            held = bytes(self._buffer[self._start : self._end])
            end = held.find(b"\n")
            if end >= 0:
                self._start += end + 1
                return (line + held[:end]).removesuffix(b"\r")
            line += held
            if len(line) > _MAX_LINE_BYTES:
                raise OSError("the server does not speak the Redis protocol")
            self._start = 0
            self._end = self._receive(self._buffer)

    def fill(self, target: memoryview) -> None:
        """Fill `target` from the buffer, and then directly from the socket."""
        num_held = min(self._end - self._start, len(target))
        target[:num_held] = self._buffer[self._start : self._start + num_held]
        self._start += num_held
        target = target[num_held:]
        while target:
            target = target[self._receive(target) :]

    def skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, 1 << 20)))
        while num_bytes:
            part = scratch[:num_bytes]
            self.fill(part)
            num_bytes -= len(part)

    def _send(self, data: bytes | bytearray | memoryview) -> None:
        self._set_timeout()
        self._socket.sendall(data)

    def _receive(self, into: memoryview) -> int:
        self._set_timeout()
        num_bytes = self._socket.recv_into(into)
        if num_bytes == 0:
            raise ConnectionResetError("the server closed the connection")
        self.received = True
        return num_bytes

    def _set_timeout(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server did not answer in time")
        self._socket.settimeout(left)


def _on_connection(
    pool: ConnectionPool,
    items: Sequence[Item],
    run: Callable[[_Wire, Sequence[Item]], Answers],
    deadline: float,
) -> Answers:
    """Run a batch on a pooled connection, and again on a new one if that was already dead."""
    for fresh in (False, True):
        connection: Any = pool.get_connection()
        wire = None
        try:
            wire = _Wire(connection, deadline)
            answers = run(wire, items)
        except ConnectionError:  # reset or closed, for example because the server was restarted
            connection.disconnect()
            if fresh or (wire is not None and wire.received):
                raise
            with suppress(*_BROKEN):
                pool.disconnect(inuse_connections=False)
        except BaseException:
            connection.disconnect()  # replies that were not read may still arrive
            raise
        else:
            return answers
        finally:
            pool.release(connection)
    raise AssertionError("unreachable")


def _put(wire: _Wire, items: Sequence[Item], ttl_seconds: float | None) -> Answers:
    parts: list[bytes | memoryview] = []
    expiry = b""
    if ttl_seconds is not None:
        expiry = _argument(b"EX") + _argument(b"%d" % max(1, int(ttl_seconds)))
    for item in items:
        parts.append(b"*%d\r\n" % (5 if expiry else 3) + _argument(b"SET"))
        parts.append(_argument(item.name.encode()) + b"$%d\r\n" % item.num_bytes)
        parts += [item.head, item.body, b"\r\n" + expiry]
    wire.send(parts)
    return [_expect(wire.line(), b"+OK") for _ in items]


def _get(wire: _Wire, items: Sequence[Item]) -> Answers:
    wire.send([_command(b"GET", item.name) for item in items])
    return [_get_one(wire, item) for item in items]


def _get_one(wire: _Wire, item: Item) -> StoreError | None:
    line = wire.line()
    if line in (b"$-1", b"_"):
        return absent()
    if line[:1] != b"$":
        return _expect(line, b"$")
    num_bytes = int(line[1:])
    if num_bytes != item.num_bytes:
        wire.skip(num_bytes + 2)
        return wrong_size(num_bytes, item.num_bytes)
    wire.fill(item.head)
    wire.fill(item.body)
    wire.skip(2)
    return None


def _exists(wire: _Wire, items: Sequence[Item]) -> Answers:
    wire.send([_command(b"EXISTS", item.name) for item in items])
    lines = [wire.line() for _ in items]
    return [absent() if line == b":0" else _expect(line, b":1") for line in lines]


def _remove(wire: _Wire, items: Sequence[Item]) -> Answers:
    wire.send([_command(b"UNLINK", item.name) for item in items])
    return [_expect(wire.line(), b":") for _ in items]


def _expect(line: bytes, wanted: bytes) -> StoreError | None:
    if line.startswith(wanted):
        return None
    if line[:1] != b"-":
        raise OSError("the server does not speak the Redis protocol")
    words = line[1:].decode(errors="replace")[:200]
    return Full(words) if words.startswith(_FULL) else StoreError(words)


def _is_moved(answer: StoreError | None) -> bool:
    return answer is not None and str(answer).startswith(_MOVED)


def _argument(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _command(verb: bytes, name: str) -> bytes:
    return b"*2\r\n" + _argument(verb) + _argument(name.encode())


def _escape_pattern(prefix: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in prefix)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
