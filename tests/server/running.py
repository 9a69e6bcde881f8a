"""Two kinds of server: a whole process, and one inside this process.

The latter starts at once, and can be broken in ways that a process cannot be from outside.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import Config
from penstock.config.options import EngineOptions
from penstock.engine.models import check_supported
from penstock.engine.weights import embedded_gguf, gguf_folder, quiet
from penstock.metrics import Metrics
from penstock.server.app import AppSettings
from penstock.server.backend import Backend, Serving
from penstock.server.listening import bind, url_of
from penstock.server.load import load_serving
from penstock.server.process import Process, ProcessSettings

TIMEOUT_SECONDS = 120.0  # of everything that should end by itself, and soon
MAX_TOKENS = 512  # of the tiny model


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < end, f"waited too long: {what}"
        time.sleep(0.02)


class Client(httpx.Client):
    """Asks one server; knows how to read its metrics."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(base_url=url, timeout=TIMEOUT_SECONDS, **options)

    def metric(self, name: str, **labels: str) -> float:
        """0 where the metric has not been set yet."""
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return 0.0

    def wait_idle(self) -> None:
        """Until no sequence is left, and no block of the device is held by one."""
        wait_until(
            lambda: (
                self.metric("penstock_leased_blocks", tier="device") == 0
                and self.metric("penstock_used_blocks", tier="device") == 0
            ),
            "blocks of the device are still held",
        )

    def check_serves(self) -> None:
        """A plain request is answered."""
        answer = self.post("/v1/completions", json={"prompt": "One two", "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 1


class Local:
    """A server inside this process, on a real port."""

    def __init__(
        self,
        model: Path | str,
        config: Config | None = None,
        *,
        settings: AppSettings | None = None,
        grace_seconds: float = 10.0,
        names: tuple[str, ...] = ("tiny",),
        port: int = 0,
        chat_template: str | None = None,
        mending: dict[str, object] | None = None,
        tool_call_parser: str | None = None,
        **options: Any,
    ) -> None:
        self.metrics = Metrics()
        self.backend = Backend(self.metrics)
        self.told: list[str] = []
        self.serving: Serving | None = None
        self.failure: BaseException | None = None
        self._is_ready = threading.Event()
        self.may_load = threading.Event()
        self.may_load.set()
        options = {
            "kv_offloading_size": 0,
            "device_kv_gib": 0.02,
            "block_tokens": 16,
            "dtype": "float32",  # in bfloat16 logits tie, where a test wants one best token
            **options,
        }

        def load() -> Serving:
            self.may_load.wait()
            return load_serving(
                EngineOptions(str(model), **options),
                config,
                observers=self.backend.observers,
                names=names,
                tell=self.told.append,
                chat_template=chat_template,
                mending=mending,
                tool_call_parser=tool_call_parser,
            )

        def note(serving: Serving) -> None:
            self.serving = serving
            self._is_ready.set()

        listener = bind("127.0.0.1", port)
        self.url = url_of(listener)
        self.process = Process(
            listener,
            self.backend,
            load,
            ProcessSettings(settings or AppSettings(), grace_seconds),
            note,
        )
        self._thread = threading.Thread(target=self._run)

    def start(self, *, wait: bool = True) -> Local:
        self._thread.start()
        if wait:
            assert self._is_ready.wait(TIMEOUT_SECONDS), self.failure
            assert self.failure is None
        return self

    def slow_down(self, seconds: float = 0.02) -> Local:
        """Every step takes at least so long: what should still run then still runs."""
        assert self.serving is not None
        engine = self.serving.service.engine
        step = engine.step

        def slow_step(*given: Any) -> Any:
            if engine.has_work:
                time.sleep(seconds)
            return step(*given)

        engine.step = slow_step  # type: ignore[method-assign]
        return self

    def stop(self) -> None:
        self.process.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive()

    def client(self, **options: Any) -> Client:
        return Client(self.url, **options)

    def _run(self) -> None:
        try:
            asyncio.run(self.process.run())
        except BaseException as error:
            self.failure = error
            self._is_ready.set()


class Spawned:
    """`penstock serve` as its own process."""

    def __init__(self, cache: Path, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--json"]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env={**inherited, "XDG_CACHE_HOME": str(cache), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> dict[str, Any]:
        """What it prints when it is ready; fails with its words if it ends before."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.stderr
        facts: dict[str, Any] = json.loads(line)
        self.url = facts["url"]
        return facts

    @property
    def stderr(self) -> str:
        if self.process.poll() is not None:
            self._reader.join(TIMEOUT_SECONDS)
        return "".join(self._lines)

    def client(self, **options: Any) -> Client:
        return Client(self.url, **options)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(TIMEOUT_SECONDS)
        finally:
            self.process.kill()
            self._reader.join(TIMEOUT_SECONDS)
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                pipe.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)


def make_tiny(cache: Path) -> Path:
    """A random Llama of two layers that speaks SmolLM2's tokens; it answers within milliseconds."""
    folder = cache / "tiny-llama"
    with (cache / "tiny-llama.lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _save_tiny(folder, cache)
    return folder


def _save_tiny(folder: Path, cache: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        unpacked = gguf_folder(embedded_gguf(), torch.float32, check_supported)
    tokenizer = AutoTokenizer.from_pretrained(unpacked)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        eos_token_id=None,
        tie_word_embeddings=False,  # tied, a random model only repeats what it hears
    )
    with quiet():
        tokenizer.save_pretrained(folder)
        LlamaForCausalLM(config).save_pretrained(folder)
