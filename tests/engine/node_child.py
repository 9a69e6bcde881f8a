"""Processes around a node, for tests: the node itself, and engines with the tiny model.

    python node_child.py SOCKET

It imports everything once, and forks a process for each connection: an engine or a node. An engine
reads commands, each a line of JSON, and answers each with a line. A node says "ready", serves until
SIGTERM, and says "sound" if its books add up at the end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
DRAM = 16 << 20
VOCABULARY = 2048  # prompts have ids from 1 to below this


class Child:
    """A process that reads commands and answers them, seen from a test."""

    def __init__(self, connection: socket.socket, **opening: Any) -> None:
        with connection:
            self._reader, self._writer = connection.makefile("r"), connection.makefile("w")
        self.pid: int = self.ask("open", **opening)
        self._pid_file = os.pidfd_open(self.pid)

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
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pid_file, number)

    def kill(self) -> None:
        """As by `kill -9`, if it still runs."""
        if self._pid_file >= 0:
            self.signal(signal.SIGKILL)
            self.close()

    def close(self) -> None:
        """Wait until it has ended."""
        for stream in (self._reader, self._writer):
            with suppress(OSError):
                stream.close()
        if self._pid_file >= 0:
            has_ended, _, _ = select.select([self._pid_file], [], [], 60)
            assert has_ended, "a process does not end"
            os.close(self._pid_file)
            self._pid_file = -1


class NodeChild(Child):
    def stop(self) -> bool:
        """Whether its books add up at the end, and it has failed nobody."""
        self.signal(signal.SIGTERM)
        try:
            return bool(self.read() == "sound")
        except EOFError:
            return False
        finally:
            self.close()


class Processes:
    """Makes engines and nodes as processes: forks of one that has imported everything."""

    def __init__(self, folder: Path, errors: Path | None = None) -> None:
        """`errors` is a file to which the stderr of all of them is appended."""
        self._path = folder / "processes.sock"
        root = HERE.parent.parent
        paths = [str(root.parent), str(root), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",  # a process with more threads cannot be forked
            "NUMBA_NUM_THREADS": "1",  # a second one would spin between steps
        }
        with ExitStack() as stack:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE), str(self._path)],
                stdout=subprocess.PIPE,
                stderr=None if errors is None else stack.enter_context(errors.open("a")),
                text=True,
                env=environment,
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == '"ready"\n'

    def engine(self, node: Path | str, **settings: Any) -> Child:
        """It is ready later: see `wait_until_ready`."""
        return Child(self._connect(), kind="engine", socket=str(node), settings=settings)

    def node(self, path: Path, **settings: Any) -> NodeChild:
        """Settings are `dram`, in bytes, and `disk`, a folder."""
        child = NodeChild(self._connect(), kind="node", socket=str(path), settings=settings)
        child.wait_until_ready()
        return child

    def close(self) -> None:
        self._process.terminate()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(30)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self._path))
        connection.settimeout(300)  # a process that hangs fails its test
        return connection


class Numbers:
    """A tokenizer whose tokens are numbers. A real one takes seconds to read."""

    all_special_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.added_tokens_decoder: dict[int, object] = {}

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"{number} " for number in ids)

    def convert_ids_to_tokens(self, number: int) -> str:
        return str(number)


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


def run_requests(
    engine: Any,
    prompts: list[list[int]],
    *,
    after_step: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[dict[str, Any]]:
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
            after_step()
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


def serve(path: str) -> None:
    import torch
    from tiny import tiny_model

    import penstock.engine.engine
    import penstock.node.service  # noqa: F401

    torch.set_num_threads(1)
    model = tiny_model(Numbers())
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
                serve_one(model)
            connection.close()


def serve_one(model: Any) -> None:
    """Be an engine or a node, and end."""
    try:
        opening = json.loads(sys.stdin.readline())
        answer(os.getpid())
        if opening["kind"] == "node":
            serve_node(opening["socket"], opening["settings"])
        else:
            serve_engine(model, opening["socket"], opening["settings"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def serve_engine(model: Any, node: str, settings: dict[str, Any]) -> None:
    from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load

    from penstock.engine.engine import Engine
    from penstock.engine.parts import EngineConfig
    from penstock.engine.residency import ResidencyConfig

    residency = ResidencyConfig(settings.get("cold", False), prefix_tokens=16, tail_tokens=16)
    size = settings.get("num_blocks", 64) * BLOCK_BYTES
    config = EngineConfig(size, BLOCK_TOKENS, settings.get("batch", 64), residency=residency)
    engine = Engine(model, config, tiers(node, settings))
    always_load(engine)
    answer("ready")
    while line := next_line(engine):
        fields = json.loads(line)
        match fields.pop("command"):
            case "run":
                trap = Trap(engine, node, fields.pop("trap", ""))
                answer(run_requests(engine, fields.pop("prompts"), after_step=trap, **fields))
            case "settle":  # saves have ended; the device forgets, so that tiers are asked
                assert engine.offloader is not None
                settled = engine.offloader.drain(60)
                engine.step()
                engine.pool.distrust()
                answer("settled" if settled else "still moving")
            case "step":
                engine.step()
                answer(bool(getattr(engine.offloader, "is_available", False)))
            case "check":  # also while others are busy: only this one's work must have ended
                assert engine.offloader is not None
                engine.step()
                while engine.offloader.is_moving:
                    engine.offloader.pause(0.01)
                    engine.step()
                engine.step()  # takes what ended while it waited for an answer
                engine.check()
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


def next_line(engine: Any) -> str:
    """Wait for a command. Meanwhile the engine goes on with saves, as one that serves does."""
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        engine.step()
    return sys.stdin.readline()


class Trap:
    """Called after each step of an engine, to let something happen at the worst moment.

    "reading": killed while it reads DRAM in place. "copying": killed while it loads or saves.
    "cut": its connection to the node ends while it reads DRAM in place. It says so, and goes on
    once it is told to.
    """

    def __init__(self, engine: Any, node: str, kind: str) -> None:
        self._engine = engine
        self._node = node
        self._kind = kind

    def __call__(self) -> None:
        match self._kind:
            case "reading" if self._engine.offloader.num_pinned:
                os.kill(os.getpid(), signal.SIGKILL)
            case "copying" if self._engine.offloader.is_moving:
                os.kill(os.getpid(), signal.SIGKILL)
            case "cut" if self._engine.offloader.num_pinned:
                self._kind = ""
                cut_connections(self._node)
                answer("cut")
                sys.stdin.readline()


def cut_connections(path: str) -> None:
    """End this process's connections to a socket, as a node does that drops a client."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family == socket.AF_UNIX and connection.getpeername() == path:
                connection.shutdown(socket.SHUT_RDWR)


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
    answer("sound")


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
