"""docs/routing.md's quick start, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from servers import free_port, is_skipped
from servers.vllm_router import WHY_NOT

PAGE = Path(__file__).parent.parent / "docs" / "routing.md"
TIMEOUT_SECONDS = 280


def commands() -> str:
    found: list[str] = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (block,) = [block for block in found if "vllm-router --host" in block]
    for port in ("8000", "8001", "8002"):
        block = re.sub(rf"\b{port}\b", str(free_port()), block)
    # Its metrics have a port of their own, which another router on this machine may have.
    return block.replace(
        "vllm-router --host", f"vllm-router --prometheus-port {free_port()} --host"
    )


@pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))
def test_a_conversation_stays_with_its_server(cache: Path, tmp_path: Path) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    environment = {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(cache),
    }
    log = tmp_path / "log"
    with (
        log.open("w") as complaints,
        subprocess.Popen(
            ["bash", "-c", commands()],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        ) as shell,
    ):
        try:
            told, _ = shell.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end: {log.read_text()}")
        finally:
            if shell.poll() is None:  # the servers go with it
                os.killpg(shell.pid, signal.SIGKILL)
    starts = [match.start() for match in re.finditer(r'\{"id"', told)]
    answers = [json.JSONDecoder().raw_decode(told, start)[0] for start in starts]
    assert len(answers) == 2, told + log.read_text()
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 64]
