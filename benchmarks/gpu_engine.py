"""The embedded engine on a GPU, Llama-3.1-8B's shapes in bf16: benefit and cost of tiers.

    python -m benchmarks.gpu_engine ttft       time to first token: computed, and from DRAM: loaded
                                               before the step, and within it
    python -m benchmarks.gpu_engine prefill    prompts in chunks of several sizes, next to vLLM's
    python -m benchmarks.gpu_engine profile    where a prompt's and a step's time goes, by kernel
    python -m benchmarks.gpu_engine cache      tokens per second for several sizes of DRAM
    python -m benchmarks.gpu_engine decode     time per token of the whole engine, next to vLLM's
    python -m benchmarks.gpu_engine sampling   the same with random tokens, next to the likeliest
    python -m benchmarks.gpu_engine larger     one sequence larger than the device pool
    python -m benchmarks.gpu_engine beside     a decode step while blocks are loaded and saved

With `--tiny` each runs at a small scale on a CPU, to show that it works. A prompt that arrives from
DRAM faster than the link can carry its bytes ends the run: it cannot have been loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.gpu_decode import VLLM_MS
from benchmarks.gpu_model import (
    Sequence,
    link_bytes_per_second,
    random_llama,
    tiny_llama,
    token_bytes,
)
from benchmarks.harness import fresh_keys, seconds_of
from penstock.config import Config, HostConfig, TransferConfig
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig
from penstock.engine.sampler import SamplerRow, begin_sampling, make_generator
from penstock.events import Decided, Event, Lost, Observer, Stepped
from penstock.types import Direction, Slot, Verdict

BLOCK_TOKENS = 16
GIB = 1 << 30
WARMS_UP = 10**7  # seeds from here on are for prompts that are not measured; -n would be n
VLLM_PREFILL_MS = {8_192: 204.0, 32_768: 1_184.0}  # vLLM 0.26 on an H200


class Scale:
    """Sizes for a GPU, or a thousandth of them for a CPU."""

    def __init__(self, tiny: bool, codec: str = "auto") -> None:
        """`codec`: of DRAM."""
        self.tiny = tiny
        self.codec = codec
        self.loaded: LoadedModel = tiny_llama() if tiny else random_llama()
        self.token_bytes = token_bytes(self.loaded)
        self.transfer = TransferConfig()

    def tokens(self, count: int) -> int:
        return max(64, count // 64) if self.tiny else count

    @contextmanager
    def engine(
        self,
        pool_tokens: int,
        host_tokens: int,
        residency: ResidencyConfig | None = None,
        observers: tuple[Observer, ...] = (),
        max_num_seqs: int = 32,
        *,
        load_in_step: bool = False,
        chunk_tokens: int = 4096,
    ) -> Iterator[Engine]:
        tiers = None
        if host_tokens:
            host = HostConfig(size_bytes=host_tokens * self.token_bytes, codec=self.codec)
            tiers = Config(host, transfer=self.transfer)
        config = EngineConfig(
            pool_tokens * self.token_bytes,
            BLOCK_TOKENS,
            chunk_tokens // 32 if self.tiny else chunk_tokens,
            max_num_seqs,
            residency=residency or ResidencyConfig(),
            load_in_step=load_in_step,
        )
        engine = Engine(self.loaded, config, tiers, observers)
        if self.tiny:
            engine.runner.only_queues = True  # as if it were a GPU
        engine.runner.warm_up(lambda _: None)
        arena = None if engine.offloader is None else engine.offloader.host
        while arena is not None and arena.num_for_device < arena.num_slots:
            time.sleep(0.1)  # DRAM is pinned in the background
        try:
            yield engine
        finally:
            engine.close()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 90) for _ in range(num_tokens)]


def serve(
    engine: Engine, prompts: list[list[int]], max_tokens: int = 1
) -> tuple[float, list[Request]]:
    """Run all requests. Returns the seconds and the finished requests."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    requests = [engine.add(f"{started}-{n}", prompt, params) for n, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started, requests


def forget(engine: Engine) -> None:
    """Empty the device once everything has been saved."""
    assert engine.offloader is not None
    engine.offloader.drain()
    engine.step()
    engine.pool.forget()


def say(row: dict[str, Any]) -> None:
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps(shown), flush=True)


