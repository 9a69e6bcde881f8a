"""Engines that use a node: the same tokens as alone, bit for bit, and one cache for all of them."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.node_child import run_requests
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load, idle

from penstock.config import Config, DiskConfig, HostConfig, NodeConfig
from penstock.config.options import EngineOptions, tiers_config
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.errors import ConfigError
from penstock.events import Audited, Event, Quarantined
from penstock.hints import Hint
from penstock.keys import KeyChain
from penstock.node.service import NodeService
from penstock.types import Tier
from tests.node.nodes import be_patient

COLD = ResidencyConfig(prefix_tokens=16, tail_tokens=16)
HOT = ResidencyConfig(cold=False)


class Node:
    """A node in a thread, that can be stopped and started again."""

    def __init__(
        self,
        path: Path,
        *,
        dram: int = 16 << 20,
        disk: Path | None = None,
        pin_share: float = NodeConfig().pin_share,
    ) -> None:
        self.path = path
        below = DiskConfig(path=None if disk is None else str(disk), size_bytes=64 << 20)
        host = HostConfig(size_bytes=dram, huge_pages=False)
        self._config = Config(host, below, node=NodeConfig(pin_share=pin_share))
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        self.service = NodeService(self._config, self.path)
        self._thread = threading.Thread(target=self.service.serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.service.stop()
        self._thread.join(10)
        self.service.check()
        self.service.close()
        assert not self.service.num_faults, "the node failed to serve somebody; see its log"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    be_patient(monkeypatch)
    made = Node(tmp_path / "node.sock", disk=tmp_path / "disk")
    yield made
    made.stop()


Engines = Callable[..., Engine]


@contextmanager
def closing(made: list[Engine]) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in made:
            engine.close()


@pytest.fixture
def engines(loaded: LoadedModel, node: Node) -> Iterator[Engines]:
    """After the node in this list, so that they are closed before it stops."""
    made: list[Engine] = []

    def make(
        url: str | None = node.url,
        num_blocks: int = 64,
        *,
        residency: ResidencyConfig = HOT,
        audit_share: float = 0.0,
        observers: tuple[Any, ...] = (),
        batch: int = 64,
    ) -> Engine:
        config = EngineConfig(
            num_blocks * BLOCK_BYTES,
            BLOCK_TOKENS,
            batch,
            residency=residency,
            audit_share=audit_share,
        )
        tiers = Config(HostConfig(size_bytes=16 << 20, huge_pages=False))
        if url is not None:
            tiers = Config(node=NodeConfig(url=url))
        made.append(Engine(loaded, config, tiers, observers))
        always_load(made[-1])
        return made[-1]

    with closing(made):
        yield make


def prompts(num: int, seed: int = 1, shared: int = 40, longest: int = 200) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1, 40_000) for _ in range(shared)]
    return [
        head + [rng.randrange(1, 40_000) for _ in range(rng.randint(20, longest))]
        for _ in range(num)
    ]


def bits(found: list[dict[str, Any]]) -> list[Any]:
    assert not any(each["failed"] for each in found)
    return [(each["tokens"], each["logprobs"]) for each in found]


def forget_device(engine: Engine) -> None:
    """Saves have ended, and the device has nothing: what comes now comes from the tiers."""
    idle(engine)
    engine.pool.distrust()


def test_tokens_and_log_probabilities_are_those_of_an_engine_alone(engines: Engines) -> None:
    alone, one, two = engines(None), engines(), engines()
    questions = prompts(6)
    first = run_requests(alone, questions)
    forget_device(alone)
    again = run_requests(alone, questions)
    assert bits(run_requests(one, questions)) == bits(first)
    forget_device(one)
    found = run_requests(two, questions)
    assert bits(found) == bits(again)
    # What one has computed, the other has loaded: all complete blocks, but for the last token.
    assert [each["cached"] for each in found] == [each["cached"] for each in again]
    assert all(each["cached"] >= 48 for each in found)
    for engine in (alone, one, two):
        idle(engine)


@pytest.mark.parametrize("num_blocks", [24, 10])
def test_cold_sequences_read_a_nodes_dram_in_place(engines: Engines, num_blocks: int) -> None:
    questions = prompts(6)
    wanted = [each["tokens"] for each in run_requests(engines(None), questions, max_tokens=30)]
    one = engines(num_blocks=num_blocks, residency=COLD)
    two = engines(num_blocks=num_blocks, residency=COLD)
    for engine in (one, two):
        found = run_requests(engine, questions, max_tokens=30, at_once=6)
        assert [each["tokens"] for each in found] == wanted
        assert found[0]["max_cold"] > 0
        idle(engine)
    # A sequence that is larger than the device.
    long = prompts(1, seed=3, shared=700)
    roomy = run_requests(engines(None, 128), long)
    assert run_requests(one, long)[0]["tokens"] == roomy[0]["tokens"]
    idle(one)


def test_cold_reads_are_bit_for_bit_those_of_an_engine_alone(engines: Engines) -> None:
    questions = prompts(2, seed=5, shared=300)
    alone = run_requests(engines(None, 10, residency=COLD), questions)
    found = run_requests(engines(num_blocks=10, residency=COLD), questions)
    assert found[0]["max_cold"] > 0
    assert [each["max_cold"] for each in found] == [each["max_cold"] for each in alone]
    assert bits(found) == bits(alone)


def test_no_more_is_cold_than_one_client_may_pin(engines: Engines) -> None:
    engine = engines(num_blocks=10, residency=COLD)
    assert engine.offloader is not None
    assert engine.admission.num_running_blocks(never_cold=False) == (
        10 + engine.offloader.num_pinnable_blocks
    )
    assert engine.offloader.num_pinnable_blocks < engine.offloader.num_host_blocks


def test_tenants_share_nothing(engines: Engines) -> None:
    one, two = engines(), engines()
    questions = prompts(2)
    run_requests(one, questions, tenant="a")
    forget_device(one)
    assert [each["cached"] for each in run_requests(two, questions, tenant="b")] == [0, 32]
    two.pool.distrust()
    assert all(each["cached"] > 32 for each in run_requests(two, questions, tenant="a"))


def test_hints_reach_the_node(engines: Engines, node: Node) -> None:
    one, two = engines(), engines()
    (question,) = prompts(1, longest=200)
    run_requests(one, [question], kv_hints={"session": "s", "retain_seconds": 60})
    forget_device(one)
    assert one.offloader is not None
    assert two.offloader is not None
    keys = KeyChain(one.namespace, question).keys
    two.step()
    assert two.offloader.num_retained >= len(keys)
    assert one.hint(Hint("release", "s")) >= len(keys)
    assert one.hint(Hint("retain", None, 60.0), question) == len(keys)
    assert one.hint(Hint("release", None), question) == len(keys)
    # From disk into DRAM, before anyone asks.
    assert two.offloader.empty_host() >= len(keys)
    assert two.offloader.match(keys).num_from(Tier.DISK) == len(keys)
    assert one.hint(Hint("prefetch", None), question) == len(keys)
    while one.offloader.is_prefetching:
        one.step()
        one.offloader.pause(0.01)
    assert two.offloader.match(keys).num_from(Tier.HOST) == len(keys)


def test_audits_find_nothing_wrong_and_pin_nothing_for_good(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    events: list[Event] = []
    one = engines()
    two = engines(audit_share=1.0, observers=(events.append,))
    questions = prompts(3)
    first = run_requests(one, questions)
    forget_device(one)
    found = run_requests(two, questions)
    assert two.audits is not None
    for _ in range(1000):
        if not two.audits.is_busy:
            break
        two.step()
        time.sleep(0.005)
    assert [each["tokens"] for each in found] == [each["tokens"] for each in first]
    assert sum(each.num_blocks for each in events if isinstance(each, Audited)) > 0
    assert not any(isinstance(event, Quarantined) for event in events)
    idle(two)


def test_an_audit_that_fails_ends_loads_for_all_clients_of_the_model(
    loaded: LoadedModel,
    engines: Engines,
    node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    questions = prompts(2)
    wanted = [each["tokens"] for each in run_requests(engines(None), questions)]
    one, events = engines(), list[Event]()
    two = engines(audit_share=1.0, observers=(events.append,))
    tensor = one.device.tensor
    run_requests(one, questions[:1])
    idle(one)
    keys = KeyChain(one.namespace, questions[0]).keys
    # What is stored under these keys is not their KV.
    assert one.offloader is not None
    one.offloader.discard(keys)
    tensor.fill_(0.5)
    ticket = one.offloader.save(keys[:4], one.pool.take(4) or [])
    one.offloader.wait([ticket])
    found = run_requests(two, questions)
    assert two.audits is not None
    for _ in range(1000):
        if any(isinstance(event, Quarantined) for event in events):
            break
        two.step()
        time.sleep(0.005)
    assert [each["tokens"] for each in found] == wanted
    one.pool.distrust()
    one.step()
    assert one.offloader.is_quarantined
    assert one.offloader.match(keys).num_blocks == 0
    assert [each["tokens"] for each in run_requests(one, questions)] == wanted
    # And for those that come later, also after a restart of the node.
    assert engines().offloader.is_quarantined  # type: ignore[union-attr]
    node.stop()
    node.start()
    later = engines()
    assert later.offloader is not None
    assert later.offloader.is_quarantined
    assert [each["tokens"] for each in run_requests(later, questions)] == wanted


def test_an_engine_goes_on_without_its_node_and_uses_it_again(engines: Engines, node: Node) -> None:
    questions = prompts(4)
    wanted = [each["tokens"] for each in run_requests(engines(None), questions)]
    engine = engines()
    assert [each["tokens"] for each in run_requests(engine, questions)] == wanted
    forget_device(engine)
    node.stop()
    found = run_requests(engine, questions)
    assert [each["tokens"] for each in found] == wanted
    assert found[0]["cached"] == 0
    assert engine.offloader is not None
    assert not engine.offloader.is_available
    node.start()
    until_attached(engine)
    until_found(engine, questions)
    engine.pool.distrust()
    found = run_requests(engine, questions)  # from the node's disk
    assert [each["tokens"] for each in found] == wanted
    assert all(each["cached"] > 32 for each in found)
    idle(engine)


def test_cold_sequences_go_on_in_the_memory_of_a_node_that_is_gone(
    engines: Engines, node: Node
) -> None:
    (question,) = prompts(1, seed=7, shared=300, longest=40)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (wanted,) = run_requests(engines(None, 128), [question], max_tokens=60)
    engine = engines(num_blocks=14, residency=COLD)
    request = engine.add("cold", question, params)
    while len(request.output_ids) < 5:
        engine.step()
    assert engine.scheduler.placement.num_cold > 0
    node.stop()
    node.start()  # at once: it is not used before the old memory is free
    while engine.has_work:
        engine.step()
    assert engine.take_failed() == []
    assert list(request.output_ids) == wanted["tokens"]
    until_attached(engine)
    idle(engine)


def test_a_fault_of_the_engine_does_not_cost_it_the_node(engines: Engines) -> None:
    questions = prompts(3)
    engine = engines()
    wanted = [each["tokens"] for each in run_requests(engine, questions)]
    idle(engine)
    for must_reopen in (False, True):
        assert engine._rebuild(must_reopen=must_reopen) is must_reopen
        always_load(engine)
        found = run_requests(engine, questions)
        assert [each["tokens"] for each in found] == wanted
        assert all(each["cached"] > 32 for each in found)
        idle(engine)


def test_an_engine_that_loses_its_books_while_the_node_is_gone_computes(
    engines: Engines, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("penstock.node.attach._AGAIN_SECONDS", 0.2)
    questions = prompts(2)
    engine = engines()
    wanted = [each["tokens"] for each in run_requests(engine, questions)]
    node.stop()
    with caplog.at_level(logging.ERROR):
        engine._rebuild(must_reopen=True)
    assert "until this process is restarted" in caplog.text
    assert engine.offloader is None
    assert [each["tokens"] for each in run_requests(engine, questions)] == wanted
    node.start()


def test_what_a_node_has_is_not_set_beside_it() -> None:
    url = "unix:///run/penstock/node.sock"
    config = tiers_config(EngineOptions(node=url))
    assert config is not None
    assert config.node.url == url
    for options in (
        {"kv_offloading_size": 4},
        {"disk_path": "kv"},
        {"remote": "redis://h"},
        {"disk_size": 3},
    ):
        with pytest.raises(ConfigError, match=r"together with node: .*set them on the node"):
            tiers_config(EngineOptions(node=url, **options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"host\.size is given together with node"):
        tiers_config(EngineOptions(node=url), settings={"host.size": "4GiB"})
    with pytest.raises(ConfigError, match="which disables offloading"):
        tiers_config(EngineOptions(node=url, kv_offloading_size=0))
    with pytest.raises(ConfigError, match="unix:///"):
        tiers_config(EngineOptions(node="/run/node.sock"))


def test_no_node_is_a_sentence(loaded: LoadedModel, tmp_path: Path) -> None:
    tiers = Config(node=NodeConfig(url=f"unix://{tmp_path}/none.sock", wait_seconds=0.1))
    with pytest.raises(ConfigError, match=r"no node is listening at .*none\.sock"):
        Engine(loaded, EngineConfig(8 * BLOCK_BYTES, BLOCK_TOKENS), tiers)


def until_attached(engine: Engine) -> None:
    assert engine.offloader is not None
    for _ in range(2000):
        if engine.offloader.is_available:
            return
        engine.step()
        time.sleep(0.01)
    raise AssertionError("the engine does not attach again")


def until_found(engine: Engine, questions: list[list[int]]) -> None:
    """A node reads the index of its disk in the background."""
    assert engine.offloader is not None
    chains = [KeyChain(engine.namespace, question).keys for question in questions]
    for _ in range(2000):
        engine.step()
        if all(engine.offloader.match(keys).num_blocks == len(keys) for keys in chains):
            return
        time.sleep(0.01)
    raise AssertionError("the node does not find what is on its disk")
