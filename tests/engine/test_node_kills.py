"""Engines and their node are killed with `kill -9`, in random order and under load.

Clients send requests to several engines on one node. A request whose engine is killed is sent to
another, as a client would. Every answer must be that of an engine alone, and in the end nothing of
the dead may be left in the node's books.

Some requests run alone, in chunks of one block. Then the same shapes are computed whatever was
loaded, and log probabilities must be equal bit for bit. The others run in batches on a device that
is too small for them: some engines preempt, the others read DRAM in place. The shapes of batches
differ, so only their tokens must be equal, and their log probabilities close. These are of another
tenant, so that their KV is not loaded by the first.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engine.node_child import Child, Engines, NodeChild

from penstock.node.connection import connect, wait_for_frame
from penstock.node.wire import VERSION

BLOCK_TOKENS = 16
NUM_DEVICE_BLOCKS = 14  # of an engine: one long sequence, or two short ones
DRAM = 2 << 20  # a third of the blocks that all prompts have
MAX_TOKENS = 10
STUCK_SECONDS = 240.0

Job = tuple[str, tuple[int, ...]]


def make_prompts(rng: random.Random, num: int) -> list[list[int]]:
    """Prompts of which many begin alike. None ends with a block: its last chunk is never cached."""
    heads = [[rng.randrange(1, 40_000) for _ in range(64)] for _ in range(3)]
    found = []
    for _ in range(num):
        ids = rng.choice(heads)[: rng.choice((16, 32, 48, 64))]
        ids += [rng.randrange(1, 40_000) for _ in range(rng.randint(20, 110))]
        found.append(ids if len(ids) % BLOCK_TOKENS else ids[:-1])
    return found


class Seat:
    """A place for an engine: whoever is killed here is replaced."""

    def __init__(self, *, cold: bool) -> None:
        self.cold = cold  # its engine reads DRAM in place, and answers batches only
        self.child: Child | None = None
        self.was_killed = False
        self.lock = threading.Lock()

    def kill(self) -> bool:
        """False if nobody lives here at the moment."""
        with self.lock:
            if self.child is None or self.was_killed:
                return False
            self.was_killed = True
            with suppress(ProcessLookupError):
                self.child.signal(signal.SIGKILL)
            return True


class Fleet:
    """A node, its engines, and the clients of these."""

    def __init__(self, folder: Path, maker: Engines, num_engines: int, seed: int) -> None:
        self.path = folder / "node.sock"
        self.errors = folder / "node.log"
        self._disk = folder / "disk"
        self._maker = maker
        self._rng = random.Random(seed)
        self.prompts = make_prompts(self._rng, 40)
        alone = maker.make("", num_blocks=64, batch=BLOCK_TOKENS)
        alone.wait_until_ready()
        self.wanted = alone.ask("run", prompts=self.prompts, max_tokens=MAX_TOKENS)
        alone.kill()
        self.node = self._start_node()
        self.seats = [Seat(cold=number % 2 == 1) for number in range(num_engines)]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._retries: list[Job] = []
        self._is_ending = False
        self._threads = [
            threading.Thread(target=self._work, args=(seat, random.Random(f"{seed} {number}")))
            for number, seat in enumerate(self.seats)
        ]
        for thread in self._threads:
            thread.start()

    # Kills.

    def kill_node(self) -> None:
        self.node.kill()
        time.sleep(self._rng.random() * 0.3)
        self.node = self._start_node()
        self.counts["nodes killed"] += 1

    def kill_engine(self) -> None:
        while not self._rng.choice(self.seats).kill():
            assert not self.wrong
            time.sleep(0.01)
        self.counts["engines killed"] += 1

    def kill_some(self, num_kills: int) -> None:
        while self.counts["nodes killed"] + self.counts["engines killed"] < num_kills:
            # Sometimes at once: while another engine starts, or the node has just been started.
            self._wait_for_answers(self._rng.choice((0, 0, 1, 2, 4, 6)))
            time.sleep(self._rng.random() * 0.2)
            if self._rng.random() < 0.3:
                self.kill_node()
            else:
                self.kill_engine()

    def _wait_for_answers(self, num: int) -> None:
        """Wait for a number of answers, not for a time: a busy machine must get some work done."""
        enough = self.counts["jobs"] + num
        end = time.monotonic() + STUCK_SECONDS
        while self.counts["jobs"] < enough and not self.wrong:
            assert time.monotonic() < end, "no engine answers"
            time.sleep(0.02)

    def _start_node(self) -> NodeChild:
        return NodeChild(self.path, self.errors, disk=str(self._disk), dram=DRAM)

    # Clients.

    def _work(self, seat: Seat, rng: random.Random) -> None:
        try:
            while not self.wrong and (job := self._next_job(seat, rng)) is not None:
                try:
                    self.ask(self._engine(seat), *job)
                except (EOFError, OSError):
                    self._bury(seat)
                    with self._lock:
                        self._retries.append(job)
                else:
                    self.counts["jobs"] += 1
        except Exception as error:
            self.wrong.append(repr(error))

    def _next_job(self, seat: Seat, rng: random.Random) -> Job | None:
        """None at the end, when every request has been answered."""
        with self._lock:
            for job in self._retries:
                if not seat.cold or job[0] != "alone":
                    self._retries.remove(job)
                    return job
        if self._is_ending:
            return None
        if rng.random() < 0.1:
            return "check", ()
        kind, num = ("batch", 5) if seat.cold or rng.random() < 0.4 else ("alone", 2)
        return kind, tuple(rng.randrange(len(self.prompts)) for _ in range(num))

    def _engine(self, seat: Seat) -> Child:
        if seat.child is None:
            child = self._maker.make(
                self.path, num_blocks=NUM_DEVICE_BLOCKS, batch=BLOCK_TOKENS, cold=seat.cold
            )
            with seat.lock:
                seat.child, seat.was_killed = child, False
            child.wait_until_ready()
        return seat.child

    def _bury(self, seat: Seat) -> None:
        with seat.lock:
            if seat.child is None:
                return
            if not seat.was_killed:
                raise AssertionError("an engine ended that nobody killed, or hangs")
            seat.child.close()
            seat.child = None
        self.counts["retried"] += 1

    def ask(self, engine: Child, kind: str, chosen: tuple[int, ...]) -> None:
        if kind == "check":
            engine.ask("settle")
            assert engine.ask("check") == "sound"
            self.counts["checks"] += 1
            return
        at_once = 1 if kind == "alone" else len(chosen)
        questions = [self.prompts[number] for number in chosen]
        found = engine.ask(
            "run", prompts=questions, max_tokens=MAX_TOKENS, tenant=kind, at_once=at_once
        )
        for number, answer in zip(chosen, found, strict=True):
            self._compare(kind, number, answer)

    def _compare(self, kind: str, number: int, answer: dict[str, Any]) -> None:
        wanted = self.wanted[number]
        assert not answer["failed"], answer["failed"]
        assert answer["finish"] == "length"
        assert answer["tokens"] == wanted["tokens"], f"wrong tokens ({kind}, {number})"
        if kind == "alone":
            assert answer["max_cold"] == 0
            assert answer["logprobs"] == wanted["logprobs"], f"not bit for bit ({number})"
        else:
            pairs = zip(answer["logprobs"], wanted["logprobs"], strict=True)
            far = max(abs(float.fromhex(one) - float.fromhex(other)) for one, other in pairs)
            assert far < 1e-3, f"log probabilities differ by {far} ({number})"
        self.counts[kind] += 1
        self.counts["loaded tokens"] += answer["loaded"]
        self.counts["preemptions"] += answer["preemptions"]
        self.counts["cold reads"] += answer["max_cold"] > 0

    # The end.

    def end_load(self) -> list[Child]:
        """Let clients finish, and return their engines, by seat."""
        self._is_ending = True
        for thread in self._threads:
            thread.join(STUCK_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads), "an engine hangs"
        for seat in self.seats:
            if seat.was_killed:
                self._bury(seat)  # by the last kills: its client had nothing more to ask
        return [self._engine(seat) for seat in self.seats]

    def describe(self) -> dict[str, Any]:
        channel = connect(self.path, 5.0)
        try:
            channel.send("describe", {"protocol": VERSION})
            (model,) = wait_for_frame(channel, 30.0).fields["models"]
            return dict(model)
        finally:
            channel.close()

    def close(self) -> None:
        self.wrong.append("the test ends")
        for seat in self.seats:
            seat.kill()
        for thread in self._threads:
            thread.join(STUCK_SECONDS)
        for seat in self.seats:
            if seat.child is not None:
                seat.child.kill()
        self.node.kill()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "engines.log"


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"), logs)
    yield made
    made.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_kills", "num_engines", "seed"), [(6, 3, 1), (100, 4, 2)], ids=["short", "long"]
)
def test_no_answer_is_wrong_or_missing(
    tmp_path: Path, maker: Engines, logs: Path, num_kills: int, num_engines: int, seed: int
) -> None:
    fleet = Fleet(tmp_path, maker, num_engines, seed)
    try:
        fleet.kill_some(num_kills)
        engines = fleet.end_load()
        assert fleet.wrong == []
        until_attached(engines)
        nothing_is_left(fleet, engines)
        tested = ("alone", "batch", "loaded tokens", "preemptions", "cold reads")
        for what in tested if num_kills >= 100 else tested[:3]:  # a few kills are soon over
            assert fleet.counts[what] > 0, f"nothing was tested: no {what}"
        for engine in engines:
            assert engine.ask("close") == "closed"
        assert fleet.node.stop() == 0  # it checks its books at the end
        for log in (fleet.errors, logs):
            assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        fleet.close()
        print(dict(fleet.counts))


def until_attached(engines: list[Child]) -> None:
    end = time.monotonic() + STUCK_SECONDS
    for engine in engines:
        while not engine.ask("step"):
            assert time.monotonic() < end, "an engine does not attach again"
            time.sleep(0.02)


def nothing_is_left(fleet: Fleet, engines: list[Child]) -> None:
    """The node has nothing of the dead: no client, no pin, no slot; and one memory for all."""
    for engine in engines:
        engine.ask("settle")
        assert engine.ask("check") == "sound"
    end = time.monotonic() + STUCK_SECONDS
    while len((model := fleet.describe())["clients"]) != len(engines):
        assert time.monotonic() < end, f"clients that are gone: {model['clients']}"
        time.sleep(0.05)
    assert model["pinned"] == 0
    memory = memory_files(fleet.node.pid)
    assert len(memory) == 1
    assert all(memory_files(engine.pid) == memory for engine in engines)
    # Every slot is free once DRAM is emptied, and every block is still found on disk, or computed.
    engines[0].ask("empty")
    model = fleet.describe()
    assert model["free_blocks"] == model["blocks"] > 0
    for first, engine in enumerate(engines):
        kind = "batch" if fleet.seats[first].cold else "alone"
        fleet.ask(engine, kind, tuple(range(first, len(fleet.prompts), len(engines))))
    for engine in engines:
        engine.ask("settle")
        assert engine.ask("check") == "sound"


def memory_files(pid: int) -> set[str]:
    """The inodes of DRAM for blocks that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:penstock-host" in line}
