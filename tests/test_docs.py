"""What the documentation says is run, and held against the code."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.config import Config, describe, load_config
from penstock.metrics import Metrics
from penstock.metrics.familiar import FamiliarNames
from penstock.metrics.families import RegistryFamilies
from penstock.metrics.node import NodeFamilies
from penstock.metrics.tiers import TierMetrics

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{name_of(page)}-{number}", text)
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_quickstart_serves_as_the_readme_does() -> None:
    """Whose commands are run by tests/test_readme.py, in one piece."""
    (whole,) = [text for name, text in blocks("sh") if "README" in name and "kill -9" in text]
    parts = [text for name, text in blocks("sh") if name.startswith("quickstart.md")]
    assert whole in "".join(parts)


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    documented: dict[str, list[str]] = {}
    for part in re.split(r"^## `\[", text, flags=re.MULTILINE)[1:]:
        section = part[: part.index("]")]
        documented[section] = re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)
    assert documented == {section: list(keys) for section, keys in describe(Config()).items()}
    assert set(documented) == {field.name for field in fields(Config)} - {"typed"}


class Noted(RegistryFamilies):
    """Notes the kind and the labels of what is made."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.made: dict[str, tuple[str, str]] = {}

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        self.made[name] = "counter", ", ".join(labels)
        return super().counter(name, text, labels)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        self.made[name] = "gauge", ", ".join(labels)
        return super().gauge(name, text, labels)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        self.made[name] = "histogram", ", ".join(labels)
        return super().histogram(name, text, labels, buckets=buckets)


def test_every_metric_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its type and labels, and in the part of those hosts that have it."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    documented = {
        title: {
            name: (kind, labels.strip())
            for name, kind, labels in re.findall(
                r"^\| `(\w+)` \| (\w+) \|([\w ,]*)\|", part, re.MULTILINE
            )
        }
        for title, part in zip(parts[1::2], parts[2::2], strict=True)
    }
    everywhere = Noted(CollectorRegistry())
    TierMetrics(everywhere)  # all that vLLM's /metrics has
    node = Noted(CollectorRegistry())
    NodeFamilies(node)
    made = []
    monkeypatch.setattr(
        "penstock.metrics.RegistryFamilies",
        lambda registry: made.append(Noted(registry)) or made[-1],
    )
    names = {metric.name for metric in Metrics().registry.collect()}
    (noted,) = made
    kinds = {"unknown": "untyped"}
    familiar = {
        sample.name: (kinds.get(metric.type, metric.type), "")
        for metric in FamiliarNames().collect()
        for sample in metric.samples
    }
    assert documented == {
        "The tiers: in every client": everywhere.made,
        "The embedded engine: not in vLLM": {
            name: facts for name, facts in noted.made.items() if name not in everywhere.made
        },
        "A node": node.made,
        "Names used by others: not in vLLM": familiar,
    }
    assert names == {*noted.made, *(name.removesuffix("_total") for name in familiar)}


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
