"""Finds a model's shape, and so its KV size, by name or from its `config.json`."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.shapes.catalog import MODELS, nearest
from penstock.shapes.model_config import shape_from_config
from penstock.shapes.shape import ModelShape, suggest_block_tokens

__all__ = ["PRESETS", "ModelShape", "find_shape", "shape_from_config", "suggest_block_tokens"]

PRESETS: dict[str, ModelShape] = {name: model.shape for name, model in MODELS.items()}


def find_shape(model: str) -> ModelShape:
    """The shape of a known model, by name in any case, or of the config.json at that path."""
    name = model.strip().lower()
    if name in PRESETS:
        return PRESETS[name]
    if Path(model).exists():
        return shape_from_config(Path(model))
    close = nearest(name, PRESETS)
    hint = f"did you mean {close}?" if close else f"known models are {', '.join(PRESETS)}"
    raise ConfigError(
        f"model {model!r} is unknown: expected a known name or the path of a config.json; {hint}"
    )
