"""The program as a whole, some of it as a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.commands import kv_size

Run = Callable[..., Any]
COMMANDS = [
    ["kv-size"],
    ["probe"],
    ["plan"],
    ["sim"],
    ["advise"],
    ["top"],
    ["dashboard"],
    ["config"],
    ["vllm-config"],
    ["sglang-config"],
    ["doctor", "vllm"],
    ["doctor", "sglang"],
    ["store", "ls"],
    ["store", "check"],
    ["store", "clear"],
]


def penstock_process(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_answer_leaves_with_0_and_nothing_on_stderr() -> None:
    done = penstock_process("kv-size", "smollm2-135m", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"kv_bytes_per_token": 23040' in done.stdout


def test_a_refusal_leaves_with_2_and_one_sentence() -> None:
    done = penstock_process("config", "--set", "host.sice=8GiB")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: unknown setting 'host.sice' in --set")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["--help"], ["kv-size", "llama-3.1-8b"], ["config", "--json"], ["vllm-config"]]
)
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys; from penstock.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'prometheus_client', 'transformers', 'vllm'}; "
        "heavy &= set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupting_a_probe_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "probe", "--dir", str(tmp_path), "--size", "8MiB"]
    process = subprocess.Popen(
        [*command, "--seconds", "30", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        tasks = Path(f"/proc/{process.pid}/task")
        deadline = time.monotonic() + 30
        while len(list(tasks.iterdir())) == 1:  # the threads that measure have not begun
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "penstock: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_stops_reading_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "penstock", "kv-size", "smollm2-135m", "--json"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["store"], ["store", "--help"], ["doctor"]])
def test_groups_show_their_help(run: Run, argv: list[str]) -> None:
    ran = run(*argv)
    assert ran.code == 0
    assert "Commands" in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_an_example_and_json(run: Run, command: list[str]) -> None:
    ran = run(*command, "--help")
    assert ran.code == 0
    assert f"Example: penstock {' '.join(command)}" in ran.stdout
    assert "--json" in ran.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["kv-sise"], "kv-sise"),
        (["kv-size", "--frobnicate"], "--frobnicate"),
        (["kv-size", "smollm2-135m", "--tokens", "many"], "--tokens"),
        (["probe", "--threads", "0"], "--threads"),
        (["store", "ls"], "DIR"),
    ],
)
def test_wrong_usage_is_one_sentence(run: Run, argv: list[str], words: str) -> None:
    refusal = run(*argv).refusal
    assert words in refusal
    assert "--help" in refusal


def test_a_fault_of_the_system_is_one_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: str) -> None:
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr(kv_size, "find_shape", fail)
    assert run("kv-size", "smollm2-135m").refusal == "/secret: Permission denied"


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(kv_size, "find_shape", fail)
    with pytest.raises(ZeroDivisionError):
        run("kv-size", "smollm2-135m")


def test_an_interrupt_leaves_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_model: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kv_size, "find_shape", interrupt)
    ran = run("kv-size", "smollm2-135m")
    assert (ran.code, ran.stdout, ran.stderr) == (130, "", "penstock: interrupted\n")
