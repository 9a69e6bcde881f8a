"""A node as a process of its own: `python node_process.py SOCKET FOLDER [REMOTE]`.

It answers lines: "check" with what is wrong with it, or an empty line, and "describe".
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any


class NodeProcess:
    def __init__(self, path: Path, disk: Path, remote: str | None = None) -> None:
        self.path = path
        self._arguments = [str(path), str(disk), *([remote] if remote else [])]
        self.url = f"unix://{path}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._ask("describe")["models"] == []

    def end(self) -> None:
        """At the end of a test: it was sound until then."""
        self.check()
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        assert self._ask("check") == ""

    @property
    def clients(self) -> list[str]:
        return [name for model in self._models() for name in model["clients"]]

    @property
    def num_used(self) -> int:
        """Blocks in DRAM, of all models."""
        return sum(model["blocks"] - model["free_blocks"] for model in self._models())

    def _models(self) -> list[dict[str, Any]]:
        return list(self._ask("describe")["models"])

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve(path: Path, disk: Path, remote: str | None = None) -> None:
    from penstock.config import Config, DiskConfig, HostConfig, RemoteConfig
    from penstock.errors import BookError
    from penstock.node.service import NodeService
    from penstock.units import MiB

    config = Config(
        host=HostConfig(size_bytes=256 * MiB),
        disk=DiskConfig(path=str(disk), size_bytes=512 * MiB),
        remote=RemoteConfig(url=remote),
    )
    service = NodeService(config, path)
    while True:
        service.step(0.001)
        if not select.select([sys.stdin], [], [], 0)[0]:
            continue
        match sys.stdin.readline().strip():
            case "":
                service.close()
                return
            case "check":
                try:
                    service.check()
                    faults = "it failed to serve somebody; see its log" * bool(service.num_faults)
                    print(json.dumps(faults), flush=True)
                except BookError as error:
                    print(json.dumps(str(error)), flush=True)
            case _:
                print(json.dumps(service.describe()), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
