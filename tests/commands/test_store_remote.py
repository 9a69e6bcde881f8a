"""`penstock store` on URLs: most against a folder as remote store, some against a real Redis."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tools import Desk, flip_bit, keys_of, spec

from penstock.commands import remote_audit
from penstock.config import ENV_REMOTE_SECRET
from penstock.errors import Missing, StoreError
from penstock.stores.base import Answers
from penstock.stores.envelope import HEAD_BYTES, Envelope
from penstock.stores.memory import MemoryClient
from penstock.stores.remote import Item, Listed, RemoteStore
from penstock.stores.remotes import open_client
from penstock.types import BlockSpec
from servers import free_port, is_skipped
from servers.redis_server import WHY_NOT, RedisServer

Run = Callable[..., Any]
SPEC = spec()
OTHER = spec(4096, "other")
NUM = 20  # more than are read at once
VALUE_BYTES = HEAD_BYTES + SPEC.block_bytes
SECRET = "a secret of the whole fleet"
COMMANDS = [["ls"], ["check"], ["clear", "--yes"]]

needs_redis = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))


def save(
    url: str,
    block_spec: BlockSpec = SPEC,
    num: int = NUM,
    *,
    secret: str = "",
    encrypt: bool = False,
    ttl_seconds: float | None = None,
    now: Callable[[], float] = time.time,
) -> list[str]:
    """What a server would save there; returns the names."""
    envelope = Envelope(
        block_spec, secret=secret.encode(), encrypt=encrypt, ttl_seconds=ttl_seconds
    )
    store = RemoteStore(open_client(url, 5.0), block_spec, envelope, now=now)
    keys = keys_of(num)
    try:
        assert not any(store.put(Desk(block_spec, num).write(keys, range(num))))
        return [store.name(key) for key in keys]
    finally:
        store.close()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # the path of a temporary folder may be long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def url(folder: Path) -> str:
    return f"file://{folder}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis", "--requirepass", "a-password")
    yield server
    server.kill()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[MemoryClient], None]:
    """Puts a client of ours in the place of the real one."""

    def use(client: MemoryClient) -> None:
        path = "penstock.commands.remote_store.open_client"
        monkeypatch.setattr(path, lambda _url, _timeout_seconds: client)

    return use


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def prefix_of(name: str) -> str:
    return name.split("/")[2]


def kinds(found: dict[str, Any]) -> dict[str, int]:
    """How many there are of each kind that is there at all."""
    names = ("ok", "corrupt", "encrypted", "expired", "foreign", "changed")
    numbers = {name: found[f"num_{name}"] for name in names}
    assert sum(numbers.values()) == found["num_values"]
    return {name: number for name, number in numbers.items() if number}


# ls


def test_ls_groups_by_namespace(run: Run, folder: Path, url: str) -> None:
    written = 1_750_000_000.0
    names = save(url, ttl_seconds=3600, now=lambda: written)
    others = save(url, OTHER, 3, secret=SECRET, encrypt=True, now=lambda: written)
    before = contents(folder)
    expected = [
        {
            "prefix": prefix_of(names[0]),
            "num_values": NUM,
            "num_bytes": NUM * VALUE_BYTES,
            "sample": {
                "namespace": SPEC.namespace.hex(),
                "block_bytes": SPEC.block_bytes,
                "encrypted": False,
                "written": "2025-06-15 15:06:40+00:00",
                "expires": "2025-06-15 16:06:40+00:00",
            },
        },
        {
            "prefix": prefix_of(others[0]),
            "num_values": 3,
            "num_bytes": 3 * (HEAD_BYTES + 4096),
            "sample": {
                "namespace": OTHER.namespace.hex(),
                "block_bytes": 4096,
                "encrypted": True,
                "written": "2025-06-15 15:06:40+00:00",
                "expires": None,
            },
        },
    ]
    assert run("store", "ls", url, "--json").json == {
        "url": url,
        "num_values": NUM + 3,
        "num_bytes": NUM * VALUE_BYTES + 3 * (HEAD_BYTES + 4096),
        "num_others": 0,
        "namespaces": sorted(expected, key=lambda group: str(group["prefix"])),
    }
    drawn = run("store", "ls", url)
    assert drawn.code == 0
    assert prefix_of(names[0]) in drawn.stdout
    for words in (url, "20 values", "3 values", "8.0 KiB", "15:06:40", "never", "one sample value"):
        assert words in drawn.stdout
    assert contents(folder) == before


def test_ls_blocks(run: Run, url: str) -> None:
    names = sorted(save(url))
    found = run("store", "ls", url, "--blocks", "--json").json["values"]
    assert found == [{"name": name, "num_bytes": VALUE_BYTES} for name in names]
    lines = run("store", "ls", url, "--blocks").stdout.splitlines()[-NUM:]
    assert [line.split() for line in lines] == [[str(VALUE_BYTES), name] for name in names]


def test_ls_of_what_is_not_ours_or_not_whole(run: Run, folder: Path, url: str) -> None:
    names = save(url, num=2)
    for name in names:
        (folder / name).write_bytes(b"short")
    (folder / "penstock/1/notes.txt").write_text("mine")
    (folder / "elsewhere").write_text("mine")
    found = run("store", "ls", url, "--json").json
    assert (found["num_values"], found["num_others"]) == (3, 1)
    (group,) = found["namespaces"]
    assert (group["num_values"], group["sample"]) == (2, None)
    drawn = run("store", "ls", url).stdout
    assert "run penstock store check" in drawn
    assert "1 value, 4 B, judging by their names" in drawn


def test_ls_does_not_stumble_over_a_damaged_head(run: Run, folder: Path, url: str) -> None:
    (name,) = save(url, num=1)
    for offset in range(24, 32):  # the time it was written
        flip_bit(folder / name, offset, bit=7)
    (group,) = run("store", "ls", url, "--json").json["namespaces"]
    assert group["sample"]["written"] is None
    assert run("store", "ls", url).code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_store(run: Run, folder: Path, url: str, command: list[str]) -> None:
    (folder / "mine").write_text("mine")
    ran = run("store", command[0], url, *command[1:])
    assert (ran.code, ran.stderr) == (0, "")
    assert url in ran.stdout
    assert contents(folder) == {"mine": b"mine"}


# check


def test_check_of_a_sound_store(run: Run, folder: Path, url: str) -> None:
    save(url)
    before = contents(folder)
    ran = run("store", "check", url, "--json")
    assert ran.code == 0
    assert ran.json == {
        "url": url,
        "sound": True,
        "num_values": NUM,
        "num_ok": NUM,
        "num_corrupt": 0,
        "num_encrypted": 0,
        "num_expired": 0,
        "num_foreign": 0,
        "num_changed": 0,
        "num_removed": 0,
        "damaged": [],
    }
    assert "sound" in run("store", "check", url).stdout
    assert contents(folder) == before


def damage_in_every_way(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Of the first names; returns what `check` should say of each."""
    flip_bit(folder / names[0], HEAD_BYTES + 5000)
    flip_bit(folder / names[1], 30)  # when it was written
    flip_bit(folder / names[2], 0)  # the magic
    flip_bit(folder / names[3], 41)  # the namespace
    value = (folder / names[4]).read_bytes()
    (folder / names[4]).write_bytes(value[:-1])
    (folder / names[5]).write_bytes(value[:100])
    (folder / names[6]).write_bytes((folder / names[7]).read_bytes())
    problems = [
        "the body of a remote value fails its checksum",
        "the head of a remote value fails its checksum",
        "the header cannot be read",
        "the header is damaged, or of another namespace",
        "8,191 bytes of data, but the header says 8,192",
        "shorter than a header",
        "a remote value belongs to another block",
    ]
    return dict(zip(names, problems, strict=False))


