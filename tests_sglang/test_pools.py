"""The storage below SGLang's own host pools, opened by SGLang's own factory."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from redis import Redis
from tiny import make_tiny

from penstock.connectors.sglang import identity as sglang_identity
from penstock.connectors.sglang import storage as storage_module
from penstock.connectors.vllm import identity
from penstock.errors import ConfigError, PenstockError
from penstock.types import Verdict
from servers import is_skipped, redis_server
from servers.redis_server import RedisServer

hicache = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
Factory = pytest.importorskip("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory

PAGE = 16  # tokens
HASHES = [f"{number:064x}" for number in range(1, 13)]


def mha_pool(
    layout: str, *, page: int = PAGE, heads: int = 2, values: int = 8, tokens: int = 256
) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(tokens, page, torch.float32, heads, values, 3, "cpu", False)
    host = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=3,
    )
    host.kv_buffer.normal_()
    return host


class Rank:
    """One rank of a server: its pools, and the storage that SGLang's controller would open."""

    def __init__(self, settings: dict[str, Any], pools: dict[str, Any], **config: Any) -> None:
        given = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": False,
            "model_name": "tiny",
        }
        extra = {
            "backend_name": "penstock",
            "module_path": "penstock.connectors.sglang",
            "class_name": "PenstockStorage",
            "interface_v1": 1,
            "penstock": settings,
        }
        self.pools = pools
        self.main = pools["kv"]
        self.storage = Factory.create_backend(
            "dynamic",
            hicache.HiCacheStorageConfig(**{**given, **config}, extra_config=extra),
            self.main,
        )
        try:
            self.storage.register_mem_pool_host(self.main)
            for name, pool in pools.items():
                self.storage.register_mem_host_pool_v2(pool, hicache.PoolName(name))
            self.storage.on_host_pools_registered()
        except BaseException:
            self.storage.close()
            raise

    def places(self, count: int, first: int = 0) -> torch.Tensor:
        return torch.arange(first * PAGE, (first + count) * PAGE)

    def page(self, number: int, pool: str = "kv") -> torch.Tensor:
        return self.pools[pool].get_data_page(number * PAGE, flat=True).clone()

    def drain(self) -> None:
        exchange = self.storage._exchange
        with exchange._lock:
            assert exchange._tiers.drain()


Start = Callable[..., Rank]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def arguments(model: Path) -> dict[str, Any]:
    """As SGLang resolves them; those that a test changes."""
    return {
        "model_path": str(model),
        "dtype": "float32",
        "page_size": PAGE,
        "load_format": "auto",
        "hicache_storage_backend": "dynamic",
    }


