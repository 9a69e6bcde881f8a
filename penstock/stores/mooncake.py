"""Mooncake Store: memory that the instances of a fleet lend each other, found through a master.

mooncake://master:50051
mooncake://master:50051?segment=64GiB&protocol=rdma&devices=mlx5_0,mlx5_1

segment   memory this instance lends to the pool; 0, the default: it only uses what others
          lend. Where nobody lends any, every put is answered with Full
host      where the others reach this instance; by default the address from which it talks to
          the master
protocol  tcp, the default, or rdma
devices   the network cards for rdma, with commas; by default the library chooses
metadata  P2PHANDSHAKE, the default: nothing else has to run; or a metadata server's URL
metrics   the port of the master's HTTP server, which knows all names; 9003 by default
"""

from __future__ import annotations

import http.client
import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from penstock.errors import ConfigError, Corrupt, Full, Missing, StoreError
from penstock.stores.base import Answers, Arena
from penstock.stores.mooncake_cargo import Cargo, address_of
from penstock.stores.mooncake_library import (
    MIN_SEGMENT_BYTES,
    NO_SERVER,
    load_library,
    read_url,
    set_bounds,
)
from penstock.stores.remote import Item, Listed
from penstock.units import parse_bytes

log = logging.getLogger(__name__)

_NAMES_AT_ONCE = 1024
_RETRY_SECONDS = 1.0
_MIN_BUFFER_BYTES = 64 << 10
_LIBRARY_BUFFER_BYTES = 16 << 20  # where it puts what it reads from disks of its own
# Of the library's error codes.
_MISSING = (-704, -703, -710, -712)  # not there; still being put; its replicas are gone
_FULL = (-101, -200, -1602, -1700)  # nobody lends memory; no room; over a quota
_UNREACHABLE = (-900, -901)

_left_open: list[Any] = []  # see `close`


