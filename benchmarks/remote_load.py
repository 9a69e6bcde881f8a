"""Eight instances share one Redis that evicts, for minutes: blocks may be lost, never wrong.

    python -m benchmarks.remote_load --minutes 10

Each instance is a separate process with DRAM for a few prompts. It looks prompts up, loads what is
there, saves the rest, and compares every loaded block with its expected content. From time to time
the server is paused, or killed and restarted. At the end it prints the blocks moved, the blocks
lost and why, and each instance's memory over time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from penstock.build import build_offloader
from penstock.config import Config, HostConfig, RemoteConfig
from penstock.events import Event, Lost, Moved
from penstock.offload import Offloader
from penstock.stores.host import HostArena
from penstock.types import BlockKey, BlockSpec, Slot, Tier, Verdict
from servers.redis_server import RedisServer

BLOCK_BYTES = 1_474_560
PROMPT_BLOCKS = 12
NUM_PROMPTS = 60
SPEC = BlockSpec(bytes(32), BLOCK_BYTES, 64)
STALL_SECONDS = 30.0  # longer than any deadline


@dataclass
class Report:
    instance: int
    num_prompts: int = 0
    num_loaded: int = 0
    num_saved: int = 0
    num_wrong: int = 0
    num_errors: int = 0  # errors that would have reached a request
    lost: dict[str, int] = field(default_factory=dict)
    longest_seconds: float = 0.0  # for one prompt's lookup and load
    rss_mib: list[int] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote_load", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(
            Path(folder), "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"
        )
        reports = _run(server, options.minutes * 60, options.instances)
        server.kill()
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
        return
    for report in reports:
        memory = " ".join(map(str, report.rss_mib))
        print(
            f"instance {report.instance}: {report.num_prompts:,} prompts, {report.num_loaded:,} "
            f"blocks loaded, {report.num_saved:,} saved, {report.num_wrong} wrong, "
            f"{report.num_errors} errors, longest {report.longest_seconds:.2f} s, "
            f"lost {report.lost}, MiB over time: {memory}"
        )
    total = sum(report.num_loaded for report in reports) * BLOCK_BYTES
    print(f"{total / options.minutes / 60 / 1e9:.2f} GB/s loaded and compared in total")


def _run(server: RedisServer, seconds: float, num_instances: int) -> list[Report]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(num_instances):
        ours, theirs = context.Pipe()
        process = context.Process(target=_live, args=(number, server.url, seconds, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    end = time.monotonic() + seconds
    rng = random.Random(0)
    while time.monotonic() < end - 30:
        time.sleep(rng.uniform(10, 30))
        if rng.random() < 0.5:
            server.pause()
            time.sleep(rng.uniform(0.5, 3))
            server.resume()
        else:
            server.kill()
            time.sleep(rng.uniform(0.5, 3))
            server.start()
        print(f"{end - time.monotonic():.0f} s left", flush=True)
    reports = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return reports


def _live(number: int, url: str, seconds: float, results: Connection) -> None:
    report = Report(number)
    lost: Counter[str] = Counter()

    def observe(event: Event) -> None:
        if isinstance(event, Lost):
            lost[f"{event.source.label} to {event.target.label}: {event.verdict.label}"] += (
                event.num_blocks
            )
        if isinstance(event, Moved) and event.target is Tier.REMOTE:
            report.num_saved += event.num_blocks

    device = HostArena(SPEC, PROMPT_BLOCKS * SPEC.stride_bytes)
    config = Config(
        HostConfig(size_bytes=4 * PROMPT_BLOCKS * SPEC.stride_bytes),
        remote=RemoteConfig(url=url, timeout_seconds=2.0, lookup_deadline_seconds=0.25),
    )
    offloader = build_offloader(config, SPEC, device, observers=[observe])
    rng = random.Random(number)
    end = time.monotonic() + seconds
    next_look = 0.0
    while time.monotonic() < end:
        try:
            _one_prompt(offloader, device, rng, report)
            offloader.check()
        except Exception as error:
            report.num_errors += 1
            print(f"instance {number}: {error!r}", flush=True)
        if time.monotonic() >= next_look:
            report.rss_mib.append(_resident_mib())
            next_look = time.monotonic() + seconds / 8
    offloader.close()
    report.lost = dict(lost)
    results.send(report)


def _one_prompt(
    offloader: Offloader, device: HostArena, rng: random.Random, report: Report
) -> None:
    prompt = rng.randrange(NUM_PROMPTS)
    keys = [BlockKey(f"{prompt:016}{block:016}".encode()) for block in range(PROMPT_BLOCKS)]
    started = time.monotonic()
    lookup = offloader.lookup(keys)
    while lookup is not None and offloader.is_looking_up(lookup):
        offloader.step()
        offloader.pause(0.002)
        if time.monotonic() - started > STALL_SECONDS:
            raise TimeoutError("a lookup never ended")
    num_found = offloader.match(keys).num_blocks
    slots = [Slot(index) for index in range(PROMPT_BLOCKS)]
    num_ok = 0
    if num_found:
        ticket = offloader.load(keys[:num_found], slots[:num_found])
        dones = offloader.wait([ticket], STALL_SECONDS)
        done = next(done for done in dones if done.ticket == ticket)
        num_ok = done.num_leading_ok
        for key, slot, verdict in zip(done.keys, slots, done.verdicts, strict=False):
            if verdict is Verdict.OK:
                report.num_loaded += 1
                report.num_wrong += bytes(device.view(slot)[:BLOCK_BYTES]) != _content(key)
    report.longest_seconds = max(report.longest_seconds, time.monotonic() - started)
    report.num_prompts += 1
    if num_ok < PROMPT_BLOCKS:  # "computed"
        for key, slot in zip(keys[num_ok:], slots[num_ok:], strict=True):
            device.view(slot)[:BLOCK_BYTES] = _content(key)
        ticket = offloader.save(keys[num_ok:], slots[num_ok:])
        offloader.wait([ticket], STALL_SECONDS)


def _content(key: BlockKey) -> bytes:
    return (key * (BLOCK_BYTES // len(key) + 1))[:BLOCK_BYTES]


def _resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
