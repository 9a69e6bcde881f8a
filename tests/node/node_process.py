"""`penstock node` as a process of its own, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_SECONDS = 60.0


def penstock(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, arguments)],
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def _environment(more: dict[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    return {**kept, "COLUMNS": "200", **more}


class NodeProcess:
    def __init__(self, *arguments: object, dram: str | None = "16MiB", **environment: str) -> None:
        command = [sys.executable, "-m", "penstock", "node", "--json"]
        if dram is not None:
            command += ["--set", f"host.size={dram}"]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env=_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        self.facts = json.loads(line)
        self.path = Path(self.facts["socket"])

    def status(self) -> dict[str, Any]:
        done = penstock("node-status", "--socket", self.path, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """By name and labels, without those that differ from model to model."""
        text = httpx.get(self.facts["metrics_url"], timeout=TIMEOUT_SECONDS).text
        return {
            (
                sample.name,
                tuple(sorted((k, v) for k, v in sample.labels.items() if k != "namespace_id")),
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics().get((name, tuple(sorted(labels.items()))), 0.0)

    def end(self, *signals: int) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        if self.process.poll() is None:
            for number in signals or (signal.SIGTERM,):
                self.process.send_signal(number)
        try:
            _, stderr = self.process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            self.process.kill()
        assert "Traceback" not in stderr, f"the node failed to serve somebody:\n{stderr}"
        return self.process.returncode, stderr


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < end, f"waited too long: {what}"
        time.sleep(0.02)