class MooncakeClient:
    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Connects to nothing yet. Raises ConfigError for a URL that means nothing."""
        self._master, self._options = read_url(url)
        self._segment_bytes = parse_bytes(self._options["segment"])
        if 0 < self._segment_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError("a segment= in the remote URL is too small: expected 0, or 16MiB up")
        self._timeout_seconds = timeout_seconds
        self._new_store = load_library()
        self._store: Any = None
        self._arenas: list[range] = []  # of addresses, to be registered
        self._registered: list[range] = []
        self._buffers: list[memoryview] = []  # registered, and not in use
        self._met: set[str] = set()  # peers that have reacted once
        self._sure = False  # of the master, until a call says otherwise
        self._trouble = ""
        self._not_before = 0.0
        self._connecting = threading.Lock()
        self._lock = threading.Condition()  # of the buffers and the two below
        self._num_calls = 0
        self._closed = False

    def put(self, items: Sequence[Item], ttl_seconds: float | None) -> Answers:
        # No time to live can be handed over: the head says it, and the pool evicts what is old.
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
            # By force: who has a lease may be reading, but he checks what he has read.
            for code in self._ask("batch_remove", page, True):
                if code < 0 and code not in _MISSING:
                    raise self._fault(code)

    def find(self, prefix: str) -> Iterator[list[Listed]]:
        for page in _pages([name for name in self._names() if name.startswith(prefix)]):
            held = self._ask("batch_get_replica_desc", page)
            sizes = {name: _size_and_peers(replicas)[0] for name, replicas in held.items()}
            yield [Listed(name, size) for name, size in sizes.items() if size is not None]

    def register(self, arena: Arena) -> None:
        size = arena.num_slots * arena.stride_bytes
        with self._connecting:
            self._arenas.append(range(arena.address, arena.address + size))
            if self._store is not None:
                self._register_arenas()

    def close(self) -> None:
        with self._connecting:
            with self._lock:
                self._closed = True
                idle = self._lock.wait_for(lambda: not self._num_calls, self._timeout_seconds)
                store, self._store, self._sure = self._store, None, False
            if store is None:
                return
            # The library does not survive this with calls under way, and keeps the interpreter's
            # lock while it takes leave of the master. Where that would hurt, it is left to the
            # exit of the process; until then memory stays lent and registered.
            try:
                self._knock(self._master)
            except OSError:
                idle = False
            if idle:
                store.close()
            else:
                _left_open.append((store, self._buffers))

    def _put(self, store: Any, items: Sequence[Item]) -> Answers:
        names = [item.name for item in items]
        cargo = Cargo(items, self._address, self._buffer)
        cargo.load()

        def replace() -> Any:
            store.batch_remove(names, True)  # a put on an older value succeeds and does nothing
            return store.batch_put_from_multi_buffers(names, cargo.addresses, cargo.sizes)

        # Given up, it may still read a slot that has another block by then: the head will tell.
        outcome = self._begin(replace)
        outcome.add_done_callback(lambda _: self._keep(cargo))
        return [None if code == 0 else self._fault(code) for code in self._await(outcome)]

    def _get(self, store: Any, items: Sequence[Item]) -> Answers:
        answers = self._look(store, items)
        wanted = [place for place, answer in enumerate(answers) if answer is None]
        if not wanted:
            return answers
        names = [items[place].name for place in wanted]
        cargo = Cargo([items[place] for place in wanted], self._address, self._buffer)
        # Waited for, come what may: nothing may write to a slot once this has returned.
        outcome = self._begin(
            lambda: store.batch_get_into_multi_buffers(names, cargo.addresses, cargo.sizes),
            here=True,
        )
        try:
            for place, code in zip(wanted, self._await(outcome), strict=True):
                if code < 0:
                    answers[place] = self._fault(code)
                elif code != items[place].num_bytes:
                    answers[place] = _wrong_size(items[place], code)
            cargo.unload([answers[place] is None for place in wanted])
        finally:
            self._keep(cargo)
        return answers

    def _look(self, store: Any, items: Sequence[Item]) -> Answers:
        """What can be said without a transfer: None if it promises to succeed."""
        names = [item.name for item in items]

        def look() -> tuple[list[int], Any]:
            codes = store.batch_is_exist(names)  # asked where they are, it logs what is missing
            there = [name for name, code in zip(names, codes, strict=True) if code == 1]
            return codes, store.batch_get_replica_desc(there) if there else {}

        codes, held = self._await(self._begin(look))
        answers: Answers = [None if code == 1 else self._fault(code or -704) for code in codes]
        places = [_size_and_peers(held.get(name, ())) for name in names]
        hung = self._meet({peer for _, peers in places for peer in peers})
        for number, (size, peers) in enumerate(places):
            if size not in (None, items[number].num_bytes):
                answers[number] = _wrong_size(items[number], size)
            elif peers & hung:
                answers[number] = StoreError("the instance that has this block does not answer")
        return answers

    def _meet(self, peers: set[str]) -> set[str]:
        """Who of these does not react. Later the library bounds all waiting, but a peer that hangs
        when it is first spoken to is waited for a whole minute."""
        hung = set()
        for peer in peers - self._met if self._options["metadata"] == NO_SERVER else ():
            host, _, port = peer.rpartition(":")
            try:
                self._knock((host.strip("[]"), int(port)))
                self._met.add(peer)
            except (OSError, ValueError):
                hung.add(peer)
        return hung

    def _answers(
        self, items: Sequence[Item], run: Callable[[Any, Sequence[Item]], Answers]
    ) -> Answers:
        if len({item.name for item in items}) < len(items):
            # The library goes by the name: of two slots for one name it would fill one.
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
        """Start it, on a thread that may outlive its caller's patience."""
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
            self._sure = False
            return StoreError("Mooncake took too long, or its master is gone")
        if code in _MISSING:
            return Missing("the remote store does not hold this block (any more)")
        if code in _FULL:
            return Full(f"Mooncake has no room (error {code}): lend more with segment= in its URL")
        return StoreError(f"Mooncake answered with error {code}")

    # The master.

    def _open(self) -> Any:
        """The library, with its master in reach as far as is known. Raises StoreError."""
        if self._sure:
            return self._store
        with self._connecting:
            if self._closed:
                raise StoreError("the client of the remote store is closed")
            if not self._sure:
                if time.monotonic() < self._not_before:
                    raise StoreError(self._trouble)
                try:
                    self._connect()
                except (OSError, StoreError) as error:
                    self._trouble = f"there is no connection to Mooncake: {error}"[:200]
                    self._not_before = time.monotonic() + _RETRY_SECONDS
                    raise StoreError(self._trouble) from None
                self._sure = True
            return self._store

    def _connect(self) -> None:
        own_address = self._knock(self._master)
        if self._store is not None:
            return  # the library has found its way back by itself, or will
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
            raise StoreError(f"its setup ended with error {code}; the standard error may say why")
        self._store = store
        self._register_arenas()

    def _knock(self, address: tuple[str, int]) -> str:
        """Our own address. Raises OSError if nobody hangs up when we do, as the living would.

        Before `setup`, since in that all threads wait for the master.
        """
        with socket.create_connection(address, self._timeout_seconds / 2) as door:
            door.shutdown(socket.SHUT_WR)
            door.recv(1)
            return str(door.getsockname()[0])

    def _names(self) -> Sequence[str]:
        place = (self._master[0], int(self._options["metrics"]))
        line = http.client.HTTPConnection(*place, timeout=self._timeout_seconds)
        try:
            line.request("GET", "/get_all_keys")
            reply = line.getresponse()
            if reply.status != http.client.OK:
                raise OSError(f"HTTP status {reply.status}")
            return reply.read().decode().splitlines()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise StoreError(
                f"Mooncake's names cannot be listed ({error}): expected the master's HTTP server "
                "at {}:{}; name its port with metrics= in the URL".format(*place)
            ) from None
        finally:
            line.close()

    # Memory.

    def _register_arenas(self) -> None:
        for arena in self._arenas:
            try:
                self._register(arena.start, len(arena))
                self._registered.append(arena)
            except StoreError as error:
                log.warning("values are copied on their way to Mooncake: %s", error)
        self._arenas = []

    def _register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            code = -1 if self._store is None else self._store.register_buffer(address, num_bytes)
        if code != 0:
            raise StoreError(f"Mooncake could not register memory (error {code})")

    def _address(self, body: memoryview) -> int:
        """Of a body in registered memory; 0 of any other."""
        if body.readonly:
            return 0
        start = address_of(body)
        last = start + len(body) - 1
        return start if any(start in arena and last in arena for arena in self._registered) else 0

    def _buffer(self, num_bytes: int) -> memoryview:
        """Registered memory, of which there is as much as was ever in use at one time."""
        with self._lock:
            for place, memory in enumerate(self._buffers):
                if len(memory) >= num_bytes:
                    return self._buffers.pop(place)
        size = max(_MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        memory = memoryview(mmap.mmap(-1, size))
        self._register(address_of(memory), size)
        return memory

    def _keep(self, cargo: Cargo) -> None:
        with self._lock:
            self._buffers.append(cargo.buffer)
            self._buffers.sort(key=len)


def _pages(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _NAMES_AT_ONCE):
        yield list(names[start : start + _NAMES_AT_ONCE])


def _size_and_peers(replicas: Sequence[Any]) -> tuple[int | None, set[str]]:
    """Of what is in memory; of what is on a disk the library tells less."""
    held = [
        replica.get_memory_descriptor().buffer_descriptor
        for replica in replicas
        if replica.is_memory_replica()
    ]
    return (int(held[0].size) if held else None), {place.transport_endpoint for place in held}


def _wrong_size(item: Item, size: int | None) -> Corrupt:
    return Corrupt(f"a remote value has {size} bytes where {item.num_bytes} were stored")
