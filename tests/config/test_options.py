"""A default stands in `EngineOptions`, and everything else has it from there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli import app
from penstock.config.options import EngineOptions, Option
from penstock.connectors.vllm.settings import VllmSettings
from penstock.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
DEFAULTS = {field.name: field.default for field in fields(EngineOptions)}
NOT_TYPED = {"kv_offloading_backend"}


def parameters_of(*words: str) -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return {parameter.name: parameter for parameter in command.params}


def option_of(cls: Any, name: str) -> Option:
    (found,) = [field.metadata["option"] for field in fields(cls) if field.name == name]
    assert isinstance(found, Option)
    return found


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_the_command_line_has_every_option_with_its_default(command: str) -> None:
    parameters = parameters_of(command)
    for name in DEFAULTS.keys() - NOT_TYPED - {"model"}:
        option, parameter = option_of(EngineOptions, name), parameters[name]
        assert parameter.default == DEFAULTS[name], name
        assert (parameter.min, parameter.max) == (option.low, option.high), name
        assert parameter.help == option.help, name
    if command != "chat":  # where --url may stand for a model
        assert parameters["model"].default == DEFAULTS["model"]


@pytest.mark.parametrize("words", [["vllm-config"], ["doctor", "vllm"]])
def test_the_options_for_vllm_are_those_of_the_connector(words: list[str]) -> None:
    parameters = parameters_of(*words)
    shared = [field for field in fields(VllmSettings) if field.name in parameters]
    assert len(shared) >= 5
    for field in shared:
        assert parameters[field.name].default == field.default
        if field.name != "config":
            assert parameters[field.name].help == option_of(VllmSettings, field.name).help


def test_the_offline_api_has_the_same_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.engine.llm as module

    opened: list[EngineOptions] = []
    monkeypatch.setattr(
        module, "open_engine", lambda options, *_, **__: opened.append(options) or object()
    )
    module.LLM()
    (found,) = opened
    # Who waits for all answers gains nothing by some being refused.
    assert found == EngineOptions(max_waiting=found.max_waiting)
    assert found.max_waiting > DEFAULTS["max_waiting"]


def rows(page: str, dashes: str) -> Iterator[tuple[list[str], list[str]]]:
    """Names and defaults of the rows whose first cell has nothing but options."""
    for names, cell in re.findall(
        rf"^\| ((?:`{dashes}[\w-]+`(?:, )?)+) \| (.*?) \|",
        (DOCS / page).read_text(),
        re.MULTILINE,
    ):
        found = [name.lstrip("-").replace("-", "_") for name in re.findall(r"`([\w-]+)`", names)]
        yield found, re.split("[,;] ", cell)


@pytest.mark.parametrize(
    ("page", "dashes", "least"), [("engine.md", "", 11), ("server.md", "--", 4)]
)
def test_tables_of_the_docs_tell_the_defaults(page: str, dashes: str, least: int) -> None:
    num_compared = 0
    for names, cells in rows(page, dashes):
        for name, cell in zip(names, cells, strict=False):
            default = DEFAULTS.get(name)
            if default is None or cell == "chosen":
                continue
            words = {True: "on", False: "off"} if isinstance(default, bool) else {}
            assert words.get(default, str(default)) == cell.strip("`").split(" ")[0], name
            num_compared += 1
    assert num_compared >= least


def test_every_field_is_described_and_has_a_default() -> None:
    for cls in (EngineOptions, VllmSettings):
        for field in fields(cls):
            assert field.default is not MISSING
            assert option_of(cls, field.name).help.endswith("."), field.name
            assert option_of(cls, field.name).accepts(field.default), field.name


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_offloading_size": -1}, "kv_offloading_size is -1: expected a number of GiB, 0 or"),
        ({"kv_offloading_size": "8"}, "kv_offloading_size is '8': expected a number of GiB"),
        ({"disk_size": float("inf")}, "disk_size is inf"),
        ({"device_kv_gib": 0}, "device_kv_gib is 0: expected a number of GiB above 0"),
        ({"gpu_memory_utilization": 1.1}, "expected a number from 0.01 to 1"),
        ({"device_low_watermark": 0}, "expected a number from 0.01 to 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: expected a whole number, 1 or more"),
        ({"max_num_seqs": 1.5}, "max_num_seqs is 1.5: expected a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_model_len": 1}, "expected a whole number, 2 or more"),
        ({"resident_tail_tokens": -1}, "expected a whole number, 0 or more"),
        ({"turn_seconds": float("nan")}, "turn_seconds is nan: expected a number of seconds"),
        ({"kv_offloading_backend": "lmcache"}, "kv_offloading_backend is 'lmcache': expected"),
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        EngineOptions(**given)


def test_the_limits_themselves_are_accepted() -> None:
    EngineOptions(kv_offloading_size=0, resident_prefix_tokens=0, max_model_len=2, max_num_seqs=1)
    EngineOptions(gpu_memory_utilization=1, device_low_watermark=0.01, turn_seconds=0.001)
