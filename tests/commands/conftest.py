from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def refusal(self) -> str:
        """The one sentence of a command that could not do what was asked, and did nothing."""
        assert self.code == 2
        assert self.stdout == ""
        assert self.stderr.startswith("penstock: ")
        assert self.stderr.count("\n") == 1
        return self.stderr.removeprefix("penstock: ").rstrip("\n")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The whole command line, errors into sentences included, in this process."""

    def run_command(*argv: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in argv])
        return Ran(code, *capsys.readouterr())

    return run_command
