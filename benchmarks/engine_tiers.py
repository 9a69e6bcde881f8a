"""Benefit and cost of tiers in the embedded engine: first tokens, small pools, cost of saving.

Every answer is compared with the computed one, because the speed of wrong answers means nothing.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness import Row
from penstock import LLM, SamplingParams
from penstock.engine.outputs import RequestOutput

LENGTHS = (512, 2048, 8000)
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
# Sessions return twice, with pools that hold all, half or a quarter of them.
SESSIONS = 8
SESSION_TOKENS = 448
TURN = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def run(directory: Path) -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=directory))
    try:
        yield from _first_token(folder / "first")
        yield from _pressure()
        yield from _saving(folder / "saving")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(num_tokens)]


def _forget(llm: LLM, *, host: bool = False) -> None:
    """Empty the device and, with `host`, DRAM."""
    offloader = llm.engine.offloader
    assert offloader is not None
    offloader.drain()
    llm.engine.step()
    llm.engine.pool.forget()
    if host:
        offloader.empty_host()


def _seconds(output: RequestOutput) -> float:
    assert output.metrics is not None
    assert output.metrics.first_token_seconds is not None
    return output.metrics.first_token_seconds


def _first_token(folder: Path) -> Iterator[Row]:
    with LLM(kv_offloading_size=1, disk_path=str(folder), disk_size=2, device_kv_gib=1) as llm:
        llm.generate([prompt(64, 0)], FIRST)
        token_bytes = llm.engine.device.block_bytes / llm.engine.block_tokens
        for length in LENGTHS:
            ids = prompt(length, length)
            (computed,) = llm.generate([ids], FIRST)
            for tier in ("DRAM", "disk"):
                hits = []
                for _ in range(5):
                    _forget(llm, host=tier == "disk")
                    (hit,) = llm.generate([ids], FIRST)
                    assert hit.outputs[0].token_ids == computed.outputs[0].token_ids
                    assert hit.metrics is not None
                    if hit.metrics.num_loaded_tokens:
                        hits.append(hit)
                if not hits:  # the engine chose to compute because that is cheaper
                    continue
                seconds = median(map(_seconds, hits))
                loaded = hits[-1].metrics.num_loaded_tokens if hits[-1].metrics else 0
                name = f"first token, {length} tokens, {loaded} from {tier}"
                recompute = _seconds(computed)
                yield Row(
                    f"{name} ({loaded * token_bytes / seconds / 1e9:.2f} GB/s end to end)",
                    seconds * 1000,
                    "ms",
                    recompute * 1000,
                    "recomputed",
                    "> 1",
                    recompute / seconds,
                )


def _pressure() -> Iterator[Row]:
    answers: list[list[int]] | None = None
    for share in (1, 2, 4):
        rates = {}
        for size in (0.0, 1.0):
            tokens, seconds, outputs = _serve_sessions(size, share)
            rates[size] = tokens / seconds
            answers = answers or outputs
            assert outputs == answers, "an answer differs"
        yield Row(
            f"{SESSIONS} sessions over a pool for {SESSIONS // share}, offloading on",
            rates[1.0],
            "tokens/s",
            rates[0.0],
            "offloading off",
            "≥ 1",
            rates[1.0] / rates[0.0],
        )


def _serve_sessions(host_gib: float, share: int) -> tuple[int, float, list[list[int]]]:
    """Run three turns of all sessions. Returns tokens processed, seconds, and the conversations."""
    block_tokens = 32
    with LLM(
        dtype="float32",  # in bfloat16 a token may depend on the rest of the batch
        kv_offloading_size=host_gib,
        device_kv_gib=_pool_gib(SESSIONS // share, block_tokens),
        block_tokens=block_tokens,
    ) as llm:
        llm.generate([prompt(64, 0)], FIRST)
        talks = [prompt(SESSION_TOKENS, 100 + number) for number in range(SESSIONS)]
        num_tokens = 0
        started = time.perf_counter()
        for turn in range(3):
            outputs = llm.generate(list(talks), TURN)
            for number, output in enumerate(outputs):
                num_tokens += len(talks[number]) + len(output.outputs[0].token_ids)
                more = prompt(24, 1000 * turn + number)
                talks[number] = talks[number] + output.outputs[0].token_ids + more
        return num_tokens, time.perf_counter() - started, talks


def _pool_gib(num_sessions: int, block_tokens: int) -> float:
    """The size of a pool that holds this many sessions at their longest."""
    token_bytes = 2 * 30 * 3 * 64 * 4  # SmolLM2-135M: layers, KV heads, head_dim, float32
    longest = SESSION_TOKENS + 3 * (16 + 24)
    num_blocks = num_sessions * (-(-longest // block_tokens) + 1)
    return num_blocks * block_tokens * token_bytes / (1 << 30)


def _saving(folder: Path) -> Iterator[Row]:
    """The cost of saving, with prompts that are never repeated."""
    rounds: dict[bool, list[float]] = {False: [], True: []}
    seed = 10_000
    with (
        LLM(kv_offloading_size=0, device_kv_gib=0.5) as off,
        LLM(kv_offloading_size=1, disk_path=str(folder), disk_size=2, device_kv_gib=0.5) as on,
    ):
        for number in range(7):
            for is_on, llm in (
                ((False, off), (True, on)) if number % 2 else ((True, on), (False, off))
            ):
                asked = [prompt(480, seed + index) for index in range(2)]
                seed += len(asked)
                started = time.perf_counter()
                llm.generate(asked, TURN)
                if number:  # the first round warms up
                    rounds[is_on].append(time.perf_counter() - started)
    on_seconds, off_seconds = median(rounds[True]), median(rounds[False])
    yield Row(
        "no reuse, saving to DRAM and disk",
        on_seconds,
        "s",
        off_seconds,
        "offloading off",
        "≥ 0.97",
        off_seconds / on_seconds,
    )
