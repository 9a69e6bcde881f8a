"""Models with a state beside attention, and with latent attention."""

from __future__ import annotations

import pytest
from group_checks import Checks


@pytest.fixture(scope="module", params=["granite4", "falconh1", "nemotronh", "lfm2", "deepseek3"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestStates(Checks):
    pass
