"""What SGLang passes on, and the flags that make it do so."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from penstock.connectors.sglang import identity
from penstock.connectors.sglang.harmless import HARMLESS
from penstock.connectors.sglang.identity import model_namespace
from penstock.connectors.sglang.settings import SglangSettings, extra_config, flags
from penstock.connectors.sglang.support import check_version
from penstock.errors import ConfigError


def test_settings_survive_the_flag() -> None:
    settings = SglangSettings(disk_path="/a b/*?", disk_size=7, weights_stay=True)
    assert SglangSettings.of(extra_config(settings)) == settings
    *_, value = flags(settings)
    assert SglangSettings.of(json.loads(value)) == settings


def test_the_shell_keeps_the_flags_whole() -> None:
    """As in `sglang serve MODEL $(penstock sglang-config ...)`."""
    expected = flags(SglangSettings(disk_path="/a b/* [x]?", disk_size=7))
    printed = shlex.quote(" ".join(expected))
    script = f"printf '%s\\n' $(printf %s {printed})"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"penstock": {"disk_paht": "/x"}}, "did you mean disk_path"),
        ({"penstock": 7}, "expected settings by name"),
        ({"disk_path": "/x"}, 'expected it inside "penstock"'),
        ({"dsik": 1}, "unknown key 'dsik'"),
        ({"penstock": {"weights_stay": "yes"}}, "expected true or false"),
        ({"penstock": {"metrics_port": 0}}, "expected a whole number from 1 to 65535"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SglangSettings.of(given)


def test_keys_of_sglang_are_left_alone() -> None:
    assert SglangSettings.of({"prefetch_threshold": 8, "interface_v1": 1}) == SglangSettings()
    assert SglangSettings.of(None) == SglangSettings()


def test_an_untested_version_is_refused_unless_the_user_insists() -> None:
    check_version("0.5.23")
    check_version("0.5.23.post1")
    for version in ("0.5.230", "0.5.22", "0.6.0"):
        with pytest.raises(ConfigError, match="allow_untested_sglang"):
            check_version(version)
        check_version(version, insist=True)


def test_no_argument_is_listed_twice() -> None:
    listed = [name for names in HARMLESS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert not {"attention_backend", "kv_cache_dtype", "quantization"} & set(listed)


class _Config:
    model_name, tp_size = "tiny", 1


def test_weights_without_files_are_for_this_run_only() -> None:
    arguments = {"model_path": "/nowhere", "load_format": "dummy"}
    one, two = (model_namespace(arguments, "0.5.23", _Config(), 4096) for _ in range(2))
    assert one.weights != two.weights


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("weight_cache_mode", "client"),
        ("weight_cache_mode", "daemon"),
        ("modelopt_checkpoint_restore_path", "/elsewhere"),
        ("quantize_and_serve", True),
        ("decrypted_draft_config_file", "/elsewhere/config.json"),
        ("ple_offload_dir", "/elsewhere"),
    ],
)
def test_weights_that_do_not_come_from_their_files_are_for_this_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, value: object
) -> None:
    monkeypatch.setattr(identity, "process_start", lambda: time.time() + 60)
    monkeypatch.setattr("penstock.connectors.vllm.identity.process_start", lambda: time.time() + 60)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def weights(**more: object) -> str:
        arguments = {"model_path": str(tmp_path), "load_format": "auto", "weight_cache_mode": "off"}
        return model_namespace(arguments | more, "0.5.23", _Config(), 4096).weights

    assert weights() == weights()
    assert weights(**{argument: value}) != weights(**{argument: value})
