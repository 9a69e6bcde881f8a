"""Engines and their node are killed with `kill -9`, in random order and under load.

Clients send requests to several engines on one node. A request whose engine is killed is sent to
another, as a client would. Every answer must be that of an engine alone. Now and then the clients
pause: then nothing of the dead may be left in the node's books.

Engines are killed at any moment, while they read DRAM in place, and while they copy. Some are not
killed but lose their connection while they read in place: the node must not give their blocks to
others as long as they live.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine.node_child import VOCABULARY, Child, NodeChild, Processes

from penstock.node.connection import connect, wait_for_frame
from penstock.node.wire import VERSION

BLOCK_TOKENS = 16
NUM_DEVICE_BLOCKS = 14  # of an engine: one long sequence, or two short ones
DRAM = 2 << 20  # a third of the blocks that all prompts have
MAX_TOKENS = 10
STUCK_SECONDS = 240.0

# What happens, in ten kills. See `Trap` for those of engines that happen at a chosen moment.
DECK = ("node", "node", "node", "now", "now", "reading", "reading", "copying", "copying", "copying")
FEW = ("node", "now", "node", "cut", "reading", "copying")

Job = tuple[str, tuple[int, ...]]


def make_prompts(rng: random.Random, num: int) -> list[list[int]]:
    """Prompts of which many begin alike. None ends with a block: its last chunk is never cached."""
    heads = [[rng.randrange(1, VOCABULARY) for _ in range(64)] for _ in range(3)]
    found = []
    for _ in range(num):
        ids = rng.choice(heads)[: rng.choice((16, 32, 48, 64))]
        ids += [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(20, 110))]
        found.append(ids if len(ids) % BLOCK_TOKENS else ids[:-1])
    return found


class Seat:
    """A place for an engine: whoever is killed here is replaced."""

    def __init__(self, *, cold: bool) -> None:
        self.cold = cold  # its engine reads DRAM in place, and answers batches only
        self.child: Child | None = None
        self.was_killed = False
        self.trap = ""  # what happens to its engine soon
        self.lock = threading.Lock()

    def kill(self) -> bool:
        """False if nobody lives here at the moment."""
        with self.lock:
            if self.child is None or self.was_killed or self.trap:
                return False
            self.was_killed = True
            self.child.signal(signal.SIGKILL)
            return True

    def set_trap(self, kind: str) -> bool:
        with self.lock:
            if self.trap or self.was_killed or (kind != "copying" and not self.cold):
                return False
            self.trap = kind
            return True


class Fleet:
    """A node, its engines, and the clients of these."""

    def __init__(self, folder: Path, maker: Processes, num_engines: int, seed: int) -> None:
        self.path = folder / "node.sock"
        self._disk = folder / "disk"
        self._maker = maker
        self._rng = random.Random(seed)
        self.prompts = make_prompts(self._rng, 40)
        alone = maker.engine("", num_blocks=64, batch=BLOCK_TOKENS)
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
        self._threads: list[threading.Thread] = []

    def start_load(self) -> None:
        self._is_ending = False
        self._threads = [
            threading.Thread(target=self._work, args=(seat, random.Random(self._rng.random())))
            for seat in self.seats
        ]
        for thread in self._threads:
            thread.start()

    # Kills.

    @property
    def _num_events(self) -> int:
        return sum(self.counts[each] for each in ("nodes killed", "engines killed", "cut"))

    def kill_some(self, what: Sequence[str]) -> None:
        """Let these happen, in this order, and return once all have happened."""
        enough = self._num_events + len(what)
        for kind in what:
            # Sometimes at once: while another engine starts, or the node has just been started.
            self._wait_until_answered(self.counts["jobs"] + self._rng.choice((0, 0, 1, 2, 3)))
            time.sleep(self._rng.random() * 0.2)
            if kind == "node":
                self._kill_node()
            elif kind == "now":
                self._at_any_seat(Seat.kill)
                self._count("engines killed", 1)
            else:
                self._at_any_seat(lambda seat, kind=kind: seat.set_trap(kind))  # type: ignore[misc]
        self._wait_until(lambda: self._num_events >= enough, "a trap does not close")

    def _kill_node(self) -> None:
        self.node.kill()
        time.sleep(self._rng.random() * 0.3)
        self.node = self._start_node()
        self._count("nodes killed", 1)

    def _at_any_seat(self, act: Callable[[Seat], bool]) -> None:
        self._wait_until(lambda: act(self._rng.choice(self.seats)), "no engine can be killed")

    def _wait_until_answered(self, num: int) -> None:
        """Wait for a number of answers, not for a time: a busy machine must get some work done."""
        self._wait_until(lambda: self.counts["jobs"] >= num, "no engine answers")

    def _wait_until(self, is_so: Callable[[], bool], problem: str) -> None:
        end = time.monotonic() + STUCK_SECONDS
        while not self.wrong and not is_so():
            assert time.monotonic() < end, problem
            time.sleep(0.01)
        assert self.wrong == []

    def _start_node(self) -> NodeChild:
        return self._maker.node(self.path, disk=str(self._disk), dram=DRAM)

    def _count(self, what: str, num: int) -> None:
        with self._lock:
            self.counts[what] += num

    # Clients.

    def _work(self, seat: Seat, rng: random.Random) -> None:
        try:
            while not self.wrong and (job := self._next_job(seat, rng)) is not None:
                try:
                    self._ask_at(seat, job)
                except (EOFError, OSError):
                    self._bury(seat)
                    with self._lock:
                        self._retries.append(job)
                else:
                    self._count("jobs", 1)
        except Exception as error:
            self.wrong.append(repr(error))

    def _ask_at(self, seat: Seat, job: Job) -> None:
        trap, engine = seat.trap, self._engine(seat)
        was_cut = self.ask(engine, *job, trap=trap)
        if was_cut:
            self._count("cut", 1)
            seat.trap = ""

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
            child = self._maker.engine(
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
            if seat.trap in ("reading", "copying"):
                self._count(f"killed while {seat.trap}", 1)
                self._count("engines killed", 1)
                seat.trap = ""
            elif not seat.was_killed:
                raise AssertionError("an engine ended that nobody killed, or hangs")
            seat.child.close()
            seat.child = None
            seat.was_killed = False
        self._count("retried", 1)

    def ask(self, engine: Child, kind: str, chosen: tuple[int, ...], trap: str = "") -> bool:
        """Whether the engine lost its connection, because of a trap, while it answered."""
        if kind == "check":
            assert engine.ask("check") == "sound"
            self._count("checks", 1)
            return False
        found = engine.ask(
            "run",
            prompts=[self.prompts[number] for number in chosen],
            max_tokens=MAX_TOKENS,
            tenant=kind,
            at_once=1 if kind == "alone" else len(chosen),
            trap=trap,
        )
        was_cut = found == "cut"
        if was_cut:
            self._write_all_of_dram()
            found = engine.ask("go on")
        for number, answer in zip(chosen, found, strict=True):
            self._compare(kind, number, answer)
        return was_cut

    def _write_all_of_dram(self) -> None:
        """Other blocks take all slots that are not pinned."""
        rng = random.Random(1)
        prompts = [[rng.randrange(1, VOCABULARY) for _ in range(481)] for _ in range(6)]
        engine = self._maker.engine(self.path, num_blocks=64)
        engine.wait_until_ready()
        engine.ask("empty")
        engine.ask("run", prompts=prompts, max_tokens=1, tenant="another")
        assert engine.ask("check") == "sound"
        engine.kill()

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
        self._count(kind, 1)
        self._count("loaded tokens", answer["loaded"])
        self._count("preemptions", answer["preemptions"])
        self._count("cold reads", answer["max_cold"] > 0)

    # The end.

    def end_load(self) -> list[Child]:
        """Let clients finish, and return their engines, by seat."""
        self._is_ending = True
        for thread in self._threads:
            thread.join(STUCK_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads), "an engine hangs"
        assert self.wrong == []
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
def maker(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("engines"), logs)
    yield made
    made.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_kills", "num_engines", "seed"), [(0, 3, 1), (100, 4, 2)], ids=["short", "long"]
)
def test_no_answer_is_wrong_or_missing(
    tmp_path: Path, maker: Processes, logs: Path, num_kills: int, num_engines: int, seed: int
) -> None:
    fleet = Fleet(tmp_path, maker, num_engines, seed)
    rng = random.Random(seed)
    decks = [[*rng.sample(DECK, len(DECK)), "cut"] for _ in range(num_kills // len(DECK))]
    try:
        for deck in decks or [FEW]:
            fleet.start_load()
            fleet.kill_some(deck)
            engines = fleet.end_load()
            nothing_is_left(fleet, engines)
        everybody_attaches(fleet, engines)
        nothing_is_left(fleet, engines)
        every_block_is_right(fleet, engines)
        tested = ("alone", "batch", "loaded tokens", "cold reads", "preemptions")
        for what in tested if decks else tested[:4]:  # a few kills are soon over
            assert fleet.counts[what] > 0, f"nothing was tested: no {what}"
        for engine in engines:
            assert engine.ask("close") == "closed"
        assert fleet.node.stop(), "the books of the node do not add up"
        assert "Traceback" not in logs.read_text(), logs.read_text()
    finally:
        fleet.close()
        print(dict(fleet.counts), logs.read_text()[-4000:])


def everybody_attaches(fleet: Fleet, engines: list[Child]) -> None:
    end = time.monotonic() + STUCK_SECONDS
    for engine in engines:
        while not engine.ask("step"):
            assert time.monotonic() < end, "an engine does not attach again"
            time.sleep(0.02)
    memory = memory_files(fleet.node.pid)
    assert len(memory) == 1
    assert all(memory_files(engine.pid) == memory for engine in engines)


def nothing_is_left(fleet: Fleet, engines: list[Child]) -> None:
    """The node has nothing of the dead: no client, no pin, no copy and no slot.

    An engine that has not attached again to a node that was started a moment ago is no client.
    """
    for engine in engines:
        assert engine.ask("settle") == "settled", "a copy of the dead is left"
        assert engine.ask("check") == "sound"
    end = time.monotonic() + STUCK_SECONDS
    while True:
        attached = [engine for engine in engines if engine.ask("step")]
        model = fleet.describe()
        if len(model["clients"]) == len(attached) > 0:
            break
        assert time.monotonic() < end, f"clients that are gone: {model['clients']}"
        time.sleep(0.05)
    assert model["pinned"] == 0, "pins of the dead are left"
    # Every slot is free once DRAM is emptied.
    attached[0].ask("empty")
    model = fleet.describe()
    assert model["free_blocks"] == model["blocks"] > 0, "slots of the dead are left"


def every_block_is_right(fleet: Fleet, engines: list[Child]) -> None:
    """DRAM is empty: every block is found on disk, or computed."""
    for first, engine in enumerate(engines):
        kind = "batch" if fleet.seats[first].cold else "alone"
        fleet.ask(engine, kind, tuple(range(first, len(fleet.prompts), len(engines))))
        assert engine.ask("settle") == "settled", "a copy of the dead is left"
        assert engine.ask("check") == "sound"


def memory_files(pid: int) -> set[str]:
    """The inodes of DRAM for blocks that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:penstock-host" in line}
