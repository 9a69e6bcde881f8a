"""Put and get KV blocks through LMCache's own Redis connectors, in process, on a CPU.

Run with the Python of an environment that has LMCache (see README.md here); nothing of Penstock
is imported. The calls are those of LMCache's storage manager, all blocks at once as
for one prompt: ``RemoteBackend.batched_submit_put_task`` and ``batched_get_blocking``, naive
serde, LMCache's defaults. The URL's scheme chooses the connector:

  redis://  RedisConnector, redis-py on one asyncio loop
  resp://   RESPConnector, LMCache's client in C++ (8 threads)

Prints one JSON line of medians. With ``--on-request`` it prints its name, then the seconds of one
round for each line "put" or "get" that it reads, so that its rounds can alternate with others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from statistics import median

# Python puts this directory first on its path; lmcache.py here would hide the package LMCache.
sys.path.pop(0)
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache import __version__
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

DTYPE = torch.bfloat16
CHUNK_TOKENS = 16
TIMEOUT_SECONDS = 60
ROUNDS = 5


class Peer:
    """Blocks in LMCache's host pool and in the store. Rounds are checked bit for bit, untimed."""

    def __init__(self, url, block_bytes, num_blocks):
        width = block_bytes // (2 * CHUNK_TOKENS * DTYPE.itemsize)
        if width * 2 * CHUNK_TOKENS * DTYPE.itemsize != block_bytes:
            raise SystemExit("--block-bytes must be a multiple of 64")
        total = block_bytes * num_blocks
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=(2 * total + (64 << 20)) / 2**30,
            remote_url=url,
            remote_serde="naive",
            blocking_timeout_secs=TIMEOUT_SECONDS,
        )
        metadata = LMCacheMetadata(
            "peer", 1, 1, 0, 0, DTYPE, (1, 2, CHUNK_TOKENS, 1, width), chunk_size=CHUNK_TOKENS
        )
        host = LocalCPUBackend(config, metadata, "cpu")
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self.backend = RemoteBackend(config, metadata, loop, host, "cpu")
        if self.backend.connection is None:
            raise SystemExit(f"LMCache has no connection to {url}")
        shape = metadata.get_shapes()[0]
        self.keys = [CacheEngineKey("peer", 1, 0, 1 + i, DTYPE) for i in range(num_blocks)]
        self.blocks = [host.allocate(shape, DTYPE, MemoryFormat.KV_2LTD) for _ in self.keys]
        for block in self.blocks:
            raw(block).random_()

    def put(self):
        """Seconds of a round. Bytes differ each time, as LMCache does not report failed puts."""
        for block in self.blocks:
            raw(block)[:64].random_()
        done = threading.Semaphore(0)
        started = time.perf_counter()
        self.backend.batched_submit_put_task(
            self.keys, self.blocks, on_complete_callback=lambda _key: done.release()
        )
        for _ in self.keys:
            if not done.acquire(timeout=TIMEOUT_SECONDS):
                raise TimeoutError("a put did not finish")
        seconds = time.perf_counter() - started
        self.get()
        return seconds

    def get(self):
        started = time.perf_counter()
        loaded = self.backend.batched_get_blocking(self.keys)
        seconds = time.perf_counter() - started
        for got, block in zip(loaded, self.blocks, strict=True):
            if got is None or got is block or not torch.equal(raw(got), raw(block)):
                raise SystemExit("a block differs from what was put")
            got.ref_count_down()
        return seconds


def raw(block):
    return block.tensor.view(torch.uint8).flatten()


def medians(peer, total):
    peer.put(), peer.get()  # warm up: connections, pages
    for name, move in (("put", peer.put), ("get", peer.get)):
        seconds = median(move() for _ in range(ROUNDS))
        yield f"{name}_bytes_per_second", round(total / seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="redis://HOST:PORT or resp://HOST:PORT")
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--num-blocks", type=int, default=96)
    parser.add_argument("--on-request", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of the checks, so that none keeps spinning during the measurement
    peer = Peer(args.url, args.block_bytes, args.num_blocks)
    name = f"lmcache {__version__} {args.url.split(':')[0]}://"
    if args.on_request:
        print(json.dumps(name), flush=True)
        for line in sys.stdin:
            print(json.dumps({"put": peer.put, "get": peer.get}[line.strip()]()), flush=True)
    else:
        rates = medians(peer, args.block_bytes * args.num_blocks)
        print(json.dumps({"peer": name, **dict(rates)}), flush=True)
    os._exit(0)  # not all of LMCache's threads end


if __name__ == "__main__":
    main()
