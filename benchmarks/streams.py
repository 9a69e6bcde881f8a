"""The cost of streaming many answers at once, with a device that takes a fixed time per step.

    python -m benchmarks.streams [--streams 64] [--step-ms 9]

No model runs: instead the engine's thread pauses, as it does for a GPU, and returns any token. What
is left is Penstock's own work per token: books, sampling, text, events, HTTP. The time between
steps is printed next to the pause, and next to the same steps without a server. Clients run in a
separate process; on a machine with two cores they take part of the CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from penstock.config.options import EngineOptions
from penstock.engine.engine import Engine
from penstock.engine.open import open_engine
from penstock.engine.params import SamplingParams
from penstock.engine.scheduler import Chunk
from penstock.metrics import Metrics
from penstock.server.backend import Backend, Serving
from penstock.server.listening import bind
from penstock.server.load import load_serving
from penstock.server.process import Process, ProcessSettings

NEW_TOKENS = 300


class Pause:
    """A runner that computes nothing and takes a given time."""

    only_queues = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        torch.manual_seed(0)
        # A small vocabulary, because a GPU's argmax would be part of its own time.
        self._logits = torch.rand(4096, 1000)
        self._next = 0
        self._ends = 0.0

    def run(self, chunks: Sequence[Chunk], between_layers: Callable[[], None]) -> torch.Tensor:
        self._ends = max(self._ends, time.perf_counter()) + self._seconds
        num = sum(chunk.samples for chunk in chunks)
        self._next = (self._next + num) % (len(self._logits) - num)
        return self._logits[self._next : self._next + num]

    def mark(self) -> float:
        return self._ends

    def wait(self, between_layers: Callable[[], None], end: float | None = None) -> None:
        time.sleep(max(0.0, (end or self._ends) - time.perf_counter()))

    def post(self, numbers: torch.Tensor) -> Callable[[], list[int]]:
        return numbers.tolist

    def warm_up(self, progress: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        pass


def options(num_streams: int) -> EngineOptions:
    return EngineOptions(
        "smollm2-135m",
        device="cpu",
        device_kv_gib=1.0,
        max_num_seqs=num_streams,
        max_num_batched_tokens=4096,
        kv_offloading_size=0,
    )


class Watch:
    """Records the start of each step in which every sequence takes part."""

    def __init__(self, engine: Engine, num_streams: int, seconds: float) -> None:
        engine.runner = Pause(seconds)
        self.began: list[float] = []
        step = engine.step

        def timed(*given: Any) -> Any:
            started = time.perf_counter()
            progress = step(*given)
            if len(progress) == num_streams:
                self.began.append(started)
            return progress

        engine.step = timed  # type: ignore[method-assign]

    def ms(self) -> float:
        return median(after - before for before, after in pairwise(self.began)) * 1e3


def alone(num_streams: int, seconds: float) -> float:
    engine = open_engine(options(num_streams))
    watch = Watch(engine, num_streams, seconds)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for number in range(num_streams):
        engine.add(str(number), [number + 100] * 20, params)
    while engine.has_work:
        engine.step()
    engine.close()
    return watch.ms()


def served(num_streams: int, seconds: float) -> float:
    backend = Backend(Metrics())
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    watches: list[Watch] = []

    def load() -> Serving:
        serving = load_serving(
            options(num_streams),
            None,
            observers=backend.observers,
            names=("it",),
            tell=lambda _: None,
        )
        watches.append(Watch(serving.service.engine, num_streams, seconds))
        return serving

    process = Process(listener, backend, load, ProcessSettings(), lambda _: ready.set())
    thread = threading.Thread(target=lambda: asyncio.run(process.run()))
    thread.start()
    ready.wait()
    port = listener.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.streams", "--client", str(port)]
    subprocess.run([*command, "--streams", str(num_streams)], check=True)
    process.stop()
    thread.join()
    return watches[0].ms()


async def read_all(port: int, num_streams: int) -> None:
    """Act as clients: each sends a request and reads the answer to its end."""

    async def read(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = {"prompt": f"{number} once upon a time", "max_tokens": NEW_TOKENS, "stream": True}
        body = json.dumps({**asked, "temperature": 0, "ignore_eos": True}).encode()
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: it\r\n{head}".encode() + body)
        while b"[DONE]" not in (data := await reader.read(1 << 16)):
            if not data:
                raise SystemExit("an answer ended early")

    await asyncio.gather(*map(read, range(num_streams)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=9.0, help="the device's time per step")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client is not None:
        asyncio.run(read_all(given.client, given.streams))
        return
    row: dict[str, Any] = {"streams": given.streams, "device_ms": given.step_ms}
    row["engine_ms"] = round(alone(given.streams, given.step_ms / 1e3), 2)
    row["served_ms"] = round(served(given.streams, given.step_ms / 1e3), 2)
    row["device/engine"] = round(given.step_ms / row["engine_ms"], 2)
    row["device/served"] = round(given.step_ms / row["served_ms"], 2)
    row["tokens_per_second"] = round(given.streams / row["served_ms"] * 1e3)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
