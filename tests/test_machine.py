from __future__ import annotations

from pathlib import Path

import pytest

from penstock import machine
from penstock.config import Config, HostConfig
from penstock.errors import ConfigError
from penstock.machine import check_machine


def test_a_containers_limit_counts_wherever_above_it_is_set(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("1:name=systemd:/old\n0::/pod/container\n")
    groups = tmp_path / "groups"
    (groups / "pod" / "container").mkdir(parents=True)
    (groups / "pod" / "container" / "memory.max").write_text("max\n")
    (groups / "pod" / "memory.max").write_text("1048576\n")
    assert machine._cgroup_limits(proc, groups) == [1048576]


def test_without_control_groups_the_machine_alone_counts(tmp_path: Path) -> None:
    assert machine._cgroup_limits(tmp_path / "nothing", tmp_path) == []


def test_more_than_the_container_may_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: [1 << 20])
    with pytest.raises(ConfigError, match=r"host\.size"):
        check_machine(Config(HostConfig(size_bytes=2 << 20)))
