"""A node against tiers in the same process, on a CPU: what crossing to another process costs.

    python -m benchmarks --only node

Rounds of both alternate. Copies of one block compare memory that processes share, on small and on
huge pages, with memory of one process alone. `match` and `load` are the calls alone: a load is
begun, and its `Done` awaited. A first token is that of the embedded engine with SmolLM2-135M, for a
prompt whose complete blocks are in DRAM and not on the device. Times are medians, in ms; the
fastest round of each is in the row's name, because other work on a machine moves medians more than
minima.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import BLOCK_SIZES, Row, block_spec, filled_arena, seconds_of
from penstock.build import build_offloader
from penstock.codecs.blocks import BlockValues, PartValues
from penstock.config import Config, HostConfig, NodeConfig
from penstock.costs.choose import LoadChoice
from penstock.keys import Namespace, chain
from penstock.node.attach import NodeOpening
from penstock.stores.host import HostArena, HostMemory
from penstock.tiers import Tiers
from penstock.types import Slot
from penstock.units import GiB, MiB

_NUM_BLOCKS = (1, 16, 64, 256)
_PROMPTS = (256, 1024, 2048)
_ROUNDS = 41
_COPY_ROUNDS = 2000

_SERVE = """
import signal, sys
from pathlib import Path
from penstock.config import Config, HostConfig
from penstock.node.service import NodeService
host = HostConfig(size_bytes=int(sys.argv[2]), codec=sys.argv[3])
service = NodeService(Config(host), Path(sys.argv[1]), prepare=True)
signal.signal(signal.SIGTERM, lambda *_: service.stop())
service.serve(lambda: not service.is_preparing)
print("ready", flush=True)
service.serve()
service.close()
"""


def run(folder: Path) -> Iterator[Row]:
    yield from _copies()
    yield from _calls()
    yield from _first_tokens()


@contextmanager
def serving_node(size_bytes: int, codec: str = "auto") -> Iterator[Config]:
    """A node in a process of its own; the settings of its clients."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/node.sock"
        command = [sys.executable, "-c", _SERVE, path, str(size_bytes), codec]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            try:
                yield Config(node=NodeConfig(url=f"unix://{path}"))
            finally:
                os.kill(process.pid, signal.SIGTERM)


def _copies() -> Iterator[Row]:
    """Copies of one block at a time, in random order over more than a cache holds."""
    num_blocks = 64
    spec = block_spec(BLOCK_SIZES["1.4 MiB"])
    own = filled_arena(spec, num_blocks)
    arenas = {"own": own}
    memories = []
    for pages in ("small", "huge"):
        num_bytes = -(-own.num_bytes // (2 * MiB)) * 2 * MiB
        memory = HostMemory(num_bytes, huge_pages=pages == "huge", numa_node=None)
        memory.allocate(0, num_bytes)
        arenas[pages] = HostArena.over(memory.file, spec, num_bytes)
        arenas[pages].buffer[: own.num_bytes] = own.buffer
        memories.append(memory)
    target = memoryview(bytearray(spec.block_bytes))
    times: dict[str, list[float]] = {name: [] for name in arenas}
    rng = random.Random(1)
    for _ in range(_COPY_ROUNDS):
        for name in rng.sample(sorted(arenas), len(arenas)):
            block = arenas[name].view(Slot(rng.randrange(num_blocks)))
            seconds = seconds_of(partial(target.__setitem__, slice(None), block))
            times[name].append(1e3 * seconds)
    limit = median(times["own"])
    for pages in ("small", "huge"):
        ours = median(times[pages])
        fastest = f"fastest {min(times[pages]):.3g} against {min(times['own']):.3g}"
        name = f"copy one block of 1.4 MiB, shared memory on {pages} pages ({fastest})"
        yield Row(name, ours, "ms", limit, "in process", "", limit / ours)
    for memory in memories:
        memory.close()


def _calls() -> Iterator[Row]:
    block_bytes = BLOCK_SIZES["1.4 MiB"]
    num_blocks = max(_NUM_BLOCKS)
    namespace = Namespace("benchmark", "none", "bfloat16", "blocks", 16)
    spec = namespace.block_spec(block_bytes)
    size = (num_blocks + 64) * spec.stride_bytes + 256 * MiB
    device = filled_arena(block_spec(block_bytes), num_blocks)
    keys = chain(namespace, range(16 * num_blocks))
    slots = [Slot(number) for number in range(num_blocks)]
    values = BlockValues((PartValues(block_bytes),))
    with serving_node(size) as config:
        node = NodeOpening(config).attach(spec, device, values)
        own = build_offloader(Config(HostConfig(size_bytes=size)), spec, device)
        for tiers in (node, own):
            (done,) = tiers.wait([tiers.save(keys, slots)])
            assert done.ok

        def match(tiers: Tiers, count: int) -> float:
            return seconds_of(lambda: tiers.match(keys[:count]))

        def load(tiers: Tiers, count: int) -> float:
            def work() -> None:
                ticket = tiers.load(keys[:count], slots[:count])
                while not (dones := tiers.step()):
                    tiers.pause(0.01)
                assert [(done.ticket, done.ok) for done in dones] == [(ticket, True)]

            return seconds_of(work)

        for count in _NUM_BLOCKS:
            yield _row(f"match {count} blocks", match, node, own, count)
        for count in _NUM_BLOCKS:
            yield _row(f"load {count} blocks of 1.4 MiB", load, node, own, count)
        node.close()
        own.close()


def _first_tokens() -> Iterator[Row]:
    from penstock.config.options import EMBEDDED
    from penstock.engine.engine import Engine
    from penstock.engine.models import load_model
    from penstock.engine.params import SamplingParams
    from penstock.engine.parts import EngineConfig

    loaded = load_model(EMBEDDED, dtype="float32", device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rng = random.Random(1)
    with serving_node(2 * GiB) as config:
        engines = [
            Engine(loaded, EngineConfig(GiB), tiers)
            for tiers in (config, Config(HostConfig(size_bytes=2 * GiB)))
        ]
        for engine in engines:
            engine.scheduler._choose = lambda match, num_past: LoadChoice(match.num_blocks)

        def first(engine: Engine, prompt: list[int]) -> float:
            assert engine.offloader is not None
            engine.offloader.drain(60)
            engine.step()
            engine.pool.distrust()  # forget what is on the device
            request = engine.add("request", prompt, params)
            while engine.has_work:
                engine.step()
            assert request.first_token_time is not None
            return request.first_token_time - request.arrival

        for num_tokens in _PROMPTS:
            # One token after the last complete block: only that is computed.
            whole = num_tokens // engines[0].block_tokens * engines[0].block_tokens
            prompt = [rng.randrange(1, 40_000) for _ in range(whole + 1)]
            for engine in engines:
                first(engine, prompt)  # computes and saves it
            yield _row(f"first token, {whole} tokens from DRAM", first, *engines, prompt)
        for engine in engines:
            engine.close()


def _row(name: str, work: Callable[..., float], node: Any, own: Any, what: Any) -> Row:
    times: dict[str, list[float]] = {"node": [], "own": []}
    work(node, what), work(own, what)
    for number in range(_ROUNDS):
        for which in ("node", "own") if number % 2 else ("own", "node"):
            times[which].append(1e3 * work(node if which == "node" else own, what))
    fastest = f"fastest {min(times['node']):.3g} against {min(times['own']):.3g}"
    ours, limit = median(times["node"]), median(times["own"])
    aim = f"+ ≤ 1 ms, is {ours - limit:+.2f}"
    return Row(f"{name} ({fastest})", ours, "ms", limit, "in process", aim, limit / ours)
