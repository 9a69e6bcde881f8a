"""What the documentation says is run, and held against the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from penstock.config import Config, describe, load_config
from penstock.metrics import Metrics

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.name}-{number}", text)
        for page in PAGES
        for number, (found, text) in enumerate(BLOCK.findall(page.read_text()))
        if found == language
    ]


# vLLM is not installed here: its page is run by tests_vllm.
RUNNABLE = [(name, code) for name, code in blocks("python") if not name.startswith("vllm.md")]


@pytest.mark.parametrize(("name", "code"), RUNNABLE, ids=lambda v: v if len(v) < 40 else "")
def test_python_runs(
    name: str, code: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "docs"})


@pytest.mark.parametrize(("name", "text"), blocks("toml"), ids=lambda v: v if len(v) < 40 else "")
def test_settings_load(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(text)
    assert tomllib.loads(text)
    assert isinstance(load_config(file, env={}), Config)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    documented: dict[str, list[str]] = {}
    for part in re.split(r"^## `\[", text, flags=re.MULTILINE)[1:]:
        section = part[: part.index("]")]
        documented[section] = re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)
    assert documented == {section: list(keys) for section, keys in describe(Config()).items()}
    assert set(documented) == {field.name for field in fields(Config)}


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = {name.removesuffix("_total") for name in re.findall(r"^\| `(\w+)` \|", text, re.M)}
    assert documented == {metric.name for metric in Metrics().registry.collect()}


RULES = ROOT / "deploy" / "penstock.rules.yml"


def test_alerts_speak_of_metrics_that_exist() -> None:
    names = [metric.name for metric in Metrics().registry.collect()]
    exposed = {name + end for name in names for end in ("", "_total", "_bucket")}
    rules = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 7
    for rule in rules:
        named = set(re.findall(r"penstock_\w+", rule["expr"]))
        assert named, rule["alert"]
        assert named <= exposed


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus's promtool")
def test_prometheus_accepts_the_alerts() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(RULES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_of_the_readme_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.cli import main

    text = (ROOT / "README.md").read_text()
    names = r"^penstock (kv-size|probe|config|vllm-config|store \w+|doctor \w+)"
    commands = set(re.findall(names, text, re.MULTILINE))
    assert len(commands) == 8
    for command in commands:
        with pytest.raises(SystemExit) as exit_info:
            raise SystemExit(main([*command.split(), "--help"]))
        assert exit_info.value.code in (0, None)
        assert "Usage" in capsys.readouterr().out
