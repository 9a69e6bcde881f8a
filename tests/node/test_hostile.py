"""Clients that are wrong, unlucky or hostile lose their session; everybody else goes on."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.codecs.blocks import BlockValues, PartValues
from penstock.config.settings import NodeConfig
from penstock.node.connection import connect, read_place, send_attach, wait_for_frame
from penstock.node.wire import Channel, Frame, WireError, encode, pack_keys, pack_slots
from penstock.types import KEY_BYTES, BlockKey, Slot, Verdict
from penstock.units import MiB
from tests.node.leftovers import at_end, end_process
from tests.node.node_process import wait_until
from tests.node.nodes import BLOCK_BYTES, Device, check, namespace, node, num_files
from tests.node.processes import ROOT, await_clients, describe, node_process


class Raw:
    """A client that sends what it likes."""

    def __init__(self, path: Path, model: str = "tiny", block_bytes: int = BLOCK_BYTES) -> None:
        self.channel = connect(path, 5.0)
        at_end(self.channel.close)
        self.spec = namespace(model).block_spec(block_bytes)
        values = BlockValues((PartValues(block_bytes),))
        send_attach(self.channel, self.spec, values, name="raw", in_one=False, events=False)
        try:
            self.place = read_place(self.channel, wait_for_frame(self.channel, 10.0))
        except WireError:
            self.channel.close()
            raise
        os.close(self.place.file)
        os.close(self.place.seals_file)

    def send(self, kind: str, fields: dict[str, Any], *parts: bytes) -> None:
        self.channel.send(kind, fields, *parts)
        self.channel.flush()

    def hear(self, *kinds: str, seconds: float = 10.0) -> Frame:
        """The next frame of one of these kinds."""
        while True:
            frame = wait_for_frame(self.channel, seconds)
            if frame.kind in kinds:
                return frame

    def is_refused(self) -> str:
        return str(self.hear("refused").fields["why"])

    def close(self) -> None:
        self.channel.close()


KEYS = [BlockKey(bytes([n]) * 32) for n in range(64)]


@contextmanager
def one_living(path: Path) -> Iterator[Device]:
    """A client that saved something before and must find it afterwards."""
    living = Device(path, name="living")
    keys = living.keys(7, 10)
    assert living.save(keys)
    yield living
    assert living.load(keys) == 10
    living.tiers.check()
    assert living.tiers.is_attached
    assert living.tiers.close()


WRONG: list[tuple[str, dict[str, Any], tuple[bytes, ...]]] = [
    ("dance", {}, ()),
    ("__class__", {}, ()),
    ("", {}, ()),
    ("attach", {"protocol": 1}, ()),
    ("load", {}, ()),
    ("load", {"ticket": 1}, (pack_keys(KEYS[:2]),)),
    ("load", {"ticket": 1}, (pack_keys(KEYS[:2]), pack_slots([Slot(0)]))),
    ("load", {"ticket": 1}, (pack_keys([KEYS[0]] * 2), pack_slots([Slot(0), Slot(1)]))),
    ("load", {"ticket": "x"}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("load", {"ticket": None}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("load", {"ticket": math.inf}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("load", {"ticket": 1, "deadline": math.nan}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("load", {"ticket": 1, "deadline": -1}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("load", {"ticket": 1, "patience": "x"}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("load", {"ticket": 1, "tenant": 5}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("load", {"ticket": 1, "tenant": "\ud800"}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("load", {"ticket": 1, "parents": [[0, "ab"]]}, (pack_keys(KEYS[:1]), pack_slots([Slot(0)]))),
    ("save", {"ticket": 1}, (pack_keys(KEYS[:1]), pack_slots([None]))),
    ("save", {"ticket": 1}, (pack_keys([KEYS[0]] * 2), pack_slots([Slot(0), Slot(1)]))),
    ("save", {"ticket": 1}, (b"x", pack_slots([Slot(0)]))),
    ("report", {"transfer": 1}, (b"\0",)),
    ("report", {"transfer": 1}, (b"\xee",)),
    ("report", {}, ()),
    ("unpin", {}, (pack_slots([Slot(0)]),)),
    ("unpin", {}, (pack_slots([Slot(10**12)]),)),
    ("match", {}, (pack_keys(KEYS[:1]),)),
    ("match", {"call": 1}, (b"short",)),
    ("pin", {"call": 1}, ()),
    ("retain", {"call": 1, "seconds": math.nan, "name": "x"}, (pack_keys(KEYS[:1]),)),
    ("retain", {"call": 1, "seconds": 1e300, "name": "x"}, (pack_keys(KEYS[:1]),)),
    ("cancel", {}, ()),
    ("cancel", {"ticket": [1]}, ()),
    ("prefetch", {"call": 1, "name": 7}, (pack_keys(KEYS[:1]),)),
    ("is_moving", {"call": []}, ()),
    ("is_moving", {"call": "x"}, ()),
    ("is_moving", {"call": math.inf}, ()),
]


def test_every_wrong_request_ends_its_session_alone(tmp_path: Path) -> None:
    with node(tmp_path) as (path, service), one_living(path):
        files = num_files()
        for kind, fields, parts in WRONG:
            raw = Raw(path)
            raw.send(kind, fields, *parts)
            assert raw.is_refused(), kind
            raw.close()
        time.sleep(0.5)
        check(service)
        # Clients in the node's own process live as long as it does: they are still watched.
        assert num_files() <= files + 2 * len(WRONG)


def test_harmless_requests_are_answered(tmp_path: Path) -> None:
    """Blocks named twice where that means nothing, unknown tickets, empty lists."""
    twice = pack_keys([KEYS[0], KEYS[0], KEYS[1]])
    with node(tmp_path, disk=tmp_path / "disk") as (path, service), one_living(path) as living:
        keys = living.keys(7, 10)
        there_twice = pack_keys([*keys, *keys])
        raw = Raw(path)
        for part in (twice, there_twice, b""):
            for kind in ("match", "where", "in_host", "lookup", "demote", "prefetch"):
                raw.send(kind, {"call": 1}, part)
                assert raw.hear("reply", "refused").kind == "reply", kind
            for kind in ("used", "offer", "keep_together", "supersede"):
                raw.send(kind, {}, part)
            raw.send("retain", {"call": 1, "seconds": 5, "name": "x"}, part)
            assert raw.hear("reply", "refused").kind == "reply"
            raw.send("pin", {"call": 1}, part)
            slots = raw.hear("reply", "refused").parts[0]
            pinned = [s for (s,) in struct.iter_unpack("<q", slots) if s >= 0]
            raw.send("unpin", {}, pack_slots([Slot(s) for s in pinned]))
        raw.send("discard", {"call": 1}, pack_keys([KEYS[5], KEYS[5]]))
        assert raw.hear("reply", "refused").kind == "reply"
        raw.send("cancel", {"ticket": 999})
        raw.send("load", {"ticket": 1}, b"", b"")
        assert raw.hear("done", "refused").kind == "done"
        raw.send("save", {"ticket": 1}, b"", b"")
        assert raw.hear("done", "refused").kind == "done"
        check(service)
        raw.send("bye", {})
        raw.close()


def test_discarding_a_block_twice_discards_it_once(tmp_path: Path) -> None:
    with node(tmp_path) as (path, service):
        living = Device(path)
        keys = living.keys(1, 4)
        assert living.save(keys)
        assert living.tiers.discard([*keys, *keys]) == 4
        assert living.tiers.is_attached
        check(service)
        assert living.tiers.close()


def test_a_ticket_that_is_open_cannot_be_used_again(tmp_path: Path) -> None:
    with node(tmp_path) as (path, _), one_living(path):
        raw = Raw(path)
        raw.send("save", {"ticket": 5}, pack_keys(KEYS[:2]), pack_slots([Slot(0), Slot(1)]))
        raw.hear("transfer")
        raw.send("save", {"ticket": 5}, pack_keys(KEYS[2:3]), pack_slots([Slot(2)]))
        assert "used twice" in raw.is_refused()
        raw.close()


def test_the_copies_of_others_cannot_be_reported(tmp_path: Path) -> None:
    with node(tmp_path) as (path, _), one_living(path):
        victim, thief = Raw(path), Raw(path)
        victim.send("save", {"ticket": 1}, pack_keys(KEYS[:1]), pack_slots([Slot(0)]))
        transfer = victim.hear("transfer").fields["transfer"]
        thief.send("report", {"transfer": transfer}, bytes([Verdict.OK]))
        assert "not this client's" in thief.is_refused()
        victim.send("report", {"transfer": transfer}, bytes([Verdict.OK]))
        assert victim.hear("done").parts[0] == bytes([Verdict.OK])
        victim.send("report", {"transfer": transfer}, bytes([Verdict.OK]))
        assert "not this client's" in victim.is_refused(), "it was reported already"
        victim.close()
        thief.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"namespace": "zz"},
        {"namespace": "ab"},
        {"block_bytes": 0},
        {"block_bytes": 10**30},
        {"block_bytes": math.inf},
        {"block_tokens": -1},
        {"values": None},
        {"values": {"parts": [], "on_gpu": False}},
        {"values": {"parts": [{}], "on_gpu": False}},
        {"description": [["a"]]},
        {"description": [["model", 5]]},
        {"description": [["model", "\ud800"]]},
        {"name": "\ud800"},
        {"ended": 7},
    ],
    ids=str,
)
def test_a_wrong_attach_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    with node(tmp_path) as (path, service), one_living(path):
        files = num_files()
        channel = connect(path)
        spec = namespace("other").block_spec(BLOCK_BYTES)
        values = BlockValues((PartValues(BLOCK_BYTES),))
        probe = _Keeping()
        send_attach(probe, spec, values, name="x", in_one=False, events=False)  # type: ignore[arg-type]
        channel.send("attach", {**probe.fields, **changed})
        assert wait_for_frame(channel, 5.0).kind == "refused"
        channel.close()
        wait_until(lambda: num_files() <= files, "its files are closed")
        check(service)


class _Keeping:
    """Keeps what would be sent."""

    def send(self, kind: str, fields: dict[str, Any], files: list[int]) -> None:
        self.fields = fields

    def flush(self) -> None:
        pass


def test_blocks_larger_than_a_models_dram_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with (
        node(tmp_path) as (path, _),
        one_living(path),
        pytest.raises(WireError, match=r"raise host\.size or node\.model_cap"),
    ):
        Raw(path, "huge", 32 * MiB)


def test_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with node(tmp_path) as (path, _), one_living(path):
        for version in (0, 99, "x" * 1000, None):
            channel = connect(path)
            channel.send("hello", {"protocol": version})
            why = wait_for_frame(channel, 5.0).fields["why"]
            assert "upgrade the older one" in why
            assert len(why) < 300
            channel.close()


def test_headers_that_are_nested_too_deep_to_be_written_break_nothing(tmp_path: Path) -> None:
    """Near the limit, what can be read cannot be written: a node that echoed it would fail."""
    with node(tmp_path) as (path, service), one_living(path):
        files = num_files()
        limit = sys.getrecursionlimit()
        for depth in range(limit - 60, limit):
            nested = b"[" * depth + b"]" * depth
            for header in (
                b'["check",{"call":%b},[]]',
                b'["hello",{"protocol":%b},[]]',
                b'["attach",{"protocol":1,"ended":[%b]},[]]',
            ):
                is_client = header.startswith(b'["check"')
                channel = Raw(path).channel if is_client else connect(path, 5.0)
                raw = header % nested
                channel._unsent += struct.pack("<II", len(raw), 0) + raw
                assert _hear(channel, "refused").kind == "refused", (depth, header)
                channel.close()
        assert not service.num_faults
        check(service)
        time.sleep(0.1)
        assert num_files() <= files + 2 * 60


def _hear(channel: Channel, kind: str) -> Frame:
    while (frame := wait_for_frame(channel, 5.0)).kind != kind:
        pass
    return frame


def test_a_refusal_does_not_repeat_all_that_a_client_has_sent(tmp_path: Path) -> None:
    with node(tmp_path) as (path, _), one_living(path):
        raw = Raw(path)
        raw.send("retain", {"call": 1, "seconds": "x" * 100_000, "name": ""}, pack_keys(KEYS[:1]))
        assert len(raw.is_refused()) <= 1000
        raw.close()


def test_a_client_cannot_take_memory_away_nor_write_seals(tmp_path: Path) -> None:
    """Shrunk memory would kill the node and all of its clients at their next access."""
    with node(tmp_path) as (path, service), one_living(path) as living:
        place = living.tiers.place
        for file, size in (
            (place.file, place.dram_bytes),
            (place.seals_file, place.num_slots * KEY_BYTES),
        ):
            writable = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
            for other_size in (0, size - 1, size + 1, 2 * size):
                with pytest.raises(PermissionError):
                    os.ftruncate(writable, other_size)
            with pytest.raises(PermissionError):  # nor stop others from mapping it
                fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            if file == place.seals_file:
                with pytest.raises(PermissionError):
                    os.pwrite(writable, b"x" * KEY_BYTES, 0)
                with pytest.raises(PermissionError):
                    mmap.mmap(writable, size)
            os.close(writable)
        check(service)


def test_random_bytes_do_not_end_a_node(tmp_path: Path) -> None:
    rng = random.Random(1)
    with node(tmp_path) as (path, service), one_living(path):
        for number in range(60):
            channel = connect(path)
            good = encode("hello", {"protocol": 1})
            header = rng.choice([b"5", b"[]", b"null", b"[" * 9000, b'["hello",{},[]]'])
            data = rng.choice(
                [
                    rng.randbytes(rng.randint(1, 500)),
                    struct.pack("<II", len(header), 0) + header,
                    struct.pack("<II", 2**32 - 1, 2**32 - 1),
                    good[: rng.randint(1, len(good))],
                    bytes(b ^ (rng.random() < 0.05) for b in good),
                ]
            )
            channel._socket.setblocking(True)
            channel._socket.sendall(data)
            if number % 2:
                time.sleep(0.005)
            channel.close()
        check(service)


def test_a_client_that_never_reads_is_not_served_for_ever(tmp_path: Path) -> None:
    with node_process(tmp_path) as path, one_living(path) as living:
        raw = Raw(path)
        keys = pack_keys(KEYS * 32)
        raw.channel._socket.setblocking(True)
        raw.channel._socket.settimeout(100)
        request = encode("pin", {"call": 1}, keys)  # the answer is a quarter of it
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            raw.channel._socket.sendall(request * 10_000)
        raw.close()
        hello = connect(path)
        hello._socket.setblocking(True)
        hello._socket.settimeout(100)
        request = encode("describe", {"protocol": 1})
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            hello._socket.sendall(request * 5_000_000)
        hello.close()
        assert living.tiers.match(living.keys(7, 10)).num_blocks == 10
        pid = describe(path)["pid"]
        status = Path(f"/proc/{pid}/status").read_text()
        (resident,) = (int(row.split()[1]) for row in status.splitlines() if "VmRSS" in row)
        assert resident < 600 << 10, "kB: what was not read has been kept"


@pytest.mark.parametrize("num_thousands", [10, 200], ids=["short", "long"])
def test_very_many_lookups_do_no_harm(tmp_path: Path, num_thousands: int) -> None:
    with node(tmp_path) as (path, service), one_living(path):
        raw = Raw(path)
        for _ in range(num_thousands):
            for _ in range(1000):
                raw.channel.send("lookup", {"call": 1}, pack_keys(KEYS[:2]))
            for _ in range(1000):
                raw.hear("reply")
        check(service)
        raw.close()


ZOMBIE = """
import sys, time
from pathlib import Path
from tests.node.test_hostile import Raw, KEYS, pack_keys, pack_slots
from penstock.types import Slot
import mmap, os
from tests.node import test_hostile
closed = []
os_close, os.close = os.close, closed.append   # keep the memory
raw = Raw(Path(sys.argv[1]))
os.close = os_close
raw.send("save", {"ticket": 1}, pack_keys(KEYS[:8]), pack_slots([Slot(n) for n in range(8)]))
frame = raw.hear("transfer")
slots = memoryview(frame.parts[2]).cast("q").tolist()
memory = mmap.mmap(raw.place.file, raw.place.dram_bytes)
raw.close()
print(*slots, flush=True)
while True:
    for slot in slots:
        start = slot * raw.place.stride_bytes
        memory[start : start + raw.place.block_bytes] = b"x" * raw.place.block_bytes
    time.sleep(0.001)
