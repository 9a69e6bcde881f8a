"""Instances share a real Redis: what one saved another loads, bit for bit, or it is a miss."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from instance import BLOCK_BYTES, Instance
from tools import key_of, keys_of, spec

from penstock.config import ENV_REMOTE_SECRET
from penstock.types import Direction, Tier, Verdict
from servers import is_skipped
from servers.redis_server import WHY_NOT, RedisServer

pytestmark = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))
SECRET = "a secret of the whole fleet"
Instances = Callable[..., Instance]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def instances(server: RedisServer) -> Iterator[Instances]:
    made: list[Instance] = []

    def make(**options: Any) -> Instance:
        made.append(Instance(options.pop("url", server.url), **options))
        return made[-1]

    yield make
    for instance in made:
        instance.close()


_opened: dict[int, redis.Redis] = {}


def values(server: RedisServer) -> redis.Redis:
    return _opened.setdefault(server.port, redis.Redis(port=server.port))


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    for client in _opened.values():
        client.close()
    _opened.clear()


def names(server: RedisServer) -> list[Any]:
    held: Any = values(server).keys()
    return list(held)


def test_what_one_saved_another_loads(instances: Instances) -> None:
    keys = keys_of(40)
    a, b = instances(), instances()
    a.save(keys)
    assert b.offloader.match(keys).num_blocks == 0, "nobody asked yet"
    assert b.lookup(keys) == 40
    done = b.load(keys)
    assert done.ok
    assert set(done.sources) == {Tier.REMOTE}
    assert b.offloader.match(keys).num_from(Tier.HOST) == 40, "and keeps them in DRAM"


def test_a_look_asks_for_hundreds_of_blocks_and_stops_where_they_end(instances: Instances) -> None:
    small = spec(64)
    keys = keys_of(2000)
    a = instances(block_spec=small, num_host=2000, num_device=2000)
    a.save(keys[:1300])
    b = instances(block_spec=small, num_host=2000, num_device=2000)
    assert b.lookup(keys) == 1300
    assert b.load(keys[:1300]).ok


def test_what_lies_above_is_not_asked_for(instances: Instances) -> None:
    a = instances()
    keys = keys_of(4)
    a.save(keys)
    assert a.offloader.lookup(keys) is None


def test_another_layout_dtype_or_size_never_shares(instances: Instances) -> None:
    a = instances()
    keys = keys_of(4)
    a.save(keys)
    for other in (spec(BLOCK_BYTES, "of another layout"), spec(BLOCK_BYTES // 2, "half")):
        assert instances(block_spec=other).lookup(keys) == 0


def test_blocks_survive_the_instance_that_wrote_them(instances: Instances) -> None:
    keys = keys_of(8)
    a = instances()
    a.save(keys)
    a.close()
    b = instances()
    assert b.lookup(keys) == 8
    assert b.load(keys).ok


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_fleet_with_a_secret(
    instances: Instances, server: RedisServer, monkeypatch: pytest.MonkeyPatch, encrypt: bool
) -> None:
    keys = keys_of(6)
    monkeypatch.setenv(ENV_REMOTE_SECRET, SECRET)
    a, b = instances(encrypt=encrypt), instances(encrypt=encrypt)
    a.save(keys, "tenant")
    assert b.lookup(keys) == 6
    assert b.load(keys, "tenant").ok
    monkeypatch.setenv(ENV_REMOTE_SECRET, SECRET + "!")
    assert instances(encrypt=encrypt).lookup(keys) == 0
    monkeypatch.delenv(ENV_REMOTE_SECRET)
    assert instances().lookup(keys) == 0
    stored: Any = values(server).get(names(server)[0])
    body = stored[192:]
    plain = [bytes(a.device.view(place)[:BLOCK_BYTES]) for place in range(6)]
    assert (body in plain) is not encrypt


def test_with_encryption_a_tenant_cannot_use_anothers_blocks(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys differ already; this holds should one guess the other's."""
    monkeypatch.setenv(ENV_REMOTE_SECRET, SECRET)
    keys = keys_of(3)
    instances(encrypt=True).save(keys, "a")
    thief = instances(encrypt=True)
    assert thief.lookup(keys) == 3
    assert thief.load(keys, "b").verdicts == (Verdict.CORRUPT,) * 3


# Faults seen in peers, by name.


