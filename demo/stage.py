"""What all parts of the demo share: the model, engines, comparison of outputs, the screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from texts import Writer

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.events import Event, Moved, TicketDone
from penstock.types import Direction, Tier
from penstock.units import counted

MODEL = "smollm2-135m"
# In other batches, sums are added in another order and differ in their last bits. In float32 that
# is too little to change the most likely token; in bfloat16 it can be enough, in any engine.
DTYPE = "float32"

Tick = Callable[[float, str], None]
"""Called with the share that is done, from 0 to 1, and a short text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's tokens and measurements."""

    prompt_ids: list[int]
    token_ids: list[int]
    first_token_seconds: float
    seconds: float
    finished: float  # on the monotonic clock
    num_cached: int  # prompt tokens that were not computed
    num_loaded: int
    num_recomputed: int  # tokens recomputed after a preemption of this request
    num_preemptions: int


@dataclass(slots=True)
class Ear:
    """An observer that counts what was loaded."""

    num_bytes: dict[Tier, int] = field(default_factory=dict)
    load_seconds: float = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Moved) and event.direction is Direction.LOAD:
            self.num_bytes[event.source] = self.num_bytes.get(event.source, 0) + event.num_bytes
        elif isinstance(event, TicketDone) and event.direction is Direction.LOAD:
            self.load_seconds += event.seconds

    def clear(self) -> None:
        self.num_bytes.clear()
        self.load_seconds = 0.0


class Comparison:
    """Compares outputs with those of the run without loads."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.num_tokens = 0
        self.different: list[str] = []

    def hold(self, name: str, expected: Sequence[object], found: Sequence[object]) -> bool:
        self.num_compared += 1
        self.num_tokens += len(expected)
        same = list(expected) == list(found)
        if not same:
            self.different.append(f"{name}: expected {expected}, found {found}")
        return same

    @property
    def verdict(self) -> str:
        if not self.different:
            return f"{self.num_compared} outputs compared, all identical"
        return f"{self.num_compared} outputs compared, {len(self.different)} DIFFERENT"


class Screen:
    """Prints results and live progress. Without a terminal, only one line per finished part."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str = "", style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False)

    @contextmanager
    def progress(self, doing: str) -> Iterator[Tick]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(36),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
        )
        shown = self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=not shown) as bars:
            bar = bars.add_task(doing, total=None, words="")  # indeterminate until the first tick
            yield lambda share, words: bars.update(bar, total=1.0, completed=share, words=words)


@dataclass(slots=True)
class Stage:
    loaded: LoadedModel
    writer: Writer
    screen: Screen
    comparison: Comparison

    @property
    def token_bytes(self) -> int:
        model = self.loaded
        num_bytes: int = model.dtype.itemsize
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * num_bytes

    @contextmanager
    def engine(
        self,
        num_tokens: int,
        block_tokens: int,
        tiers: Config | None = None,
        ear: Ear | None = None,
    ) -> Iterator[Engine]:
        """Open an engine whose device pool holds `num_tokens`; its books are checked at the end."""
        pool_bytes = -(-num_tokens // block_tokens) * block_tokens * self.token_bytes
        config = EngineConfig(pool_bytes, block_tokens, max_waiting=1 << 20)
        engine = Engine(self.loaded, config, tiers, () if ear is None else (ear,))
        try:
            yield engine
            engine.check()
        finally:
            engine.close()

    def tiers(self, num_tokens: int, directory: Path | None = None) -> Config:
        """Tiers with ample room for `num_tokens`: DRAM and, if there is a `directory`, disk."""
        num_bytes = num_tokens * self.token_bytes * 5 // 4
        disk = DiskConfig()
        if directory is not None:
            disk = DiskConfig(path=str(directory), size_bytes=2 * num_bytes)
        return Config(HostConfig(size_bytes=num_bytes), disk)


class OutOfTime(Exception):
    """A prompt was aborted after `num_tokens` of it had been computed in `seconds`."""

    def __init__(self, num_tokens: int, seconds: float) -> None:
        super().__init__(f"{num_tokens} tokens took {seconds:.1f} s")
        self.num_tokens = num_tokens
        self.seconds = seconds


def ask(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_tokens: int,
    tick: Tick | None = None,
    max_seconds: float | None = None,
) -> list[Answer]:
    """Complete all prompts at once, greedily.

    Raises OutOfTime if there is no first token after `max_seconds`.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    name = time.monotonic_ns()
    requests = [engine.add(f"{name}-{n}", ids, params) for n, ids in enumerate(prompts)]
    while engine.has_work:
        engine.step()
        if tick is not None:
            tick(*_share(engine, requests))
        first, seconds = requests[0], time.monotonic() - requests[0].arrival
        if max_seconds is not None and seconds > max_seconds and first.first_token_time is None:
            num_computed = first.num_computed
            for request in requests:
                engine.abort(request.id)
            raise OutOfTime(num_computed, seconds)
    return [_answer(request) for request in requests]


def _share(engine: Engine, requests: Sequence[Request]) -> tuple[float, str]:
    if len(requests) == 1:
        (request,) = requests
        num_prompt = len(request.prompt_ids)
        num_done = min(request.num_computed, num_prompt)
        return num_done / num_prompt, f"{num_done:,} of {num_prompt:,} tokens"
    num_done = sum(request.finish_reason is not None for request in requests)
    scheduler = engine.scheduler
    return num_done / len(requests), (
        f"{num_done} of {len(requests)} answered, {scheduler.num_running} running, "
        f"{scheduler.num_loading} loading, {counted(scheduler.num_preemptions, 'preemption')}"
    )


def _answer(request: Request) -> Answer:
    assert request.first_token_time is not None
    assert request.finished_time is not None
    return Answer(
        list(request.prompt_ids),
        request.output_ids,
        request.first_token_time - request.arrival,
        request.finished_time - request.arrival,
        request.finished_time,
        request.num_cached_tokens,
        request.num_loaded_tokens,
        request.num_recomputed_tokens,
        request.num_preemptions,
    )


def json_ready(value: Any) -> Any:
    """Convert tuples and keys to what JSON supports, and round floats to six decimals."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value
