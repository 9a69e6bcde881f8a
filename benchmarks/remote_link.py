"""REMOTE save and load, compared with the fastest raw client of the same store, over loopback.

Ours is the hop between HOST and the store as the transfer threads run it: headers, a checksum of
every byte in both directions (with a secret: keyed BLAKE3), and blocks end up in HOST's slots. The
raw client does none of that: data stays where its library puts it. Server, clients and checksums
share the cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.harness import (
    BLOCK_SIZES,
    MIB,
    Row,
    block_spec,
    compare,
    filled_arena,
    in_threads,
    seconds_of,
)
from benchmarks.hop import Hop
from benchmarks.remote_servers import mooncake_master, redis_server, s3_server
from penstock.config import RemoteConfig
from penstock.stores.host import HostArena
from penstock.stores.remote import Client, RemoteStore
from penstock.stores.remotes import batch_bytes, headroom_bytes, open_remote, threads_for
from penstock.types import Slot, Tier

TOTAL_BYTES = 192 * MIB
MOONCAKE_BYTES = 384 * MIB  # several batches
THREADS = threads_for(RemoteConfig())
PIPELINE = 8  # values per pipeline: as many as blocks of 2 MiB in one of our transfers
NUM_NAMES = 512
SIZES = {label: size for label, size in BLOCK_SIZES.items() if label != "0.36 MiB"}
AIM = "≥ 0.85"
LMCACHE = Path(__file__).with_name("peers") / "lmcache_redis.py"

Move = Callable[[], float]
Raw = Callable[[ExitStack, HostArena], tuple[Move, Move, str]]


def run(directory: Path, lmcache_python: str | None = None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=directory) as folder:
        with redis_server(Path(folder)) as url:
            rows = list(_measure("Redis", url, lambda o, memory: _raw_redis(url, memory)))
            yield from rows
            yield from _beside_redis_benchmark(url, rows)
            if lmcache_python:
                yield from _beside_lmcache(url, lmcache_python)
        with s3_server(Path(folder)) as url:
            yield from _measure("S3", url, lambda o, memory: _raw_s3(url, memory))
        with mooncake_master(Path(folder)) as url:
            yield from _measure(
                "Mooncake", url, lambda o, memory: _raw_mooncake(o, url, memory), MOONCAKE_BYTES
            )


def _measure(store: str, url: str, raw: Raw, num_bytes: int = TOTAL_BYTES) -> Iterator[Row]:
    yield from _measure_with(b"", store, url, raw, num_bytes=num_bytes)
    yield from _measure_with(b"s" * 32, f"{store} with a secret,", url, raw, num_bytes=num_bytes)


def _measure_with(
    secret: bytes,
    store: str,
    url: str,
    raw: Raw,
    *,
    beside: str = "",
    aim: str = AIM,
    num_bytes: int = TOTAL_BYTES,
) -> Iterator[Row]:
    for label, block_bytes in SIZES.items():
        spec = block_spec(block_bytes)
        num = num_bytes // spec.stride_bytes
        host = filled_arena(spec, num, headroom_bytes(url))
        raw_memory = filled_arena(spec, num)
        remote = open_remote(RemoteConfig(url=url, timeout_seconds=60.0), spec, secret=secret)
        remote.client.register(host)
        with ExitStack() as opened:
            put, get, limit = raw(opened, raw_memory)
            threads = threads_for(RemoteConfig(url=url))
            with Hop(remote, host, Tier.REMOTE, threads, batch_bytes(url)) as hop:
                size = num * block_bytes

                def save(hop: Hop = hop, remote: RemoteStore = remote) -> float:
                    if url.startswith(
                        "mooncake"
                    ):  # like the raw client, without replacing any value
                        remote.client.remove([remote.name(key) for key in hop.keys])
                    return hop.save()

                for verb, ours, theirs in (("put", save, put), ("get", hop.load, get)):
                    name = f"{store} {verb}, {label}{beside}"
                    yield compare(name, size, ours, theirs, limit, aim=aim)
                if label == "2 MiB" and not secret and not beside:
                    rate = _existence_rate(remote.client)
                    yield Row(f"{store} existence checks", rate, "names/s")


def _existence_rate(client: Client) -> float:
    names = [f"penstock/none/{os.urandom(16).hex()}" for _ in range(NUM_NAMES)]
    return NUM_NAMES / min(seconds_of(lambda: client.exists(names)) for _ in range(7))


def _raw_redis(url: str, memory: HostArena) -> tuple[Move, Move, str]:
    import redis

    clients = [redis.Redis.from_url(url) for _ in range(THREADS)]
    body = memory.block_bytes

    def share(thread: int) -> list[range]:
        mine = range(thread, memory.num_slots, THREADS)
        return [mine[start : start + PIPELINE] for start in range(0, len(mine), PIPELINE)]

    def put(thread: int) -> None:
        for part in share(thread):
            pipeline = clients[thread].pipeline(transaction=False)
            for slot in part:
                pipeline.set(f"raw {slot}", memory.view(Slot(slot))[:body])
            pipeline.execute()

    def get(thread: int) -> None:
        for part in share(thread):
            pipeline = clients[thread].pipeline(transaction=False)
            for slot in part:
                pipeline.get(f"raw {slot}")
            assert all(len(value) == body for value in pipeline.execute())

    name = f"redis-py with hiredis, {THREADS} threads, pipelines of {PIPELINE}"
    return lambda: in_threads(THREADS, put), lambda: in_threads(THREADS, get), name


def _beside_redis_benchmark(url: str, rows: list[Row]) -> Iterator[Row]:
    """Redis' own benchmark in C, which sends one buffer repeatedly and discards its replies."""
    if shutil.which("redis-benchmark") is None:
        return
    port = str(urlsplit(url).port)
    for label, block_bytes in SIZES.items():
        best: dict[str, float] = {}
        for num_clients in ("1", "4"):
            command = ["redis-benchmark", "-p", port, "-t", "set,get", "-d", str(block_bytes)]
            command += ["-n", "300", "-c", num_clients, "--csv"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for line in told.splitlines()[1:]:
                verb, rate = (cell.strip('"') for cell in line.split(",")[:2])
                best[verb] = max(best.get(verb, 0.0), float(rate) * block_bytes / 1e9)
        for verb, name in (("SET", "put"), ("GET", "get")):
            ours = next(row.ours for row in rows if row.name == f"Redis {name}, {label}")
            beside = f"Redis {name}, {label}, beside its own benchmark"
            limit = best[verb]
            yield Row(beside, ours, "GB/s", limit, "redis-benchmark", "", ours / limit)


def _beside_lmcache(url: str, python: str) -> Iterator[Row]:
    """LMCache's two clients: one in Python on an asyncio loop, one in C++."""
    for scheme in ("redis", "resp"):
        raw = partial(_lmcache, python, f"{scheme}://127.0.0.1:{urlsplit(url).port}")
        yield from _measure_with(b"", "Redis", url, raw, beside=", beside LMCache", aim="")


def _lmcache(python: str, url: str, opened: ExitStack, like: HostArena) -> tuple[Move, Move, str]:
    """A separate process with as many blocks of the same size, which runs a round on request."""
    command = [python, str(LMCACHE), "--on-request", "--url", url]
    command += ["--block-bytes", str(like.block_bytes), "--num-blocks", str(like.num_slots)]
    pipe = subprocess.PIPE
    peer = opened.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    asks, answers = peer.stdin, peer.stdout
    assert asks is not None
    assert answers is not None

    def seconds(verb: str) -> float:
        print(verb, file=asks, flush=True)
        return float(json.loads(answers.readline()))

    name = json.loads(answers.readline())
    return lambda: seconds("put"), lambda: seconds("get"), name


def _raw_s3(url: str, memory: HostArena) -> tuple[Move, Move, str]:
    import obstore

    from penstock.stores.s3 import ObjectClient

    num_threads = 16
    store = ObjectClient(url, timeout_seconds=60.0)._store
    body = memory.block_bytes
    pool = ThreadPoolExecutor(num_threads)

    def put(slot: int) -> None:
        obstore.put(store, f"raw/{slot}", memory.view(Slot(slot))[:body], use_multipart=False)

    def get(slot: int) -> None:
        assert len(obstore.get(store, f"raw/{slot}").bytes()) == body

    def all_of(move: Callable[[int], None]) -> Move:
        return lambda: seconds_of(lambda: list(pool.map(move, range(memory.num_slots))))

    return all_of(put), all_of(get), f"obstore, {num_threads} threads"


def _raw_mooncake(opened: ExitStack, url: str, memory: HostArena) -> tuple[Move, Move, str]:
    from benchmarks.remote_servers import raw_mooncake_store

    store = raw_mooncake_store(url)
    opened.callback(store.close)
    body = memory.block_bytes
    assert store.register_buffer(memory.address, memory.num_slots * memory.stride_bytes) == 0
    places = [memory.address + slot * memory.stride_bytes for slot in range(memory.num_slots)]
    names = [f"raw {slot}" for slot in range(memory.num_slots)]
    sizes = [body] * len(names)

    def put() -> None:
        assert store.batch_put_from(names, places, sizes) == [0] * len(names)

    def get() -> None:
        assert store.batch_get_into(names, places, sizes) == sizes

    def timed_put() -> float:
        for name in names:
            store.remove(name, True)
        return seconds_of(put)

    return timed_put, lambda: seconds_of(get), "batch_put_from, batch_get_into"
