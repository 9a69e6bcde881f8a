"""Real SGLang with a small model on a CPU: its scheduler, radix tree, cache controller, host pool.

Every run is another process, which is killed at its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from penstock.connectors.sglang.settings import SglangSettings, extra_config

pytest.importorskip("sglang")

HERE = Path(__file__).parent
PROMPTS = [[(3 + 7 * place + 11 * number) % 500 for place in range(400)] for number in range(2)]
WHOLE_PAGES = 384  # of a prompt's 400 tokens; the last page must be computed in any case

Answers = list[dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[], Answers]:
    model = make_tiny(tmp_path / "model")
    settings = SglangSettings(
        disk_path=str(tmp_path / "kv"), disk_size=0.25, kv_offloading_size=0.0625
    )

    def one() -> Answers:
        line = json.dumps(extra_config(settings))
        done = subprocess.run(
            [sys.executable, str(HERE / "one_run.py"), str(model), line, json.dumps(PROMPTS)],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        for printed in done.stdout.splitlines():
            if printed.startswith("ANSWERS "):
                return json.loads(printed.removeprefix("ANSWERS "))
        raise AssertionError(f"SGLang did not answer:\n{done.stdout[-3000:]}{done.stderr[-6000:]}")

    return one


def said(answers: Answers) -> list[tuple[list[int], list[float]]]:
    return [(answer["tokens"], answer["log_probabilities"]) for answer in answers]


def test_kv_is_loaded_after_a_restart_and_damaged_kv_is_computed(
    run: Callable[[], Answers], tmp_path: Path
) -> None:
    computed = run()
    assert [answer["cached"] for answer in computed] == [0, 0]
    loaded = run()
    assert [answer["stored"] for answer in loaded] == [WHOLE_PAGES] * 2
    assert said(loaded) == said(computed)
    for slab in (tmp_path / "kv").rglob("slab-*"):
        data = bytearray(slab.read_bytes())
        for place in range(100, len(data), 4096):
            data[place] ^= 1
        slab.write_bytes(data)
    again = run()
    assert [answer["cached"] for answer in again] == [0, 0]
    assert said(again) == said(computed)
