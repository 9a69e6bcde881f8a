"""The engine under asyncio: one thread computes, any number of coroutines wait for tokens.

    service = Service(engine)
    stream = await service.submit(prompt_ids, params)     # raises if refused, else queued
    async for delta in stream: ...
    await service.close()

Only that thread touches the engine. It passes immutable values to the event loop. Closing a stream
early, because of an error or a lost connection, aborts its sequences.
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
from typing import TypeVar

from penstock.engine.census import Sighting
from penstock.engine.engine import Engine, Progress
from penstock.engine.faults import EngineLost
from penstock.engine.grammar import COMPILE_SECONDS, CompiledGrammar
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.engine.sampler import Sampled
from penstock.engine.structure import UnusableStructure
from penstock.errors import PenstockError
from penstock.hints import Hint
from penstock.types import NO_ORIGIN, Origin

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# How long to wait for a command before the tiers are polled again.
_COMPILE_LOOKS = 4  # at whether threads are late, while a request waits for its grammar
_IDLE_SECONDS = 0.5  # while no transfer is running
_MOVING_SECONDS = 0.002  # while one is


class Stopped(PenstockError):
    """The engine accepts no requests: it is shutting down, or it has failed."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sequence of a request."""

    index: int  # which of the n sequences
    text: str  # new text; may be empty
    sampled: Sampled
    finish_reason: str | None = None  # set in a sequence's last delta
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_lossy_tokens: int = 0  # of the prompt
    num_reused_tokens: int = 0
    num_mended_tokens: int = 0


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
            self.close()  # one failed sequence ends the whole request
            raise delta
        if delta.finish_reason is not None:
            self._open.pop(self.request_ids[delta.index], None)
        return delta

    def close(self) -> None:
        """Abort unfinished sequences. Their blocks are freed at the next step."""
        if self._open:
            self._service.abort(self._open)
            self._open = {}

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _deliver(self, deltas: Sequence[Delta | PenstockError]) -> None:
        for delta in deltas:
            self._arrived.put_nowait(delta)


class Service:
    """Runs an engine on its own thread and streams results to an event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # from other threads, read only what never changes: model, sizes
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[str, tuple[Stream, int]] = {}  # by sequence; only for the thread
        self._progress: list[Progress] = []  # not delivered yet; only for the thread
        self._num_requests = 0
        self._failure: BaseException | None = None
        self.ended: Future[None] = Future()  # done when the thread has closed the engine
        self._closing = False
        self._gate = threading.Lock()  # no command may be queued after the thread's last read
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread, if any."""
        return self._failure

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        priority: int = 0,
        origin: Origin = NO_ORIGIN,
        segments: Sequence[tuple[int, int]] = (),
    ) -> Stream:
        """Queue a request. Its n sequences are accepted together or not at all.

        Raises Stopped, or whatever `Engine.add` raises.
        """
        prompt_ids = self.engine.intake.check(prompt_ids, params, priority=priority, tenant=tenant)
        grammar = await self._compile(params)
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
                        segments=segments,
                        grammar=grammar,
                    )
                    added.append(name)
            except Exception as error:
                try:
                    for name in added:
                        self.engine.abort(name)
                finally:  # also if abort fails
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
            self.abort(names)  # queued after `add`, so it also works if `add` has not run yet
            raise
        return stream

    async def _compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """Compile the request's grammar, on a thread that no other request waits for."""
        if params.structure is None:
            return None
        compiling = asyncio.wrap_future(self.engine.grammars.submit(params.structure))
        try:
            for _ in range(_COMPILE_LOOKS):
                await asyncio.wait([compiling], timeout=COMPILE_SECONDS / _COMPILE_LOOKS)
                if compiling.done():
                    return compiling.result()
                self.engine.grammars.replace_late()
        finally:
            compiling.cancel()
        raise UnusableStructure(
            f"the schema or grammar was not compiled within {COMPILE_SECONDS:.0f} s; simplify it, "
            "or send the request again if the server is busy."
        )

    async def hint(
        self,
        hint: Hint,
        prompt_ids: Sequence[int] = (),
        *,
        tenant: str = "",
        segments: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Like `Engine.hint`. Raises Stopped."""
        prompt_ids = self.engine.intake.check_prompt(prompt_ids)
        self.engine.intake.check_tenant(tenant)
        return await self._ask(
            lambda: self.engine.hint(hint, prompt_ids, tenant=tenant, segments=segments)
        )

    async def census(self) -> list[Sighting]:
        """Like `Engine.census`, taken between two steps. Raises Stopped."""
        return await self._ask(self.engine.census)

    async def _ask(self, question: Callable[[], _Result]) -> _Result:
        """Run `question` on the engine's thread and return its result."""
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
                raise Stopped(
                    "the engine is shutting down and accepts no more requests; send the request "
                    "to another instance, or later."
                )
            self._commands.put(command)

    def abort(self, request_ids: Sequence[str] | dict[str, None]) -> None:
        """Abort sequences, from any thread. Finished ones are ignored."""
        names = list(request_ids)

        def drop() -> None:
            for name in names:
                self.engine.abort(name)
                self._streams.pop(name, None)

        self._commands.put(drop)

    async def close(self, grace_seconds: float = 30.0) -> None:
        """Accept no more requests, finish the running ones, drain saves, close the tiers.

        Requests that have not finished after `grace_seconds` are aborted: their streams raise
        Stopped.
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
            log.exception("the engine failed and cannot continue")
            self._failure = error
        self._end_streams()
        try:
            self.engine.close()
        except Exception:
            log.exception("the engine failed to close cleanly")
        finally:
            _resolve(self.ended, None)

    def _compute(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run_commands()
                self._progress = self.engine.step(self._deliver)
                self._deliver_failures()
        finally:
            self._deliver()  # tokens computed before the end are still delivered

    def _run_commands(self) -> None:
        """Run all queued commands. If the engine has no work, wait for one."""
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

    def _deliver(self) -> None:
        """Deliver the last step's output. A GPU computes the next step meanwhile."""
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

    def _deliver_failures(self) -> None:
        """End the streams of requests that failed. Other requests are not affected."""
        for request, error in self.engine.take_failed():
            found = self._streams.pop(request.id, None)
            if found is not None:
                self._send(found[0], [error])

    def _end_streams(self) -> None:
        """The engine has stopped: fail all streams, and all commands queued meanwhile."""
        reason = Stopped(
            "the engine stopped before the request had finished; send the request again."
        )
        with self._gate:
            self._closing = True
        while True:
            try:
                self._commands.get_nowait()()
            except Empty:
                break
            except Exception:  # a failed engine may fail again; the other commands still run
                log.exception("the engine failed at one of its last commands")
        for stream in {stream for stream, _ in self._streams.values()}:
            self._send(stream, [reason])
        self._streams.clear()

    @staticmethod
    def _send(stream: Stream, deltas: Sequence[Delta | PenstockError]) -> None:
        try:
            stream._loop.call_soon_threadsafe(stream._deliver, deltas)
        except RuntimeError:  # its event loop is closed
            stream.close()


def _resolve(future: Future[_Result], result: _Result) -> None:
    with suppress(InvalidStateError):  # the caller was cancelled
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
        min(request.num_lossy_tokens, len(request.prompt_ids)),
        request.num_reused_tokens,
        request.num_mended_tokens,
    )
