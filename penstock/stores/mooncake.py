"""Mooncake Store: a pool of memory lent by the instances of a fleet, coordinated by a master.

mooncake://master:50051
mooncake://master:50051?segment=64GiB&protocol=rdma&devices=mlx5_0,mlx5_1

segment   memory that this instance lends to the pool. The default, 0, only uses the memory of
          other instances; if no instance lends memory, every put fails with Full
host      the address at which other instances reach this one; by default the local address of
          the connection to the master
protocol  tcp (the default) or rdma
devices   the network cards for rdma, separated by commas; by default the library chooses
metadata  P2PHANDSHAKE (the default), which needs no server, or the URL of a metadata server
metrics   the port of the master's HTTP server, which lists all names; 9003 by default
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from penstock.errors import ConfigError, Full, StoreError
from penstock.stores.base import Answers, Arena
from penstock.stores.mooncake_library import (
    MIN_SEGMENT_BYTES,
    NO_SERVER,
    load_library,
    read_url,
    set_bounds,
)
from penstock.stores.mooncake_memory import Cargo, RegisteredMemory
from penstock.stores.remote import Client, Item, Listed, absent, wrong_size
from penstock.units import parse_bytes

_NAMES_AT_ONCE = 1024
_RETRY_SECONDS = 1.0
_LIBRARY_BUFFER_BYTES = 16 << 20  # for values that it reads from its own disks
# The library's error codes.
_MISSING = (-704, -703, -710, -712)  # not found; put is not finished; no replica is left
_FULL = (-101, -200, -1602, -1700)  # no memory was lent; no room; over a quota
_UNREACHABLE = (-900, -901)

_left_open: list[Any] = []  # see `close`


class MooncakeClient(Client):
    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Does not connect yet. Raises ConfigError if the URL is invalid."""
        self._master, self._options = read_url(url)
        self._segment_bytes = parse_bytes(self._options["segment"])
        if 0 < self._segment_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError(
                f"segment={self._options['segment']} in the remote URL is too small: expected 0, "
                "or at least 16MiB"
            )
        self._timeout_seconds = timeout_seconds
        self._new_store = load_library()
        self._store: Any = None
        self._memory = RegisteredMemory(self._register)
        self._known_peers: set[str] = set()  # peers that have answered once
        self._is_connected = False  # to the master, as far as is known
        self._last_error = ""
        self._not_before = 0.0
        self._connecting = threading.Lock()
        self._lock = threading.Condition()  # guards the two below
        self._num_calls = 0
        self._closed = False

    def put(self, items: Sequence[Item], ttl_seconds: float | None) -> Answers:
        # Mooncake takes no time to live: the head has it, and the pool evicts old values.
        return self._answers(items, self._put)

    def get(self, items: Sequence[Item]) -> Answers:
        return self._answers(items, self._get)

    def exists(self, names: Sequence[str]) -> list[bool]:
        codes = [code for page in _pages(names) for code in self._ask("batch_is_exist", page)]
        for code in codes:
            if code < 0:
                raise self._fault(code)
        return [code == 1 for code in codes]

    def remove(self, names: Sequence[str]) -> None:
        for page in _pages(names):
            # Forced, although others may hold a lease: readers verify what they have read.
            for code in self._ask("batch_remove", page, True):
                if code < 0 and code not in _MISSING:
                    raise self._fault(code)

    def find(self, prefix: str) -> Iterator[list[Listed]]:
        for page in _pages([name for name in self._names() if name.startswith(prefix)]):
            held = self._ask("batch_get_replica_desc", page)
            sizes = {name: _size_and_peers(replicas)[0] for name, replicas in held.items()}
            yield [Listed(name, size) for name, size in sizes.items() if size is not None]

    def register(self, arena: Arena) -> None:
        with self._connecting:
            self._memory.add(arena)
            if self._store is not None:
                self._memory.register_arenas()

    def close(self) -> None:
        with self._connecting:
            with self._lock:
                self._closed = True
                idle = self._lock.wait_for(lambda: not self._num_calls, self._timeout_seconds)
                store, self._store, self._is_connected = self._store, None, False
            if store is None:
                return
            # Closing crashes the library if a call is running, and holds the GIL while it talks
            # to the master. If a call is running or the master is down, the library stays open
            # until the process exits; until then its memory stays lent and registered.
            try:
                self._probe(self._master)
            except OSError:
                idle = False
            if idle:
                store.close()
            else:
                _left_open.append((store, self._memory.buffers))

    def _put(self, store: Any, items: Sequence[Item]) -> Answers:
        names = [item.name for item in items]
        cargo = Cargo(items, self._memory.address, self._memory.take_buffer)
        cargo.load()

        def replace() -> Any:
            store.batch_remove(names, True)  # a put does not replace an older value
            return store.batch_put_from_multi_buffers(names, cargo.addresses, cargo.sizes)

        # After a timeout it may still read a slot that then holds another block: the checksum
        # in the head will not match.
        outcome = self._begin(replace)
        outcome.add_done_callback(lambda _: self._memory.give_back(cargo.buffer))
        return [None if code == 0 else self._fault(code) for code in self._await(outcome)]

    def _get(self, store: Any, items: Sequence[Item]) -> Answers:
        answers = self._look_up(store, items)
        wanted = [place for place, answer in enumerate(answers) if answer is None]
        if not wanted:
            return answers
        names = [items[place].name for place in wanted]
        parts = [items[place] for place in wanted]
        cargo = Cargo(parts, self._memory.address, self._memory.take_buffer)
        # Without a timeout: nothing may write to a slot after this function has returned.
        outcome = self._begin(
            lambda: store.batch_get_into_multi_buffers(names, cargo.addresses, cargo.sizes),
            here=True,
        )
        try:
            for place, code in zip(wanted, self._await(outcome), strict=True):
                if code < 0:
                    answers[place] = self._fault(code)
                elif code != items[place].num_bytes:
                    answers[place] = wrong_size(code, items[place].num_bytes)
            cargo.unload([answers[place] is None for place in wanted])
        finally:
            self._memory.give_back(cargo.buffer)
        return answers

    def _look_up(self, store: Any, items: Sequence[Item]) -> Answers:
        """Errors that can be found without a transfer; None if it will probably succeed."""
        names = [item.name for item in items]

        def look() -> tuple[list[int], Any]:
            codes = store.batch_is_exist(names)  # the next call logs every missing name
            there = [name for name, code in zip(names, codes, strict=True) if code == 1]
            return codes, store.batch_get_replica_desc(there) if there else {}

        codes, held = self._await(self._begin(look))
        answers: Answers = [None if code == 1 else self._fault(code or -704) for code in codes]
        places = [_size_and_peers(held.get(name, ())) for name in names]
        silent = self._find_silent({peer for _, peers in places for peer in peers})
        for number, (size, peers) in enumerate(places):
            if size not in (None, items[number].num_bytes):
                answers[number] = wrong_size(size, items[number].num_bytes)
            elif peers & silent:
                answers[number] = StoreError("the instance that has this block does not answer")
        return answers

    def _find_silent(self, peers: set[str]) -> set[str]:
        """The peers that do not answer.

        The library waits a whole minute if a peer hangs on first contact. Later calls time out.
        """
        silent = set()
        for peer in peers - self._known_peers if self._options["metadata"] == NO_SERVER else ():
            host, _, port = peer.rpartition(":")
            try:
                self._probe((host.strip("[]"), int(port)))
                self._known_peers.add(peer)
            except (OSError, ValueError):
                silent.add(peer)
        return silent

    def _answers(
        self, items: Sequence[Item], run: Callable[[Any, Sequence[Item]], Answers]
    ) -> Answers:
        if len({item.name for item in items}) < len(items):
            # The library would fill only one of several slots with the same name.
            return [answer for item in items for answer in self._answers([item], run)]
        try:
            return run(self._open(), items) if items else []
        except StoreError as error:
            return [error] * len(items)

    # Calls of the library.

    def _ask(self, verb: str, *arguments: Any) -> Any:
        store = self._open()
        return self._await(self._begin(lambda: getattr(store, verb)(*arguments)))

    def _begin(self, call: Callable[[], Any], *, here: bool = False) -> Future[Any]:
        """Start a call on a thread of its own, or on this one if `here`."""
        outcome: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise StoreError("the client of the remote store is closed")
            self._num_calls += 1

        def run() -> None:
            try:
                outcome.set_result(call())
            except Exception as error:
                outcome.set_exception(StoreError(f"Mooncake failed: {error}"[:200]))
            finally:
                with self._lock:
                    self._num_calls -= 1
                    self._lock.notify_all()

        if here:
            run()
        else:
            threading.Thread(target=run, name="penstock-mooncake", daemon=True).start()
        return outcome

    def _await(self, outcome: Future[Any]) -> Any:
        try:
            return outcome.result(self._timeout_seconds)
        except TimeoutError:
            raise self._fault(_UNREACHABLE[0]) from None

    def _fault(self, code: int) -> StoreError:
        if code in _UNREACHABLE:
            self._is_connected = False
            return StoreError("Mooncake did not answer in time, or its master is down")
        if code in _MISSING:
            return absent()
        if code in _FULL:
            return Full(f"Mooncake has no room (error {code}): lend more with segment= in its URL")
        return StoreError(f"Mooncake answered with error {code}")

    # The master.

    def _open(self) -> Any:
        """The library's store, connected to its master. Raises StoreError."""
        if self._is_connected:
            return self._store
        with self._connecting:
            if self._closed:
                raise StoreError("the client of the remote store is closed")
            if not self._is_connected:
                if time.monotonic() < self._not_before:
                    raise StoreError(self._last_error)
                try:
                    self._connect()
                except (OSError, StoreError) as error:
                    self._last_error = f"cannot connect to Mooncake: {error}"[:200]
                    self._not_before = time.monotonic() + _RETRY_SECONDS
                    raise StoreError(self._last_error) from None
                self._is_connected = True
            return self._store

    def _connect(self) -> None:
        own_address = self._probe(self._master)
        if self._store is not None:
            return  # the library reconnects on its own
        set_bounds(self._timeout_seconds / 2)
        store = self._new_store()
        code = store.setup(
            self._options["host"] or own_address,
            self._options["metadata"],
            self._segment_bytes,
            _LIBRARY_BUFFER_BYTES,
            self._options["protocol"],
            self._options["devices"],
            "{}:{}".format(*self._master),
        )
        if code != 0:
            raise StoreError(f"its setup failed with error {code}; see standard error for details")
        self._store = store
        self._memory.register_arenas()

    def _probe(self, address: tuple[str, int]) -> str:
        """Our own address. Raises OSError if the server does not close the connection after us.

        Called before `setup`, which blocks all threads while it waits for the master.
        """
        with socket.create_connection(address, self._timeout_seconds / 2) as connection:
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return str(connection.getsockname()[0])

    def _register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            code = -1 if self._store is None else self._store.register_buffer(address, num_bytes)
        if code != 0:
            raise StoreError(f"Mooncake could not register memory (error {code})")

    def _names(self) -> Sequence[str]:
        import httpx

        host, port = self._master[0], int(self._options["metrics"])
        try:
            url = httpx.URL(scheme="http", host=host, port=port, path="/get_all_keys")
            reply = httpx.get(url, timeout=self._timeout_seconds, trust_env=False)  # no proxy
            if reply.status_code != httpx.codes.OK:
                raise OSError(f"HTTP status {reply.status_code}")
            return reply.content.decode().splitlines()
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise StoreError(
                f"Mooncake's names cannot be listed ({str(error) or type(error).__name__}): "
                f"expected the master's HTTP server at {host}:{port}; set its port with metrics= "
                "in the remote URL"
            ) from None


def _pages(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _NAMES_AT_ONCE):
        yield list(names[start : start + _NAMES_AT_ONCE])


def _size_and_peers(replicas: Sequence[Any]) -> tuple[int | None, set[str]]:
    """The size, and the peers with a copy in memory. Copies on disk are not counted."""
    held = [
        replica.get_memory_descriptor().buffer_descriptor
        for replica in replicas
        if replica.is_memory_replica()
    ]
    return (int(held[0].size) if held else None), {place.transport_endpoint for place in held}
