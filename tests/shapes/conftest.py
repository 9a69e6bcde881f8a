from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a config.json and returns its path."""

    def write_json(config: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return path

    return write_json
