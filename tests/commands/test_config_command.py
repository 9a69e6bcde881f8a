from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, describe

Run = Callable[..., Any]


def test_defaults_are_what_the_loader_has(run: Run) -> None:
    assert run("config", "--json").json == describe(Config())


def test_file_environment_and_set_in_this_order(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('[host]\nsize = "1MiB"\nverify = true\n[disk]\nthreads = 8\n')
    monkeypatch.setenv("PENSTOCK_HOST_SIZE", "2MiB")
    monkeypatch.setenv("PENSTOCK_DISK_THREADS", "9")
    settings = ["--set", "disk.threads=10", "--set", "disk.threads=11"]
    found = run("config", "--config", file, *settings, "--json").json
    assert found["host"]["size"] == 2 << 20
    assert found["host"]["verify"] is True
    assert found["disk"]["threads"] == 11


def test_the_table_shows_what_was_changed(run: Run) -> None:
    ran = run("config", "--set", "host.size=2MiB")
    assert ran.code == 0
    line = next(line for line in ran.stdout.splitlines() if "host.size" in line)
    assert line.split() == ["host.size", "2.0", "MiB", "4.0", "GiB"]


def test_paths_are_not_markup(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "[red]"
    settings = ["--set", f"disk.path={folder}", "--set", "disk.size=1MiB"]
    assert "[red]" in "".join(run("config", *settings).stdout.split())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["host.sise=8GiB"], "did you mean host.size?"),
        (["host.size=0"], "host.size is '0'"),
        (["host.size=7EiB"], "the machine's memory"),
        (["disk.path={folder}", "disk.size=7EiB"], "lower disk.size"),
        (["disk.path={file}"], "is a file"),
        (["host.size"], "--set 'host.size' is not a setting"),
        (["=8GiB"], "is not a setting"),
        (["remote.url=http://foo"], "remote.url is 'http://foo': expected one that begins with"),
        (["disk.path=/proc/x"], "disk.path /proc/x cannot be created"),
        (["host.size=1"], "host.size is 1 B, less than one block"),
        (["host.numa_node=1023"], "no such node"),
        (["remote.url=memory://x", "remote.encrypt=true"], "without a secret"),
    ],
)
def test_refusals_write_nothing(run: Run, tmp_path: Path, settings: list[str], words: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    argv = []
    for setting in settings:
        argv += ["--set", setting.format(folder=tmp_path / "kv", file=file)]
    assert words in run("config", *argv).refusal
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [("[host\nsize = 1", "is not valid TOML"), ("[host]\nsice = 1", "unknown setting")],
)
def test_bad_files(run: Run, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(text)
    assert words in run("config", "--config", file).refusal
    assert words in run("config", "--config", file, "--json").refusal
    assert file.read_text() == text


def test_a_missing_file(run: Run, tmp_path: Path) -> None:
    assert "there is no file" in run("config", "--config", tmp_path / "none.toml").refusal


def test_a_folder_that_another_process_writes(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "LOCK").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "is being written by" in run("config", "--set", f"disk.path={tmp_path}").refusal


def test_a_variable_of_the_environment_is_named_by_its_own_name(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOST_SIZE", "7EiB")
    refusal = run("config").refusal
    assert refusal.startswith("PENSTOCK_HOST_SIZE is ")
    assert "host.size" not in refusal


def test_a_remote_store_without_a_secret_is_warned_of(run: Run) -> None:
    ran = run("config", "--set", "remote.url=redis://user:hush@h", "--json")
    assert ran.code == 0
    assert ran.json["remote"]["url"] == "redis://…@h"
    assert ran.stderr.startswith("penstock: warning: the remote store is used without a secret")
    assert "hush" not in ran.stderr