@pytest.fixture
def start(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    for module in (identity, sglang_identity):
        monkeypatch.setattr(module, "process_start", lambda: time.time() + 60)
    monkeypatch.setattr(
        storage_module, "get_server_args", lambda: SimpleNamespace(resolved_dict=lambda: arguments)
    )
    monkeypatch.setattr(
        storage_module, "process_model_config", lambda: SimpleNamespace(is_multimodal=False)
    )
    ranks: list[Rank] = []

    def one(layout: str = "layer_first", **given: Any) -> Rank:
        if not given.pop("beside", False):
            for rank in ranks:
                rank.storage.close()
            ranks.clear()
        settings = {
            "disk_path": str(tmp_path / "kv"),
            "disk_size": 0.25,
            "set": {"host.size": "2MiB"},
            **given.pop("settings", {}),
        }
        pools = given.pop("pools", None) or {"kv": mha_pool(layout)}
        ranks.append(Rank(settings, pools, **given))
        return ranks[-1]

    yield one
    for rank in ranks:
        rank.storage.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_are_found_after_a_restart_bit_for_bit(start: Start, layout: str) -> None:
    first = start(layout)
    stored = [first.page(number) for number in range(12)]
    assert all(first.storage.batch_set_v1(HASHES, first.places(12)))
    first.drain()
    again = start(layout)
    before = again.page(12)
    assert again.storage.batch_exists([*HASHES, "ff" * 32]) == 12
    assert all(again.storage.batch_get_v1(HASHES, again.places(12)))
    assert all(torch.equal(again.page(number), page) for number, page in enumerate(stored))
    assert torch.equal(again.page(12), before), "no other page has changed"
    again.storage._exchange.check()


def test_the_first_question_after_a_restart_is_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.stores.disk import DiskStore

    first = start()
    assert all(first.storage.batch_set_v1(HASHES, first.places(12)))
    first.drain()
    first.storage.close()
    scan = DiskStore.scan

    def slow(self: DiskStore) -> Any:
        time.sleep(0.5)
        yield from scan(self)

    monkeypatch.setattr(DiskStore, "scan", slow)
    assert start().storage.batch_exists(HASHES) == 12


def test_generic_calls_move_the_same_pages(start: Start) -> None:
    rank = start()
    values = [rank.page(number) for number in range(4)]
    assert rank.storage.batch_set(HASHES[:4], values)
    assert rank.storage.set(HASHES[4], rank.page(4))
    found = rank.storage.batch_get(HASHES[:4], [torch.empty_like(value) for value in values])
    assert all(torch.equal(*pair) for pair in zip(found, values, strict=True))
    assert torch.equal(rank.storage.get(HASHES[4]), rank.page(4))
    assert rank.storage.get("ff" * 32, torch.empty_like(values[0])) is None
    assert rank.storage.exists(HASHES[0])
    assert not rank.storage.exists("ff" * 32)
    assert not rank.storage.set(HASHES[5], values[0][:-1]), "not a page"


def test_memory_is_sglangs_again_once_a_save_returns(start: Start) -> None:
    rank = start()
    stored = [rank.page(number) for number in range(12)]
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))
    rank.main.kv_buffer.zero_()  # while the disk is still written to
    rank.drain()
    again = start()
    assert all(again.storage.batch_get_v1(HASHES, again.places(12)))
    assert all(torch.equal(again.page(number), page) for number, page in enumerate(stored))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_a_damaged_page_is_a_miss_and_no_byte_of_it_arrives(
    start: Start, tmp_path: Path, damage: str
) -> None:
    first = start()
    assert all(first.storage.batch_set_v1(HASHES, first.places(12)))
    stored = [first.page(number) for number in range(12)]
    first.drain()
    again = start()
    for slab in (tmp_path / "kv").rglob("slab-*"):
        data = bytearray(slab.read_bytes())
        if damage == "flipped":
            for place in range(100, len(data), 4096):
                data[place] ^= 1
            slab.write_bytes(data)
        elif damage == "truncated":
            with slab.open("rb+") as file:
                file.truncate(3 * 4096)
        else:
            slab.unlink()
    before = [again.page(number) for number in range(12)]
    arrived = again.storage.batch_get_v1(HASHES, again.places(12))
    assert not all(arrived)
    for number, is_there in enumerate(arrived):
        assert torch.equal(again.page(number), (stored if is_there else before)[number])
    again.storage._exchange.check()
    # SGLang computes them and stores them again.
    again.main.kv_buffer.normal_()
    computed = [again.page(number) for number in range(12)]
    missing = [number for number, is_there in enumerate(arrived) if not is_there]
    for number in missing:
        again.storage.batch_set_v1([HASHES[number]], again.places(1, number))
    again.main.kv_buffer.zero_()
    for number in missing:
        assert again.storage.batch_get_v1([HASHES[number]], again.places(1, number)) == [True]
        assert torch.equal(again.page(number), computed[number])


def test_what_is_not_the_same_kv_is_not_found(
    start: Start, arguments: dict[str, Any], tmp_path: Path
) -> None:
    first = start()
    assert all(first.storage.batch_set_v1(HASHES, first.places(12)))
    first.drain()
    other = make_tiny(tmp_path / "other", seed=1)
    assert start("page_first").storage.batch_exists(HASHES) == 0, "other layout"
    assert start(pools={"kv": mha_pool("layer_first", page=8)}).storage.batch_exists(HASHES) == 0
    for name, value in {
        "model_path": str(other),
        "kv_cache_dtype": "fp8_e5m2",
        "attention_backend": "triton",
        "json_model_override_args": '{"rope_theta": 1}',
        "an_argument_nobody_has_read": 1,
    }.items():
        kept = arguments.get(name)
        arguments[name] = value
        assert start().storage.batch_exists(HASHES) == 0, name
        arguments[name] = kept
        if kept is None:
            del arguments[name]
    arguments["max_running_requests"] = 7
    assert start().storage.batch_exists(HASHES) == 12


