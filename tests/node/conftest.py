from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.leftovers import end_all
from tests.node.nodes import be_patient


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that let a node hang ask for `impatient`."""
    if "impatient" not in request.fixturenames:
        be_patient(monkeypatch)


@pytest.fixture
def impatient() -> None:
    """A node hangs if it does not answer for as long as in production."""


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    end_all()
