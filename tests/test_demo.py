"""The demonstration in its quick form: it runs to the end, and what it writes is whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PICTURES = ("first_token", "sessions", "restart")

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "demo/engine.py", "--quick", "--json", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == json.loads((out / "results.json").read_text())
    assert "outputs compared, all identical" in done.stderr
    return out


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


pytestmark = pytest.mark.timeout(600)  # two servers start, on whatever else the machine does


def test_every_output_is_compared(results: dict[str, Any]) -> None:
    shape = results["sessions"]["shape"]
    num_loads = 3 * 2 * 2  # tries, tiers, sizes
    num_turns = shape["num_sessions"] * shape["num_turns"]
    assert results["num_compared"] == num_loads + num_turns + 3
    assert results["identical"]
    assert results["different"] == []


def test_first_tokens_come_from_where_they_should(results: dict[str, Any]) -> None:
    rows = results["first_token"]
    assert [(row["num_tokens"], row["source"]) for row in rows] == [
        (size, source) for size in (128, 256) for source in ("computed", "host", "disk")
    ]
    for row in rows:
        if row["source"] == "computed":
            assert row["num_loaded"] == 0
        else:
            assert row["num_loaded"] >= row["num_tokens"] - 32
            assert row["bytes_per_second"] > 0
        assert row["seconds"] > 0
        assert row["identical"]


def test_offloading_computes_less_again(results: dict[str, Any]) -> None:
    off, on = results["sessions"]["off"], results["sessions"]["on"]
    assert on["num_recomputed"] < off["num_recomputed"] / 2
    assert off["num_loaded"] == 0
    assert on["num_loaded"] > 0
    assert off["num_output"] == on["num_output"]


def test_a_killed_server_leaves_its_kv(results: dict[str, Any]) -> None:
    restart = results["restart"]
    assert restart["first"]["num_cached"] == 0
    assert restart["resumed"]["num_cached"] > restart["resumed"]["num_prompt"] / 2


def test_documents_in_another_order_are_reused(results: dict[str, Any]) -> None:
    found = results["anywhere"]
    assert found["num_tokens"] == 2 * 128 + 2 * 64
    assert found["num_reused"] == 2 * (128 - 64)
    assert found["num_mended"] == 2 * 64
    assert found["computed_seconds"] > 0
    assert found["reused_seconds"] > 0
    assert 0 <= found["num_equal"] <= found["num_answer"] == 8


def test_the_page_is_whole(out: Path) -> None:
    page = (out / "report.html").read_text()
    assert "all identical" in page
    assert "This is lossy" in page
    named = set(re.findall(r'(?:src|srcset)="([^"]+)"', page))
    assert named == {f"{name}{theme}.png" for name in PICTURES for theme in ("", "-dark")}
    for name in named:
        picture = (out / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000
    assert not re.search(r"https?://", page)


def test_nothing_else_is_left(out: Path) -> None:
    names = {path.name for path in out.iterdir()}
    pictures = {f"{name}{theme}.png" for name in PICTURES for theme in ("", "-dark")}
    assert names == {"report.html", "results.json", *pictures}
