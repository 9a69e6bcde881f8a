"""Keys, matches and the index: the cost of every request before any transfer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import xxhash
from blake3 import blake3

from benchmarks.harness import MIB, Row, block_spec, filled_arena, in_threads, seconds_of
from penstock.books.ledger import Ledger
from penstock.books.stack import TierStack
from penstock.keys import KeyChain, Namespace, chain
from penstock.policies import POLICIES
from penstock.stores import slab
from penstock.stores.disk import DiskStore
from penstock.stores.slab import Geometry, SlabRecord
from penstock.transfer.recovery import Recovery
from penstock.types import BlockKey, BlockSpec, Slot, Tier

NUM_TOKENS = 131_072
BLOCK_TOKENS = 16
MILLION = 1_000_000


def run(directory: Path) -> Iterator[Row]:
    yield from _keys_and_match()
    yield from _lookups()
    for name in POLICIES:
        yield _index_bytes(name)
    yield _recovery(directory)
    yield _checksum()


def _median_seconds(work, rounds: int = 9) -> float:
    return median(seconds_of(work) for _ in range(rounds))


def _keys_and_match() -> Iterator[Row]:
    namespace = Namespace("llama-3.1-8b", "weights", "bf16", "layout", BLOCK_TOKENS)
    tokens = [(i * 7919) % 128_256 for i in range(NUM_TOKENS)]
    keys = chain(namespace, tokens)
    stack = _stack(keys)
    data = [bytes(96)] * len(keys)

    def both() -> None:
        assert stack.match(chain(namespace, tokens)).num_blocks == len(keys)

    hashing = _median_seconds(lambda: [blake3(piece).digest() for piece in data])
    whole = _median_seconds(both)
    yield Row(
        f"keys and match, {NUM_TOKENS:,} tokens in {BLOCK_TOKENS}-token blocks",
        whole * 1e3,
        "ms",
        hashing * 1e3,
        "BLAKE3 calls alone",
        "< 20 ms",
        hashing / whole,
    )
    growing = KeyChain(namespace, tokens)
    new_tokens = tokens[:BLOCK_TOKENS]
    append = _median_seconds(lambda: [growing.extend(new_tokens) for _ in range(1000)]) / 1000
    yield Row(
        f"… and {BLOCK_TOKENS} tokens appended to it",
        append * 1e6,
        "µs",
        hashing / len(keys) * 1e6,
        "one BLAKE3 call",
        "",
        hashing / len(keys) / append,
    )


def _stack(keys: list[BlockKey]) -> TierStack:
    """Books with half of the prompt in HOST and all of it on DISK."""
    books = {}
    for tier, held in ((Tier.HOST, keys[: len(keys) // 2]), (Tier.DISK, keys)):
        ledger = Ledger(len(keys), POLICIES["reuse"](len(keys)), recovering=True)
        for slot, key in enumerate(held):
            ledger.adopt(Slot(slot), key)
        books[tier] = ledger
    return TierStack(2 * MIB, books.pop(Tier.HOST), books)


def _lookups() -> Iterator[Row]:
    num = 200_000
    keys = [BlockKey(blake3(i.to_bytes(8, "little")).digest()) for i in range(num)]
    stack = _stack(keys)
    plain = dict.fromkeys(keys)
    ours = num / _median_seconds(lambda: stack.match(keys), 5)
    limit = num / _median_seconds(lambda: [key in plain for key in keys], 5)
    name = "a dict's own lookups"
    yield Row("lookups over two tiers", ours / 1e6, "M/s", limit / 1e6, name, "> 1", ours / limit)


def _index_bytes(policy: str) -> Row:
    """Memory per block, in a separate process, as counted by the kernel."""
    program = f"""
import os
from penstock.books.ledger import Ledger
from penstock.policies import POLICIES
from penstock.types import BlockKey, Slot
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
ledger = Ledger({MILLION}, POLICIES[{policy!r}]({MILLION}), recovering=True)
for slot in range({MILLION}):
    ledger.adopt(Slot(slot), BlockKey(os.urandom(32)))
print((resident() - before) / {MILLION})
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    num_bytes = float(answer.stdout)
    # 32 bytes of key and 4 of slot: the least that such an index needs.
    name = "key and slot alone"
    return Row(
        f"index of a million blocks, {policy}",
        num_bytes,
        "B/block",
        36,
        name,
        "< 400",
        36 / num_bytes,
    )


def _recovery(directory: Path) -> Row:
    """Read a million records and enter them into the books; the payload files are sparse."""
    spec = BlockSpec(bytes(32), 4096, 16)
    geometry = Geometry.of(spec)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=directory) as folder:
        path = Path(folder)
        slab.write_manifest(path, geometry)
        with open(path / "index", "wb") as file:
            for number in range(MILLION):
                key = BlockKey(number.to_bytes(32, "little"))
                record = SlabRecord(True, number, key, spec.namespace, spec.block_bytes, bytes(16))
                file.write(slab.pack_record(record))
        for number in range(-(-MILLION // geometry.slots_per_slab)):
            with open(slab.slab_path(path, number), "wb") as file:
                file.truncate(geometry.slots_per_slab * spec.stride_bytes)
        cap = MILLION * (spec.stride_bytes + slab.RECORD_BYTES) + slab.FIXED_BYTES + 4096
        with open(path / "index", "rb") as file:
            reading = seconds_of(lambda: file.read())
        started = time.perf_counter()
        store = DiskStore(path, spec, cap, read_only=True)
        ledger = Ledger(store.num_slots, POLICIES["reuse"](store.num_slots), recovering=True)
        stack = TierStack(4096, Ledger(1, POLICIES["lru"](1)), {Tier.DISK: ledger})
        recovery = Recovery(Tier.DISK, store, store.num_slots)
        num_found = 0
        while not recovery.complete:
            num_found += stack.ledgers.adopt(Tier.DISK, recovery.take(1.0) or [])
        seconds = time.perf_counter() - started
        store.close()
        assert num_found == MILLION
    name = "reading the index file"
    return Row(
        "restart with a million blocks", seconds, "s", reading, name, "seconds", reading / seconds
    )


def _checksum() -> Row:
    threads = os.cpu_count() or 1
    spec = block_spec(2 * MIB)
    arena = filled_arena(spec, 128)

    def share(thread: int) -> None:
        for slot in range(thread, 128, threads):
            xxhash.xxh3_128_digest(arena.view(Slot(slot)))

    rate = 256 * MIB / median(in_threads(threads, share) for _ in range(7)) / 1e9
    return Row(f"XXH3-128 of 2 MiB blocks, {threads} threads", rate, "GB/s")
