"""The README's way from nothing to a served model, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


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
