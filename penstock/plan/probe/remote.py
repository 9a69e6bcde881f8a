"""Measures a remote store with puts, gets and lookups, through the remote tier's own client.

All values are under penstock/probe/ and a random name, and are removed at the end.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import NamedTuple

from penstock.config import RemoteConfig
from penstock.config.urls import shown_value, without_password
from penstock.errors import ConfigError, Full, StoreError
from penstock.plan.probe import links
from penstock.plan.probe.links import BLOCK_BYTES, Link, Tick
from penstock.stores.base import Answers
from penstock.stores.envelope import HEAD_BYTES
from penstock.stores.host import HostArena
from penstock.stores.remote import Client, Item
from penstock.stores.remotes import open_client, threads_for
from penstock.types import Slot
from penstock.units import counted, format_bytes

BATCH_BLOCKS = 16
LOOKUP_NAMES = 512  # as many as the remote tier looks up at once
_BLOCK_SIZES = (64 * 23_040, BLOCK_BYTES)  # 64 tokens of SmolLM2-135M; the other probes' size
_NUM_PARTS = 2 * len(_BLOCK_SIZES) + 1
_NAMES_AT_ONCE = 1000
_TIMEOUT_SECONDS = 30.0
# In case this process is killed. Has no effect in stores that do not expire values.
_TTL_SECONDS = 3600.0


class LookupTimes(NamedTuple):
    """Lookups of many names each, one after another."""

    num_names: int  # per lookup
    names_per_second: float
    seconds: float  # per lookup


class _Measured(NamedTuple):
    link: Link
    num_batches: int


_Move = Callable[[int, int, int], None]
"""Takes a thread, its first block and the number of blocks to move."""


class RemoteProbe:
    """Uses values under unique names. Stores at most `size_bytes` at a time."""

    def __init__(
        self,
        url: str,
        size_bytes: int,
        seconds: float,
        num_threads: int | None = None,
    ) -> None:
        """Raises ConfigError or StoreError if the store cannot be reached."""
        links.check_size(size_bytes)
        if "://" not in url:
            raise ConfigError(
                f"--remote is {shown_value(url)}: expected a URL such as redis://host:6379/0"
            )
        self.shown = without_password(url)
        self.lookups: LookupTimes | None = None  # known after `measure`
        self.prefix = f"penstock/probe/{os.urandom(8).hex()}/"
        self._url = url
        # Other stores' servers, caches included, are part of what is measured.
        in_folder = url.lower().startswith("file:")
        self._note = (
            "measured through the page cache, because the remote store is a folder"
            if in_folder
            else ""
        )
        self._size_bytes = size_bytes
        self._seconds = seconds
        self._num_threads = num_threads or threads_for(RemoteConfig(url=url))
        client = self._open()
        try:
            client.exists([f"{self.prefix}0"])
        except StoreError as error:
            raise StoreError(
                f"{self.shown} does not answer ({error}): expected a running remote store; start "
                "it, or correct --remote"
            ) from None
        finally:
            client.close()

    def measure(self, tick: Tick) -> Iterator[Link]:
        batch_blocks = min(BATCH_BLOCKS, self._size_bytes // BLOCK_BYTES)
        arena = links.new_arena(self._num_threads * batch_blocks * BLOCK_BYTES)
        links.fill(arena)
        client = self._open()
        try:
            client.register(arena)
            for index, block_bytes in enumerate(_BLOCK_SIZES):
                num_batches = self._size_bytes // (batch_blocks * block_bytes)
                values = _Values(
                    client, arena, f"{self.prefix}{block_bytes}/", block_bytes, batch_blocks
                )
                names = [values.name(block) for block in range(num_batches * batch_blocks)]
                try:
                    yield from self._measure(values, num_batches, tick, 2 * index)
                    if index == len(_BLOCK_SIZES) - 1:
                        self.lookups = self._lookup(client, names, tick)
                finally:
                    values.end()
                    self._remove(client, names)
        except Full as error:
            raise ConfigError(
                f"{self.shown} has no room for {format_bytes(self._size_bytes)} ({error}): lower "
                "--size, or give the store more room"
            ) from None
        except StoreError as error:
            raise StoreError(f"{self.shown} failed during the measurement: {error}") from None
        finally:
            client.close()

    def _measure(self, values: _Values, num_batches: int, tick: Tick, part: int) -> Iterator[Link]:
        num_threads = min(self._num_threads, num_batches)
        batch_blocks, block_bytes = values.batch_blocks, values.block_bytes

        def measure(verb: str, move: _Move, batches: Iterator[int], num_held: int) -> _Measured:
            """Single blocks are taken from the first `num_held` batches."""
            name = f"remote {verb}, {format_bytes(block_bytes)}, {counted(num_threads, 'thread')}"
            ticked = links.tick_part(tick, name, part + (verb == "get"), _NUM_PARTS)
            block_seconds = _uninterrupted(
                lambda: links.single_seconds(
                    lambda thread, block: move(thread, block, 1), num_held * batch_blocks
                )
            )
            num_moved, seconds = links.move_blocks(
                lambda thread, batch: move(thread, batch * batch_blocks, batch_blocks),
                batches,
                num_threads,
                self._seconds,
                ticked,
            )
            rate = num_moved * batch_blocks * block_bytes / seconds
            loads = verb == "get"
            link = Link(name, num_threads, rate, block_seconds, loads, self._note, block_bytes)
            return _Measured(link, num_moved)

        written = measure("put", values.put, iter(range(num_batches)), num_batches)
        order = list(range(written.num_batches))
        random.Random(0).shuffle(order)  # as the blocks of many prompts would be
        yield measure("get", values.get, cycle(order), written.num_batches).link
        yield written.link

    def _lookup(self, client: Client, names: Sequence[str], tick: Tick) -> LookupTimes:
        absent = [f"{self.prefix}absent/{number}" for number in range(LOOKUP_NAMES)]
        asked = [*names, *absent][:LOOKUP_NAMES]

        def lookup(_thread: int, _number: int) -> None:
            client.exists(asked)

        ticked = links.tick_part(tick, "remote lookups", _NUM_PARTS - 1, _NUM_PARTS)
        num_asked, seconds = links.move_blocks(lookup, cycle((0,)), 1, self._seconds, ticked)
        return LookupTimes(LOOKUP_NAMES, num_asked * LOOKUP_NAMES / seconds, seconds / num_asked)

    def _remove(self, client: Client, names: Sequence[str]) -> None:
        try:
            for start in range(0, len(names), _NAMES_AT_ONCE):
                client.remove(names[start : start + _NAMES_AT_ONCE])
        except StoreError as error:
            raise StoreError(
                f"the probe's values could not be removed ({error}); delete everything under "
                f"{self.prefix}"
            ) from None

    def _open(self) -> Client:
        return open_client(self._url, _TIMEOUT_SECONDS)


class _Values:
    """Blocks of one size, by number and by batch. Each thread has memory for one batch."""

    def __init__(
        self, client: Client, arena: HostArena, prefix: str, block_bytes: int, batch_blocks: int
    ) -> None:
        self.block_bytes = block_bytes
        self.batch_blocks = batch_blocks
        self._client = client
        self._arena = arena
        self._prefix = prefix
        self._change = threading.Condition()  # guards the two fields below
        self._num_puts = 0  # running
        self._ended = False

    def name(self, block: int) -> str:
        return f"{self._prefix}{block}"

    def put(self, thread: int, first: int, num_blocks: int) -> None:
        with self._change:
            if self._ended:
                raise StoreError("the measurement has ended")
            self._num_puts += 1
        try:
            _check(self._client.put(self._items(thread, first, num_blocks), _TTL_SECONDS))
        finally:
            with self._change:
                self._num_puts -= 1
                self._change.notify_all()

    def get(self, thread: int, first: int, num_blocks: int) -> None:
        _check(self._client.get(self._items(thread, first, num_blocks)))

    def end(self) -> None:
        """Wait for running puts and refuse new ones, so that all values can be removed."""
        with self._change:
            self._ended = True
            self._change.wait_for(lambda: not self._num_puts)

    def _items(self, thread: int, first: int, num_blocks: int) -> list[Item]:
        return [
            Item(
                self.name(first + index),
                memoryview(bytearray(HEAD_BYTES)),
                self._arena.view(Slot(thread * self.batch_blocks + index))[: self.block_bytes],
            )
            for index in range(num_blocks)
        ]


def _uninterrupted(measure: Callable[[], float]) -> float:
    """Run on another thread, so that Ctrl-C cannot leave a put to finish after the cleanup."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


def _check(answers: Answers) -> None:
    for answer in answers:
        if answer is not None:
            raise answer
