"""Known models, GPUs and links, read from the tables in `data/`. Each row names its source.

models.json   fields of the model's own config.json, under the same names, and what no config has:
              exact parameter counts, and the size of quantized weights
gpus.json     GPUs as in the vendor's data sheet, and the links between them and DRAM
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from penstock.errors import ConfigError
from penstock.shapes.model_config import shape_from_fields
from penstock.shapes.shape import ModelShape


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    repo: str  # on the Hugging Face Hub
    shape: ModelShape
    weight_bytes: int | None  # as published; None if the number of parameters is unknown
    source: str


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link between one GPU and DRAM, in one direction."""

    name: str
    bytes_per_second: float  # copying blocks of 2 MiB
    cold_bytes_per_second: float  # a kernel reading the same blocks in place
    latency_seconds: float  # of a load, beyond its transfer and the step that follows
    source: str


@dataclass(frozen=True, slots=True)
class DiskLink:
    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    title: str
    memory_bytes: int
    memory_bytes_per_second: float
    operations_per_second: float  # dense matrix products in bf16, or fp16 if it has no bf16
    link: HostLink
    source: str


def nearest(name: str, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(name, list(known), n=1)
    return close[0] if close else None


def _rows(file: str) -> Any:
    return json.loads(resources.files("penstock.shapes").joinpath("data", file).read_bytes())


def _read_models() -> dict[str, KnownModel]:
    models = {}
    for row in _rows("models.json")["models"]:
        shape = shape_from_fields(row["config"], row["name"])
        counts = {name: row[name] for name in ("num_params", "num_active_params") if name in row}
        shape = replace(shape, **counts)
        weight_bytes = row.get("weight_bytes")
        if weight_bytes is None and shape.num_params is not None:
            weight_bytes = shape.num_params * row.get("weight_bits", 16) // 8
        models[row["name"]] = KnownModel(
            row["name"], row["repo"], shape, weight_bytes, row["source"]
        )
    return models


def _read_gpus() -> tuple[dict[str, Gpu], dict[str, str], DiskLink]:
    table = _rows("gpus.json")
    links = {
        row["name"]: HostLink(
            row["name"],
            row["gb_per_second"] * 1e9,
            row["cold_gb_per_second"] * 1e9,
            row["latency_ms"] / 1e3,
            row["source"],
        )
        for row in table["links"]
    }
    gpus: dict[str, Gpu] = {}
    others: dict[str, str] = {}
    for row in table["gpus"]:
        gpus[row["name"]] = Gpu(
            row["name"],
            row["title"],
            # Vendors' GB count as 10^9 bytes: cautious, because cards report a few percent more.
            int(row["memory_gb"] * 1e9),
            row["memory_gb_per_second"] * 1e9,
            row["dense_tflops"] * 1e12,
            links[row["link"]],
            row["source"],
        )
        others |= dict.fromkeys(row.get("also", ()), row["name"])
    disk = table["disk"]
    return (
        gpus,
        others,
        DiskLink(disk["gb_per_second"] * 1e9, disk["latency_ms"] / 1e3, disk["source"]),
    )


MODELS = _read_models()
GPUS, _GPU_ALIASES, COMMON_DISK = _read_gpus()


def find_gpu(name: str) -> Gpu:
    """Find a GPU by name, in any case and with any separators."""
    plain = "-".join(name.lower().replace("_", "-").replace("/", "-").split())
    plain = plain.removeprefix("nvidia-")
    plain = _GPU_ALIASES.get(plain, plain)
    if plain in GPUS:
        return GPUS[plain]
    close = nearest(plain, [*GPUS, *_GPU_ALIASES])
    hint = f"did you mean {_GPU_ALIASES.get(close, close)}?" if close else "choose one of them"
    raise ConfigError(f"GPU {name[:80]!r} is unknown: expected one of {', '.join(GPUS)}; {hint}")


def find_model(name: str) -> KnownModel | None:
    """Find a model by its short name or its Hugging Face name, in any case; None if unknown."""
    plain = name.strip().lower()
    if plain in MODELS:
        return MODELS[plain]
    return next((model for model in MODELS.values() if model.repo.lower() == plain), None)
