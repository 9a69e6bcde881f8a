"""A node and its engines as processes: one cache, and whoever is killed, no answer changes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.node_child import VOCABULARY, Child, NodeChild, Processes

from penstock.node.connection import connect, wait_for_frame
from penstock.node.wire import VERSION

BLOCK_TOKENS = 16


def prompts(num: int, seed: int = 1, shared: int = 40, longest: int = 120) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1, VOCABULARY) for _ in range(shared)]
    return [
        head + [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(20, longest))]
        for _ in range(num)
    ]


class Stage:
    """The processes of one test."""

    def __init__(self, folder: Path, maker: Processes) -> None:
        self._maker = maker
        self.path = folder / "node.sock"
        self._disk = folder / "disk"
        self.children: list[Child] = []

    def node(self) -> NodeChild:
        child = self._maker.node(self.path, disk=str(self._disk))
        self.children.append(child)
        return child

    def engines(self, count: int, **settings: Any) -> list[Child]:
        made = [self._maker.engine(self.path, **settings) for _ in range(count)]
        self.children += made
        for child in made:
            child.wait_until_ready()
        return made

    def alone(self, **settings: Any) -> Child:
        child = self._maker.engine("", **settings)
        self.children.append(child)
        child.wait_until_ready()
        return child

    def describe(self) -> dict[str, Any]:
        channel = connect(self.path, 5.0)
        try:
            channel.send("describe", {"protocol": VERSION})
            return dict(wait_for_frame(channel, 10.0).fields)
        finally:
            channel.close()

    def close(self) -> None:
        for child in self.children:
            child.kill()


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.fixture
def stage(tmp_path: Path, maker: Processes) -> Iterator[Stage]:
    made = Stage(tmp_path, maker)
    yield made
    made.close()


def bits(found: list[dict[str, Any]]) -> list[Any]:
    assert not any(each["failed"] for each in found)
    return [(each["tokens"], each["logprobs"]) for each in found]


def tokens(found: list[dict[str, Any]]) -> list[list[int]]:
    assert not any(each["failed"] for each in found)
    assert all(each["finish"] == "length" for each in found)
    return [each["tokens"] for each in found]


def memory_files(pid: int) -> set[str]:
    """The inodes of DRAM for blocks that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:penstock-host" in line}


@pytest.mark.parametrize("num_engines", [2, 4])
def test_engines_on_one_node_answer_as_one_alone(stage: Stage, num_engines: int) -> None:
    questions = prompts(num_engines * 2)
    alone = stage.alone()
    first = alone.ask("run", prompts=questions)
    alone.ask("settle")
    again = alone.ask("run", prompts=questions)
    alone.kill()

    node = stage.node()
    engines = stage.engines(num_engines)
    # One computes everything. The others find it, and are asked at the same time.
    assert bits(engines[0].ask("run", prompts=questions)) == bits(first)
    engines[0].ask("settle")
    for engine in engines[1:]:
        engine.send("run", prompts=questions)
    for engine in engines[1:]:
        found = engine.read()
        assert bits(found) == bits(again)
        assert [each["cached"] for each in found] == [each["cached"] for each in again]

    # DRAM is taken once: one file, and each block one time.
    files = [memory_files(process.pid) for process in (node, *engines)]
    assert len(files[0]) == 1
    assert all(each == files[0] for each in files)
    chains = [(*ids, *each["tokens"]) for ids, each in zip(questions, first, strict=True)]
    starts = range(BLOCK_TOKENS, 1024, BLOCK_TOKENS)
    # The KV of the last token is not computed.
    distinct = {chain[:end] for chain in chains for end in starts if end < len(chain)}
    for engine in engines:
        engine.ask("settle")
        assert engine.ask("check") == "sound"
    (model,) = stage.describe()["models"]
    assert model["blocks"] - model["free_blocks"] == len(distinct)
    assert model["pinned"] == 0
    assert len(model["clients"]) == num_engines
    for engine in engines:
        assert engine.ask("close") == "closed"
    assert node.stop()  # it checks its books at the end


def test_engines_that_are_killed_leave_nothing_behind(stage: Stage) -> None:
    questions = prompts(8)
    alone = stage.alone()
    wanted = tokens(alone.ask("run", prompts=questions, at_once=4))
    alone.kill()
    node = stage.node()
    (survivor,) = stage.engines(1, num_blocks=24, cold=True)
    rng = random.Random(1)
    for _ in range(3):
        victims = stage.engines(2, num_blocks=24, cold=True)
        for victim in victims:
            victim.send("run", prompts=questions * 4, at_once=4, max_tokens=40)
        survivor.send("run", prompts=questions, at_once=4)
        time.sleep(rng.uniform(0.1, 1.0))  # while they save and load
        for victim in victims:
            victim.kill()
        assert tokens(survivor.read()) == wanted
        survivor.ask("settle")
        assert survivor.ask("check") == "sound"
    (model,) = stage.describe()["models"]
    assert len(model["clients"]) == 1
    assert model["pinned"] == 0
    # What the dead had saved is whole, or not there.
    found = survivor.ask("run", prompts=questions, at_once=4)
    assert tokens(found) == wanted
    assert survivor.ask("close") == "closed"
    assert node.stop()


def test_a_node_that_dies_hangs_or_restarts_fails_no_request(stage: Stage) -> None:
    questions = prompts(10)
    alone = stage.alone()
    wanted = tokens(alone.ask("run", prompts=questions * 4, at_once=5))
    alone.kill()
    node = stage.node()
    engines = stage.engines(2, num_blocks=24, cold=True)

    def start() -> None:
        for engine in engines:
            engine.send("run", prompts=questions * 4, at_once=5)
        time.sleep(0.3)

    def finish() -> None:
        for engine in engines:
            assert tokens(engine.read()) == wanted
            engine.ask("settle")

    start()
    node.kill()
    finish()

    node = stage.node()
    until_attached(engines)
    start()
    node.signal(signal.SIGSTOP)
    time.sleep(2.5)
    node.signal(signal.SIGCONT)
    finish()
    until_attached(engines)

    start()
    assert node.stop()  # as for an upgrade: it writes what is pending, and leaves
    node = stage.node()
    finish()
    until_attached(engines)

    # Back to normal: what one computes, the other finds.
    fresh = prompts(3, seed=9, shared=0)
    engines[0].ask("run", prompts=fresh)
    engines[0].ask("settle")
    assert all(each["cached"] >= 16 for each in engines[1].ask("run", prompts=fresh))
    for engine in engines:
        engine.ask("settle")
        assert engine.ask("check") == "sound"
        assert engine.ask("close") == "closed"
    assert node.stop()


def until_attached(engines: list[Child]) -> None:
    for engine in engines:
        for _ in range(3000):
            if engine.ask("step"):
                break
            time.sleep(0.02)
        else:
            raise AssertionError("an engine does not attach again")