def ttft(scale: Scale, rounds: int) -> None:
    link = None if scale.tiny else link_bytes_per_second()
    # Whole blocks, and some tokens more, as most prompts have: these steps have no graph.
    given = (512, 519, 2_048, 2_055, 8_160, 8_192, 32_768, 131_072)
    lengths = [scale.tokens(n) for n in given]
    lengths[-1] -= 64  # room for an answer
    room = sum(lengths) * 11 // 10
    brought = _Brought()
    with scale.engine(room, room, observers=(brought,), load_in_step=True) as engine:
        brought_loads = engine.scheduler.brought_loads
        max_blocks = brought_loads.max_blocks
        # Kernels are compiled.
        serve(engine, [prompt_of(n, WARMS_UP + n) for n in lengths[:2]])
        serve(engine, [prompt_of(lengths[4], WARMS_UP)])
        for length in lengths:
            prompt = prompt_of(length, length)
            computed = [serve(engine, [prompt])[0]]
            for seed in range(1, rounds if length <= 40_000 else 1):
                computed.append(serve(engine, [prompt_of(length, length + seed)])[0])
            answer = serve(engine, [prompt])[1][0].output_ids
            taken: dict[bool, list[float]] = {False: [], True: []}
            parts: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for _ in range(max(3, rounds)):
                for in_step in (False, True):  # loaded first, and within the step
                    brought_loads.max_blocks = max_blocks if in_step else lambda: 0
                    forget(engine)
                    brought.num_blocks = 0
                    with Moments(engine) as moments:
                        seconds, found = serve(engine, [prompt])
                    if brought.num_blocks or not in_step:
                        taken[in_step].append(seconds)
                        parts[in_step].append(moments.ms())
                    if found[0].output_ids != answer:
                        raise SystemExit(f"{length} tokens: the answer from DRAM differs")
            loaded = taken[False]
            row: dict[str, Any] = {"tokens": length, "computed_ms": median(computed) * 1e3}
            row |= {"dram_ms": median(loaded) * 1e3, "loaded_tokens": found[0].num_loaded_tokens}
            row["gain"] = row["computed_ms"] / row["dram_ms"]
            if taken[True]:
                row["in_step_ms"] = median(taken[True]) * 1e3
                row["in_step_gain"] = row["dram_ms"] / row["in_step_ms"]
            if link is not None:
                assert engine.offloader is not None
                block_bytes = engine.offloader.host.block_bytes  # packed, unless DRAM is raw
                num_bytes = found[0].num_loaded_tokens / BLOCK_TOKENS * block_bytes
                row["link_ms"] = num_bytes / link * 1e3
                if row["link_ms"] > 1.05 * min(row["dram_ms"], row.get("in_step_ms", 1e9)):
                    raise SystemExit(f"{row}: more than the link can carry")
            say(row)
            for in_step, times in parts.items():
                if times:
                    say({"hit_of": length, "in_step": in_step, **_medians(times)})


def prefill(scale: Scale, rounds: int) -> None:
    for chunk_tokens in (2_048, 4_096, 8_192, 16_384):
        room = scale.tokens(40_000)
        with scale.engine(room, 0, chunk_tokens=chunk_tokens) as engine:
            for length, vllm_ms in VLLM_PREFILL_MS.items():
                num_tokens = scale.tokens(length)
                serve(engine, [prompt_of(num_tokens, WARMS_UP + length)])  # kernels are compiled
                prompts = [prompt_of(num_tokens, length + n) for n in range(rounds)]
                taken = [serve(engine, [prompt])[0] for prompt in prompts]
                ms = median(taken) * 1e3
                row = {"tokens": num_tokens, "chunk_tokens": chunk_tokens, "ms": ms}
                say(row if scale.tiny else row | {"of_vllm": vllm_ms / ms})


