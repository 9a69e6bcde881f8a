"""Both sides of the connector on a node, under a small vLLM (see `vllm_model`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connectors.group_model import GroupVllm
from connectors.memory_model import BLOCK_TOKENS, PART_BYTES
from connectors.test_group_sides import MIXES
from connectors.users_model import live
from connectors.vllm_model import Vllm
from tools import keys_of

from penstock.config import Config, DiskConfig, HostConfig
from penstock.connectors.vllm import lookups
from penstock.connectors.vllm.kv_events import BlockNews
from penstock.errors import ConfigError
from penstock.events import Stored
from penstock.groups.kinds import Group, Kind
from penstock.node.delegated import DelegatedNodeTiers, join
from penstock.node.service import NodeService
from penstock.types import Slot, Tier
from penstock.units import MiB
from tests.node.nodes import be_patient, check


class Node:
    """A node in a thread, which can be ended and started again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._disk = path.parent / "node kv"
        self.start()

    def start(self) -> None:
        config = Config(
            host=HostConfig(size_bytes=2 * MiB),
            disk=DiskConfig(path=str(self._disk), size_bytes=64 * MiB),
        )
        self.service = NodeService(config, self.path)
        self._thread = threading.Thread(target=self.service.serve, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.service.stop()
        self._thread.join(10)
        self.service.close()
        assert not self.service.num_faults, "the node failed to serve somebody; see its log"


@pytest.fixture
def node(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    if "hanging" not in request.node.name:  # else it hangs after the seconds of production
        be_patient(monkeypatch)
    monkeypatch.setattr(lookups, "_ENOUGH_BYTES", 4 * PART_BYTES)
    node = Node(tmp_path / "node.sock")
    yield node
    node.end()


Models = Callable[..., Vllm]


@pytest.fixture
def models(node: Node) -> Iterator[Models]:
    made: list[Vllm] = []

    def make(mix: str | None = None, **options: Any) -> Vllm:
        if mix is None:
            made.append(Vllm(None, node=node.path, **options))
        else:
            made.append(GroupVllm(None, MIXES[mix], node=node.path, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
        model.audit()


ALL = ("blocks saved", "fences", "preempted", "aborted", "loads", "blocks checked")


@pytest.mark.parametrize(
    ("mix", "options"),
    [
        pytest.param(None, {}, id="plain"),
        pytest.param(None, {"num_workers": 2, "overlaps": True}, id="two workers, steps overlap"),
        pytest.param(None, {"num_drafts": 2}, id="drafts"),
        pytest.param("full, window and state", {}, id="several groups"),
    ],
)
def test_no_wrong_block_is_loaded_or_computed_from(
    models: Models, mix: str | None, options: dict[str, Any]
) -> None:
    vllm = models(mix, seed=1, **options)
    live(vllm, 1, 300, harm=False)
    missing = [name for name in ALL if not vllm.seen[name]]
    assert not missing, f"the test hardly tests: {sorted(vllm.seen.items())}"


def test_a_node_that_is_slow_saves_no_block_that_is_overwritten_meanwhile(
    models: Models, node: Node
) -> None:
    step = node.service.step

    def slow(seconds: float) -> None:
        time.sleep(0.005)
        step(seconds)

    node.service.step = slow  # type: ignore[method-assign]
    for seed in range(2):
        vllm = models(seed=seed, num_blocks=16, is_caching=False)
        live(vllm, seed, 200, harm=False)
        assert vllm.seen["blocks loaded"]


def test_what_one_has_computed_the_other_loads(models: Models, node: Node) -> None:
    one, other = models(), models(num_drafts=1)
    one.add(range(4 * BLOCK_TOKENS), 1)
    one.flush()
    other.add(range(4 * BLOCK_TOKENS + 1), 1)
    other.flush()
    assert other.seen["blocks loaded"] == 4
    check(node.service)


def test_a_node_is_restarted_in_the_middle(models: Models, node: Node) -> None:
    vllm = models(num_workers=2)
    assert isinstance(vllm.offloader, DelegatedNodeTiers)
    first = vllm.offloader.handle
    live(vllm, 1, 100, harm=False)
    assert vllm.seen["blocks loaded"]
    node.end()
    live(vllm, 2, 50, harm=False)  # everything is computed
    assert not vllm.offloader.is_attached
    node.start()
    while not vllm.offloader.is_attached:
        vllm.step()
    handle = vllm.offloader.handle
    assert handle.token != first.token
    with pytest.raises(ConfigError, match="no client has this token"):
        join(first)
    before = vllm.seen["blocks loaded"]
    live(vllm, 3, 100, harm=False)
    assert vllm.seen["blocks loaded"] > before
    assert vllm.seen["joined"] == 4  # each worker twice
    check(node.service)


def test_routers_are_told_when_the_node_is_gone(models: Models, node: Node) -> None:
    names = SimpleNamespace(
        all_token_ids=list(range(BLOCK_TOKENS)), block_hashes=["a"], lora_request=None
    )
    news = BlockNews()
    vllm = models(news=news, observers=[news])
    vllm.add(range(BLOCK_TOKENS), 1)
    key = keys_of(1)[0]
    news.name([key], 0, names, Group(0, Kind.FULL, BLOCK_TOKENS))
    news(Stored(Tier.HOST, (key,)))
    vllm.flush()
    assert [event.is_stored for event in news.take()] == [True]
    node.end()
    while vllm.offloader.is_attached:
        vllm.step()
    vllm.step()
    assert [event.is_stored for event in news.take()] == [False]
    node.start()


def test_a_save_at_a_hanging_node_is_ordered_in_time_or_not_at_all(
    models: Models, node: Node
) -> None:
    """A node that hangs asks for copies when their blocks hold something else already."""
    vllm = models()
    release = threading.Event()
    step = node.service.step

    def hang(seconds: float) -> None:
        release.wait()
        step(seconds)

    vllm.add(range(4 * BLOCK_TOKENS), 1)
    node.service.step = hang  # type: ignore[method-assign]
    vllm.run()
    saved = vllm.seen["blocks saved"]
    for prompt in range(1, 12):  # every block of the device is used for something else
        vllm.add(range(100 * prompt, 100 * prompt + 4 * BLOCK_TOKENS), 1)
        vllm.run()
    release.set()
    node.service.step = step  # type: ignore[method-assign]
    while not vllm.offloader.is_attached:
        vllm.step()
    assert vllm.seen["blocks saved"] == saved
    vllm.add(range(4 * BLOCK_TOKENS), 1)
    vllm.flush()
    vllm.check()


def test_workers_that_still_copy_keep_their_slots(models: Models, node: Node) -> None:
    vllm = models()
    vllm.add(range(BLOCK_TOKENS), 1)
    vllm.flush()
    vllm.movers[0].saves_gate.clear()
    vllm.add(range(100, 100 + 4 * BLOCK_TOKENS), 1)
    while vllm.requests:
        vllm.step()
    assert vllm.engine.num_flying
    assert not vllm.side.close()
    vllm.movers[0].saves_gate.set()
    (room,) = node.service._rooms
    assert room.num_sessions == 1  # the worker's process lives
    check(node.service)


def test_a_scheduler_that_gives_up_keeps_no_file_of_its_node_open(
    models: Models, node: Node
) -> None:
    vllm = models(seed=4)
    live(vllm, 4, 20, harm=False)
    vllm.flush()
    tiers = vllm.offloader
    assert isinstance(tiers, DelegatedNodeTiers)
    opened = (tiers.place.file, tiers.place.seals_file, tiers._line._wake_file)
    vllm.side._ticker.stop(wait=True)
    tiers.load(keys_of(1, "unknown"), [Slot(0)])
    assert tiers.drain()  # the load has ended, which nobody has been told of
    vllm.scheduler.ask(None, lambda side: side.fail())  # type: ignore[attr-defined]
    assert vllm.scheduler.side is None
    for file in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
    # Its thread may take one more turn, when these numbers may be others' already.
    others = [os.open(os.devnull, os.O_RDONLY) for _ in opened]
    assert tiers.step() == []
    tiers.pause(0.0)
    assert tiers.abandon(1.0)
    for other in others:
        os.close(other)
