"""The dashboard for Grafana, its provisioning, and the compose file that starts both."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from promtool import VLLM, WHY_NOT, check_expressions, named_in, scraped_names

from servers import is_skipped

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
GRAFANA = DEPLOY / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "penstock.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def expressions() -> list[str]:
    targets = [target["expr"] for panel in CHARTS for target in panel["targets"]]
    marks = [mark["expr"] for mark in DASHBOARD["annotations"]["list"]]
    return targets + marks


def test_panels_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(at["x"] + at["w"] <= 24 for at in places)
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_rows_are_the_questions_that_the_page_explains() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    part = page[page.index("## Reading the dashboard") : page.index("## Alerts")]
    explained = re.findall(r"^\| ([A-Z]\w[\w ]*|vLLM) \|", part, re.M)
    assert explained == [panel["title"] for panel in PANELS if panel["type"] == "row"]


@pytest.mark.parametrize("panel", CHARTS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_is_and_what_to_do(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 40
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_titles_differ() -> None:
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)


def test_every_panel_is_of_the_chosen_servers() -> None:
    assert list(VARIABLES) == ["datasource", "job", "instance"]
    assert VARIABLES["datasource"]["query"] == "prometheus"
    for name in ("job", "instance"):
        assert VARIABLES[name]["multi"]
        assert VARIABLES[name]["includeAll"]
        assert named_in(VARIABLES[name]["definition"]) <= scraped_names()
    for expression in expressions():
        for selector in re.findall(r"(?:penstock_|vllm:)\w+(\{[^}]*\})?", expression):
            assert selector.startswith('{job=~"$job",instance=~"$instance"'), expression


def test_panels_speak_of_metrics_that_exist_and_need_no_rules() -> None:
    known = scraped_names() | VLLM
    for expression in expressions():
        assert named_in(expression) <= known
        assert "penstock:" not in expression  # whoever imports the dashboard alone has no records


def test_panels_lead_to_alerts_that_exist() -> None:
    groups = yaml.safe_load((DEPLOY / "penstock.rules.yml").read_text())["groups"]
    alerts = {rule.get("alert") for group in groups for rule in group["rules"]}
    for panel in CHARTS:
        assert set(re.findall(r"Penstock[A-Z]\w+", panel["description"])) <= alerts


@pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))
def test_expressions_parse(tmp_path: Path) -> None:
    stand_ins = {"$__rate_interval": "5m", "$__range": "3h", "$job": ".+", "$instance": ".+"}
    found = []
    for expression in expressions():
        for name, value in stand_ins.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        found.append(expression)
    check_expressions(found, tmp_path)


def test_provisioning_finds_prometheus_and_the_dashboard() -> None:
    compose = yaml.safe_load((DEPLOY / "observe.compose.yml").read_text())
    services = compose["services"]
    (source,) = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"]
    assert (
        f"--web.listen-address={source['url'].removeprefix('http://')}"
        in services["prometheus"]["command"]
    )
    (provider,) = yaml.safe_load(
        (GRAFANA / "provisioning" / "dashboards" / "penstock.yml").read_text()
    )["providers"]
    mounts = {}
    for service in services.values():
        assert service["network_mode"] == "host"
        for mount in service["volumes"]:
            here, there = mount.split(":")[:2]
            mounts[there] = here
            assert here in compose["volumes"] or (DEPLOY / here).exists(), mount
    assert mounts[f"{provider['options']['path']}/penstock.json"] == "./grafana/penstock.json"
    assert mounts["/etc/grafana/provisioning"] == "./grafana/provisioning"
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert config["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]
    for file in ("prometheus.yml", *config["rule_files"]):
        assert mounts[f"/etc/prometheus/{file}"] == f"./{file}"
