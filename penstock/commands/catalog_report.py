"""Prints the known models and GPUs with their sources: as tables, or as JSON."""

from __future__ import annotations

from dataclasses import asdict

from penstock.commands import new_table, print_json, stdout_console
from penstock.shapes.catalog import GPUS, MODELS
from penstock.units import format_bytes, format_rate


def show_catalog(*, as_json: bool) -> None:
    if as_json:
        models = [
            {
                "name": model.name,
                "repo": model.repo,
                "kv_bytes_per_token": model.shape.bytes_per_token,
                "num_params": model.shape.num_params,
                "weight_bytes": model.weight_bytes,
                "source": model.source,
            }
            for model in MODELS.values()
        ]
        print_json({"models": models, "gpus": [asdict(gpu) for gpu in GPUS.values()]})
        return
    table = new_table("model", "KV per token", "weights", "source", title="Models")
    for model in MODELS.values():
        weights = "–" if model.weight_bytes is None else format_bytes(model.weight_bytes)
        table.add_row(model.name, format_bytes(model.shape.bytes_per_token), weights, model.source)
    console = stdout_console()
    console.print(table)
    table = new_table("GPU", "memory", "bandwidth", "dense bf16", "link", "source", title="GPUs")
    for gpu in GPUS.values():
        table.add_row(
            gpu.name,
            f"{gpu.memory_bytes / 1e9:g} GB",
            format_rate(gpu.memory_bytes_per_second),
            f"{gpu.operations_per_second / 1e12:,.0f} TFLOP/s",
            f"{gpu.link.name}, {format_rate(gpu.link.bytes_per_second)}",
            gpu.source,
        )
    console.print(table)
