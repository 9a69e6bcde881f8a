"""`vllm serve` as a process, with Penstock: what tests of several servers ask of it."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from conftest import BLOCK, MODEL, Tokens

from servers import free_port

TIMEOUT_SECONDS = 240.0
MAX_TOKENS = 1024


class Answer(NamedTuple):
    tokens: list[str]
    logprobs: bytes  # of each token and of the likeliest, as float32
    num_loaded: int  # tokens that Penstock brought to the server that generated


class Served:
    """A server. It may need a minute until `wait_ready` returns: start several at once."""

    def __init__(self, log: Path, *, role: str = "kv_both", **settings: Any) -> None:
        from penstock.connectors.vllm.settings import VllmSettings, transfer_config

        self._log, port = log, free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = transfer_config(VllmSettings(**settings)) | {"kv_role": role}
        command = [str(Path(sys.executable).parent / "vllm"), "serve", MODEL, "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_TOKENS)]
        command += ["--block-size", str(BLOCK), "--served-model-name", "smol"]
        # Small steps, so that the blocks of a long prompt are saved one after the other.
        command += ["--max-num-batched-tokens", "64", "--max-num-seqs", "8"]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(config)]
        with log.open("w") as complaints:
            self._process = subprocess.Popen(
                command, stdout=complaints, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self) -> Served:
        ends = time.monotonic() + 400
        while True:
            try:
                httpx.get(f"{self.url}/health", timeout=5).raise_for_status()
                return self
            except httpx.HTTPError:
                assert self._process.poll() is None, self._log.read_text()[-3000:]
                assert time.monotonic() < ends, self._log.read_text()[-3000:]
                time.sleep(0.5)

    def kill(self) -> None:
        """With its engine and workers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT_SECONDS).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def num_computed(self) -> int:
        """Tokens of prompts that vLLM has computed here, by its own count."""
        return int(self.metric("vllm:prompt_tokens_by_source_total", source="local_compute"))

    @property
    def num_answers(self) -> int:
        return int(self.metric("vllm:request_success_total"))


def post(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    kind = "chat/completions" if "messages" in body else "completions"
    asked = {"model": "smol", "temperature": 0, "max_tokens": 8, **body}
    return httpx.post(f"{url}/v1/{kind}", json=asked, headers=headers, timeout=TIMEOUT_SECONDS)


def ask(url: str, prompt: Tokens, **fields: Any) -> Answer:
    answer = post(url, {"prompt": prompt, "logprobs": 3, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    given = body["choices"][0]["logprobs"]
    # vllm-router reads numbers and writes them anew, and may miss the last bit of a float64.
    numbers = [number for each in given["top_logprobs"] for number in each.values()]
    told = (body.get("kv_transfer_params") or {}).get("penstock", {}).get("loaded_tokens", {})
    packed = b"".join(struct.pack("f", number) for number in numbers + given["token_logprobs"])
    return Answer(given["tokens"], packed, sum(told.values()))


def cached_tokens(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < ends, f"not within {TIMEOUT_SECONDS:.0f} s: {what}"
        time.sleep(0.005)


def comes_to(count: Callable[[], float], expected: float) -> bool:
    """Whether a count comes to be exactly this. vLLM counts a request after it has answered."""
    wait_until(lambda: count() >= expected, f"{count()} comes to {expected}")
    return count() == expected
