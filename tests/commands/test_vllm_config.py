from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, describe
from penstock.connectors.vllm.settings import VllmSettings, transfer_config

Run = Callable[..., Any]
MIB = 1 << 20


def settings_in(ran: Any) -> VllmSettings:
    """As the connector will read them, from a command that said nothing else."""
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.count("\n") == 1
    return VllmSettings.read(ran.json["kv_connector_extra_config"])


def test_without_options_it_is_the_defaults(run: Run) -> None:
    ran = run("vllm-config")
    assert settings_in(ran) == VllmSettings()
    assert ran.json == {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {},
    }


def test_every_option_arrives(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("[disk]\nthreads = 3\n")
    given = VllmSettings(
        kv_offloading_size=0.25,
        disk_path=str(tmp_path / "kv"),
        disk_size=0.5,
        config=str(file),
        set={"host.huge_pages": "false", "disk.size": "8MiB"},
        always_load=True,
        allow_untested_vllm=True,
    )
    ran = run(
        "vllm-config",
        *("--kv-offloading-size", 0.25, "--disk-path", tmp_path / "kv", "--disk-size", 0.5),
        *("--config", file, "--set", "host.huge_pages=false", "--set", "disk.size=8MiB"),
        *("--always-load", "--allow-untested-vllm"),
    )
    assert settings_in(ran) == given
    assert ran.json == transfer_config(given)
    tiers = given.tiers()
    assert (tiers.host.size_bytes, tiers.disk.size_bytes) == (256 * MIB, 8 * MIB)
    assert (tiers.host.huge_pages, tiers.disk.threads) == (False, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["penstock.toml"]


def test_a_node_has_the_tiers(run: Run, tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/node.sock"
    ran = run("vllm-config", "--node", url)
    assert settings_in(ran) == VllmSettings(node=url)
    assert settings_in(ran).tiers().node.url == url
    for options in (
        ("--kv-offloading-size", 1),
        ("--disk-path", tmp_path),
        ("--remote", "redis://host"),
        ("--set", "host.codec=raw"),
    ):
        ran = run("vllm-config", "--node", url, *options)
        assert ran.code == 2
        assert "together with --node" in ran.stderr
    assert "unix:///run/penstock/node.sock" in run("vllm-config", "--node", "here").stderr


def test_whole_sizes_are_written_as_people_do(run: Run) -> None:
    assert '"kv_offloading_size": 1}' in run("vllm-config", "--kv-offloading-size", "1").stdout


def test_paths_hold_in_another_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "penstock.toml").write_text('[disk]\nsize = "1MiB"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = settings_in(run("vllm-config", "--disk-path", "~/kv", "--config", "penstock.toml"))
    assert found.disk_path == str(tmp_path / "home" / "kv")
    assert found.config == str(tmp_path / "penstock.toml")
    small = ["--set", "disk.size=1MiB"]
    found = settings_in(run("vllm-config", "--set", "disk.path=kv", *small))
    assert found.tiers().disk.path == str(tmp_path / "kv")
    found = settings_in(run("vllm-config", "--set", "disk.path=none"))
    assert found.tiers().disk.path is None


def test_json_has_the_settings_and_the_command_beside_it(run: Run) -> None:
    found = run("vllm-config", "--kv-offloading-size", "0.5", "--json").json
    assert list(found) == ["kv_transfer_config", "tiers", "command"]
    assert found["kv_transfer_config"] == run("vllm-config", "--kv-offloading-size", "0.5").json
    host = {**describe(Config())["host"], "size": 512 * MIB}
    assert found["tiers"] == {**describe(Config()), "host": host}
    *words, line = shlex.split(found["command"])
    assert words == ["vllm", "serve", "MODEL", "--kv-transfer-config"]
    assert json.loads(line) == found["kv_transfer_config"]


def test_a_shell_hands_it_over_whole(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "quoted" $HOME'
    options = shlex.join(["--disk-path", str(folder), "--set", "disk.size=1MiB"])
    command = f'printf "%s" "$({sys.executable} -m penstock vllm-config {options})"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kv_connector_extra_config"]["disk_path"] == str(folder)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--kv-offloading-size", "0"],
            "--kv-offloading-size is 0: expected a number of GiB above 0",
        ),
        (["--kv-offloading-size", "-1"], "expected a number of GiB above 0"),
        (["--kv-offloading-size", "nan"], "expected a number of GiB above 0"),
        (["--kv-offloading-size", "inf"], "expected a number of GiB above 0"),
        (["--disk-size", "0"], "--disk-size is 0"),
        (["--disk-path", " "], "--disk-path is ' ': expected a path"),
        (["--config", "/nowhere.toml"], "there is no file /nowhere.toml"),
        (["--set", "host.sise=8GiB"], "did you mean host.size?"),
        (["--set", "host.size"], "--set 'host.size' is not a setting"),
        (["--kv-offloading-size", "much"], "--kv-offloading-size"),
        (["--disk-size", "4"], "--disk-size is given without --disk-path"),
        (["--remote", "http://foo"], "--remote is 'http://foo': expected one that begins with"),
        (["--set", "host.verify=true"], "if other processes write"),
        (["--set", "host.size=1"], "host.size is 1 B, less than one block"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"], ["--no-check"]])
def test_wrong_settings_are_refused(run: Run, argv: list[str], words: str, more: list[str]) -> None:
    assert words in run("vllm-config", *argv, *more).refusal


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-offloading-size", "1e9"], "lower --kv-offloading-size"),
        (["--disk-path", "/dev/null"], "is a file"),
        (["--disk-path", "kv", "--disk-size", "1e9"], "lower --disk-size"),
    ],
)
def test_what_does_not_fit_is_for_another_machine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    warned, quiet = run("vllm-config", *argv), run("vllm-config", *argv, "--no-check")
    settings_in(quiet)
    assert (warned.code, warned.stdout) == (0, quiet.stdout)
    assert warned.stderr.startswith("penstock: warning: --")
    assert warned.stderr.count("\n") == 1
    assert words in warned.stderr
    assert "vLLM will not start on this machine" in warned.stderr
    assert os.listdir(tmp_path) == []


def test_a_password_is_printed_only_with_a_warning(run: Run) -> None:
    ran = run("vllm-config", "--remote", "redis://user:hush@cache")
    assert ran.code == 0
    assert "PENSTOCK_REMOTE_URL" in ran.stderr
    assert "without a secret" in ran.stderr
    assert "hush" not in ran.stderr
