from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.leftovers import end_all
from tests.node.nodes import be_patient


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    end_all()
