"""Where the ranks of an SGLang server keep their pages, and that they stay below one cap."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import Config, load_config
from penstock.connectors.sglang.ranks import own_disk
from penstock.errors import ConfigError
from penstock.units import MiB

CAP = 256 * MiB


def rank(place: int, size: int) -> Any:
    return SimpleNamespace(
        dp_rank=0,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        tp_rank=place,
        tp_size=size,
    )


def config(folder: Path) -> Config:
    return load_config(overrides={"disk.path": str(folder), "disk.size": CAP})


def fill(folder: Path, num_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slab").write_bytes(os.urandom(num_bytes))


def test_ranks_divide_the_cap(tmp_path: Path) -> None:
    disks = [own_disk(config(tmp_path), rank(place, 4)).disk for place in range(4)]
    assert len({disk.path for disk in disks}) == 4
    assert sum(disk.size_bytes for disk in disks) == CAP
    fill(Path(disks[1].path or ""), 8 * MiB)
    assert own_disk(config(tmp_path), rank(0, 4)).disk == disks[0], "its own ranks' files"
    assert own_disk(config(tmp_path / "one"), rank(0, 1)).disk.path == str(tmp_path / "one")


@pytest.mark.parametrize(("before", "now"), [(2, 4), (4, 2), (1, 2), (2, 1)])
def test_what_another_number_of_ranks_has_left_counts(
    tmp_path: Path, before: int, now: int
) -> None:
    left = 0
    for place in range(before):
        folder = Path(own_disk(config(tmp_path), rank(place, before)).disk.path or "")
        fill(folder / "of a model", 8 * MiB)
        left += 8 * MiB
    size = sum(own_disk(config(tmp_path), rank(place, now)).disk.size_bytes for place in range(now))
    assert CAP - left - now - MiB <= size <= CAP - left


def test_a_cap_that_others_have_used_up_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path / "rank0of2", 2 * MiB)
    small = load_config(overrides={"disk.path": str(tmp_path), "disk.size": 2 * MiB})
    with pytest.raises(ConfigError, match="another number of ranks than 4"):
        own_disk(small, rank(0, 4))
