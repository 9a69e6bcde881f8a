"""The cost of streaming many answers at once.

    python -m benchmarks.streams [--streams 64] [--step-ms 9]    with a device that is imagined
    python -m benchmarks.streams --model llama [--streams 64]    on a GPU, Llama-3.1-8B's shapes
    python -m benchmarks.streams --model tiny                    shows on a CPU that it works

With an imagined device no model runs: instead the engine's thread pauses, as it does for a GPU, and
returns any token. What is left is Penstock's own work per token: books, sampling, text, events,
HTTP. The time between steps is printed next to the pause, or next to vLLM's time per step, and next
to the same steps without a server. Clients run in a separate process; on a machine with two cores
they take part of the CPU time.
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
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

import penstock.engine.open as open_module
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
    is_doubtful = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        torch.manual_seed(0)
        # A small vocabulary, because a GPU's argmax would be part of its own time.
        self._logits = torch.rand(4096, 1000)
        self._next = 0
        self._ends = 0.0

    def run(
        self, chunks: Sequence[Chunk], between_layers: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
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


@dataclass(frozen=True)
class Device:
    """What computes the steps: a model, or a pause of so many seconds."""

    options: EngineOptions
    prompt_tokens: int
    pause_seconds: float | None = None


def imagined(num_streams: int, pause_seconds: float) -> Device:
    options = EngineOptions(
        "smollm2-135m",
        device="cpu",
        device_kv_gib=1.0,
        max_num_seqs=num_streams,
        max_num_batched_tokens=4096,
        kv_offloading_size=0,
    )
    return Device(options, 20, pause_seconds)


def real(num_streams: int, tiny: bool) -> Device:
    """A model with random weights, whatever model the options name."""
    from benchmarks.gpu_model import random_llama, tiny_llama

    loaded = tiny_llama() if tiny else random_llama()
    open_module.load_model = lambda *_, **__: loaded  # type: ignore[attr-defined]
    options = EngineOptions(
        "random",
        device=str(loaded.device),
        device_kv_gib=0.1 if tiny else 40.0,
        max_num_seqs=num_streams,
        max_num_batched_tokens=4096,
        kv_offloading_size=0.1 if tiny else 16.0,
    )
    return Device(options, 64 if tiny else 2048)


class Watch:
    """Records the start of each step in which every sequence takes part."""

    def __init__(self, engine: Engine, num_streams: int, pause_seconds: float | None) -> None:
        if pause_seconds is not None:
            engine.runner = Pause(pause_seconds)
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


def prompt(number: int, num_tokens: int) -> list[int]:
    return [5 + (number + place) % 90 for place in range(num_tokens)]


def alone(num_streams: int, device: Device) -> float:
    engine = open_engine(device.options)
    watch = Watch(engine, num_streams, device.pause_seconds)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for number in range(num_streams):
        engine.add(str(number), prompt(number, device.prompt_tokens), params)
    while engine.has_work:
        engine.step()
    engine.close()
    return watch.ms()


def served(num_streams: int, device: Device) -> float:
    backend = Backend(Metrics())
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    watches: list[Watch] = []

    def load() -> Serving:
        serving = load_serving(
            device.options,
            None,
            observers=backend.observers,
            names=("it",),
            tell=lambda _: None,
        )
        watches.append(Watch(serving.service.engine, num_streams, device.pause_seconds))
        return serving

    process = Process(listener, backend, load, ProcessSettings(), lambda _: ready.set())

    def run() -> None:
        try:
            asyncio.run(process.run())
        finally:
            ready.set()  # also if the model could not be loaded

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    if not watches:
        raise SystemExit("the server did not start")
    port = listener.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.streams", "--client", str(port)]
    sizes = ["--streams", str(num_streams), "--prompt-tokens", str(device.prompt_tokens)]
    subprocess.run([*command, *sizes], check=True)
    process.stop()
    thread.join()
    return watches[0].ms()


async def read_all(port: int, num_streams: int, prompt_tokens: int) -> None:
    """Act as clients: each sends a request and reads the answer to its end."""

    async def read(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ids = prompt(number, prompt_tokens)
        asked = {"prompt": ids, "max_tokens": NEW_TOKENS, "stream": True}
        body = json.dumps({**asked, "temperature": 0, "ignore_eos": True}).encode()
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}".encode() + body)
        if not (status := await reader.readline()).startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{status!r}: {(await reader.read(1 << 16)).decode()}")
        while b"[DONE]" not in (data := await reader.read(1 << 16)):
            if not data:
                raise SystemExit("an answer ended early")

    await asyncio.gather(*map(read, range(num_streams)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=9.0, help="the device's time per step")
    parser.add_argument("--model", choices=("imagined", "llama", "tiny"), default="imagined")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--prompt-tokens", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    num = given.streams
    if given.client is not None:
        asyncio.run(read_all(given.client, num, given.prompt_tokens))
        return
    row: dict[str, Any] = {"streams": num, "model": given.model}
    if given.model == "imagined":
        device, limit, limit_ms = imagined(num, given.step_ms / 1e3), "device", given.step_ms
    else:
        from benchmarks.gpu_decode import VLLM_MS

        # Measured earlier, on an H200, for these numbers of streams.
        device, limit = real(num, given.model == "tiny"), "vllm"
        limit_ms = VLLM_MS.get(num) if given.model == "llama" else None
    row["engine_ms"] = round(alone(num, device), 2)
    row["served_ms"] = round(served(num, device), 2)
    if limit_ms is not None:
        row[f"{limit}_ms"] = limit_ms
        row[f"{limit}/engine"] = round(limit_ms / row["engine_ms"], 2)
        row[f"{limit}/served"] = round(limit_ms / row["served_ms"], 2)
    row["tokens_per_second"] = round(num / row["served_ms"] * 1e3)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
