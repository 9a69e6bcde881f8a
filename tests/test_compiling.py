"""What numba compiled of other code is never run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from penstock import compiling

CALLER = """
from penstock.compiling import compiled
from {callee} import factor

@compiled(nogil=True)
def times(x):
    return x * factor()
"""
CALLEE = """
import numba

@numba.njit
def factor():
    return {factor}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Writes and imports a function that multiplies by a number from another file.

    Both files are as old and as long each time.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiling, "SOURCES", [tmp_path / "sources"])

    def load(factor: int) -> Any:
        folder = tmp_path / "sources"
        folder.mkdir(exist_ok=True)
        texts = {"callee_of_a_test": CALLEE.format(factor=factor)}
        texts["caller_of_a_test"] = CALLER.format(callee="callee_of_a_test")
        compiling._digest.cache_clear()
        found: Any = None
        for name, text in texts.items():
            path = folder / f"{name}.py"
            path.write_text(text)
            os.utime(path, (1_000_000_000, 1_000_000_000))
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            found = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, found)
            exec(compile(text, path, "exec"), found.__dict__)
        return found.times

    yield load
    compiling._digest.cache_clear()


def test_code_is_kept_until_a_file_changes(load: Callable[[int], Any]) -> None:
    first = load(3)
    assert first(2) == 6
    assert first.stats.cache_misses
    again = load(3)
    assert again(2) == 6
    assert again.stats.cache_hits
    assert not again.stats.cache_misses
    other = load(5)
    assert other(2) == 10
    assert not other.stats.cache_hits
    back = load(3)
    assert back(2) == 6
    assert back.stats.cache_hits


def test_where_numba_cannot_write_it_compiles_at_every_start(
    load: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])  # as on a file system that is read-only
    for _ in range(2):
        times = load(7)
        assert times(2) == 14
        assert not times.stats.cache_hits


def test_where_numba_keeps_code_in_another_way_it_is_not_kept(
    load: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba.core import caching

    monkeypatch.delattr(caching, "IndexDataCacheFile")
    assert load(7)(2) == 14
    assert load(9)(2) == 18


def test_whatever_is_compiled_is_among_the_sources() -> None:
    root = Path(compiling.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "@compiled(" in text or "numba.njit" in text:
            at_home = any(path.is_relative_to(folder) for folder in compiling.SOURCES)
            assert at_home or path.name == "compiling.py", path
        assert "cache=True" not in text or path.name == "compiling.py", path
