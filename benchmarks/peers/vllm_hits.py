"""vLLM with one kind of offloading, or none, as JSON. `benchmarks.vllm_hits` runs it per kind.

    python vllm_hits.py {none,native,penstock,lmcache} MODEL_FOLDER [--lengths 512,2048] ...

Prompts are random token ids from a fixed seed, so that every system gets the same ones. A hit is
measured after vLLM's own prefix cache was emptied, so it comes from offloaded KV. Answers to hits
are compared with computed ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

Prompts = list[list[int]]


def draw(num: int, length: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(num)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


class System:
    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM

        self._server: subprocess.Popen[bytes] | None = None
        given: dict[str, Any] = {}
        if options.system == "native":
            given = {"kv_offloading_size": options.host_gib, "kv_offloading_backend": "native"}
        elif options.system == "penstock":
            from penstock.connectors.vllm.settings import VllmSettings, transfer_config

            settings = VllmSettings(kv_offloading_size=options.host_gib)
            given = {"kv_transfer_config": _transfer(transfer_config(settings))}
        elif options.system == "lmcache":
            os.environ |= {
                "LMCACHE_LOCAL_CPU": "True",
                "LMCACHE_MAX_LOCAL_CPU_SIZE": str(options.host_gib),
                "LMCACHE_CHUNK_SIZE": "256",
            }
            connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
            given = {"kv_transfer_config": _transfer(connector)}
        elif options.system == "lmcache-mp":
            self._server, port = _lmcache_server(options.host_gib)
            connector = {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.port": port},
            }
            given = {"kv_transfer_config": _transfer(connector)}
        if options.dummy:
            given |= {"load_format": "dummy", "skip_tokenizer_init": True}
        self._num_wakes = 0
        self.llm = LLM(
            options.folder,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            seed=0,
            enable_prefix_caching=True,
            **given,
        )

    def generate(self, prompts: Prompts, num: int = 1) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return list(self.llm.generate(asked, params, use_tqdm=False))

    def wake(self) -> None:
        """A device that has slept takes its time: a server that is used does not."""
        self._num_wakes += 1
        self.generate(draw(1, 40, -self._num_wakes), 2)

    def forget(self, *, below: bool = False) -> None:
        """Empty vLLM's own prefix cache, once what is being saved has been; or `below` too."""
        time.sleep(0.5)
        for _ in range(100):
            if self.llm.reset_prefix_cache(reset_connector=below):
                self.wake()
                return
            time.sleep(0.1)
        raise SystemExit("vLLM's prefix cache could not be emptied")


def _lmcache_server(size_gib: float) -> tuple[subprocess.Popen[bytes], int]:
    """The process in which LMCache's multiprocess mode keeps its KV."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    command = [str(Path(sys.executable).parent / "lmcache"), "server", "--port", str(port)]
    command += ["--l1-size-gb", str(size_gib), "--chunk-size", "256", "--eviction-policy", "LRU"]
    # On a CPU its connector copies by itself, through shared memory where it is named.
    command += ["--supported-transfer-mode", "auto", "--shm-name", f"lmcache-{port}"]
    server = subprocess.Popen([*command, "--http-port", "0", "--disable-observability"])
    time.sleep(20)
    return server, port


def _transfer(settings: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**settings)


def _answers(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    system = System(options)
    found: dict[str, Any] = {"first": {}}
    system.generate(draw(1, 64, 1), 4)
    if options.system == "penstock":
        time.sleep(options.settle)  # DRAM that is pinned in the background
    offloads = options.system != "none"
    for length in options.lengths:
        computed, hit, hit_tokens, same = [], [], [], True
        for turn in range(options.rounds):
            prompt = draw(1, length, 1000 * length + turn)
            system.wake()
            seconds, outputs = timed(lambda prompt=prompt: system.generate(prompt))
            computed.append(seconds)
            if offloads:
                system.forget()
                seconds, again = timed(lambda prompt=prompt: system.generate(prompt))
                hit.append(seconds)
                hit_tokens.append(again[0].num_cached_tokens or 0)
                same &= _answers(outputs) == _answers(again)
        found["first"][length] = {
            "computed": median(computed[1:] or computed),
            "hit": median(hit) if hit else None,
            "hit_tokens": min(hit_tokens) if hit else None,
            "same": same,
        }
        print(f"{options.system} {length}: {found['first'][length]}", flush=True)
    if options.num_prompts:
        rounds: dict[str, list[float]] = {"computed": [], "hit": []}
        hit_tokens = []
        for turn in range(options.bulk_rounds):
            prompts = draw(options.num_prompts, options.prompt_tokens, 5 + turn)
            system.forget(below=options.system in ("native", "penstock"))
            rounds["computed"].append(timed(lambda prompts=prompts: system.generate(prompts))[0])
            if offloads:
                system.forget()
                seconds, again = timed(lambda prompts=prompts: system.generate(prompts))
                rounds["hit"].append(seconds)
                hit_tokens.append(sum(output.num_cached_tokens or 0 for output in again))
        found["bulk"] = {
            "computed": median(rounds["computed"]),
            "hit": median(rounds["hit"]) if offloads else None,
            "hit_tokens": min(hit_tokens) if offloads else None,
        }
        print(f"{options.system} bulk: {found['bulk']}", flush=True)
    if options.decode_batch:
        slopes = []
        for turn in range(options.bulk_rounds):
            prompts = draw(options.decode_batch, options.decode_tokens, 77 + turn)
            system.generate(prompts)
            short = timed(lambda prompts=prompts: system.generate(prompts))[0]
            num = 1 + options.decode_steps
            long = timed(lambda prompts=prompts, num=num: system.generate(prompts, num))[0]
            slopes.append((long - short) / options.decode_steps)
        found["decode"] = median(slopes)
        print(f"{options.system} decode: {found['decode']}", flush=True)
    if system._server is not None:
        system._server.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("none", "native", "penstock", "lmcache", "lmcache-mp"))
    parser.add_argument("folder")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=40_000)
    parser.add_argument("--host-gib", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=0)
    parser.add_argument("--num-prompts", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--bulk-rounds", type=int, default=3)
    parser.add_argument("--decode-batch", type=int, default=0)
    parser.add_argument("--decode-tokens", type=int, default=2048)
    parser.add_argument("--decode-steps", type=int, default=128)
    print("RESULT " + json.dumps(measure(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
