"""Compare the simulator's fleets with real ones: hit rates behind a real vllm-router.

    python -m benchmarks.router_agreement conversation_trace.jsonl

It starts `penstock serve` with small random models, and the real router before them, once for each
policy. Every n-th session of the trace is replayed in its order by some number of clients. A block
of the trace becomes 16 tokens, and lengths shrink in proportion. Prompts are text, because that is
what the router's cache_aware compares. The simulator plays the same requests with the same sizes,
twice: with its own model of the router, and with the choices that the real router made. Where the
first differs and the second does not, routing differs; where both do, caching does.

Every policy and round has its own words, so that nothing is found from before. With LRU, what
earlier rounds left in the tiers is evicted first and changes no hit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from penstock.costs.rates import LinkRate, PrefillRate
from penstock.sim.compute import ComputeRates, DecodeRate
from penstock.sim.fleet import FleetConfig, simulate_fleet
from penstock.sim.formats import read_trace, write_trace
from penstock.sim.instance import InstanceConfig
from penstock.sim.links import LinkSpec
from penstock.sim.routers import CacheAwareRules, RoutedPrompt, Router, new_router, session_keys
from penstock.sim.trace import Trace, TraceRequest
from penstock.units import GiB
from servers.penstock_server import PenstockServer
from servers.vllm_router import VllmRouter

# The simulator's names, and the router's.
POLICIES = {
    "round-robin": "round_robin",
    "sticky": "consistent_hash",
    "cache-aware": "cache_aware",
}
RULES = CacheAwareRules(
    cache_threshold=0.3, balance_abs_threshold=64, balance_rel_threshold=1.5, eviction_seconds=120.0
)
AIM = 0.03
MODEL = "tiny"
_MAX_TOKENS = 8192
_TIMEOUT_SECONDS = 600.0
# Those of the model below on two busy cores, roughly. They matter little: with one client not at
# all, with several only for who is answered first.
_RATES = ComputeRates(PrefillRate(5000.0), DecodeRate(0.01))
_LINK = LinkSpec(LinkRate(20e9), LinkRate(20e9))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the fleet. Blocks are those of one server."""

    num_servers: int = 2
    num_clients: int = 1
    block_tokens: int = 16
    num_device_blocks: int = 256  # room for the longest request of Mooncake's conversations
    num_host_blocks: int = 768

    def server_options(self, block_bytes: int) -> dict[str, float | int]:
        """Options of `penstock serve`. Half a block more, against rounding."""
        return {
            "block_tokens": self.block_tokens,
            "device_kv_gib": (self.num_device_blocks + 0.5) * block_bytes / GiB,
            "kv_offloading_size": (self.num_host_blocks + 0.5) * block_bytes / GiB,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    server: int
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy in one round: hit rates are shares of the prompts' tokens."""

    policy: str
    real: float
    simulated: float
    same_routing: float  # simulated, with the real router's choices
    num_same_choice: int  # requests that the simulated router sent to the same server
    num_requests: int
    real_loads: tuple[int, ...]  # requests of each server
    simulated_loads: tuple[int, ...]
    seconds: float

    @property
    def difference(self) -> float:
        return self.simulated - self.real


# The requests.


def shrink(trace: Trace, num_requests: int, block_tokens: int) -> Trace:
    """Every n-th session of a trace, with blocks of `block_tokens`.

    Ends after `num_requests`, so the last sessions may be cut.
    """
    sessions = session_keys(trace.requests)
    every = max(1, round(len(trace.requests) / num_requests))
    order = {session: number for number, session in enumerate(dict.fromkeys(sessions))}
    requests = [
        TraceRequest(
            request.arrival_seconds,
            max(1, request.num_input_tokens * block_tokens // trace.block_tokens),
            max(1, request.num_output_tokens * block_tokens // trace.block_tokens),
            request.prompt_blocks,
            session=f"session {order[session]}",
        )
        for request, session in zip(trace.requests, sessions, strict=True)
        if order[session] % every == 0
    ]
    return Trace(trace.name, block_tokens, tuple(requests[:num_requests]))


def single_token_words(tokenizer: Any) -> list[str]:
    """Words of equal length, each of which is one token wherever it stands."""
    found = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    return [
        word
        for word in found
        if len(word) == 4 and word[0] == " " and word[1:].isascii() and word[1:].islower()
        if word[1:].isalpha()
    ]


def prompt_text(request: TraceRequest, words: Sequence[str], block_tokens: int, salt: str) -> str:
    """A prompt with one token per word: equal blocks of a trace become equal words."""
    text: list[str] = []
    for key in request.prompt_blocks:
        rng = random.Random(salt.encode() + key)
        text += rng.choices(words, k=block_tokens)
    # Words of a trace's last block are cut, those that the trace does not name are unique.
    rng = random.Random(f"{salt} {request}")
    text += rng.choices(words, k=max(0, request.num_input_tokens - len(text)))
    return "".join(text[: request.num_input_tokens])


# The real fleet.


def save_model(folder: Path, tokenizer: Any, seed: int) -> int:
    """Save a random model and return the bytes of one token's KV.

    It computes much for few bytes of KV, so that a load is always worth it.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from penstock.engine.weights import quiet

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=_MAX_TOKENS,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with quiet():
        tokenizer.save_pretrained(folder)
        LlamaForCausalLM(config).save_pretrained(folder)
    return 2 * 3 * 1 * 64 * 4  # K and V, layers, heads, head_dim, float32


def fingerprint(url: str) -> str:
    """How the answers of a server name it; each server has weights of its own.

    It also compiles what the first request compiles. The prompt has less than a block.
    """
    body = {"model": MODEL, "prompt": "One two", "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_TIMEOUT_SECONDS)
    return str(answer.raise_for_status().json()["system_fingerprint"])


@contextmanager
def real_router(folder: Path, urls: Sequence[str], policy: str) -> Iterator[str]:
    """Start a router and yield its URL."""
    router = VllmRouter(
        folder,
        urls,
        POLICIES[policy],
        *("--cache-threshold", RULES.cache_threshold),
        *("--balance-abs-threshold", RULES.balance_abs_threshold),
        *("--balance-rel-threshold", RULES.balance_rel_threshold),
        *("--eviction-interval-secs", int(RULES.eviction_seconds)),
        *("--request-timeout-secs", int(_TIMEOUT_SECONDS)),
    )
    try:
        yield router.url
    finally:
        router.kill()


def replay(
    url: str, trace: Trace, prompts: Sequence[str], fingerprints: Sequence[str], num_clients: int
) -> list[Answer]:
    """Send the requests in order; each client sends the next when it has its last answer."""
    numbers = {name: number for number, name in enumerate(fingerprints)}

    with httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS) as client:

        def ask(request: TraceRequest, prompt: str) -> Answer:
            body = {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": request.num_output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            header = {"X-Session-Id": request.session}
            answer = client.post("/v1/completions", json=body, headers=header).raise_for_status()
            usage = answer.json()["usage"]
            if usage["prompt_tokens"] != request.num_input_tokens:
                raise ValueError(f"{usage} for a request of {request.num_input_tokens} tokens")
            return Answer(
                numbers[answer.json()["system_fingerprint"]],
                usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
            )

        with ThreadPoolExecutor(num_clients) as pool:
            return list(pool.map(ask, trace.requests, prompts))


# The simulated fleet.


class _Noted:
    """Notes what a router chooses."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.choices: list[int] = []

    def route(self, prompt: RoutedPrompt, loads: Sequence[int], now: float) -> int:
        self.choices.append(self._router.route(prompt, loads, now))
        return self.choices[-1]


class _Repeated:
    """Chooses what another router has chosen."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = iter(choices)

    def route(self, prompt: RoutedPrompt, loads: Sequence[int], now: float) -> int:
        return next(self._choices)


def simulated(
    trace: Trace, policy: str, sizes: Sizes, block_bytes: int, choices: Sequence[int] | None = None
) -> list[Answer]:
    """The same requests in the simulator; with `choices`, each goes to this server."""
    instance = InstanceConfig(
        sizes.block_tokens,
        block_bytes,
        _RATES,
        num_device_blocks=sizes.num_device_blocks,
        num_host_blocks=sizes.num_host_blocks,
        policy="lru",
        host_link=_LINK,
        max_num_batched_tokens=512,
    )
    config = FleetConfig(
        instance, sizes.num_servers, policy, rules=RULES, num_clients=sizes.num_clients
    )
    router = _Noted(
        new_router(policy, sizes.num_servers, RULES) if choices is None else _Repeated(choices)
    )
    found = simulate_fleet(trace, config, router=router).total.requests
    answers = []
    for request, result, server in zip(trace.requests, found, router.choices, strict=True):
        num_hits = result.num_device_blocks + result.num_loaded_blocks
        # A server computes the last token even if it finds the whole prompt.
        num_cached = min(num_hits * sizes.block_tokens, request.num_input_tokens - 1)
        answers.append(Answer(server, request.num_input_tokens, num_cached))
    return answers


# Both.


def hit_rate(answers: Sequence[Answer]) -> float:
    return sum(a.num_cached_tokens for a in answers) / sum(a.num_prompt_tokens for a in answers)


def compare(
    trace: Trace, policy: str, sizes: Sizes, block_bytes: int, real: Sequence[Answer]
) -> Compared:
    ours = simulated(trace, policy, sizes, block_bytes)
    choices = [answer.server for answer in real]
    repeated = simulated(trace, policy, sizes, block_bytes, choices)

    def loads(answers: Sequence[Answer]) -> tuple[int, ...]:
        return tuple(sum(a.server == n for a in answers) for n in range(sizes.num_servers))

    return Compared(
        policy,
        hit_rate(real),
        hit_rate(ours),
        hit_rate(repeated),
        sum(a.server == b.server for a, b in zip(real, ours, strict=True)),
        len(real),
        loads(real),
        loads(ours),
        0.0,
    )


def run(
    trace: Trace, policies: Sequence[str], sizes: Sizes, num_rounds: int, tell: Any = print
) -> list[Compared]:
    from penstock.engine.models import load_model

    tokenizer = load_model("smollm2-135m", dtype="float32").tokenizer
    words = single_token_words(tokenizer)
    found: list[Compared] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        servers = []
        for number in range(sizes.num_servers):
            model = folder / f"model {number}"
            block_bytes = sizes.block_tokens * save_model(model, tokenizer, number)
            options = sizes.server_options(block_bytes)
            server = PenstockServer(
                folder / f"server {number}",
                model,
                *("--served-model-name", MODEL, "--dtype", "float32", "--no-cold-kv"),
                *("--set", "host.policy=lru"),
                *(part for name, value in options.items() for part in (_flag(name), value)),
                environment={"OMP_NUM_THREADS": "1"},
            )
            stack.callback(server.kill)
            servers.append(server)
        urls = [server.wait_ready() for server in servers]
        fingerprints = [fingerprint(url) for url in urls]
        for number in range(num_rounds):
            for policy in policies:
                salt = f"{number} {policy}"
                prompts = [
                    prompt_text(request, words, sizes.block_tokens, salt)
                    for request in trace.requests
                ]
                with real_router(folder / f"router {salt}", urls, policy) as url:
                    started = time.perf_counter()
                    answers = replay(url, trace, prompts, fingerprints, sizes.num_clients)
                    seconds = time.perf_counter() - started
                compared = compare(trace, policy, sizes, block_bytes, answers)
                found.append(replace(compared, seconds=seconds))
                tell(_line(found[-1]))
        for number, server in enumerate(servers):
            tell(f"server {number}, loads decided: {server.load_decisions()}")
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _line(each: Compared) -> str:
    return (
        f"| {each.policy} | {each.real:.3f} | {each.simulated:.3f} | {each.difference:+.3f} | "
        f"{each.same_routing:.3f} | {each.num_same_choice} of {each.num_requests} | "
        f"{' + '.join(map(str, each.real_loads))} | "
        f"{' + '.join(map(str, each.simulated_loads))} | {each.seconds:.0f} s |"
    )


def _summary(found: Sequence[Compared]) -> Iterator[str]:
    """For each policy: the median round and its spread, also against round robin."""
    by_policy: dict[str, list[Compared]] = {}
    for each in found:
        by_policy.setdefault(each.policy, []).append(each)
    turns = by_policy.get("round-robin", [])
    for policy, rounds in by_policy.items():
        real = [each.real for each in rounds]
        worst = max((each.difference for each in rounds), key=abs)
        verdict = "within" if abs(worst) <= AIM else "NOT within"
        against = ""
        if turns and policy != "round-robin":
            ours = statistics.median(each.simulated for each in rounds)
            gain = statistics.median(real) - statistics.median(each.real for each in turns)
            gain_ours = ours - statistics.median(each.simulated for each in turns)
            against = f"; against round robin {gain:+.3f} real, {gain_ours:+.3f} simulated"
        yield (
            f"{policy}: real {statistics.median(real):.3f} ({min(real):.3f} to {max(real):.3f}), "
            f"largest difference {worst:+.3f}, {verdict} {AIM}{against}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_agreement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Sizes()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--servers", type=int, default=default.num_servers)
    parser.add_argument("--clients", type=int, default=default.num_clients)
    parser.add_argument("--device-blocks", type=int, default=default.num_device_blocks)
    parser.add_argument("--host-blocks", type=int, default=default.num_host_blocks)
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--save-trace", type=Path, metavar="FILE", help="write the requests, for `penstock sim`"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = Sizes(
        options.servers,
        options.clients,
        num_device_blocks=options.device_blocks,
        num_host_blocks=options.host_blocks,
    )
    trace = shrink(read_trace(options.trace), options.requests, sizes.block_tokens)
    if options.save_trace is not None:
        write_trace(trace, options.save_trace)

    def tell(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    num_tokens = sum(request.num_input_tokens for request in trace.requests)
    tell(f"{len(trace.requests)} requests, {num_tokens} tokens of prompts, {sizes}")
    tell("| policy | real | simulated | difference | same routing | same choice | real | sim | |")
    tell("|---|---|---|---|---|---|---|---|---|")
    found = run(trace, options.policy or list(POLICIES), sizes, options.rounds, tell)
    if options.json:
        print(json.dumps({"sizes": asdict(sizes), "compared": [asdict(each) for each in found]}))
        return
    for line in _summary(found):
        print(line)


if __name__ == "__main__":
    main()
