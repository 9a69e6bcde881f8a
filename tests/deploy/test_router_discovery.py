"""A real vllm-router with the arguments of deploy/kubernetes finds the pods that it should.

The Kubernetes API that it asks is a stand-in here: a list of pods, and a watch of their changes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
import yaml
from kustomize import Manifest, pod_specs, render
from tools import TIMEOUT_SECONDS

from servers import free_port

KUBERNETES = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
_BESIDE = Path(sys.executable).with_name("vllm-router")
EXECUTABLE = str(_BESIDE) if _BESIDE.exists() else shutil.which("vllm-router")
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="vllm-router is not installed")


def pod(name: str, address: str, labels: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "penstock",
            "uid": name,
            "resourceVersion": "1",
            "labels": labels,
        },
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def say(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(host: str, port: int, answer: type[Answer]) -> Iterator[None]:
    server = ThreadingHTTPServer((host, port), answer)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def api(pods: list[Manifest], changes: Queue[Manifest | None]) -> Iterator[str]:
    """What the role `vllm-router` may do, and nothing else: list and watch pods of a namespace."""

    class Api(Answer):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path != "/api/v1/namespaces/penstock/pods":
                self.send_error(403)
            elif "watch=true" not in query:
                found = {"metadata": {"resourceVersion": "1"}, "items": pods}
                self.say({"apiVersion": "v1", "kind": "PodList", **found})
            else:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while (change := changes.get()) is not None:
                    line = json.dumps(change).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    self.wfile.flush()
                self.close_connection = True

    port = free_port()
    with serving("127.0.0.1", port, Api):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            changes.put(None)


@contextmanager
def router(overlay: str, url: str, worker_port: int, folder: Path) -> Iterator[str]:
    """The router of an overlay, with other ports."""
    (deployment,) = [
        each
        for each in render(KUBERNETES / overlay)
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "vllm-router")
    ]
    (container,) = pod_specs(deployment)[0]["containers"]
    port = free_port()
    here = {
        "--host": "127.0.0.1",
        "--port": port,
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": free_port(),
        "--service-discovery-port": worker_port,
    }
    arguments = []
    for argument in container["args"]:
        option = argument.partition("=")[0]
        arguments.append(f"{option}={here[option]}" if option in here else argument)
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "current-context": "here",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    assert EXECUTABLE is not None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [EXECUTABLE, *arguments],
            stdout=log,
            stderr=log,
            env={"KUBECONFIG": str(folder / "kubeconfig"), "PATH": "/usr/bin:/bin"},
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def await_workers(url: str, expected: dict[str, str], log: Path) -> None:
    """Wait until the router knows these: role by address."""
    found: object = None
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        try:
            workers = httpx.get(f"{url}/workers").json()["workers"]
            found = {httpx.URL(each["url"]).host: each["worker_type"] for each in workers}
        except httpx.TransportError as error:
            found = error
        if found == expected:
            return
        time.sleep(0.05)
    pytest.fail(f"expected {expected}, found {found}: {log.read_text()}")


@contextmanager
def workers(asked: list[tuple[str, dict[str, Any]]], *hosts: str) -> Iterator[int]:
    class Worker(Answer):
        def do_GET(self) -> None:
            self.say({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            host = str(self.server.server_address[0])
            asked.append((host, json.loads(body)))
            choice = {"index": 0, "text": "", "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
            answer |= {"choices": [choice], "usage": usage, "kv_transfer_params": {"from": host}}
            self.say(answer)

    port = free_port()
    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(serving(host, port, Worker))
        yield port


ASK = {"model": "m", "prompt": "A penstock carries water", "max_tokens": 4}


def test_replicas_come_and_go(tmp_path: Path) -> None:
    engine = {"app.kubernetes.io/name": "vllm", "penstock.dev/role": "both"}
    one, other = pod("a", "127.0.0.2", engine), pod("b", "127.0.0.3", engine)
    node = pod("node", "127.0.0.4", {"app.kubernetes.io/name": "penstock-node"})
    asked: list[tuple[str, dict[str, Any]]] = []
    changes: Queue[Manifest | None] = Queue()
    with (
        workers(asked, "127.0.0.2", "127.0.0.3") as port,
        api([one, node], changes) as url,
        router("base", url, port, tmp_path) as routed,
    ):
        log = tmp_path / "log"
        await_workers(routed, {"127.0.0.2": "regular"}, log)
        assert httpx.get(f"{routed}/readiness").status_code == 200
        assert httpx.get(f"{routed}/liveness").status_code == 200
        changes.put({"type": "ADDED", "object": other})
        await_workers(routed, {"127.0.0.2": "regular", "127.0.0.3": "regular"}, log)
        # Kubernetes marks a pod before it ends. The router does not look at the type "DELETED".
        one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        changes.put({"type": "MODIFIED", "object": one})
        await_workers(routed, {"127.0.0.3": "regular"}, log)
        assert httpx.post(f"{routed}/v1/completions", json=ASK).status_code == 200
    assert [host for host, _ in asked] == ["127.0.0.3"]


def test_prefillers_and_decoders_are_told_apart(tmp_path: Path) -> None:
    engine = {"app.kubernetes.io/name": "vllm"}
    pods = [
        pod("p", "127.0.0.2", {**engine, "penstock.dev/role": "prefill"}),
        pod("d", "127.0.0.3", {**engine, "penstock.dev/role": "decode"}),
        pod("node", "127.0.0.4", {"app.kubernetes.io/name": "penstock-node"}),
    ]
    asked: list[tuple[str, dict[str, Any]]] = []
    with (
        workers(asked, "127.0.0.2", "127.0.0.3") as port,
        api(pods, Queue()) as url,
        router("overlays/prefill-decode", url, port, tmp_path) as routed,
    ):
        log = tmp_path / "log"
        await_workers(routed, {"127.0.0.2": "prefill", "127.0.0.3": "decode"}, log)
        assert httpx.get(f"{routed}/readiness").status_code == 200
        assert httpx.post(f"{routed}/v1/completions", json=ASK).status_code == 200
    (prefiller, prefill), (decoder, decode) = asked
    assert (prefiller, decoder) == ("127.0.0.2", "127.0.0.3")
    assert prefill["kv_transfer_params"]["do_remote_decode"]
    assert prefill["max_tokens"] == 1
    assert decode["kv_transfer_params"] == {"from": prefiller}  # as the prefiller answered
    assert decode["max_tokens"] == 4
