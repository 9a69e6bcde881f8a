"""docs/remote.md's quick start, run as it stands there; and the files of its recipes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.commands.remote_audit import PREFIX
from penstock.config import load_config
from servers import free_port, is_skipped
from servers.redis_server import WHY_NOT

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "remote.md"
TIMEOUT_SECONDS = 200


def commands() -> str:
    found: list[str] = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (block,) = [block for block in found if "redis-server --port" in block]
    for port in sorted(set(re.findall(r"\b(?:6379|800[12])\b", block))):
        block = re.sub(rf"\b{port}\b", str(free_port()), block)
    return block


@pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))
def test_two_instances_share_a_redis(cache: Path, tmp_path: Path) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    environment = {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(cache),
        # The machine may be busy with other tests; whoever reads the page has it for himself.
        "PENSTOCK_REMOTE_LOOKUP_DEADLINE_SECONDS": "60",
        "PENSTOCK_REMOTE_TIMEOUT_SECONDS": "60",
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
    first, second = answers
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    hits = re.search(r'penstock_hit_blocks_total\{tier="remote"\} (\S+)', told)
    assert hits is not None
    assert float(hits[1]) > 0


@pytest.mark.parametrize("name", ["redis", "mooncake"])
def test_instances_of_a_compose_file_have_settings_that_load(name: str) -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / f"{name}.compose.yml").read_text())
    services = services["services"]
    for instance in (services["a"], services["b"]):
        environment = {
            key: re.sub(r"\$\{\w+:\?[^}]*\}", "0123456789abcdef", value)
            for key, value in instance["environment"].items()
        }
        config = load_config(env=environment)
        assert config.remote.url is not None
        assert config.remote.url.startswith(f"{name}://")
        assert instance["command"][:2] == ["penstock", "serve"]
        # What is copied into the image exists here.
        dockerfile = instance["build"]["dockerfile_inline"]
        for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.M):
            assert all((ROOT / source).exists() for source in line.split())


def test_lifecycle_rules_are_for_what_is_stored() -> None:
    rules = json.loads((ROOT / "deploy" / "s3-lifecycle.json").read_text())["Rules"]
    (settings,) = re.findall(
        r"^url = \"s3://[^/]+/(\w+)\?.*?^ttl_seconds = (\d+)", PAGE.read_text(), re.M | re.S
    )
    prefix, ttl_seconds = settings
    (blocks,) = [rule for rule in rules if rule["Filter"]["Prefix"] == f"{prefix}/{PREFIX}"]
    assert blocks["Status"] == "Enabled"
    assert blocks["Expiration"]["Days"] * 86_400 == int(ttl_seconds)
