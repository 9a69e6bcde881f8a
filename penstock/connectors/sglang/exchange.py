"""Blocks in and out of the tiers, for several threads that wait for their answers.

SGLang's threads call us with memory that is theirs only until they return. Nothing of ours touches
it: blocks pass through buffers, and a caller copies between a buffer and its memory itself, before
a save begins or after a load has ended well. A read that ends late finds only a buffer.

    SGLang's host memory ──copy──► buffer ──► tiers           save
    SGLang's host memory ◄──copy── buffer ◄── tiers           load, if the block is sound
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from penstock.connectors.vllm.ticker import Ticker
from penstock.stores.host import HostArena
from penstock.tiers import Tiers
from penstock.types import NO_PARENTS, BlockKey, Direction, Done, Slot, TicketId, Verdict

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.0005
_CLOSE_SECONDS = 30.0
# After the tiers' own deadlines. Only a copy in memory that hangs lasts so long.
_GIVE_UP_SECONDS = 120.0

Fill = Callable[[int, memoryview], None]
"""Write the block at this index into a buffer."""

Take = Callable[[int, memoryview], None]
"""Read the block at this index, which has arrived, from a buffer."""


class BlockExchange:
    """Thread-safe. Whatever goes wrong with a tier, a block is not there, or not saved."""

    def __init__(self, tiers: Tiers, buffers: HostArena, *, load_seconds: float) -> None:
        """`tiers` are below `buffers`, which must have at least two slots.

        A call of `load` lasts `load_seconds`, however many blocks it is for: SGLang stops its
        threads when it flushes its cache, and ends if one of them is busy for longer than 10 s.
        """
        self._tiers = tiers
        self._load_seconds = load_seconds
        self._buffers = buffers
        half = buffers.num_slots // 2
        slots = [Slot(index) for index in range(buffers.num_slots)]
        # Loads have buffers of their own, so that they do not wait for saves.
        self._slots = {Direction.LOAD: slots[:half], Direction.SAVE: slots[half:]}
        self._turns = {direction: threading.Lock() for direction in Direction}
        self._lock = threading.Lock()  # the tiers are for one thread at a time
        self._waited: dict[TicketId, Done | None] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._ticker = Ticker(self._tick)

    @property
    def is_working(self) -> bool:
        """False after an error in our own code, and after `close`."""
        return self._problem is None

    def find(self, keys: Sequence[BlockKey], *, is_request: bool = False) -> list[bool]:
        """Which blocks could be loaded now. Asks a shared tier too, and waits for its answer.

        Counts as a request's lookup if `is_request`.
        """
        try:
            with self._lock:
                self._require_working()
                lookup = self._tiers.lookup(keys)
            self._ticker.wake()
            end = time.monotonic() + _GIVE_UP_SECONDS
            while lookup is not None and time.monotonic() < end:
                with self._lock:
                    self._settle()
                    if not self._tiers.is_looking_up(lookup):
                        break
                time.sleep(_POLL_SECONDS)
            with self._lock:
                if is_request:
                    self._tiers.note(self._tiers.match(keys))
                return [tier is not None for tier in self._tiers.where(keys)]
        except Exception as error:
            self._fail(error)
            return [False] * len(keys)

    def save(
        self, keys: Sequence[BlockKey], fill: Fill, *, parent: BlockKey | None = None
    ) -> list[bool]:
        """Save blocks that no tier of this instance has. Returns which are kept when it returns.

        `fill` is called on this thread, and never after the return.
        """
        try:
            with self._lock:
                self._require_working()
                kept = [tier is not None for tier in self._tiers.where(keys)]
                self._tiers.used([key for key, is_kept in zip(keys, kept, strict=True) if is_kept])
            missing = [index for index, is_kept in enumerate(kept) if not is_kept]
            with self._turns[Direction.SAVE]:
                for chunk in _chunks(missing, keys, len(self._slots[Direction.SAVE])):
                    slots = self._slots[Direction.SAVE][: len(chunk)]
                    for index, slot in zip(chunk, slots, strict=True):
                        fill(index, self._block(slot))
                    parents = {
                        place: keys[index - 1] if index else parent
                        for place, index in enumerate(chunk)
                        if not place or chunk[place - 1] != index - 1
                    }
                    with self._lock:
                        self._require_working()
                        ticket = self._tiers.save(
                            [keys[index] for index in chunk], slots, parents=parents or NO_PARENTS
                        )
                        self._waited[ticket] = None
                    done = self._wait(ticket)
                    for index, verdict in zip(chunk, done.verdicts, strict=True):
                        kept[index] = verdict is Verdict.OK
            return kept
        except Exception as error:
            self._fail(error)
            return [False] * len(keys)

    def load(
        self, keys: Sequence[BlockKey], take: Take, *, parent: BlockKey | None = None
    ) -> list[bool]:
        """Load blocks. `take` is called on this thread for each that arrived, in their order."""
        arrived = [False] * len(keys)
        try:
            with self._turns[Direction.LOAD]:
                end = time.monotonic() + self._load_seconds
                for chunk in _chunks(range(len(keys)), keys, len(self._slots[Direction.LOAD])):
                    seconds = end - time.monotonic()
                    if seconds <= 0:
                        break
                    slots = self._slots[Direction.LOAD][: len(chunk)]
                    before = keys[chunk[0] - 1] if chunk[0] else parent
                    with self._lock:
                        self._require_working()
                        ticket = self._tiers.load(
                            [keys[index] for index in chunk],
                            slots,
                            deadline_seconds=seconds,
                            parents={0: before},
                        )
                        self._waited[ticket] = None
                    done = self._wait(ticket)
                    for index, slot, verdict in zip(chunk, slots, done.verdicts, strict=True):
                        if verdict is Verdict.OK:
                            take(index, self._block(slot))
                            arrived[index] = True
                    if not done.ok:
                        break  # the rest would not be used
            return arrived
        except Exception as error:
            self._fail(error)
            return [False] * len(keys)

    def forget(self) -> None:
        """Drop what is in DRAM, unless it is a node's: others use that."""
        try:
            with self._lock:
                self._require_working()
                self._tiers.empty_host()
        except Exception as error:
            self._fail(error)

    def recover(self, timeout_seconds: float) -> bool:
        """Wait until the index of the disk has been read."""
        try:
            with self._lock:
                self._require_working()
                return self._tiers.recover(timeout_seconds)
        except Exception as error:
            self._fail(error)
            return False

    def check(self) -> None:
        """Raise BookError if the books do not add up."""
        with self._lock:
            self._tiers.check()

    def close(self) -> bool:
        """Finish the writes to lower tiers. False if one of them hung."""
        self._ticker.stop(wait=True)
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            if self._failure is not None:
                return self._tiers.abandon(_CLOSE_SECONDS)
            self._tiers.let_go(_CLOSE_SECONDS)
            return self._tiers.close(_CLOSE_SECONDS)

    def _block(self, slot: Slot) -> memoryview:
        return self._buffers.view(slot)[: self._buffers.block_bytes]

    def _wait(self, ticket: TicketId) -> Done:
        """Wait for a ticket. The tiers end it at its deadline at the latest."""
        self._ticker.wake()
        end = time.monotonic() + _GIVE_UP_SECONDS
        while True:
            with self._lock:
                self._settle()
                if (done := self._waited[ticket]) is not None:
                    del self._waited[ticket]
                    return done
                self._require_working()
            if time.monotonic() >= end:
                # Its copies may still run, so its buffers cannot be used again.
                raise TimeoutError(f"ticket {ticket} did not end after its deadline")
            time.sleep(_POLL_SECONDS)

    def _settle(self) -> None:
        for done in self._tiers.step():
            if done.ticket in self._waited:
                self._waited[done.ticket] = done

    def _tick(self) -> bool:
        with self._lock:
            if self._closed or self._failure is not None:
                return False
            self._settle()
            return self._tiers.is_moving

    @property
    def _problem(self) -> str | None:
        if self._closed:
            return "closed"
        failure = self._failure or self._ticker.error
        return None if failure is None else repr(failure)

    def _require_working(self) -> None:
        if (problem := self._problem) is not None:
            raise _Stopped(problem)

    def _fail(self, error: Exception) -> None:
        """After an error in our own code the books cannot be trusted: use them no more."""
        if isinstance(error, _Stopped) and (self._closed or self._failure is not None):
            return
        if isinstance(error, _Stopped):
            assert self._ticker.error is not None
            error = self._ticker.error
        self._failure = error
        log.error("Penstock stops: SGLang goes on without it until it is restarted", exc_info=error)


class _Stopped(Exception):
    """Closed, or stopped by an earlier error."""


def _chunks(indices: Sequence[int], keys: Sequence[BlockKey], size: int) -> list[list[int]]:
    """At most `size` indices each. No chunk names a block twice: a ticket must not."""
    chunks: list[list[int]] = []
    named: set[BlockKey] = set()
    for index in indices:
        if not chunks or len(chunks[-1]) == size or keys[index] in named:
            chunks.append([])
            named.clear()
        chunks[-1].append(index)
        named.add(keys[index])
    return chunks