def profile(scale: Scale) -> None:
    """What kernels take by kind, and the time in which none runs: for prompts, and for steps.

    Best in a process of its own: watching may slow down what is measured later.
    """
    # Graphs that are captured before the profiler starts may not be seen by one that starts anew.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    with _Profile(scale, {"nothing": True}):
        pass
    for length in VLLM_PREFILL_MS:
        num_tokens = scale.tokens(length)
        with scale.engine(scale.tokens(40_000), 0) as engine:
            serve(engine, [prompt_of(num_tokens, WARMS_UP)])
            with _Profile(scale, {"prompt": num_tokens}):
                serve(engine, [prompt_of(num_tokens, 0)])
    context, num_steps = scale.tokens(2_048), 20
    params = SamplingParams(temperature=0.0, max_tokens=4 * num_steps, ignore_eos=True)
    for batch in VLLM_MS:
        room = batch * (context + 8 * num_steps) * 5 // 4
        with scale.engine(room, scale.tokens(16_384), max_num_seqs=batch) as engine:
            requests = [engine.add(str(n), prompt_of(context, n), params) for n in range(batch)]
            while min(len(request.output_ids) for request in requests) < 4:
                engine.step()
            with _Profile(scale, {"batch": batch, "context": context}, num_steps):
                for _ in range(num_steps):
                    engine.step()
            for request in requests:
                engine.abort(request.id)


class _Profile:
    """Watches the device's kernels, and says what they took. Copies run beside kernels."""

    def __init__(self, scale: Scale, what: dict[str, Any], num_times: int = 1) -> None:
        self._on_gpu = not scale.tiny
        self._what, self._num_times = what, num_times
        activity = torch.profiler.ProfilerActivity
        activities = [activity.CUDA if self._on_gpu else activity.CPU]
        self._profile: Any = torch.profiler.profile(activities=activities)

    def __enter__(self) -> None:
        self._profile.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        ms = (time.perf_counter() - self._began) * 1e3 / self._num_times
        self._profile.__exit__(*error)
        by_name: dict[str, float] = {}
        by_kind: Counter[str] = Counter()
        for each in self._profile.key_averages():
            took = each.self_device_time_total if self._on_gpu else each.self_cpu_time_total
            by_name[each.key] = took / 1e3 / self._num_times
            by_kind[kind_of(each.key)] += by_name[each.key]
        idle = ms - sum(by_kind.values()) + by_kind["copies by engines"]
        say({**self._what, "ms": ms, "idle_ms": idle, **by_kind})
        for name, took in sorted(by_name.items(), key=lambda each: -each[1])[:16]:
            say({**self._what, "kernel": name[:100], "ms": took})


def kind_of(kernel: str) -> str:
    """What a kernel is for, from its name."""
    kinds = {
        "copies by engines": ("memcpy", "memset"),
        "attention": ("attend", "attention", "flash", "fmha", "sdpa", "softmax", "merge"),
        "products": ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitk", "::mm", "addmm"),
        "elementwise": ("add_norm", "gate", "rotate", "store_tokens"),
        "copies": ("copy", "catarray", "::cat"),
    }
    lower = kernel.lower()
    for kind, words in kinds.items():
        if any(word in lower for word in words):
            return kind
    return "other"


class _Brought:
    """Counts blocks that steps brought."""

    num_blocks = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.num_blocks += event.num_cold_blocks


class Moments:
    """When each part of a hit ended, counted from its arrival, and how long Python took in it."""

    def __init__(self, engine: Engine) -> None:
        offloader = engine.offloader
        assert offloader is not None
        self._parts: list[tuple[str, Any, str]] = [
            ("added", engine, "add"),
            ("matched", offloader, "match"),
            ("load_queued", offloader, "load"),
            ("load_settled", engine.scheduler, "settle"),
            ("launched", engine.runner, "run"),
            ("booked", engine.scheduler, "computed"),
            ("waited", engine.runner, "wait"),
        ]
        self._ends: dict[str, float] = {}
        self._took: Counter[str] = Counter()
        self._copies = 0.0

    def __enter__(self) -> Moments:
        for name, owner, method in self._parts:
            setattr(owner, method, self._timed(name, getattr(owner, method)))
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends["token_read"] = time.perf_counter() - self._began
        for _, owner, method in self._parts:
            delattr(owner, method)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = call(*args, **options)
            ended = time.perf_counter()
            self._ends[name] = ended - self._began
            self._took[name] += ended - began
            if name == "load_settled":
                self._copies += args[0].seconds
            return found

        return timed

    def ms(self) -> dict[str, float]:
        ends = {f"{name}_at": end * 1e3 for name, end in self._ends.items()}
        took = {f"in_{name}": seconds * 1e3 for name, seconds in self._took.items()}
        return {**ends, "copies": self._copies * 1e3, **took}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(row.get(name, 0.0) for row in rows) for name in rows[0]}


