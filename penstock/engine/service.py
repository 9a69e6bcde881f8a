"""The engine behind an event loop: one thread computes, any number of coroutines wait for tokens.

    service = Service(engine)
    stream = await service.submit(prompt_ids, params)     # refused here, or queued
    async for delta in stream: ...
    await service.close()

The thread is the only one that touches the engine. What crosses to the loop is plain and frozen.
A stream that is closed early, by an error or a client that went away, aborts its sequences.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TypeVar

from penstock.engine.census import Sighting
from penstock.engine.engine import Engine, Progress
from penstock.engine.faults import EngineLost
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.engine.sampler import Sampled
from penstock.errors import PenstockError
from penstock.hints import Hint
from penstock.types import NO_ORIGIN, Origin

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_IDLE_SECONDS = 0.5  # between looks at the tiers, while nothing moves
_MOVING_SECONDS = 0.002  # while something does


class Stopped(PenstockError):
    """The engine takes no more requests: it is shutting down, or it has failed."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sequence of a request."""

    index: int  # which of the n
    text: str  # new text that may be shown; may be empty
    sampled: Sampled
    finish_reason: str | None = None  # set in a sequence's last delta
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class Stream:
    """The deltas of one request, from all its sequences, until each has finished."""

    def __init__(self, service: Service, names: Sequence[str]) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Delta | PenstockError] = asyncio.Queue()
        self._open = dict.fromkeys(names)
        self.request_ids = tuple(names)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if not self._open:
            raise StopAsyncIteration
        delta = await self._arrived.get()
        if isinstance(delta, PenstockError):
            self.close()  # the others of the n are not wanted without this one
            raise delta
        if delta.finish_reason is not None:
            self._open.pop(self.request_ids[delta.index], None)
        return delta

    def close(self) -> None:
        """Give up what has not finished; its blocks are free for others at the next step."""
        if self._open:
            self._service.abort(self._open)
            self._open = {}

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _deliver(self, deltas: Sequence[Delta | PenstockError]) -> None:
        for delta in deltas:
            self._arrived.put_nowait(delta)


