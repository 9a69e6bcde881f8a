"""The ranks of one SGLang server: which pages are whose, and where each keeps them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.units import format_bytes

_OF_RANK = re.compile(r"rank\d+of(\d+)")


def check_ranks(storage_config: Any, config: Config) -> None:
    """Refuse ranks that would each look for pages that only one of them writes."""
    is_shared = config.node.url is not None or config.remote.url is not None
    num_readers = storage_config.tp_size
    if storage_config.is_mla_model and num_readers > 1 and not is_shared:
        raise ConfigError(
            f"this model's KV is the same on {num_readers} ranks, of which one stores it, but each "
            "rank has a disk folder of its own: expected a store that they share; set node or "
            "remote."
        )


def rank_of(storage_config: Any, *, is_replicated: bool) -> str:
    """The rank whose values a page has. Replicated pages are those of all tensor-parallel ranks."""
    config = storage_config
    parts = [f"pp {config.pp_rank} of {config.pp_size}"]
    parts.append(f"cp {config.attn_cp_rank} of {config.attn_cp_size}")
    parts.append(f"dcp {config.dcp_rank} of {config.dcp_size}")
    if not is_replicated:
        parts.append(f"tp {config.tp_rank} of {config.tp_size}")
    return ", ".join(parts)


def place_of(storage_config: Any) -> int:
    """The number of this rank among those of its server."""
    config = storage_config
    rank = config.dp_rank * config.pp_size + config.pp_rank
    rank = rank * config.attn_cp_size + config.attn_cp_rank
    return int(rank * config.tp_size + config.tp_rank)


def own_disk(config: Config, storage_config: Any, num_groups: int = 1) -> Config:
    """Give each rank its own folder and its share of the cap: a store has one owner.

    `num_groups` is how many data-parallel groups of these ranks there are.
    """
    one = storage_config
    num_ranks = one.tp_size * one.pp_size * one.attn_cp_size * num_groups
    if config.disk.path is None:
        return config
    root = Path(config.disk.path)
    left = _left_over(root, num_ranks)
    size = (config.disk.size_bytes - left) // num_ranks
    if size <= 0:
        raise ConfigError(
            f"{root} has {format_bytes(left)} of another number of ranks than {num_ranks}, which "
            f"leaves nothing of {format_bytes(config.disk.size_bytes)}: delete them with `penstock "
            "store clear`, or choose another folder."
        )
    folder = root
    if num_ranks > 1:
        root.mkdir(parents=True, exist_ok=True)
        folder = root / f"rank{place_of(one)}of{num_ranks}"
    return replace(config, disk=replace(config.disk, path=str(folder), size_bytes=size))


def _left_over(root: Path, num_ranks: int) -> int:
    """The bytes that servers with another number of ranks have left. They count towards the cap."""
    found = 0
    for place in [root, *sorted(root.glob("*"))]:
        rank = _OF_RANK.fullmatch(place.name)
        is_another = int(rank[1]) != num_ranks if rank and place != root else num_ranks > 1
        if not is_another:
            continue
        inside = place.glob("*") if place == root else place.rglob("*")
        found += sum(os.stat(path).st_blocks * 512 for path in inside if path.is_file())
    return found
