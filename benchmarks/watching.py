"""The cost of metrics and the dashboard: the same load on a server with and without them.

    python -m benchmarks.watching [--rounds 12] [--json]

Two servers with SmolLM2 on this machine, each in its own process: `watched` is a normal
`penstock serve` with two dashboards open and /metrics scraped every second; `mute` has no observers
and no dashboard. The same requests go to both, alternately. It prints tokens per second, and CPU
seconds per thousand tokens, which other work on the machine disturbs less. The cost is the
difference of the medians; compare it with the spread between equal rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

CLIENTS = 4
REQUESTS = 12  # per round, all different, so that prompts are computed
PROMPT = "The gate opens and the water runs down to the wheel. " * 24
NEW_TOKENS = 48
NUM_DASHBOARDS = 2
KINDS = ("watched", "mute")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Round:
    tokens_per_second: float
    cpu_seconds_per_1000: float


class Server:
    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-m", "benchmarks.watching", "--serve", kind]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise SystemExit(f"the {kind} server did not start")
        self.num_asked = 0

    def cpu_seconds(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def round(self) -> Round:
        work = [self.num_asked + number for number in range(REQUESTS)]
        self.num_asked += REQUESTS
        lock = threading.Lock()

        def ask() -> None:
            with httpx.Client(base_url=self.url, timeout=600) as client:
                while True:
                    with lock:
                        if not work:
                            return
                        number = work.pop()
                    body = {
                        "prompt": f"{number} {PROMPT}",
                        "max_tokens": NEW_TOKENS,
                        "ignore_eos": True,
                        "temperature": 0,
                        "stream": True,
                    }
                    client.post("/v1/completions", json=body).raise_for_status()

        before, started = self.cpu_seconds(), time.perf_counter()
        threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds, cpu = time.perf_counter() - started, self.cpu_seconds() - before
        num_tokens = REQUESTS * NEW_TOKENS
        return Round(num_tokens / seconds, cpu / num_tokens * 1000)

    def watch(self, is_over: threading.Event) -> list[threading.Thread]:
        """Keep dashboards open and scrape /metrics, each on its own thread."""

        def follow_live() -> None:
            with (
                httpx.Client(base_url=self.url, timeout=60) as client,
                client.stream("GET", "/v1/penstock/live") as response,
            ):
                for _ in response.iter_bytes():
                    if is_over.is_set():
                        return

        def scrape() -> None:
            with httpx.Client(base_url=self.url, timeout=60) as client:
                while not is_over.wait(1):
                    client.get("/metrics")

        threads = [threading.Thread(target=follow_live) for _ in range(NUM_DASHBOARDS)]
        return [*threads, threading.Thread(target=scrape)]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def serve(kind: str) -> None:
    """In a separate process: `penstock serve`, or the same without observers and dashboard."""
    from penstock.config import Config, HostConfig
    from penstock.config.options import EngineOptions
    from penstock.metrics import Metrics
    from penstock.server.backend import Backend, Serving
    from penstock.server.listening import bind, url_of
    from penstock.server.load import load_serving
    from penstock.server.process import Process, ProcessSettings
    from penstock.server.watching import Watch

    backend = Backend(Metrics())
    observers = backend.observers if kind == "watched" else ()
    if kind == "mute":
        Watch.start = lambda self: None  # type: ignore[method-assign]
    bound = bind("127.0.0.1", 0)

    def load() -> Serving:
        return load_serving(
            EngineOptions(device_kv_gib=0.5),
            Config(HostConfig(size_bytes=1 << 30)),
            observers=observers,
            names=(),
            tell=lambda _: None,
        )

    def announce(_: Serving) -> None:
        print(url_of(bound), flush=True)

    process = Process(bound, backend, load, ProcessSettings(), announce)
    asyncio.run(process.run())


def summarize(rounds: Sequence[Round]) -> dict[str, float]:
    speeds = [each.tokens_per_second for each in rounds]
    cpu = [each.cpu_seconds_per_1000 for each in rounds]
    return {
        "tokens_per_second": median(speeds),
        "tokens_per_second_spread": spread(speeds),
        "cpu_seconds_per_1000_tokens": median(cpu),
        "cpu_spread": spread(cpu),
    }


def spread(values: Sequence[float]) -> float:
    """The share of the median within which half of the values are."""
    middle = median(values)
    return median(abs(value - middle) for value in values) / middle


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="of each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    servers = {kind: Server(kind) for kind in KINDS}
    rounds: dict[str, list[Round]] = {kind: [] for kind in KINDS}
    is_over = threading.Event()
    watchers = servers["watched"].watch(is_over)
    try:
        for watcher in watchers:
            watcher.start()
        for server in servers.values():
            server.round()  # pages, threads, compiled code
        for number in range(options.rounds):
            for kind in KINDS if number % 2 else reversed(KINDS):
                rounds[kind].append(servers[kind].round())
                print(f"{number + 1}/{options.rounds} {kind}: {rounds[kind][-1]}", file=sys.stderr)
    finally:
        is_over.set()
        for watcher in watchers:
            watcher.join()
        for server in servers.values():
            server.stop()
    shown: dict[str, Any] = {kind: summarize(rounds[kind]) for kind in KINDS}
    pairs = list(zip(rounds["watched"], rounds["mute"], strict=True))
    shown["throughput_ratio"] = median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)
    shown["cpu_ratio"] = median(a.cpu_seconds_per_1000 / b.cpu_seconds_per_1000 for a, b in pairs)
    if options.json:
        print(json.dumps(shown, indent=2))
        return
    print("| | tokens/s | ± | CPU s per 1,000 tokens | ± |\n|---|---|---|---|---|")
    for kind in KINDS:
        row = shown[kind]
        print(
            f"| {kind} | {row['tokens_per_second']:.1f} | {row['tokens_per_second_spread']:.1%} | "
            f"{row['cpu_seconds_per_1000_tokens']:.2f} | {row['cpu_spread']:.1%} |"
        )
    print(
        f"| watched / mute | {shown['throughput_ratio']:.3f} | | {shown['cpu_ratio']:.3f} | |\n\n"
        "Aim: below 1% of throughput."
    )


if __name__ == "__main__":
    main()
