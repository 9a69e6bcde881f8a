"""Save and load KV blocks through LMCache's own storage backends, in process, on a CPU.

Run with the Python of an environment that has LMCache (see README.md here); nothing of Penstock
is imported. Every block is a KV ``MemoryObj`` of LMCache's own host allocator, many
blocks are in flight at once, and worker counts are LMCache's defaults.

Backends:
  local_disk  LocalDiskBackend (4 write and 4 read threads)
  fs          RemoteBackend over FSConnector, ``fs://`` (the event loop's default thread pool)
  fs_native   the C++ file-system L2 adapter of its multi-process mode (4 workers), one batch
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

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
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

DTYPE = torch.bfloat16
CHUNK_TOKENS = 16
TIMEOUT_SECONDS = 600


class Engine:
    """LocalDiskBackend or RemoteBackend: both have the same put and get calls."""

    def __init__(self, name, host, config, metadata, in_flight, load_batch):
        self.in_flight = in_flight
        self.load_batch = load_batch
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        if name == "local_disk":
            self.backend = LocalDiskBackend(config, loop, host, "cpu", metadata=metadata)
            self.direct = self.backend.use_odirect
        else:
            self.backend = RemoteBackend(config, metadata, loop, host, "cpu")
            connection = self.backend.connection
            self.direct = getattr(connection, "_connector", connection).use_odirect

    def keys(self, count):
        return [CacheEngineKey("peer", 1, 0, 1 + i, DTYPE) for i in range(count)]

    def save(self, keys, blocks):
        window = threading.Semaphore(self.in_flight)

        def wait():
            if not window.acquire(timeout=TIMEOUT_SECONDS):
                raise TimeoutError("a save did not finish")

        for key, block in zip(keys, blocks, strict=True):
            wait()
            self.backend.submit_put_task(key, block, lambda _key: window.release())
        for _ in range(self.in_flight):
            wait()
        if getattr(self.backend, "put_failed_count", 0):
            raise RuntimeError("a save failed")

    def load(self, keys, allocate):
        loaded = []
        for first in range(0, len(keys), self.load_batch):
            loaded += self.backend.batched_get_blocking(keys[first : first + self.load_batch])
        return loaded


class NativeEngine:
    """The C++ file-system adapter: batches in, an event descriptor signals completion."""

    def __init__(self, directory, direct):
        from lmcache.v1.distributed.l2_adapters import fs_native_l2_adapter as native

        config = native.FSNativeL2AdapterConfig(str(directory), use_odirect=direct)
        self.adapter = native._create_fs_native_l2_adapter(config)
        self.direct = direct

    def keys(self, count):
        from lmcache.v1.distributed.api import ObjectKey

        return [ObjectKey((1 + i).to_bytes(32, "big"), "peer", 0) for i in range(count)]

    @staticmethod
    def wait(descriptor):
        if not select.select([descriptor], [], [], TIMEOUT_SECONDS)[0]:
            raise TimeoutError("the native adapter did not finish")

    def save(self, keys, blocks):
        task = self.adapter.submit_store_task(keys, blocks)
        self.wait(self.adapter.get_store_event_fd())
        if not self.adapter.pop_completed_store_tasks()[task].is_successful():
            raise RuntimeError("a save failed")

    def load(self, keys, allocate):
        blocks = [allocate() for _ in keys]
        task = self.adapter.submit_load_task(keys, blocks)
        self.wait(self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        return [block if loaded.test(i) else None for i, block in enumerate(blocks)]


def sync_and_drop_page_cache(directory):
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDWR)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def raw(block):
    return block.tensor.view(torch.uint8)


def run(name, directory, block_bytes, num_blocks, direct, in_flight, load_batch):
    width = block_bytes // (2 * CHUNK_TOKENS * DTYPE.itemsize)
    if width * 2 * CHUNK_TOKENS * DTYPE.itemsize != block_bytes:
        raise SystemExit("--block-bytes must be a multiple of 64")
    total = block_bytes * num_blocks
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=False,
        max_local_cpu_size=(2 * total + (64 << 20)) / 2**30,
        local_disk=str(directory) if name == "local_disk" else None,
        max_local_disk_size=2 * total / 2**30,
        remote_url=f"fs://localhost:0{directory}" if name == "fs" else None,
        blocking_timeout_secs=TIMEOUT_SECONDS,
        extra_config={
            "use_odirect": direct,
            "fs_connector_use_odirect": direct,
            "save_chunk_meta": not direct,  # FSConnector writes a header, so O_DIRECT is impossible
        },
    )
    metadata = LMCacheMetadata(
        "peer", 1, 1, 0, 0, DTYPE, (1, 2, CHUNK_TOKENS, 1, width), chunk_size=CHUNK_TOKENS
    )
    host = LocalCPUBackend(config, metadata, "cpu")

    def allocate():
        return host.allocate(metadata.get_shapes()[0], DTYPE, MemoryFormat.KV_2LTD)

    if name == "fs_native":
        engine = NativeEngine(directory, direct)
    else:
        engine = Engine(name, host, config, metadata, in_flight, load_batch)
    keys = engine.keys(num_blocks)
    blocks = [allocate() for _ in keys]
    for block in blocks:
        raw(block).random_()

    started = time.perf_counter()
    engine.save(keys, blocks)
    saved = time.perf_counter()
    sync_and_drop_page_cache(directory)
    synced = time.perf_counter()
    loaded = engine.load(keys, allocate)
    finished = time.perf_counter()

    verified = len(loaded) == num_blocks and all(
        got is not None and got is not block and torch.equal(raw(got), raw(block))
        for got, block in zip(loaded, blocks, strict=True)
    )
    # fs_native pads a block to the alignment; the others write an unaligned one buffered.
    aligned = name == "fs_native" or block_bytes % os.statvfs(directory).f_bsize == 0
    mode = "odirect" if engine.direct and aligned else "buffered"
    label = "O_DIRECT" if mode == "odirect" else "buffered"
    return {
        "peer": f"lmcache {__version__} {name} ({label})",
        "save_bytes_per_second": round(total / (saved - started)),
        "save_and_fsync_bytes_per_second": round(total / (synced - started)),
        "load_bytes_per_second": round(total / (finished - synced)),
        "mode": mode,
        "verified_bit_for_bit": verified,
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="directory on the disk to use")
    parser.add_argument("--block-bytes", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--backend", choices=["local_disk", "fs", "fs_native"], required=True)
    parser.add_argument("--buffered", action="store_true", help="LMCache's default, no O_DIRECT")
    parser.add_argument("--in-flight", type=int, default=32, help="saves submitted at once")
    parser.add_argument("--load-batch", type=int, default=128, help="keys per batched get")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of text")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="lmcache-", dir=args.dir)).resolve()
    try:
        result = run(
            args.backend,
            directory,
            args.block_bytes,
            args.num_blocks,
            direct=not args.buffered,
            in_flight=args.in_flight,
            load_batch=args.load_batch,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if args.json:
        print(json.dumps(result), flush=True)
    else:
        save, load = result["save_bytes_per_second"], result["load_bytes_per_second"]
        verified = result["verified_bit_for_bit"]
        print(
            f"{result['peer']}: save {save / 1e6:.0f} MB/s, load {load / 1e6:.0f} MB/s, "
            f"verified {verified}",
            flush=True,
        )
    sys.stdout.flush()
    os._exit(0 if result["verified_bit_for_bit"] else 1)  # not all of LMCache's threads end


if __name__ == "__main__":
    main()
