"""The README's way from nothing to a served model, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.stores.disk import DiskStore
from penstock.types import BlockSpec

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def commands() -> str:
    found: list[str] = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.M | re.S)
    (block,) = [block for block in found if "kill -9" in block]
    return block


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_a_newcomer_serves_a_model_whose_kv_survives_a_kill(cache: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", commands().replace("8000", str(free_port()))],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    starts = [match.start() for match in re.finditer(r'\{"id"', done.stdout)]
    answers = [json.JSONDecoder().raw_decode(done.stdout, start)[0] for start in starts]
    assert len(answers) == 2, done.stdout + done.stderr
    first, second = answers
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_python_runs_again_and_where_a_server_kept_other_kv(
    page: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    (code,) = [block for block in blocks if "import LLM" in block]
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)
    # The folder of the shell example, as another dtype or model would have left it.
    DiskStore(tmp_path / "kv", BlockSpec(bytes(32), 4096, 16), 1 << 20).close()
    for _ in range(2):
        exec(compile(code, page, "exec"), {"__name__": "docs"})
