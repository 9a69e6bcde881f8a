"""What would keep tiers from opening is found before anybody waits for a model."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.build import build_delegated, build_offloader
from penstock.config import Config, load_config
from penstock.config.options import EngineOptions, tiers_config
from penstock.errors import ConfigError, PenstockError
from penstock.stores.folder import FOLDER_BYTES, store_path
from penstock.stores.host import HostArena
from penstock.stores.preflight import check_anywhere, check_block, check_tiers, warnings
from penstock.stores.slab import Geometry
from penstock.types import BlockSpec

SPEC = BlockSpec(bytes(32), block_bytes=4096, block_tokens=16)
SECRET = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "locked"
    folder.mkdir()
    with (folder / "LOCK").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


def tiers(**settings: object) -> Config:
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    return load_config(env={}, overrides={"host.size": "1MiB", "disk.size": "1MiB", **dotted})


def build(config: Config) -> None:
    device = HostArena(SPEC, 4 * SPEC.stride_bytes)
    build_offloader(config, SPEC, device).close()


REFUSED = {
    "remote.url": ({"remote__url": "http://foo"}, "expected one that begins with redis://"),
    "an unreadable URL": ({"remote__url": "redis://u:p?w@h"}, "percent-encoded"),
    "an unknown option": ({"remote__url": "redis://h?colour=red"}, "options of redis-py"),
    "no bucket": ({"remote__url": "s3://"}, "has no valid bucket"),
    "no folder": ({"remote__url": "file:///no/such/folder"}, "cannot be opened"),
    "encryption": ({"remote__url": "memory://x", "remote__encrypt": True}, "without a secret"),
    "disk.path": ({"disk__path": "/proc/x"}, "cannot be created"),
    "disk.size": ({"disk__path": "{folder}/kv", "disk__size": "4KiB"}, "too little for one block"),
    "host.size": ({"host__size": 1}, "less than one block"),
    "host.numa_node": ({"host__numa_node": 1023}, "no such node"),
    "too much DRAM": ({"host__size": "1EiB"}, "the machine's memory"),
    "nothing to read": ({"disk__path": "{folder}", "disk__read_only": True}, "no store to read"),
    "a stranger's index": ({"disk__path": "{folder}/strange"}, "not Penstock's"),
    "a damaged manifest": ({"disk__path": "{folder}/damaged"}, "MANIFEST is damaged"),
    "another version": ({"disk__path": "{folder}/newer"}, "version 999"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_build_refuses_is_refused_before(case: str, tmp_path: Path) -> None:
    for name in ("strange", "damaged", "newer"):
        (tmp_path / name).mkdir()
    (tmp_path / "strange" / "index").write_text("my own list")
    (tmp_path / "damaged" / "MANIFEST").write_text("{")
    (tmp_path / "newer" / "MANIFEST").write_text('{"format_version": 999}')
    before = sorted(path for path in tmp_path.rglob("*"))
    settings, words = REFUSED[case]
    config = tiers(
        **{
            name: value.format(folder=tmp_path) if isinstance(value, str) else value
            for name, value in settings.items()
        }
    )
    with pytest.raises(PenstockError, match=re.escape(words)):
        check_tiers(config)
    with pytest.raises(PenstockError):
        build(config)
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_a_folder_that_another_process_writes(locked: Path) -> None:
    config = tiers(disk__path=str(locked))
    with pytest.raises(PenstockError, match="is being written by another process"):
        check_tiers(config)
    check_tiers(tiers(disk__path=str(locked.parent)))


def test_a_secret_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiers(remote__url="memory://x")
    check_tiers(config)
    monkeypatch.setenv("PENSTOCK_REMOTE_SECRET", "short")
    with pytest.raises(ConfigError, match="5 bytes: expected at least 16"):
        check_tiers(config)


def test_what_passes_can_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_SECRET", SECRET)
    config = tiers(
        disk__path=str(tmp_path / "kv"), remote__url="memory://preflight", remote__encrypt=True
    )
    check_tiers(config)
    assert list(tmp_path.iterdir()) == []
    build(config)
    check_tiers(config)
    build(config)


def test_checksums_where_other_processes_write() -> None:
    config = tiers(host__verify=True)
    check_tiers(config)
    with pytest.raises(ConfigError, match=r"host\.verify is set"):
        build_delegated(config, SPEC, 1, shared=False)


def test_a_store_without_a_secret_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis")
    config = tiers(remote__url="redis://127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        build(config)
    assert [r.getMessage() for r in caplog.records if "without a secret" in r.getMessage()] == (
        warnings(config)
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build_delegated(config, SPEC, 1, shared=False).offloader.close()
    assert caplog.text.count("without a secret") == 1
    monkeypatch.setenv("PENSTOCK_REMOTE_SECRET", SECRET)
    assert warnings(config) == []
    monkeypatch.delenv("PENSTOCK_REMOTE_SECRET")
    assert warnings(tiers()) == warnings(tiers(remote__url="memory://x")) == []


def test_errors_name_what_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(kv_offloading_size=1e6, disk_path=str(tmp_path), disk_size=1.0)
    config = tiers_config(options)
    assert config is not None
    with pytest.raises(ConfigError, match=r"^kv_offloading_size is .* lower kv_offloading_size$"):
        check_tiers(config)
    # A single setting overrules the option: then that is what was typed.
    config = tiers_config(options, settings={"host.size": "1EiB"})
    assert config is not None
    with pytest.raises(ConfigError, match=r"^host\.size is "):
        check_tiers(config)
    monkeypatch.setenv("PENSTOCK_HOST_SIZE", "1EiB")
    with pytest.raises(ConfigError, match=r"^PENSTOCK_HOST_SIZE is .* lower PENSTOCK_HOST_SIZE$"):
        check_tiers(load_config())
    config = load_config(overrides={"host.size": 1})
    with pytest.raises(ConfigError, match=r"^host\.size is 1 B"):
        check_anywhere(config)


def test_a_disk_size_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="disk_size is given without disk_path"):
        tiers_config(EngineOptions(disk_size=4))
    with pytest.raises(ConfigError, match="passes through DRAM"):
        tiers_config(EngineOptions(kv_offloading_size=0, disk_size=4))
    monkeypatch.setenv("PENSTOCK_DISK_PATH", "/kv")
    config = tiers_config(EngineOptions(disk_size=4))
    assert config is not None
    assert config.disk.path == "/kv"


@pytest.mark.parametrize("num_bytes", range(-1, 1))
def test_the_least_disk_size_that_is_named_is_the_least_that_opens(
    tmp_path: Path, num_bytes: int
) -> None:
    """The folder itself takes some room, besides its store."""
    least = Geometry.of(SPEC).min_cap_bytes + FOLDER_BYTES
    config = tiers(disk__path=str(tmp_path / "kv"), disk__size=least + num_bytes)
    if num_bytes < 0:
        with pytest.raises(ConfigError, match="too little for one block"):
            check_block(config, SPEC)
    else:
        check_block(config, SPEC)
        build(config)


def test_a_folder_to_read_of_which_nothing_can_be_read(tmp_path: Path) -> None:
    config = tiers(disk__path=str(tmp_path / "kv"))
    build(config)
    store_path(tmp_path / "kv", SPEC.namespace).joinpath("MANIFEST").write_text("{")
    with pytest.raises(PenstockError, match="MANIFEST is damaged"):
        check_tiers(tiers(disk__path=str(tmp_path / "kv"), disk__read_only=True))