def test_kv_of_media_that_clients_name_is_for_this_run_only(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `mm_hashes`, a client can give another image the name of one that is stored."""
    monkeypatch.setattr(
        storage_module, "process_model_config", lambda: SimpleNamespace(is_multimodal=True)
    )
    rank = start()
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))
    assert rank.storage.batch_exists(HASHES) == 12
    rank.drain()
    assert start().storage.batch_exists(HASHES) == 0
    trusting = {"trust_media_names": True}
    rank = start(settings=trusting)
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))
    rank.drain()
    assert start(settings=trusting).storage.batch_exists(HASHES) == 12


def test_a_config_that_sglang_may_have_read_otherwise_is_not_shared(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_identity, "files_fingerprint", lambda *_: "weights")
    first = start()
    assert all(first.storage.batch_set_v1(HASHES, first.places(12)))
    first.drain()
    assert start().storage.batch_exists(HASHES) == 12
    monkeypatch.setattr(
        sglang_identity, "process_start", lambda: 0.0
    )  # before config.json was written
    assert start().storage.batch_exists(HASHES) == 0


def test_ranks_do_not_share_shards(start: Start, tmp_path: Path) -> None:
    one = start(tp_rank=0, tp_size=2)
    two = start(tp_rank=1, tp_size=2, beside=True)
    assert all(one.storage.batch_set_v1(HASHES, one.places(12)))
    assert one.storage.batch_exists(HASHES) == 12
    assert two.storage.batch_exists(HASHES) == 0
    names = sorted(path.name for path in (tmp_path / "kv").iterdir())
    assert names == ["rank0of2", "rank1of2"]
    assert one.storage._config.disk.size_bytes == (256 << 20) // 2, "the cap holds for all"


def test_a_folder_has_one_owner(start: Start) -> None:
    start()
    with pytest.raises(PenstockError, match="is being written by process"):
        start(beside=True)


def test_replicated_kv_needs_a_store_that_ranks_share(start: Start) -> None:
    with pytest.raises(ConfigError, match="node or remote"):
        start(is_mla_model=True, tp_size=4)


def test_windows_and_states_limit_a_prefix(start: Start) -> None:
    rank = start(pools={"kv": mha_pool("layer_first"), "mamba": mha_pool("layer_first", heads=1)})
    transfer = hicache.PoolTransfer(
        name=hicache.PoolName.MAMBA,
        host_indices=rank.places(1, 3),
        keys=[HASHES[5]],
        hit_policy=hicache.PoolHitPolicy.TRAILING_PAGES,
    )
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))
    assert rank.storage.batch_set_v2([transfer]) == {hicache.PoolName.MAMBA: [True]}
    asked = hicache.PoolTransfer(
        name=hicache.PoolName.MAMBA,
        keys=HASHES[-1:],
        hit_policy=hicache.PoolHitPolicy.TRAILING_PAGES,
    )
    hits = rank.storage.batch_exists_v2(HASHES, [asked])
    assert (hits.kv_hit_pages, hits.restorable_prefix_pages) == (6, [6])
    assert hits.extra_pool_hit_pages == {"kv": 12, "mamba": 6}
    expected = rank.page(3, "mamba")
    rank.pools["mamba"].kv_buffer.zero_()
    assert rank.storage.batch_get_v2([transfer]) == {hicache.PoolName.MAMBA: [True]}
    assert torch.equal(rank.page(3, "mamba"), expected)
    asked.hit_policy = hicache.PoolHitPolicy.ALL_PAGES
    assert rank.storage.batch_exists_v2(HASHES, [asked]).kv_hit_pages == 0


def test_after_a_flush_nothing_stored_before_is_found(start: Start) -> None:
    rank = start()
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))
    rank.main.clear()  # as SGLang does after it has replaced weights
    assert rank.storage.batch_exists(HASHES) == 0
    assert all(rank.storage.batch_set_v1(HASHES[:3], rank.places(3)))
    assert rank.storage.batch_exists(HASHES) == 3
    rank.drain()
    promised = start(settings={"weights_stay": True})
    promised.main.clear()
    assert promised.storage.batch_exists(HASHES) == 12


def test_a_flush_while_no_storage_is_attached_is_noticed(start: Start) -> None:
    rank = start()
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))
    rank.drain()
    again = start(pools=rank.pools)
    assert again.storage.batch_exists(HASHES) == 12, "detached and attached"
    again.storage.close()
    again.main.clear()
    assert start(pools=rank.pools).storage.batch_exists(HASHES) == 0


def test_a_storage_attached_to_a_running_server_cannot_know_its_weights(
    start: Start, arguments: dict[str, Any]
) -> None:
    rank = start()
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))
    rank.drain()
    arguments["hicache_storage_backend"] = None
    late = start()
    assert late.storage.batch_exists(HASHES) == 0
    assert late.storage.batch_set_v1(HASHES[:3], late.places(3)) == [True] * 3
    assert late.storage.batch_exists(HASHES) == 3
    assert start(settings={"weights_stay": True}).storage.batch_exists(HASHES) == 12


def test_a_pool_that_does_not_show_flushes_is_refused(start: Start) -> None:
    pool = mha_pool("layer_first")
    del pool.slot_used
    with pytest.raises(ConfigError, match="set weights_stay"):
        start(pools={"kv": pool})
    start(pools={"kv": pool}, settings={"weights_stay": True})


def test_threads_that_see_a_flush_at_once_all_leave_what_was_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start()
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))
    rank.main.clear()
    leaving, found, leave = threading.Event(), [], rank.storage._leave

    def slow(why: str) -> None:
        leaving.set()
        time.sleep(0.2)
        leave(why)

    monkeypatch.setattr(rank.storage, "_leave", slow)
    first = threading.Thread(target=rank.storage.batch_exists, args=(HASHES,))
    first.start()
    assert leaving.wait(60)
    found.append(rank.storage.batch_exists(HASHES))
    first.join()
    assert found == [0]


def test_parts_of_two_damaged_pages_do_not_make_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = mha_pool("layer_first", heads=64, values=128, tokens=128)
    rank = start(pools={"kv": pool}, settings={"set": {"host.size": "64MiB"}})
    assert rank.storage._formats["kv"].num_parts == 3
    assert rank.storage.batch_set_v1(HASHES[:3], rank.places(3)) == [True] * 3
    exchange = rank.storage._exchange
    wait = exchange._wait

    def lose(ticket: Any) -> Any:
        """Of two pages, the end of the first and the beginning of the second are missing."""
        done = wait(ticket)
        lost = [Verdict.MISSING if 1 <= place <= 3 else Verdict.OK for place in range(9)]
        return dataclasses.replace(done, verdicts=tuple(lost))

    monkeypatch.setattr(exchange, "_wait", lose)
    before = [rank.page(number) for number in range(8, 11)]
    third = rank.page(2)
    arrived = rank.storage.batch_get_v1(HASHES[:3], rank.places(3, 8))
    assert arrived == [False, False, True]
    for number, expected in enumerate([*before[:2], third], 8):
        assert torch.equal(rank.page(number), expected)
    found = rank.storage.batch_get(HASHES[:3])
    assert found[:2] == [None, None]
    assert torch.equal(found[2], third)


def test_a_page_that_is_named_twice(start: Start) -> None:
    rank = start()
    twice, stored = [HASHES[0], HASHES[1], HASHES[0]], [rank.page(0), rank.page(1)]
    rank.main.kv_buffer[:, :, 2 * PAGE : 3 * PAGE] = rank.main.kv_buffer[:, :, :PAGE]
    assert rank.storage.batch_set_v1(twice, rank.places(3)) == [True] * 3
    assert rank.storage.batch_exists(twice) == 3
    assert rank.storage.batch_get_v1(twice, rank.places(3, 8)) == [True] * 3
    for place, number in enumerate([0, 1, 0], 8):
        assert torch.equal(rank.page(place), stored[number])
    rank.storage._exchange.check()


def test_a_drafter_with_heads_is_sharded_though_the_model_is_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "check_ranks", lambda *_: None)
    pools = {"kv": mha_pool("layer_first"), "draft": mha_pool("layer_first")}
    formats = start(pools=pools, is_mla_model=True, tp_size=2).storage._formats
    assert "tp 0 of 2" in formats["draft"].layout
    assert "tp 0 of 2" not in formats["kv"].layout


def test_indices_that_are_not_pages_are_refused(start: Start) -> None:
    rank = start()
    assert rank.storage.batch_set_v1(HASHES[:2], rank.places(1)) == [False, False]
    assert rank.storage.batch_get_v1(HASHES[:2], None) == [False, False]


def test_a_full_disk_costs_pages_and_nothing_else(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.stores.disk import DiskStore

    rank = start()

    def full(self: object, blocks: Any, digests: Any) -> list[Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskStore, "write", full)
    rank.storage.batch_set_v1(HASHES, rank.places(12))
    rank.drain()
    assert rank.storage._exchange.is_working
    assert start().storage.batch_exists(HASHES) == 0


def test_an_error_of_ours_is_a_miss_from_then_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start()
    assert all(rank.storage.batch_set_v1(HASHES, rank.places(12)))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rank.storage._exchange._tiers, "load", fail)
    assert rank.storage.batch_get_v1(HASHES, rank.places(12)) == [False] * 12
    assert rank.storage.batch_exists(HASHES) == 0
    assert rank.storage.batch_set_v1(HASHES, rank.places(12)) == [False] * 12


def test_threads_that_set_get_and_ask_at_once(start: Start) -> None:
    rank = start()
    stored = {name: rank.page(number) for number, name in enumerate(HASHES)}
    wrong: list[str] = []
    stop = threading.Event()

    def write() -> None:
        for turn in range(30):
            number = turn % 12
            rank.storage.batch_set_v1([HASHES[number]], rank.places(1, number))
        stop.set()

    def read() -> None:
        while not stop.is_set():
            count = rank.storage.batch_exists(HASHES)
            if count:
                arrived = rank.storage.batch_get_v1(HASHES[:count], rank.places(count, 16))
                for number, is_there in enumerate(arrived):
                    if is_there and not torch.equal(rank.page(16 + number), stored[HASHES[number]]):
                        wrong.append(HASHES[number])

    threads = [threading.Thread(target=each) for each in (write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    rank.storage._exchange.check()


def test_a_key_in_the_wrong_place_is_named(start: Start) -> None:
    with pytest.raises(ConfigError, match="did you mean disk_path"):
        start(settings={"disk_paht": "/x"})


def test_ranks_share_replicated_kv_through_a_node(start: Start, tmp_path: Path) -> None:
    socket = tmp_path / "node.sock"
    command = [sys.executable, "-m", "penstock", "node", "--socket", str(socket)]
    node = subprocess.Popen([*command, "--kv-offloading-size", "0.0625"], env=os.environ)
    try:
        shared = {"disk_path": None, "disk_size": None, "node": f"unix://{socket}", "set": None}
        kind = {"is_mla_model": True, "tp_size": 2, "settings": shared}
        writer = start(tp_rank=0, **kind)
        reader = start(tp_rank=1, beside=True, **kind)
        stored = [writer.page(number) for number in range(12)]
        assert all(writer.storage.batch_set_v1(HASHES, writer.places(12)))
        assert reader.storage.batch_exists(HASHES) == 12
        assert all(reader.storage.batch_get_v1(HASHES, reader.places(12)))
        assert all(torch.equal(reader.page(number), page) for number, page in enumerate(stored))
        node.kill()
        node.wait()
        assert reader.storage.batch_exists(HASHES) == 0, "SGLang goes on without the node"
        assert reader.storage.batch_get_v1(HASHES, reader.places(12)) == [False] * 12
        assert reader.storage._exchange.is_working
    finally:
        node.kill()
        node.wait()


def test_a_read_that_ends_after_its_deadline_touches_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.stores.disk import DiskStore

    first = start()
    assert all(first.storage.batch_set_v1(HASHES, first.places(12)))
    first.drain()
    again = start(settings={"set": {"host.size": "2MiB", "transfer.load_deadline_seconds": 0.2}})
    answering, read = threading.Event(), DiskStore.read

    def hang(self: DiskStore, blocks: Any) -> Any:
        assert answering.wait(60)
        return read(self, blocks)

    monkeypatch.setattr(DiskStore, "read", hang)
    before = again.main.kv_buffer.clone()
    assert again.storage.batch_get_v1(HASHES, again.places(12)) == [False] * 12
    answering.set()
    again.drain()
    assert torch.equal(again.main.kv_buffer, before)
    assert again.storage._exchange.is_working
    for _ in range(100):  # calls, some of which may be late on a busy machine
        if all(again.storage.batch_get_v1(HASHES, again.places(12))):
            return
    raise AssertionError("it is not there again")


def test_a_slow_disk_delays_a_call_by_one_deadline(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang ends if a call is still running 10 s after a flush of its cache."""
    from penstock.stores.disk import DiskStore

    monkeypatch.setattr(storage_module, "_BUFFER_BYTES", 1)  # one page after the other
    first = start()
    assert all(first.storage.batch_set_v1(HASHES, first.places(12)))
    stored = [first.page(number) for number in range(12)]
    first.drain()
    again = start(settings={"set": {"host.size": "2MiB", "transfer.load_deadline_seconds": 1}})
    read = DiskStore.read

    def slow(self: DiskStore, blocks: Any) -> Any:
        time.sleep(0.2)
        return read(self, blocks)

    monkeypatch.setattr(DiskStore, "read", slow)
    before = again.main.kv_buffer.clone()
    arrived = again.storage.batch_get_v1(HASHES, again.places(12))
    count = arrived.index(False)
    assert arrived == [True] * count + [False] * (12 - count)
    assert all(torch.equal(again.page(number), stored[number]) for number in range(count))
    assert torch.equal(again.main.kv_buffer[:, :, count * PAGE :], before[:, :, count * PAGE :])


def test_evicted_pages_are_not_there_and_the_cap_holds(start: Start, tmp_path: Path) -> None:
    pool = mha_pool("layer_first", heads=64, values=128, tokens=128)
    rank = start(
        pools={"kv": pool}, settings={"disk_size": 24 / 1024, "set": {"host.size": "8MiB"}}
    )
    stored = [rank.page(number) for number in range(8)]
    names = [f"{number:064x}" for number in range(1, 25)]
    for number, name in enumerate(names):
        assert rank.storage.batch_set_v1([name], rank.places(1, number % 8)) == [True]
        rank.drain()
    used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv").rglob("*"))
    assert used <= 24 << 20
    num_found = 0
    for number, name in enumerate(names):
        is_there, before = rank.storage.exists(name), rank.page(15)
        assert rank.storage.batch_get_v1([name], rank.places(1, 15)) == [is_there]
        assert torch.equal(rank.page(15), stored[number % 8] if is_there else before)
        num_found += is_there
    assert 0 < num_found < len(names)
    rank.storage._exchange.check()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    if is_skipped(redis_server.WHY_NOT):
        pytest.skip(str(redis_server.WHY_NOT))
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


def test_servers_share_pages_through_redis(
    start: Start, tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_SECRET", "a secret of these servers")

    def server(name: str) -> Rank:
        patient = {"host.size": "2MiB", "remote.lookup_deadline_seconds": 20}
        disk = str(tmp_path / name)
        return start(settings={"disk_path": disk, "remote": redis.url, "set": patient})

    first = server("first")
    stored = [first.page(number) for number in range(12)]
    assert all(first.storage.batch_set_v1(HASHES, first.places(12)))
    first.drain()

    second = server("second")  # has nothing on its own disk
    assert second.storage.batch_exists([*HASHES, "ff" * 32]) == 12
    assert all(second.storage.batch_get_v1(HASHES, second.places(12)))
    assert all(torch.equal(second.page(number), page) for number, page in enumerate(stored))

    client = Redis(port=redis.port)
    names = sorted(client.scan_iter(match="penstock/*"))
    assert len(names) >= 12
    for name in names:
        value = bytearray(client.get(name))
        value[-1] ^= 1
        client.set(name, bytes(value))
    third = server("third")
    before = [third.page(number) for number in range(12)]
    assert not any(third.storage.batch_get_v1(HASHES, third.places(12)))
    assert all(torch.equal(third.page(number), page) for number, page in enumerate(before))

    redis.kill()
    fourth = server("fourth")
    assert fourth.storage.batch_exists(HASHES) == 0
    assert not any(fourth.storage.batch_get_v1(HASHES, fourth.places(12)))
    assert all(fourth.storage.batch_set_v1(HASHES, fourth.places(12))), "its disk takes them"
    assert fourth.storage.batch_exists(HASHES) == 12
    fourth.storage._exchange.check()
