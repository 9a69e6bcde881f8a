"""Alerts, their runbooks, and the configuration of Prometheus that loads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import product, starmap
from pathlib import Path
from types import UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from promtool import (
    VLLM,
    WHY_NOT,
    check_expressions,
    named_in,
    promtool,
    scraped_names,
)

from penstock.config import Config, describe
from penstock.events import (
    CodecsChosen,
    Event,
    ModelId,
    ModelRemoved,
    ModelUsage,
    NodeUsage,
    OfModel,
)
from penstock.metrics import Metrics
from penstock.metrics.node import NodeMetrics
from servers import is_skipped

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "penstock.rules.yml"
PAGE = ROOT / "docs" / "operations.md"

OTHERS_FLAGS = {"--config", "--web"}  # Prometheus's, up to the dot

needs_promtool = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDS = [rule for rule in rules() if "record" in rule]


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "--lint=all", "--lint-fatal", RULES),
        ("check", "config", DEPLOY / "prometheus.yml"),
        ("test", "rules", DEPLOY / "rules.test.yml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_prometheus_accepts(arguments: tuple[str | Path, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_speak_of_metrics_that_exist() -> None:
    recorded = {rule["record"] for rule in RECORDS}
    assert len(recorded) == len(RECORDS)
    known = scraped_names() | VLLM
    for rule in rules():
        assert named_in(rule["expr"]) <= known
        assert set(re.findall(r"penstock:[\w:]+", rule["expr"])) <= recorded


def test_an_alert_says_what_and_where_to_read_on() -> None:
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert set(alert["annotations"]) == {"summary", "runbook"}
        where = f"docs/operations.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook"] == where


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    headings = re.findall(r"^### (Penstock\w+)$", PAGE.read_text(), re.M)
    assert headings == [alert["alert"] for alert in ALERTS]


def test_every_alert_is_tested_to_fire_and_not_to() -> None:
    """One series that fires, and beside it one that does not."""
    fired, spared = set(), set()
    for case in yaml.safe_load((DEPLOY / "rules.test.yml").read_text())["tests"]:
        instances = set(re.findall(r'instance="([^"]+)"', str(case["input_series"])))
        for question in case["alert_rule_test"]:
            if expected := question.get("exp_alerts"):
                firing = {alert["exp_labels"]["instance"] for alert in expected}
                fired.add(question["alertname"])
                if instances - firing:
                    spared.add(question["alertname"])
    assert fired == spared == {alert["alert"] for alert in ALERTS}


def test_jobs_of_prometheus_are_those_that_an_alert_names() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    (down,) = [alert for alert in ALERTS if alert["alert"] == "PenstockTargetDown"]
    (pattern,) = re.findall(r'job=~"([^"]+)"', down["expr"])
    assert set(pattern.split("|")) == jobs
    assert config["rule_files"] == [RULES.name]


@pytest.mark.parametrize("page", ["operations.md", "metrics.md"])
def test_a_page_speaks_of_metrics_that_exist(page: str) -> None:
    text = (PAGE.parent / page).read_text()
    # In prose a counter or a histogram is named without its end.
    registries = (Metrics().registry, NodeMetrics().registry)
    families = {metric.name for registry in registries for metric in registry.collect()}
    families |= {re.sub("_(total|bucket)$", "", name) for name in VLLM}
    assert named_in(text) <= scraped_names() | VLLM | families
    recorded = {rule["record"] for rule in RECORDS}
    assert set(re.findall(r"(?<![\w:])penstock:[\w:]+", text)) <= recorded


def test_links_of_the_page_lead_to_a_heading() -> None:
    for page, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", PAGE.read_text()):
        text = (PAGE.parent / page).read_text() if page else PAGE.read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.M)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{page}#{anchor}"


def test_commands_and_settings_of_the_page_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.cli import main

    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal gets its options cut
    text = PAGE.read_text()
    code = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    code += "\n" + "\n".join(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text))
    commands = set(re.findall(r"\bpenstock ((?:store|doctor) \w+|[a-z][a-z-]+)", code))
    assert {"advise", "serve", "store check", "store ls", "store clear"} <= commands
    told = ""
    for command in commands:
        with pytest.raises(SystemExit) as exit_info:
            raise SystemExit(main([*command.split(), "--help"]))
        assert exit_info.value.code in (0, None), command
        told += capsys.readouterr().out
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)) - OTHERS_FLAGS
    assert flags <= set(re.findall(r"--[a-z][a-z-]+", told))
    settings = {f"{section}.{key}" for section, keys in describe(Config()).items() for key in keys}
    assert set(re.findall(r"\b(?:host|disk|remote|transfer)\.(?!md)\w+", code)) <= settings


@needs_promtool
def test_expressions_of_the_page_parse(tmp_path: Path) -> None:
    found = re.findall(r"^```promql\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(found) >= len(ALERTS)
    check_expressions(found, tmp_path)


@needs_promtool
def test_what_is_exposed_is_in_good_form() -> None:
    """promtool's own lint, after every kind of event was observed."""
    metrics = Metrics()
    # It comes first, and with 0 for the tokens of a block they are unknown.
    chosen = [replace(e, block_tokens=16) for e in examples() if isinstance(e, CodecsChosen)]
    for event in (*chosen, *(e for e in examples() if not isinstance(e, CodecsChosen))):
        metrics(event)
    silent = [family.name for family in metrics.registry.collect() if not family.samples]
    assert silent == []
    done = promtool("check", "metrics", text=metrics.expose().decode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_promtool
def test_what_a_node_exposes_is_in_good_form() -> None:
    """With two models of one name. When a model is removed, its series end."""
    metrics = NodeMetrics()
    models = [ModelId("m", "01234567"), ModelId("m", "89abcdef")]
    for model in models:
        for event in examples():
            metrics(OfModel(model, event))
    usage = tuple(ModelUsage(model, 8, 2, 1) for model in models)
    metrics(NodeUsage(32, 16, 32, usage))
    done = promtool("check", "metrics", text=metrics.expose().decode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for model in models:
        assert f'penstock_used_blocks{{model_name="m",namespace_id="{model.namespace}",' in (
            metrics.expose().decode()
        )
    metrics(ModelRemoved(models[0], is_broken=False))
    metrics(NodeUsage(32, 24, 32, usage[1:]))
    assert models[0].namespace not in metrics.expose().decode()
    assert models[1].namespace in metrics.expose().decode()


def examples() -> Iterator[Event]:
    """Every event, with every member of each enumeration and both values of each flag."""
    for kind in get_args(Event):
        yield from _values(kind)


def _values(hint: Any) -> Iterable[Any]:
    if isinstance(hint, NewType):
        return _values(hint.__supertype__)
    if get_origin(hint) in (Union, UnionType):
        return _values(get_args(hint)[0])  # not None
    if get_origin(hint) is Callable:
        return (tuple,)  # what returns nothing
    if get_origin(hint) is tuple:
        kinds = [kind for kind in get_args(hint) if kind is not ...]
        return product(*map(_values, kinds))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return (
            hint(*values) for values in product(*(_values(hints[f.name]) for f in fields(hint)))
        )
    if issubclass(hint, Enum):
        return hint
    if issubclass(hint, tuple):
        return starmap(hint, product(*map(_values, get_type_hints(hint).values())))
    return (False, True) if hint is bool else (hint(),)