@pytest.mark.parametrize("secret", ["", SECRET])
def test_damage_is_found_and_repaired(
    run: Run, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv(ENV_REMOTE_SECRET, secret)
    names = save(url, secret=secret)
    expected = damage_in_every_way(folder, names)
    before = contents(folder)
    ran = run("store", "check", url, "--json")
    assert ran.code == 1
    assert ran.stderr == ""
    assert not ran.json["sound"]
    assert {entry["name"]: entry["problem"] for entry in ran.json["damaged"]} == expected
    assert kinds(ran.json) == {"ok": NUM - len(expected), "corrupt": len(expected)}
    drawn = run("store", "check", url)
    assert drawn.code == 1
    assert "damage found" in drawn.stdout
    assert "--repair" in drawn.stdout
    assert names[0].split("/")[3][:16] in drawn.stdout
    assert contents(folder) == before

    repaired = run("store", "check", url, "--repair", "--json")
    assert repaired.code == 1  # there was damage
    assert repaired.json["num_removed"] == len(expected)
    assert contents(folder) == {n: v for n, v in before.items() if n not in expected}
    again = run("store", "check", url, "--json")
    assert (again.code, kinds(again.json)) == (0, {"ok": NUM - len(expected)})


def test_another_secret_s_values_are_not_damage(
    run: Run, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_in_every_way(folder, save(url, secret=SECRET + "!"))
    save(url, OTHER, 3, secret=SECRET, encrypt=True)
    save(url, OTHER, 2)
    (folder / "penstock/1/notes.txt").write_text("mine")
    before = contents(folder)
    monkeypatch.setenv(ENV_REMOTE_SECRET, "yet another secret of a fleet")
    ran = run("store", "check", url, "--repair", "--json")
    assert (ran.code, kinds(ran.json)) == (0, {"foreign": NUM + 3 + 2 + 1})
    assert "no value was written with this secret" in run("store", "check", url).stdout
    monkeypatch.delenv(ENV_REMOTE_SECRET)
    ran = run("store", "check", url, "--repair", "--json")
    assert (ran.code, kinds(ran.json)) == (0, {"ok": 2, "foreign": NUM + 3 + 1})
    assert contents(folder) == before


def test_of_encrypted_values_the_head_is_verified(
    run: Run, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_REMOTE_SECRET, SECRET)
    names = save(url, secret=SECRET, encrypt=True)
    ran = run("store", "check", url, "--json")
    assert (ran.code, kinds(ran.json)) == (0, {"encrypted": NUM})
    flip_bit(folder / names[0], 30)
    ran = run("store", "check", url, "--json")
    assert (ran.code, kinds(ran.json)) == (1, {"encrypted": NUM - 1, "corrupt": 1})
    assert [entry["name"] for entry in ran.json["damaged"]] == [names[0]]
    assert "the data needs the tenant's name" in run("store", "check", url).stdout


def test_what_has_expired_is_no_damage(run: Run, url: str) -> None:
    save(url, ttl_seconds=60, now=lambda: 1_000_000.0)
    save(url, OTHER, 2, ttl_seconds=3600)
    assert kinds(run("store", "check", url, "--json").json) == {"expired": NUM, "ok": 2}


def test_what_changes_during_the_check_is_no_damage(
    run: Run, stand_in: Callable[[MemoryClient], None]
) -> None:
    """One value goes and one is replaced after they were listed; one is listed as it goes."""

    class Changing(MemoryClient):
        def find(self, prefix: str) -> Iterator[list[Listed]]:
            pages = [*super().find(prefix), [Listed(f"{prefix}{'0' * 32}/{'0' * 64}", 0)]]
            first, second, *_ = self.values
            del self.values[first]
            self.values[second] += b"longer"
            yield from pages

        def close(self) -> None: ...

    client = Changing()
    store = RemoteStore(client, SPEC, Envelope(SPEC))
    assert not any(store.put(Desk(SPEC, NUM).write(keys_of(NUM), range(NUM))))
    stand_in(client)
    ran = run("store", "check", "redis://cache", "--json")
    assert (ran.code, kinds(ran.json)) == (0, {"ok": NUM - 2, "changed": 3})


def test_what_reads_well_the_second_time_is_no_damage(
    run: Run, stand_in: Callable[[MemoryClient], None]
) -> None:
    class Once(MemoryClient):
        def get(self, items: Sequence[Item]) -> Answers:
            answers = super().get(items)
            self.faults.corrupting = False
            return answers

    client = Once()
    store = RemoteStore(client, SPEC, Envelope(SPEC))
    assert not any(store.put(Desk(SPEC, NUM).write(keys_of(NUM), range(NUM))))
    client.faults.corrupting = True
    stand_in(client)
    ran = run("store", "check", "redis://cache", "--json")
    assert (ran.code, kinds(ran.json)) == (0, {"ok": NUM})


def test_a_secret_that_can_be_guessed_is_refused(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_REMOTE_SECRET, "short")
    assert "at least 16" in run("store", "check", url).refusal


def test_large_values_are_read_a_few_at_a_time() -> None:
    values = {str(number): 20 << 20 for number in range(3)} | {"small": 1, "huge": 100 << 20}
    batches = [[name for name, _ in batch] for batch in remote_audit._batches(values)]
    assert batches == [["0"], ["1"], ["2", "small"], ["huge"]]


# clear


def test_clear_deletes_our_values_and_nothing_else(run: Run, folder: Path, url: str) -> None:
    save(url)
    save(url, OTHER, 3, secret=SECRET)
    mine = ["notes.txt", "penstock/10/x", "penstock/probe/x"]
    for name in mine:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    ran = run("store", "clear", url, "--yes", "--json")
    assert ran.code == 0
    assert ran.json == {
        "url": url,
        "prefix": "penstock/1/",
        "num_removed": NUM + 3,
        "freed_bytes": NUM * VALUE_BYTES + 3 * (HEAD_BYTES + 4096),
    }
    assert sorted(contents(folder)) == mine
    assert run("store", "clear", url).code == 0  # nothing there, nothing to ask


def test_clear_of_one_namespace(run: Run, folder: Path, url: str) -> None:
    names, others = save(url), save(url, OTHER, 3)
    ran = run("store", "clear", url, "--namespace", prefix_of(names[0]), "--yes")
    assert ran.code == 0
    assert "Deleted 20 values, 163.8 KiB" in ran.stdout
    assert sorted(contents(folder)) == sorted(others)
    for wrong in ("", prefix_of(others[0])[:-1], "penstock", "../" * 10 + "ab"):
        assert "32 hexadecimal digits" in run("store", "clear", url, "--namespace", wrong).refusal
    assert sorted(contents(folder)) == sorted(others)


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_clear_asks(
    run: Run, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    names = save(url)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    ran = run("store", "clear", url)
    assert ran.code == code
    assert f"Delete 20 values, 163.8 KiB, under penstock/1/ in {url}?" in ran.stderr
    assert len(contents(folder)) == (0 if code == 0 else len(names))
    if code == 1:
        assert "nothing was done" in ran.stderr


def test_clear_with_json_does_not_ask(run: Run, folder: Path, url: str) -> None:
    names = save(url)
    assert "--yes" in run("store", "clear", url, "--json").refusal
    assert sorted(contents(folder)) == sorted(names)


# What cannot be read.


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://user:hush@host/folder", "expected one that begins with redis://"),
        ("redis://user:hush@host:port/0", "not a valid URL"),
        ("file://", "has no valid bucket or folder"),
        ("file:///nowhere/at/all", "cannot be opened"),
        ("s3://bucket?region=Über all", "option region is invalid"),
    ],
)
def test_a_url_that_means_nothing(run: Run, command: list[str], url: str, words: str) -> None:
    refusal = run("store", command[0], url, *command[1:]).refusal
    assert words in refusal
    assert "hush" not in refusal


@pytest.mark.parametrize("command", COMMANDS)
def test_a_library_that_is_missing(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delitem(sys.modules, "penstock.stores.s3", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    refusal = run("store", command[0], url, *command[1:]).refusal
    assert "pip install '.[s3]'" in refusal


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_away(run: Run, command: list[str]) -> None:
    url = f"redis://user:hush@127.0.0.1:{free_port()}/0"
    refusal = run("store", command[0], url, *command[1:]).refusal
    assert "redis://…@127.0.0.1" in refusal
    assert "start it" in refusal
    assert "hush" not in refusal


@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_that_cannot_list(
    run: Run, stand_in: Callable[[MemoryClient], None], command: list[str]
) -> None:
    class Mute(MemoryClient):
        def find(self, prefix: str) -> Iterator[list[Listed]]:
            raise StoreError("names cannot be listed")

    stand_in(Mute())
    refusal = run("store", command[0], "redis://cache", *command[1:]).refusal
    assert "redis://cache failed (names cannot be listed)" in refusal


def test_a_store_that_fails_halfway_is_not_called_damaged(
    run: Run, stand_in: Callable[[MemoryClient], None]
) -> None:
    class Failing(MemoryClient):
        def get(self, items: Sequence[Item]) -> Answers:
            return [Missing("gone"), *[StoreError("the server left")] * (len(items) - 1)]

    client = Failing()
    store = RemoteStore(client, SPEC, Envelope(SPEC))
    assert not any(store.put(Desk(SPEC, NUM).write(keys_of(NUM), range(NUM))))
    stand_in(client)
    assert "the server left" in run("store", "check", "redis://cache", "--repair").refusal


def test_whoever_looks_lends_no_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_none(url: str, _timeout_seconds: float) -> MemoryClient:
        opened.append(url)
        return MemoryClient()

    monkeypatch.setattr("penstock.commands.remote_store.open_client", open_none)
    assert run("store", "ls", "mooncake://master?segment=64GiB&protocol=rdma").code == 0
    assert run("store", "ls", "mooncake://master?protocol=rdma&segment=64GiB").code == 0
    assert opened == [
        "mooncake://master?segment=0&protocol=rdma",
        "mooncake://master?protocol=rdma&segment=0",
    ]


# A real server.


@needs_redis
def test_a_redis_is_listed_checked_and_cleared(run: Run, server: RedisServer) -> None:
    import redis

    url = server.url.replace("redis://", "redis://default:a-password@")
    shown = server.url.replace("redis://", "redis://…@")
    held = redis.Redis(port=server.port, password="a-password")
    held.set("mine", "mine")
    held.set("penstock/10/mine", "mine")
    names = save(url)
    save(url, OTHER, 3)
    found = run("store", "ls", url, "--blocks", "--json")
    assert found.json["url"] == shown
    assert len(found.json["values"]) == NUM + 3
    assert len(found.json["namespaces"]) == 2

    held.setrange(names[0], HEAD_BYTES + 10, "damaged")
    held.set(names[1], "")
    ran = run("store", "check", url, "--repair", "--json")
    assert (ran.code, kinds(ran.json)) == (1, {"ok": NUM + 1, "corrupt": 2})
    assert run("store", "check", url).code == 0

    spoken = [found.stdout, ran.stdout]
    for command in COMMANDS:
        done = run("store", command[0], url, *command[1:])
        assert done.code == 0
        assert shown in done.stdout
        spoken += [done.stdout, done.stderr]
    left: Any = held.keys()
    assert sorted(left) == [b"mine", b"penstock/10/mine"]
    assert "a-password" not in "".join(spoken)


@needs_redis
def test_a_wrong_password_is_told_and_not_shown(run: Run, server: RedisServer) -> None:
    url = server.url.replace("redis://", "redis://default:hush@")
    refusal = run("store", "ls", url).refusal
    assert "password" in refusal
    assert "hush" not in refusal