class Service:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # for what never changes: its model, its sizes
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[str, tuple[Stream, int]] = {}  # the thread's, by sequence
        self._progress: list[Progress] = []  # the thread's: not handed out yet
        self._num_requests = 0
        self._failure: BaseException | None = None
        self.ended: Future[None] = Future()  # once the thread has closed the engine
        self._closing = False
        self._gate = threading.Lock()  # no command is queued once the thread has read its last
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread, if anything did."""
        return self._failure

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        priority: int = 0,
        origin: Origin = NO_ORIGIN,
    ) -> Stream:
        """Queue a request; its n sequences are accepted together or not at all.

        Raises what `Engine.add` raises, or Stopped.
        """
        prompt_ids = self.engine.intake.check(prompt_ids, params, priority=priority, tenant=tenant)
        self._num_requests += 1
        names = [f"{self._num_requests}-{index}" for index in range(params.n)]
        stream = Stream(self, names)
        accepted: Future[None] = Future()

        def add() -> None:
            added = []
            try:
                for index, name in enumerate(names):
                    self.engine.add(
                        name,
                        prompt_ids,
                        params,
                        priority=priority,
                        tenant=tenant,
                        index=index,
                        origin=origin,
                    )
                    added.append(name)
            except Exception as error:
                try:
                    for name in added:
                        self.engine.abort(name)
                finally:  # whatever becomes of the engine
                    _fail(accepted, error)
                if isinstance(error, EngineLost):
                    raise
                return
            for index, name in enumerate(names):
                self._streams[name] = (stream, index)
            _resolve(accepted, None)

        self._queue(add)
        try:
            await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:
            self.abort(names)  # comes after `add` in the queue, whatever became of it
            raise
        return stream

    async def hint(self, hint: Hint, prompt_ids: Sequence[int] = (), *, tenant: str = "") -> int:
        """As `Engine.hint`. Raises Stopped."""
        prompt_ids = self.engine.intake.check_prompt(prompt_ids)
        self.engine.intake.check_tenant(tenant)
        return await self._ask(lambda: self.engine.hint(hint, prompt_ids, tenant=tenant))

    async def census(self) -> list[Sighting]:
        """As `Engine.census`; between two steps. Raises Stopped."""
        return await self._ask(self.engine.census)

    async def _ask(self, question: Callable[[], _Result]) -> _Result:
        """Have the engine's thread answer."""
        answered: Future[_Result] = Future()

        def answer() -> None:
            try:
                result = question()
            except Exception as error:
                _fail(answered, error)
                if isinstance(error, EngineLost):
                    raise
            else:
                _resolve(answered, result)

        self._queue(answer)
        return await asyncio.wrap_future(answered)

    def _queue(self, command: Callable[[], None]) -> None:
        with self._gate:
            if self._closing:
                raise Stopped("the engine takes no more requests; ask another instance, or later.")
            self._commands.put(command)

    def abort(self, request_ids: Sequence[str] | dict[str, None]) -> None:
        """Give sequences up; from any thread. Those that have ended are passed over."""
        names = list(request_ids)

        def drop() -> None:
            for name in names:
                self.engine.abort(name)
                self._streams.pop(name, None)

        self._commands.put(drop)

    async def close(self, grace_seconds: float = 30.0) -> None:
        """Take no more requests, finish those there are, drain the saves, close the tiers.

        What has not finished after `grace_seconds` is aborted, and its streams end with Stopped.
        """
        self._closing = True
        end = time.monotonic() + grace_seconds
        while self._streams and self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._stopping.set()
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._compute()
        except BaseException as error:
            log.exception("the engine failed, and cannot go on")
            self._failure = error
        self._end_streams()
        try:
            self.engine.close()
        except Exception:
            log.exception("the engine did not close in order")
        finally:
            _resolve(self.ended, None)

    def _compute(self) -> None:
        try:
            while not self._stopping.is_set():
                self._obey()
                self._progress = self.engine.step(self._hand_out)
                self._tell_failed()
        finally:
            self._hand_out()  # what was computed before the end is theirs

    def _obey(self) -> None:
        """Run what was asked; where there is nothing to do, wait to be asked."""
        wait = 0.0
        if not self._progress and not self.engine.has_work:
            wait = _MOVING_SECONDS if self.engine.is_moving else _IDLE_SECONDS
        try:
            command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except Empty:
            return

    def _hand_out(self) -> None:
        """What the last step did. The loop's work with it goes on while a GPU computes the next."""
        progress, self._progress = self._progress, []
        deltas: dict[Stream, list[Delta | PenstockError]] = defaultdict(list)
        for step in progress:
            found = self._streams.get(step.request.id)
            if found is None:
                continue
            stream, index = found
            delta = _delta(index, step)
            deltas[stream].append(step.error or delta)
            if step.request.finish_reason is not None or step.error is not None:
                del self._streams[step.request.id]
        for stream, new in deltas.items():
            self._send(stream, new)

    def _tell_failed(self) -> None:
        """Requests that a fault has ended: they alone, and whoever waits for them."""
        for request, error in self.engine.take_failed():
            found = self._streams.pop(request.id, None)
            if found is not None:
                self._send(found[0], [error])

    def _end_streams(self) -> None:
        """Nothing will be computed any more: whoever waits, or has asked meanwhile, is told."""
        reason = Stopped("the engine stopped before the request had finished; ask again.")
        with self._gate:
            self._closing = True
        while True:
            try:
                self._commands.get_nowait()()
            except Empty:
                break
            except Exception:  # an engine that has failed may fail again: the others are told
                log.exception("the engine failed at what was asked of it last")
        for stream in {stream for stream, _ in self._streams.values()}:
            self._send(stream, [reason])
        self._streams.clear()

    @staticmethod
    def _send(stream: Stream, deltas: Sequence[Delta | PenstockError]) -> None:
        try:
            stream._loop.call_soon_threadsafe(stream._deliver, deltas)
        except RuntimeError:  # its loop is closed: nobody listens any more
            stream.close()


def _resolve(future: Future[_Result], result: _Result) -> None:
    with suppress(InvalidStateError):  # whoever asked has gone
        future.set_result(result)


def _fail(future: Future[_Result], error: Exception) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)


def _delta(index: int, progress: Progress) -> Delta:
    request: Request = progress.request
    return Delta(
        index,
        progress.text,
        progress.sampled,
        request.finish_reason,
        request.stop_reason,
        request.num_cached_tokens,
        request.num_preemptions,
    )
