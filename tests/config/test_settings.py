from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config import (
    Config,
    DiskConfig,
    HostConfig,
    NodeConfig,
    TransferConfig,
    describe,
    load_config,
)
from penstock.errors import ConfigError
from penstock.machine import check_machine

GIB = 1 << 30
TINY_HOST = HostConfig(size_bytes=4096)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_toml(text: str) -> Path:
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        return path

    return write_toml


def refusal(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, env or {}, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert "expected" in message or "did you mean" in message
    return message


def machine_refusal(config: Config, total_memory_bytes: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_machine(config, total_memory_bytes=total_memory_bytes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults() -> None:
    config = load_config(env={})
    assert config == Config()
    assert config.host == HostConfig(4 * GIB, None, True, False, "reuse")
    assert config.disk == DiskConfig(None, 32 * GIB, False, True, "reuse", "auto", 4)
    assert config.transfer == TransferConfig(2, 256, 32 << 20, 10.0, 1024, 4 * GIB)


def test_every_key_can_be_set_in_a_file(write: Write) -> None:
    path = write("""
        [host]
        size = "8GiB"
        numa_node = 1
        huge_pages = false
        verify = true
        policy = "lru"
        codec = "lossless"
        retain_share = 0
        [disk]
        path = "/kv"
        size = 1_000_000
        read_only = true
        direct = false
        policy = "lru"
        codec = "int8"
        threads = 8
        admit = "second-use"
        [transfer]
        copy_threads = 3
        queue_transfers = 7
        batch_bytes = "1MiB"
        load_deadline_seconds = 2
        max_pending_loads = 5
        max_pending_save_bytes = "2 GB"
        [node]
        url = "unix:///run/n.sock"
        wait_seconds = 3
        model_floor = 0
        model_cap = 0.5
        pin_share = 0.25
        max_models = 2
    """)
    config = load_config(path, env={})
    assert config.host == HostConfig(8 * GIB, 1, False, True, "lru", "lossless", 0.0)
    assert config.disk == DiskConfig("/kv", 1_000_000, True, False, "lru", "int8", 8, "second-use")
    assert config.transfer == TransferConfig(3, 7, 1 << 20, 2.0, 5, 2_000_000_000)
    assert isinstance(config.transfer.load_deadline_seconds, float)
    assert config.node == NodeConfig("unix:///run/n.sock", 3.0, 0.0, 0.5, 0.25, 2)


def test_an_override_beats_the_environment_beats_the_file(write: Write) -> None:
    path = write('[host]\nsize = "1GiB"\npolicy = "lru"\n[disk]\nthreads = 9')
    env = {"PENSTOCK_HOST_SIZE": "2GiB", "PENSTOCK_DISK_THREADS": "10", "HOME": "/root"}
    config = load_config(path, env, {"host.size": "3GiB"})
    assert config.host.size_bytes == 3 * GIB
    assert config.disk.threads == 10
    assert config.host.policy == "lru"


def test_the_environment_can_name_the_file_and_an_argument_wins(write: Write) -> None:
    path = write("[disk]\nthreads = 9")
    assert load_config(env={"PENSTOCK_CONFIG": str(path)}).disk.threads == 9
    assert load_config(env={"PENSTOCK_CONFIG": ""}) == Config()
    assert load_config(path, {"PENSTOCK_CONFIG": "/nowhere"}).disk.threads == 9


def test_the_key_of_the_server_in_the_environment_is_no_setting() -> None:
    assert load_config(env={"PENSTOCK_API_KEY": "s3cret"}) == Config()
    message = refusal(env={"PENSTOCK_API_KYE": "s3cret"})
    assert "did you mean PENSTOCK_API_KEY?" in message
    assert "s3cret" not in message


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TRANSFER_COPY_THREADS", "5")
    assert load_config().transfer.copy_threads == 5


@pytest.mark.parametrize("text", ["true", "Yes", "on", " 1 "])
def test_text_that_means_true(text: str) -> None:
    assert load_config(env={"PENSTOCK_HOST_VERIFY": text}).host.verify is True


@pytest.mark.parametrize("text", ["false", "NO", "off", "0"])
def test_text_that_means_false(text: str) -> None:
    assert load_config(env={}, overrides={"disk.direct": text}).disk.direct is False


def test_none_unsets_what_may_be_unset(write: Write) -> None:
    path = write('[host]\nnuma_node = 1\n[disk]\npath = "/kv"')
    config = load_config(path, {"PENSTOCK_HOST_NUMA_NODE": "none", "PENSTOCK_DISK_PATH": ""})
    assert config == Config()
    assert load_config(path, {}, {"disk.path": None}).disk.path is None
    assert "host.size is None in --set" in refusal(overrides={"host.size": None})


def test_a_tilde_is_the_home_folder(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config(write('[disk]\npath = "~/kv"'), {}).disk.path == "/home/me/kv"
    assert load_config(env={"PENSTOCK_DISK_PATH": "~/kv"}).disk.path == "/home/me/kv"


def test_overrides_may_be_values_and_not_only_text() -> None:
    overrides = {"host.size": 123, "host.verify": True, "transfer.load_deadline_seconds": 0.5}
    config = load_config(env={}, overrides=overrides)
    assert config.host == HostConfig(size_bytes=123, verify=True)
    assert config.transfer.load_deadline_seconds == 0.5


def test_a_description_is_plain_data_and_loads_to_the_same_configuration() -> None:
    config = Config(HostConfig(size_bytes=12345, numa_node=3), DiskConfig(path="/kv", policy="lru"))
    plain = describe(config)
    assert plain["host"]["size"] == 12345
    assert plain["transfer"]["batch_bytes"] == 32 << 20
    dotted = {f"{name}.{key}": v for name, table in plain.items() for key, v in table.items()}
    assert load_config(env={}, overrides=dotted) == config


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().host.size_bytes = 1  # type: ignore[misc]


def test_unknown_key_in_a_file(write: Write) -> None:
    message = refusal(write('[host]\nsze = "1GiB"'))
    assert message.startswith("unknown setting 'host.sze' in ")
    assert "penstock.toml: did you mean host.size?" in message


def test_unknown_section_in_a_file(write: Write) -> None:
    assert "section 'hosts'" in (message := refusal(write("[hosts]\nsize = 1")))
    assert "did you mean host?" in message


def test_a_key_above_all_sections_in_a_file(write: Write) -> None:
    assert "did you mean host.size?" in refusal(write("size = 1"))
    assert "host in " in (message := refusal(write("host = 3")))
    assert "write [host]" in message


def test_unknown_environment_variable() -> None:
    message = refusal(env={"PENSTOCK_HOST_SIZ": "1GiB"})
    assert "'PENSTOCK_HOST_SIZ' in the environment: did you mean PENSTOCK_HOST_SIZE?" in message
    assert "did you mean PENSTOCK_CONFIG?" in refusal(env={"PENSTOCK_CONFG": "x"})
    assert "expected one of PENSTOCK_HOST_SIZE, " in refusal(env={"PENSTOCK_ZZZ": "x"})


def test_unknown_override() -> None:
    message = refusal(overrides={"disk.thread": "4"})
    assert message == "unknown setting 'disk.thread' in --set: did you mean disk.threads?"
    assert "did you mean disk.threads?" in refusal(overrides={"host.threds": "4"})
    assert "did you mean disk.path?" in refusal(overrides={"host.path": "/kv"})
    assert "did you mean host.size?" in refusal(overrides={"hots.size": "4"})
    message = refusal(overrides={"host.xyzzy": "4"})
    assert "expected one of host.size, " in message
    assert "disk.size" not in message


@pytest.mark.parametrize("size", ["0", '"0GiB"'])
def test_size_zero(write: Write, size: str) -> None:
    message = refusal(write(f"[host]\nsize = {size}"))
    assert message.startswith("host.size is ")
    assert "penstock.toml: expected a size above 0" in message


def test_negative_size(write: Write) -> None:
    message = refusal(write("[disk]\nsize = -1"))
    assert message.startswith("disk.size in ")
    assert "a size of -1 is negative" in message
    assert "--set: '-1GiB' is not a size" in refusal(overrides={"disk.size": "-1GiB"})


def test_absurd_size() -> None:
    assert "below 8EiB" in refusal(overrides={"transfer.batch_bytes": "9EiB"})


@pytest.mark.parametrize(
    ("dotted", "toml"),
    [
        ("host.size", "1.5"),
        ("host.size", "true"),
        ("host.numa_node", '"0"'),
        ("host.numa_node", "-1"),
        ("host.huge_pages", '"true"'),
        ("host.verify", "1"),
        ("host.policy", '"fifo"'),
        ("host.policy", "[]"),
        ("disk.path", "3"),
        ("disk.path", '""'),
        ("disk.path", '"a\\u0000b"'),
        ("disk.path", '"~\\u0000b"'),
        ("disk.threads", '"4"'),
        ("disk.threads", "4.0"),
        ("disk.threads", "true"),
        ("disk.threads", "{}"),
        ("disk.threads", "0"),
        ("disk.threads", "257"),
        ("disk.admit", '"third-use"'),
        ("disk.admit", "2"),
        ("transfer.copy_threads", "0"),
        ("transfer.queue_transfers", "0"),
        ("transfer.max_pending_loads", "-3"),
        ("transfer.load_deadline_seconds", "0.0"),
        ("transfer.load_deadline_seconds", "nan"),
        ("transfer.load_deadline_seconds", "inf"),
        ("transfer.load_deadline_seconds", "true"),
        ("transfer.load_deadline_seconds", '"1"'),
        ("transfer.load_deadline_seconds", "1" + "0" * 400),
    ],
)
def test_wrong_type_or_range_in_a_file(write: Write, dotted: str, toml: str) -> None:
    section, key = dotted.split(".")
    message = refusal(write(f"[{section}]\n{key} = {toml}"))
    assert message.startswith(dotted)
    assert "penstock.toml" in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PENSTOCK_HOST_SIZE", ""),
        ("PENSTOCK_HOST_SIZE", "four"),
        ("PENSTOCK_HOST_NUMA_NODE", "first"),
        ("PENSTOCK_HOST_VERIFY", "maybe"),
        ("PENSTOCK_DISK_THREADS", "4.5"),
        ("PENSTOCK_DISK_THREADS", ""),
        ("PENSTOCK_DISK_POLICY", "random"),
        ("PENSTOCK_DISK_ADMIT", "never"),
        ("PENSTOCK_TRANSFER_LOAD_DEADLINE_SECONDS", "soon"),
        ("PENSTOCK_TRANSFER_LOAD_DEADLINE_SECONDS", "1e999"),
    ],
)
def test_wrong_text_in_the_environment(name: str, text: str) -> None:
    assert name in refusal(env={name: text})


def test_a_wrong_value_is_quoted_and_cut() -> None:
    message = refusal(overrides={"host.policy": "x" * 5000})
    assert "'xxx" in message
    assert len(message) < 300


def test_malformed_toml_names_the_line(write: Write) -> None:
    message = refusal(write('[host]\nsize = "1GiB"\npolicy lru\n'))
    assert "penstock.toml is not valid TOML: " in message
    assert "line 3" in message
    assert "line 2" in refusal(write("[host]\n[disk\n\n"))
    assert "not valid TOML" in refusal(write("[host]\nnuma_node = " + "9" * 5000))
    assert "not valid TOML" in refusal(write("[host]\nsize = " + "[" * 20_000))


def test_a_file_that_is_not_text_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_bytes(b"[host]\n# \xff\n")
    assert "line 2" in refusal(path)


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert refusal(path).startswith(f"there is no file {path}: expected")
    assert "(named by PENSTOCK_CONFIG)" in refusal(env={"PENSTOCK_CONFIG": str(path)})


def test_a_folder_given_instead_of_a_file(tmp_path: Path) -> None:
    assert f"{tmp_path} is a folder" in refusal(tmp_path)


def test_unreadable_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read (Permission denied)" in refusal(write(""))


@pytest.mark.parametrize(
    "make",
    [
        lambda: HostConfig(size_bytes=0),
        lambda: HostConfig(size_bytes="4GiB"),  # type: ignore[arg-type]
        lambda: HostConfig(policy="fifo"),
        lambda: HostConfig(numa_node=-1),
        lambda: HostConfig(retain_share=0.6),
        lambda: HostConfig(retain_share=-0.1),
        lambda: HostConfig(retain_share=True),
        lambda: DiskConfig(threads=257),
        lambda: DiskConfig(path=""),
        lambda: DiskConfig(admit=""),
        lambda: DiskConfig(path=Path("/kv")),  # type: ignore[arg-type]
        lambda: TransferConfig(load_deadline_seconds=-1),
        lambda: TransferConfig(batch_bytes=None),  # type: ignore[arg-type]
    ],
)
def test_ranges_hold_without_the_loader(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        make()


def test_a_machine_that_fits(tmp_path: Path) -> None:
    check_machine(Config(host=TINY_HOST))
    inside = tmp_path / "not" / "yet"
    check_machine(Config(TINY_HOST, DiskConfig(path=str(inside), size_bytes=4096)))
    check_machine(Config(TINY_HOST, DiskConfig(path=str(tmp_path), size_bytes=4096)))
    assert list(tmp_path.iterdir()) == []


def test_host_size_larger_than_memory() -> None:
    config = Config(host=HostConfig(size_bytes=8 * GIB))
    message = machine_refusal(config, total_memory_bytes=8 * GIB - 1)
    assert "8589934592 bytes" in message
    assert "8589934591 bytes" in message
    check_machine(config, total_memory_bytes=8 * GIB)
    assert "memory of" in machine_refusal(Config(host=HostConfig(size_bytes=1 << 60)))


def test_a_machine_that_does_not_say_its_memory_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", refuse)
    check_machine(Config(host=HostConfig(size_bytes=1 << 60)))


def test_disk_path_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.write_text("")
    assert f"{path} is a file" in machine_refusal(Config(TINY_HOST, DiskConfig(path=str(path))))
    below = DiskConfig(path=str(path / "a" / "b"))
    assert f"is below the file {path}" in machine_refusal(Config(TINY_HOST, below))


def test_disk_path_is_a_dangling_link(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.symlink_to(tmp_path / "gone")
    assert "cannot be used" in machine_refusal(Config(TINY_HOST, DiskConfig(path=str(path))))


def test_disk_path_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Faked, because root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    here = DiskConfig(path=str(tmp_path), size_bytes=4096)
    below = DiskConfig(path=str(tmp_path / "a" / "b"), size_bytes=4096)
    assert f"{tmp_path} is not writable" in machine_refusal(Config(TINY_HOST, here))
    assert f"cannot be created: {tmp_path} is not" in machine_refusal(Config(TINY_HOST, below))
    check_machine(Config(TINY_HOST, DiskConfig(path=str(tmp_path), read_only=True)))


def test_a_disk_to_read_from_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = DiskConfig(path=str(tmp_path / "gone"), read_only=True)
    assert "does not exist" in machine_refusal(Config(TINY_HOST, gone))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    here = DiskConfig(path=str(tmp_path), read_only=True)
    assert "not readable" in machine_refusal(Config(TINY_HOST, here))


def fake_filesystem(monkeypatch: pytest.MonkeyPatch, total_bytes: int, free_bytes: int) -> None:
    usage = SimpleNamespace(
        f_frsize=4096, f_blocks=total_bytes // 4096, f_bavail=free_bytes // 4096
    )
    monkeypatch.setattr(os, "statvfs", lambda path: usage)


def test_disk_size_larger_than_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(TINY_HOST, DiskConfig(path=str(tmp_path), size_bytes=1 << 62))
    assert "size of the filesystem of " in machine_refusal(config)
    fake_filesystem(monkeypatch, total_bytes=64 << 20, free_bytes=64 << 20)
    config = Config(TINY_HOST, DiskConfig(path=str(tmp_path), size_bytes=65 << 20))
    message = machine_refusal(config)
    assert "disk.size is 65.0 MiB (68157440 bytes)" in message
    assert "64.0 MiB (67108864 bytes)" in message


def test_disk_size_larger_than_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_filesystem(monkeypatch, total_bytes=64 << 20, free_bytes=8 << 20)
    config = Config(TINY_HOST, DiskConfig(path=str(tmp_path), size_bytes=9 << 20))
    message = machine_refusal(config)
    assert "8.0 MiB free" in message
    assert "9437184 bytes" in message
    # A store from an earlier run is room, not a rival.
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub" / "blocks").open("wb") as file:
        file.write(b"x" * (2 << 20))
        file.flush()
        os.fsync(file.fileno())  # some filesystems find the space only now
    check_machine(config)


def test_holes_in_files_are_not_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_filesystem(monkeypatch, total_bytes=64 << 20, free_bytes=8 << 20)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(16 << 20)
    config = Config(TINY_HOST, DiskConfig(path=str(tmp_path), size_bytes=9 << 20))
    assert "free some space" in machine_refusal(config)


def test_a_filesystem_that_does_not_say_its_size_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_filesystem(monkeypatch, total_bytes=0, free_bytes=0)
    check_machine(Config(TINY_HOST, DiskConfig(path=str(tmp_path))))


def test_the_disk_is_not_looked_at_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_filesystem(monkeypatch, total_bytes=4096, free_bytes=0)
    check_machine(Config(TINY_HOST, DiskConfig(size_bytes=1 << 62)))
