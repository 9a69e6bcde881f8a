"""Models whose layers look back only so far: sliding windows, and chunks."""

from __future__ import annotations

import pytest
from group_checks import Checks


@pytest.fixture(scope="module", params=["gemma3", "gemma4", "gptoss", "mistral", "llama4"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestWindows(Checks):
    pass