"""


def test_slots_of_a_client_that_lives_on_are_not_reused(tmp_path: Path) -> None:
    """It closes its socket, and goes on writing into the slots of a save it never reported."""
    with node_process(tmp_path, 4 * MiB) as path:
        zombie = subprocess.Popen(
            [sys.executable, "-c", ZOMBIE, str(path)], cwd=ROOT, text=True, stdout=subprocess.PIPE
        )
        at_end(lambda: end_process(zombie))
        assert zombie.stdout is not None
        held = {int(word) for word in zombie.stdout.readline().split()}
        assert held
        living = Device(path, name="living", num_slots=128)
        (model,) = describe(path)["models"]
        assert model["clients"] == ["raw", "living"]
        for prompt in range(8):
            keys = living.keys(prompt, 40)
            living.save(keys)
            assert living.load(keys) > 0
            slots = living.tiers.pin(keys)
            assert held.isdisjoint(slots)
            living.tiers.unpin([slot for slot in slots if slot is not None])
        end_process(zombie)
        (model,) = await_clients(path, {"living"})["models"]
        keys = living.keys(99, model["blocks"])
        assert living.save(keys), "its slots are free now"
        assert living.load(keys) == len(keys)
        living.tiers.check()
        assert living.tiers.close()


def test_a_greedy_client_stays_within_its_limits(tmp_path: Path) -> None:
    limits = NodeConfig(model_floor=0.25, model_cap=0.5, pin_share=0.5)
    with node(tmp_path, dram=32 * MiB, limits=limits) as (path, service):
        greedy = Device(path, "greedy", num_slots=512)
        all_keys = [greedy.keys(prompt, 64) for prompt in range(16)]
        for keys in all_keys:
            greedy.save(keys)
        limit = greedy.tiers.num_pinnable_blocks
        assert limit == 16 * MiB // greedy.tiers.place.stride_bytes // 2
        pins = [slot for keys in all_keys for slot in greedy.tiers.pin(keys) if slot is not None]
        tickets = [greedy.tiers.load(keys, [None] * 64) for keys in all_keys]
        for done in greedy.tiers.wait(tickets, 10):
            pins += [slot for slot in done.pins if slot is not None]
        assert greedy.tiers.num_pinned <= limit
        modest = Device(path, "modest")
        keys = modest.keys(1, 60)
        assert modest.save(keys)
        assert modest.load(keys) == 60
        (first, second) = service.describe()["models"]
        assert first["dram_bytes"] == 16 * MiB
        assert second["dram_bytes"] >= 60 * BLOCK_BYTES
        check(service)
        assert greedy.tiers.close()
        assert modest.tiers.close()
