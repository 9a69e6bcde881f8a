from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.leftovers import end_all


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    end_all()