def test_a_key_evicted_between_lookup_and_load_is_a_miss(
    instances: Instances, server: RedisServer
) -> None:
    keys = keys_of(8)
    instances().save(keys)
    b = instances()
    assert b.lookup(keys) == 8
    for name in names(server)[:3]:
        values(server).delete(name)
    verdicts = b.load(keys).verdicts
    assert sorted(verdicts) == [Verdict.OK] * 5 + [Verdict.MISSING] * 3
    assert b.offloader.match(keys).num_blocks < 8, "it does not promise them again"


@pytest.mark.parametrize(
    "damage",
    [
        lambda value, other: value[:-1],
        lambda value, other: value[: len(value) // 2],
        lambda value, other: b"",
        lambda value, other: value + b"\0",
        lambda value, other: other,
        lambda value, other: value[:192] + other[192:],
        lambda value, other: value[:5000] + bytes([value[5000] ^ 1]) + value[5001:],
    ],
    ids=["cut", "half", "empty", "longer", "of another key", "other body", "bit flipped"],
)
def test_a_damaged_value_is_a_counted_miss_and_is_replaced(
    instances: Instances, server: RedisServer, damage: Callable[[bytes, bytes], bytes]
) -> None:
    keys = keys_of(4)
    instances().save(keys)
    held = sorted(names(server), key=lambda n: n.endswith(keys[1].hex().encode()))
    other, value = (values(server).get(name) for name in held[-2:])
    values(server).set(held[-1], damage(value, other))
    b = instances()
    assert b.lookup(keys) == 4
    assert b.load(keys).verdicts == (Verdict.OK, Verdict.CORRUPT, Verdict.OK, Verdict.OK)
    b.offloader.step()
    assert b.lost[Tier.REMOTE, Verdict.CORRUPT] == 1
    b.save(keys)  # it was computed after all
    c = instances()
    assert c.lookup(keys) == 4
    assert c.load(keys).ok


def test_a_value_that_is_no_string_is_a_miss(instances: Instances, server: RedisServer) -> None:
    keys = keys_of(1)
    instances().save(keys)
    (name,) = names(server)
    values(server).delete(name)
    values(server).hset(name, "a", "b")
    b = instances()
    assert b.lookup(keys) == 1
    assert b.load(keys).verdicts == (Verdict.FAILED,)


@pytest.mark.parametrize("moment", ["load", "save"])
def test_a_server_killed_in_the_middle_is_used_again_when_it_is_back(
    instances: Instances, server: RedisServer, moment: str
) -> None:
    keys = keys_of(64)
    a = instances(num_host=128)
    a.save(keys)
    b = instances(num_host=128)
    assert b.lookup(keys) == 64
    killer = threading.Timer(0.003, server.kill)
    killer.start()
    if moment == "load":
        b.load(keys)  # compares what is called OK
    else:
        b.save(keys_of(64, "more"))
    killer.join()
    b.drain()
    server.start()
    fresh = keys_of(8, "fresh")
    end = time.monotonic() + 60
    while True:
        b.save([key_of((time.monotonic(), "probe"))])  # rests pass, then it is tried again
        if names(server):
            break
        assert time.monotonic() < end
        time.sleep(0.1)
    b.save(fresh)
    c = instances()
    assert c.lookup(fresh) == 8
    assert c.load(fresh).ok


def test_a_server_that_hangs_costs_no_more_than_the_deadline_and_is_left_alone(
    instances: Instances, server: RedisServer
) -> None:
    keys = keys_of(8)
    instances().save(keys)
    b = instances(timeout_seconds=0.5, lookup_deadline_seconds=0.1)
    b.until(lambda: b.lookup(keys) == 8)  # its first answer may be late, and counts then
    server.pause()
    assert b.load(keys).verdicts == (Verdict.FAILED,) * 8
    b.lookup(keys_of(8, "others"))
    for number in range(6):
        b.lookup(keys_of(2, str(number)))
    b.until(lambda: b.offloader._stack.ledgers.is_resting(Tier.REMOTE, Direction.LOAD))
    assert b.offloader.lookup(keys_of(3, "resting")) is None, "nobody waits for it any more"
    server.resume()


def test_a_port_that_accepts_and_never_answers(instances: Instances) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        a = instances(url=url, timeout_seconds=0.3, lookup_deadline_seconds=0.1)
        keys = keys_of(8)
        assert a.lookup(keys) == 0
        assert a.save(keys) == [Verdict.OK] * 8, "DRAM has them all the same"
        assert a.load(keys).ok


def test_a_store_that_is_not_there_at_the_start_is_used_later(
    instances: Instances, server: RedisServer
) -> None:
    server.kill()
    a = instances()
    keys = keys_of(4)
    assert a.lookup(keys) == 0
    assert a.save(keys) == [Verdict.OK] * 4
    server.start()
    end = time.monotonic() + 60
    while not names(server):
        a.save([key_of((time.monotonic(), "probe"))])
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_wrong_password_is_a_miss(instances: Instances, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "closed", "--requirepass", "word")
    a = instances(url=f"redis://:wrong@127.0.0.1:{server.port}/0")
    keys = keys_of(4)
    assert a.lookup(keys) == 0
    assert a.save(keys) == [Verdict.OK] * 4
    a.offloader.step()
    assert a.lost[Tier.HOST, Verdict.FAILED] == 4
    server.kill()


def test_a_server_without_room_loses_nothing_here(instances: Instances, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "full", "--maxmemory", "3mb")
    a = instances(url=server.url)
    keys = keys_of(32)
    assert a.save(keys) == [Verdict.OK] * 32
    assert a.load(keys).ok
    b = instances(url=server.url)
    found = b.lookup(keys)
    assert 0 < found < 32
    assert b.load(keys[:found]).ok
    server.kill()


def test_a_slow_server_is_given_up_when_patience_ends(
    instances: Instances, server: RedisServer
) -> None:
    keys = keys_of(8)
    instances().save(keys)
    b = instances()
    assert b.lookup(keys) == 8
    server.pause()
    done = b.load(keys, patience_seconds=0.2)
    assert done.verdicts == (Verdict.EXPIRED,) * 8
    server.resume()
    b.drain()
    assert b.load(keys).ok


# Bounds.


def test_only_what_is_used_twice_is_written(instances: Instances, server: RedisServer) -> None:
    a = instances(admit="second-use")
    keys = keys_of(8)
    a.save(keys)
    assert not names(server)
    a.load(keys[:5])
    a.drain()
    assert len(names(server)) == 5
    a.offloader.used(keys[5:6])  # found on the device itself
    a.drain()
    assert len(names(server)) == 6


def test_a_daily_budget_is_kept(instances: Instances, server: RedisServer) -> None:
    a = instances(write_per_day_bytes=5 * BLOCK_BYTES)
    keys = keys_of(8)
    assert a.save(keys) == [Verdict.OK] * 8
    assert len(names(server)) == 5
    a.offloader.step()
    assert a.lost[Tier.HOST, Verdict.DROPPED] == 3


def test_a_tenants_budget_is_kept_and_values_expire(
    instances: Instances, server: RedisServer
) -> None:
    a = instances(tenant_size_bytes=2 * BLOCK_BYTES, ttl_seconds=3600)
    a.save(keys_of(4, "a"), "a")
    a.save(keys_of(4, "b"), "b")
    held = names(server)
    assert len(held) == 4
    assert {0 < values(server).ttl(name) <= 3600 for name in held} == {True}


def test_a_reader_writes_nothing(instances: Instances, server: RedisServer) -> None:
    instances(read_only=True).save(keys_of(4))
    assert not names(server)


def test_the_memory_of_what_others_hold_is_bounded(instances: Instances) -> None:
    small = spec(64)
    keys = keys_of(600)
    a = instances(block_spec=small, num_host=700, num_device=700)
    a.save(keys)
    b = instances(block_spec=small, num_host=700, num_device=700, max_known_blocks=100)
    b.lookup(keys)
    b.offloader.check()
    assert b.offloader.match(keys).num_blocks <= 100


def test_clients_that_save_load_and_lose_find_nothing_wrong(
    instances: Instances, tmp_path: Path
) -> None:
    """They share a server that evicts all the time; `Instance.load` compares every block."""
    server = RedisServer(
        tmp_path / "lru", "--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru"
    )
    prompts = [keys_of(6, name) for name in "abcdefghij"]
    made = [instances(url=server.url, num_host=8, num_device=8) for _ in range(4)]
    num_loaded = 0
    for turn in range(80):
        instance = made[turn % 4]
        keys = prompts[int.from_bytes(os.urandom(1)) % len(prompts)]
        found = instance.lookup(keys)
        done = instance.load(keys[:found]) if found else None
        num_loaded += 0 if done is None else done.num_leading_ok
        instance.save(keys)
    assert num_loaded > 20
    server.kill()
