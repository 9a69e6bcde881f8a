"""`penstock sim --instances`: routers compared in one command."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"
CHAT = ["--generate", "chat", "--requests", "60", "--device-gib", "4", "--host-gib", "8"]
FLEET = ["sim", *CHAT, "--jobs", "1", "--instances", "4"]


def test_all_routers_are_compared(run: Run) -> None:
    found = run(*FLEET, "--json").json
    assert found["fleet"]["num_instances"] == found["fleet"]["num_nodes"] == 4
    points = {point["router"]: point for point in found["points"]}
    assert list(points) == ["round-robin", "sticky", "cache-aware"]
    (trace,) = found["traces"]
    assert trace["has_sessions"]
    for point in points.values():
        times = point["first_token_seconds"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]
        assert point["token_hit_rate"] <= trace["unbounded_token_hit_rate"]
        assert sum(each["num_requests"] for each in point["instances"]) == 60
        assert sum(each["num_blocks"] for each in point["instances"]) == point["num_blocks"]
        assert point["balance"] >= 1
        assert point["network_load_bytes"] == point["network_save_bytes"] == 0
    assert points["sticky"]["hit_rate"] > points["round-robin"]["hit_rate"]


def test_one_instance_says_what_sim_says(run: Run) -> None:
    alone = run("sim", *CHAT, "--jobs", "1", "--json").json["points"][0]
    fleet = run("sim", *CHAT, "--jobs", "1", "--instances", "1", "--json").json
    assert len(fleet["points"]) == 3
    for point in fleet["points"]:
        by_tier = point.pop("hit_rate_by_tier")
        assert by_tier.pop("remote") == 0
        assert by_tier == alone["hit_rate_by_tier"]
        for name in set(alone) & set(point):
            assert point[name] == alone[name]


def test_routers_in_a_list_or_one_by_one_on_two_processes(run: Run) -> None:
    listed = run(*FLEET, "--router", "sticky,round-robin", "--json").json
    apart = ["--router", "sticky", "--router", "round-robin", "--jobs", "2"]
    given = run("sim", *CHAT, "--instances", "4", *apart, "--json").json
    assert listed == given
    assert [point["router"] for point in given["points"]] == ["sticky", "round-robin"]


def test_nodes_a_store_and_roles(run: Run) -> None:
    options = ["--instances-per-node", 2, "--remote-gib", 100, "--roles", "prefill=1,decode=3"]
    found = run(*FLEET, *options, "--router", "round-robin", "--json").json
    mixed, apart = found["points"]
    assert mixed["roles"] is None
    assert apart["roles"] == {"prefill": 1, "decode": 3}
    assert found["fleet"]["num_nodes"] == 2
    assert found["fleet"]["remote_gb_per_second"] == 10
    roles = [each["role"] for each in apart["instances"]]
    assert sorted(roles) == ["decode", "decode", "decode", "prefill"]
    assert {each["role"] for each in mixed["instances"]} == {"both"}
    assert apart["num_handed_blocks"] > 0
    assert apart["network_save_bytes"] > 0
    assert apart["links"]["remote_save"]["num_bytes"] == apart["network_save_bytes"]
    # Stores in blocks, and clients that wait.
    few = ["--remote-blocks", 50, "--remote-gb-per-second", 1, "--clients", 2]
    (point,) = run(*FLEET, *few, "--router", "round-robin", "--json").json["points"]
    assert point["num_remote_blocks"] == 50
    assert point["num_store_evicted_blocks"] > 0
    assert point["num_served"] == 60


def test_tables_and_a_page(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "fleet.html"
    ran = run(*FLEET, "--remote-gib", 10, "--roles", "prefill=2,decode=2", "--plot", page)
    assert ran.code == 0
    for text in ("Hit rate", "from store", "busiest", "TTFT P50", "lost", "sticky, 2P 2D"):
        assert text in ran.stdout
    assert "Sticky: by the trace's sessions." in ran.stdout
    html = page.read_text()
    assert html.count("<figure>") == 2
    assert "cache-aware, 2P 2D" in html
    assert "optimum" not in html


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--instances", 0], "--instances is 0: expected 1 or more"),
        (["--instances", -3], "--instances is -3: expected 1 or more"),
        (["--instances", "many"], "valid integer"),
        (["--instances", 4, "--instances-per-node", 0], "--instances-per-node is 0"),
        (["--instances", 4, "--instances-per-node", 3], "4 instances do not fill nodes of 3"),
        (["--instances", 4, "--router", "best"], "there is no router 'best'"),
        (["--instances", 4, "--router", ""], "there is no router ''"),
        (["--instances", 4, "--roles", "prefill=4"], "expected prefill=P,decode=D"),
        (["--instances", 4, "--roles", "prefill=2,prefill=2"], "expected prefill=P,decode=D"),
        (["--instances", 4, "--roles", "prefill=x,decode=2"], "expected prefill=P,decode=D"),
        (["--instances", 4, "--roles", "prefill=-1,decode=5"], "expected prefill=P,decode=D"),
        (["--instances", 4, "--roles", "prefill=2,decode=1"], "add up to 3"),
        (["--instances", 4, "--roles", "prefill=0,decode=4"], "expected at least 1 of each"),
        (["--instances", 4, "--roles", "prefill=2,decode=2"], "there is no shared store"),
        (["--instances", 4, "--clients", 0], "clients is 0"),
        (["--instances", 4, "--remote-gib", 0], "--remote-gib is 0: expected a number above 0"),
        (["--instances", 4, "--remote-gib", "nan"], "--remote-gib is nan"),
        (["--instances", 4, "--remote-gib", 1e-9], "expected room for at least one block"),
        (["--instances", 4, "--remote-gib", 1, "--remote-blocks", 1], "give one of them"),
        (["--instances", 4, "--cache-threshold", 2], "threshold is 2.0: expected a share"),
        (["--instances", 4, "--window", 64], "leave out one of them"),
        (["--router", "sticky"], "--router is given, but no --instances"),
        (["--clients", 0], "--clients is given, but no --instances"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, options: list[object], message: str) -> None:
    assert message in run("sim", *CHAT, *options).refusal


def test_a_fleet_needs_a_device_pool(run: Run) -> None:
    ran = run("sim", "--generate", "chat", "--host-gib", 8, "--instances", 4)
    assert "a fleet is simulated in time; give --device-gib" in ran.refusal
    ran = run("sim", "--generate", "chat", "--device-gib", 8, "--instances", 4, "--remote-gib", 1)
    assert "a remote store is given, but no host tier" in ran.refusal


def test_the_commands_of_the_page_run(run: Run, tmp_path: Path) -> None:
    """On two small conversations in Mooncake's format."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * turn + 100 * who,
            "input_length": 512 * (turn + 1),
            "output_length": 4,
            "hash_ids": [100 * who + block for block in range(turn + 1)],
        }
        for turn in range(6)
        for who in range(2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = PAGE.read_text().partition("## Fleets")[2].partition("\n## ")[0]
    commands = re.findall(r"^penstock (sim .*)$", section, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        words = [str(path) if word == "trace.jsonl" else word for word in shlex.split(command)]
        ran = run(*words, "--jobs", 1)
        assert ran.code == 0, ran.stderr
        assert "cache-aware" in ran.stdout