class _Watch:
    """Why blocks were computed: not found, loading looked too expensive, or lost."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.decisions: list[Decided] = []
        self.lost: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Decided):
            self.decisions.append(event)
        elif isinstance(event, Lost) and event.direction is Direction.LOAD:
            self.lost[event.verdict.label] += event.num_blocks

    def row(self, num_blocks: int) -> dict[str, Any]:
        declined = [each for each in self.decisions if each.num_loaded < each.num_matched]
        row: dict[str, Any] = {
            "matched": sum(each.num_matched for each in self.decisions) / num_blocks,
            "declined": sum(each.num_matched - each.num_loaded for each in declined) / num_blocks,
            "lost": dict(self.lost),
        }
        if declined:
            row["first_declined"] = [declined[0].load_seconds, declined[0].compute_seconds]
        return row


def cache(scale: Scale, sizes: list[int]) -> None:
    """Prompts return in random order; together they have 24 GiB of KV."""
    num, length = 24, scale.tokens(8_192)
    prompts = [prompt_of(length, seed) for seed in range(num)]
    asked = random.Random(0).choices(prompts, k=36)

    def measure(gib: int) -> dict[str, Any]:
        host_tokens = gib * GIB // 131_072 // (64 if scale.tiny else 1)
        watch = _Watch()
        with scale.engine(4 * length, host_tokens, observers=(watch,)) as engine:
            serve(engine, prompts)
            if engine.offloader is not None:
                engine.offloader.drain()
            watch.clear()
            seconds, requests = serve(engine, asked)
            cached = sum(request.num_cached_tokens for request in requests)
            total = len(asked) * length
            row = {"dram_gib": gib, "tokens_per_second": total / seconds, "cached": cached / total}
            return row | watch.row(len(asked) * length // BLOCK_TOKENS)

    measure(sizes[-1])  # not counted: kernels are compiled once for every length
    for gib in sizes:
        say(measure(gib))


def decode(scale: Scale) -> None:
    """The whole step: settle, schedule, compute, sample, detokenize, with saves in parallel."""
    context, answer = scale.tokens(2_048), 100
    for batch, vllm_ms in VLLM_MS.items():
        room = batch * (context + answer + BLOCK_TOKENS) * 5 // 4  # nothing becomes cold
        with scale.engine(room, scale.tokens(16_384), max_num_seqs=batch) as engine:
            answers = {}
            for is_ahead in (False, True, False, True):
                engine.ahead.is_on = is_ahead
                row, said = _steps(engine, batch, context, answer)
                row = {"batch": batch, "context": context, "ahead": is_ahead, **row}
                say(row | {"of_vllm": vllm_ms / row["ms"]})
                answers[is_ahead] = said
            same = sum(a == b for a, b in zip(*answers.values(), strict=True))
            say({"batch": batch, "same_answers": same})
    context = scale.tokens(32_768)
    residency = ResidencyConfig(max_cold_bytes_per_step=1 << 40)
    for batch in (1, 4):
        room = int(0.9 * batch * context)
        host = batch * (context + 2 * answer)
        with scale.engine(room, host, residency) as engine:
            row = {"batch": batch, "context": context, **_steps(engine, batch, context, answer)[0]}
            if not scale.tiny:
                row["of_link"] = row["cold_gb_s"] / link_bytes_per_second() * 1e9
            say(row)


def sampling(scale: Scale) -> None:
    """What random tokens cost: a whole step with them, next to one with the likeliest."""
    context, answer = scale.tokens(2_048), 100
    kinds: dict[str, dict[str, float]] = {
        "likeliest": {"temperature": 0.0},
        "temperature 1": {"temperature": 1.0},
        "temperature 0.6, top_p 0.9": {"temperature": 0.6, "top_p": 0.9},
        "top_k 50": {"top_k": 50},
    }
    for batch in VLLM_MS:
        room = batch * (context + answer + BLOCK_TOKENS) * 5 // 4
        with scale.engine(room, scale.tokens(16_384), max_num_seqs=batch) as engine:
            ms = {}
            for name, wishes in kinds.items():
                ms[name] = _steps(engine, batch, context, answer, wishes)[0]["ms"]
                share = ms["likeliest"] / ms[name]
                say({"batch": batch, "sampling": name, "ms": ms[name], "of_likeliest": share})


def _steps(
    engine: Engine,
    batch: int,
    context: int,
    answer: int,
    wishes: Mapping[str, Any] = MappingProxyType({"temperature": 0.0}),
) -> tuple[dict[str, Any], list[list[int]]]:
    """For steps in which the whole batch decodes: their seconds, those that Python took in each
    part, and the bytes read from DRAM. Also the answers."""
    parts: Counter[str] = Counter()
    timed = [(engine.scheduler, "schedule"), (engine.runner, "run"), (engine.runner, "wait")]
    timed += [(engine.scheduler, "computed"), (engine, "_take"), (engine, "_settle")]
    for owner, name in timed:
        setattr(owner, name, _added(parts, name, getattr(owner, name)))
    params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=1, **wishes)
    prompts = [prompt_of(context, seed) for seed in range(batch)]
    requests = [engine.add(str(n), prompt, params) for n, prompt in enumerate(prompts)]
    taken, cold = [], []
    of_part: dict[str, list[float]] = {name: [] for _, name in timed}
    while engine.has_work:
        num_before = [len(request.output_ids) for request in requests]
        num_cold = sum(request.table.num_cold for request in requests)
        parts.clear()
        seconds = seconds_of(engine.step)
        num_after = [len(request.output_ids) for request in requests]
        if min(num_before) > 1 and all(
            b + 1 == a for b, a in zip(num_before, num_after, strict=True)
        ):
            taken.append(seconds)
            cold.append(num_cold * engine.device.block_bytes / seconds)
            for name, found in of_part.items():
                found.append(parts[name])
    for owner, name in timed:
        delattr(owner, name)
    row: dict[str, Any] = {"steps": len(taken), "ms": median(taken) * 1e3}
    row |= {f"{name}_ms": median(found) * 1e3 for name, found in of_part.items()}
    row |= {"cold_gb_s": median(cold) / 1e9} if any(cold) else {}
    return row, [request.output_ids for request in requests]


def _added(seconds: Counter[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            seconds[name] += time.perf_counter() - began

    return timed


def larger(scale: Scale) -> None:
    pool, length, answer = scale.tokens(16_384), scale.tokens(49_152), 32
    prompt = prompt_of(length, 1)
    with scale.engine(4 * pool, 0) as engine:
        serve(engine, [prompt_of(pool, 2)])
        seconds, whole = serve(engine, [prompt], answer)
    say({"pool_tokens": 4 * pool, "prompt_tokens": length, "seconds": seconds})
    with scale.engine(pool, 4 * pool) as engine:
        serve(engine, [prompt_of(pool // 2, 2)])
        seconds, part = serve(engine, [prompt], answer)
        left = engine.scheduler.placement.num_left
    is_same = part[0].output_ids == whole[0].output_ids
    row: dict[str, Any] = {"pool_tokens": pool, "prompt_tokens": length, "seconds": seconds}
    came, ended = part[0].first_token_time, part[0].finished_time
    assert came is not None
    assert ended is not None
    row["first_token_seconds"] = came - part[0].arrival
    row["token_ms"] = (ended - came) / (answer - 1) * 1e3
    say(row | {"blocks_left": left, "same_tokens": is_same})
    if not is_same:
        raise SystemExit("the tokens differ")


def beside(scale: Scale) -> None:
    """Decode 16 sequences of 2,048 tokens, alone and while 512 blocks at a time are loaded or
    saved: with the likeliest and with random tokens."""
    batch, context, num = (2, 128, 8) if scale.tiny else (16, 2_048, 512)
    blocks = batch * context // BLOCK_TOKENS
    with scale.engine((blocks + 2 * num) * BLOCK_TOKENS, 16 * num * BLOCK_TOKENS) as engine:
        offloader = engine.offloader
        assert offloader is not None
        per = context // BLOCK_TOKENS
        chunks = [
            Sequence([5] * context, list(range(row * per, (row + 1) * per))).last()
            for row in range(batch)
        ]
        sources = [Slot(slot) for slot in range(blocks, blocks + num)]
        targets = [Slot(slot) for slot in range(blocks + num, blocks + 2 * num)]
        keys = fresh_keys(num, 0)
        made = [fresh_keys(num, number) for number in range(1, 2_000 if scale.tiny else 800)]

        def load() -> Any:
            return offloader.load(keys, targets)

        def save() -> Any:
            return offloader.save(made.pop(), sources)

        def step() -> None:
            engine.runner.post(engine.runner.run(chunks).argmax(-1))()

        drawn = SamplingParams(temperature=0.6, top_p=0.9)
        rows = [SamplerRow(drawn, make_generator(number)) for number in range(batch)]

        def random_step() -> None:
            begin_sampling(engine.runner.run(chunks), rows, engine.runner.post)()

        def step_ms(
            starts: list[Callable[[], Any]], step: Callable[[], None] = step
        ) -> tuple[float, float]:
            """Milliseconds per step while these transfers keep running, and their GB/s."""
            pending = {start: start() for start in starts if made}
            taken, moved, began = [], 0, time.perf_counter()
            while time.perf_counter() - began < (0.2 if scale.tiny else 2.0):
                taken.append(seconds_of(step))
                for done in offloader.step():
                    for start, ticket in list(pending.items()):
                        if done.ticket == ticket:
                            moved += done.verdicts.count(Verdict.OK)
                            del pending[start]
                            if made:
                                pending[start] = start()
            seconds = time.perf_counter() - began
            offloader.wait(list(pending.values()))
            block_bytes = scale.token_bytes * BLOCK_TOKENS
            return median(taken) * 1e3, moved * block_bytes / seconds / 1e9

        def bare_ms(loads: bool, saves: bool) -> float:
            """Milliseconds per step during large copies without our code: the limit."""
            with bare_copies(loads=loads, saves=saves) as go_on:
                taken, began = [], time.perf_counter()
                while time.perf_counter() - began < 2.0:
                    go_on()
                    taken.append(seconds_of(step))
            return median(taken) * 1e3

        step_ms([])
        for name, starts in (("load", [load]), ("save", [save]), ("both", [load, save])):
            offloader.wait([offloader.save(keys, sources)])  # new blocks may have evicted them
            before = step_ms([])[0]
            ms, rate = step_ms(list(starts))
            base = (before + step_ms([])[0]) / 2
            row = {"beside": name, "alone_ms": base, "ms": ms, "slower": ms / base - 1}
            row["gb_s"] = rate
            row["random_alone_ms"] = step_ms([], random_step)[0]
            row["random_ms"] = step_ms(list(starts), random_step)[0]
            if not scale.tiny:
                row["bare_slower"] = bare_ms(load in starts, save in starts) / base - 1
            say(row)


@contextmanager
def bare_copies(*, loads: bool, saves: bool) -> Iterator[Callable[[], None]]:
    """Run large copies of pinned memory. Call the yielded function often to keep them going."""
    size = 256 << 20
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_gpu = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)]
    ways = [(on_gpu[0], pinned[0], streams[0])] * loads
    ways += [(pinned[1], on_gpu[1], streams[1])] * saves
    queued: list[list[Any]] = [[] for _ in ways]

    def go_on() -> None:
        for (target, source, stream), events in zip(ways, queued, strict=True):
            while events and events[0].query():
                del events[0]
            while len(events) < 4:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                    events.append(torch.cuda.Event())
                    events[-1].record()

    yield go_on
    torch.cuda.synchronize()


PARTS: dict[str, Callable[[Scale], None]] = {
    "decode": decode,
    "profile": profile,
    "sampling": sampling,
    "larger": larger,
    "beside": beside,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_engine", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["ttft", "prefill", "cache", *PARTS])
    parser.add_argument("--rounds", type=int, default=3, help="of ttft and prefill")
    parser.add_argument("--dram-gib", type=int, nargs="+", default=[0, 16, 64], help="of cache")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--codec", default="auto", help="of DRAM")
    options = parser.parse_args()
    scale = Scale(options.tiny, options.codec)
    for part in options.parts:
        print(f"# {part}", flush=True)
        if part == "ttft":
            ttft(scale, options.rounds)
        elif part == "prefill":
            prefill(scale, options.rounds)
        elif part == "cache":
            cache(scale, options.dram_gib)
        else:
            PARTS[part](scale)


if __name__ == "__main__":
    main()
