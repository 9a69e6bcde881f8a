"""What stands in `kv_connector_extra_config`: read strictly, and written so that vLLM finds us."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors.vllm import settings
from penstock.connectors.vllm.settings import VllmSettings, transfer_config
from penstock.errors import ConfigError
from penstock.units import GiB


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_CONFIG", "PENSTOCK_HOST_SIZE", "PENSTOCK_DISK_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("kv_ofloading_size", "kv_offloading_size"),
        ("disk_pth", "disk_path"),
        ("allways_load", "always_load"),
        ("disksize", "disk_size"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{key}' .*did you mean {meant}\?"):
        VllmSettings.read({key: 1})


def test_a_key_like_no_other_is_refused_with_all_there_are() -> None:
    with pytest.raises(ConfigError, match=r"expected one of kv_offloading_size, .*always_load"):
        VllmSettings.read({"qqqq": 1})


@pytest.mark.parametrize("name", ["kv_offloading_size", "disk_size"])
@pytest.mark.parametrize(
    "value", [0, -1, True, "8", "8GiB", float("nan"), float("inf"), 1 << 34, [8]]
)
def test_a_size_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .* expected a number of GiB above 0"):
        VllmSettings.read({name: value})


@pytest.mark.parametrize("name", ["disk_path", "config"])
@pytest.mark.parametrize("value", ["", "  ", 3, True, ["/kv"]])
def test_a_path_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .* expected a path"):
        VllmSettings.read({name: value})


@pytest.mark.parametrize("name", ["always_load", "allow_untested_vllm"])
@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_a_flag_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .* expected true or false"):
        VllmSettings.read({name: value})


@pytest.mark.parametrize("value", [["disk.threads", 8], "disk.threads=8", 8])
def test_single_settings_come_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="expected settings by name"):
        VllmSettings.read({"set": value})


def test_nothing_given_is_the_defaults() -> None:
    read = VllmSettings.read({})
    assert read == VllmSettings()
    assert read.extra() == {}
    assert read.tiers().disk.path is None


ALL: dict[str, Any] = {
    "kv_offloading_size": 1.5,
    "disk_path": "/kv",
    "disk_size": 3,
    "set": {"disk.threads": 8},
    "always_load": True,
    "audit_share": 0.001,
    "allow_untested_vllm": True,
}


@pytest.mark.parametrize("names", [[], ["disk_path"], ["set", "always_load"], list(ALL)])
def test_what_is_written_is_read_again(names: list[str]) -> None:
    given = VllmSettings.read({name: ALL[name] for name in names})
    extra = given.extra()
    assert set(extra) == set(names), "defaults are not repeated"
    assert VllmSettings.read(json.loads(json.dumps(extra))) == given


def test_sizes_are_in_gib() -> None:
    tiers = VllmSettings.read(ALL).tiers()
    assert tiers.host.size_bytes == 3 * GiB // 2
    assert tiers.disk.size_bytes == 3 * GiB
    assert tiers.disk.path == "/kv"
    assert tiers.disk.threads == 8


def test_later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('[host]\nsize = "1GiB"\n[disk]\nsize = "1GiB"\nthreads = 1\n')
    assert VllmSettings(config=str(file)).tiers().host.size_bytes == GiB
    monkeypatch.setenv("PENSTOCK_HOST_SIZE", "2GiB")
    assert VllmSettings(config=str(file)).tiers().host.size_bytes == 2 * GiB
    named = VllmSettings(config=str(file), kv_offloading_size=3)
    assert named.tiers().host.size_bytes == 3 * GiB
    single = VllmSettings(config=str(file), kv_offloading_size=3, set={"host.size": "4GiB"})
    tiers = single.tiers()
    assert tiers.host.size_bytes == 4 * GiB
    assert tiers.disk.size_bytes == GiB
    assert tiers.disk.threads == 1


def test_the_whole_of_kv_transfer_config() -> None:
    config = transfer_config(VllmSettings.read({"kv_offloading_size": 2, "always_load": True}))
    assert json.loads(json.dumps(config)) == {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_offloading_size": 2, "always_load": True},
    }


def test_the_module_that_is_named_can_be_imported_without_vllm() -> None:
    module = importlib.import_module(settings.MODULE)
    with pytest.raises(AttributeError, match="no attribute 'PenstockConector'"):
        module.PenstockConector  # noqa: B018


@pytest.mark.parametrize(
    "wrong", [{"set": {"host.sise": 1}}, {"set": {"disk.threads": 0}}, {"config": "/nowhere.toml"}]
)
def test_settings_that_are_wrong_never_become_a_config(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        transfer_config(VllmSettings.read(wrong))
