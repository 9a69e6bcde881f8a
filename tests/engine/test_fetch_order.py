"""No buffer is overwritten while it is read, nor read before it is full, whatever the GPU's timing.

A GPU that is only imagined notes what each piece of work waits for. Two pieces that touch the same
memory must have an order, unless both only read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.lossless_format import LosslessFormat

pytest.importorskip("triton")
from penstock.engine import fetching
from penstock.engine.attention import packed_triton
from penstock.engine.attention import triton as kernels
from penstock.engine.decode_plan import DecodePlan
from penstock.engine.table import PACKED_MARK

LAYER = (2, 8, 1, 64)
MAX_FETCHED = 4


class Gpu:
    """Streams, events and graphs, as in `torch.cuda`. Each piece of work is a bit of an integer."""

    def __init__(self) -> None:
        self.main = self.current = Stream(self)
        self.captured: list[Callable[[], None]] | None = None
        self.content: dict[str, Any] = {}
        self._next_work = 1
        self._written: dict[str, int] = defaultdict(int)
        self._read_since: dict[str, int] = defaultdict(int)

    def queue(self, what: Callable[[], None]) -> None:
        if self.captured is None:
            what()
        else:
            self.captured.append(what)

    def work(self, reads: list[str], writes: str = "", does: Callable[[], Any] = str) -> None:
        """Queue work on the current stream. What `does` returns is written."""
        stream = self.current
        self.queue(lambda: self._work(stream, reads, writes, does))

    def _work(self, stream: Stream, reads: list[str], writes: str, does: Callable[[], Any]) -> None:
        work, self._next_work = self._next_work, 2 * self._next_work
        content = does()
        for memory in reads:
            assert not self._written[memory] & ~stream.before, f"{memory} may not be full yet"
            self._read_since[memory] |= work
        if writes:
            earlier = self._read_since.pop(writes, 0) | self._written[writes]
            assert not earlier & ~stream.before, f"{writes} may be in use"
            self._written[writes] = work
            self.content[writes] = content
        stream.before |= work

    @contextmanager
    def capture(self) -> Iterator[list[Callable[[], None]]]:
        captured: list[Callable[[], None]] = []
        self.captured = captured
        yield captured
        self.captured = None

    def replay(self, graph: list[Callable[[], None]], others: list[Stream]) -> None:
        """Replay on the main stream. The graph does not run on the `others` it was captured on."""
        outside = [stream.before for stream in others]
        for stream in others:
            stream.before = 0
        for what in graph:
            what()
        for stream, before in zip(others, outside, strict=True):
            self.main.before |= stream.before  # a graph ends when all of it has ended
            stream.before = before

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def Event(self, *, external: bool = False) -> Event:  # noqa: N802
        return Event(self)


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.before = 0  # work that has ended when the next begins

    def wait_event(self, event: Event) -> None:
        self._gpu.queue(lambda: self._wait(event))

    def wait_stream(self, other: Stream) -> None:
        self._gpu.queue(lambda: self._wait(other))

    def _wait(self, other: Event | Stream) -> None:
        self.before |= other.before


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.before = 0

    def record(self) -> None:
        stream = self._gpu.current
        self._gpu.queue(lambda: self._record(stream))

    def _record(self, stream: Stream) -> None:
        self.before = stream.before


class Steps:
    """A fetcher, and steps that use it as the runner does."""

    def __init__(
        self,
        gpu: Gpu,
        num_layers: int,
        num_buffers: int,
        monkeypatch: pytest.MonkeyPatch,
        *,
        packed: bool,
    ) -> None:
        self._gpu = gpu
        self._num_layers = num_layers
        self._num_left = -1  # fetches until one fails
        plan = DecodePlan(4, 64, 8, 16, torch.device("cpu"), MAX_FETCHED)
        form = LosslessFormat(64, 8, 2 * num_layers) if packed else None
        like = torch.empty(0, dtype=torch.bfloat16)
        num_buffers = max(1, min(num_buffers, num_layers // 2))
        self._fetcher = fetcher = fetching.Fetcher(plan, num_buffers, num_layers, LAYER, like, form)
        self._names = {plan.waves.data_ptr(): "plan", fetcher._ahead.waves.data_ptr(): "ahead"}
        for kind, tensors in (("buffer", fetcher._buffers), ("arrival", fetcher._arrivals)):
            self._names |= {t.data_ptr(): f"{kind} {n}" for n, t in enumerate(tensors)}
        layer_bytes = 2 * 8 * 64 * 2
        offsets = [layer * layer_bytes for layer in range(num_layers)]
        if form is not None:
            offsets = [packed_triton.packed_at(form, offset) - PACKED_MARK for offset in offsets]
        self._layers = {offset: layer for layer, offset in enumerate(offsets)}
        monkeypatch.setattr(fetching, "_cuda", gpu)
        monkeypatch.setattr(kernels, "fetch_layer", self._fetch_layer)
        monkeypatch.setattr(packed_triton, "unpack_layer", self._unpack_layer)
        monkeypatch.setattr(torch, "add", lambda *_, out: gpu.work(["plan"], "ahead"))
        fetcher._streams = self._streams = [Stream(gpu) for _ in range(fetching._NUM_STREAMS)]
        for events in (fetcher._all_arrived, fetcher._are_free, fetcher._arrived_ahead):
            events[:] = [fetching._Event(on_gpu=True) for _ in events]
        with gpu.capture() as self._graph:
            self._step(fetches=True)

    def run(self, num_waves: int, *, use_graph: bool, is_steady: bool, fails_after: int) -> None:
        """`num_waves` is 0 in a step that fetches nothing."""
        self._num_left = fails_after
        try:
            self._fetcher.choose_nothing()
            self._fetcher._num_waves = max(1, num_waves)
            self._gpu.work([], "plan")
            if use_graph and num_waves == 1:
                self._gpu.replay(self._graph, self._streams)
            else:
                self._step(fetches=num_waves > 0)
            self._fetcher._choice.is_steady = is_steady and num_waves > 0
            self._fetcher.fetch_ahead()
        except Injected:
            self._fetcher.cut_short()

    def _step(self, *, fetches: bool) -> None:
        fetcher = self._fetcher
        if not fetches:
            return
        fetcher.begin()
        for layer in range(self._num_layers):
            for wave in range(fetcher._num_waves):
                buffer = self._names[fetcher.address(layer, wave)]
                self._gpu.work([buffer, "plan"], does=self._expecting(buffer, (layer, wave)))
                fetcher.end(layer, wave)

    def _expecting(self, memory: str, unit: tuple[int, int]) -> Callable[[], None]:
        def check() -> None:
            assert self._gpu.content[memory] == unit

        return check

    def _count(self) -> None:
        if self._num_left == 0:
            raise Injected
        self._num_left -= 1

    def _fetch_layer(
        self, _: Any, waves: Any, wave: int, offset: int, out: Any, *__: Any, **which: bool
    ) -> None:
        self._count()
        unit = (self._layers[offset], wave)
        names = self._names
        self._gpu.work([names[waves.data_ptr()]], names[out.data_ptr()], lambda: unit)

    def _unpack_layer(
        self, arrived: Any, waves: Any, wave: int, out: Any, *_: Any, **which: bool
    ) -> None:
        self._count()
        names, content = self._names, self._gpu.content
        arrival = names[arrived.data_ptr()]
        reads = [arrival, names[waves.data_ptr()]]
        self._gpu.work(reads, names[out.data_ptr()], lambda: content[arrival])


class Injected(Exception):
    pass


STEP = st.tuples(
    st.sampled_from([0, 1, 1, 1, 2, 3, 9]),
    st.booleans(),
    st.booleans(),
    st.one_of(st.just(-1), st.integers(0, 30)),
)


@given(st.integers(1, 20), st.integers(1, 8), st.booleans(), st.lists(STEP, min_size=2, max_size=6))
def test_all_work_on_a_buffer_has_an_order(
    num_layers: int, num_buffers: int, packed: bool, steps: list[tuple[int, bool, bool, int]]
) -> None:
    """Even after steps that failed halfway, before all that they fetch was read."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tried = Steps(Gpu(), num_layers, num_buffers, monkeypatch, packed=packed)
        for num_waves, use_graph, is_steady, fails_after in steps:
            tried.run(num_waves, use_graph=use_graph, is_steady=is_steady, fails_after=fails_after)
