"""Compare the simulator with the real engine on the same requests: hits and first tokens.

    python -m benchmarks.sim_agreement

Conversations with a shared system prompt run through SmolLM2-135M on this machine's CPU, with a
device pool that holds only part of them, DRAM that holds a little more, and a disk. The engine's
requests become a trace; the simulator uses the rates that the engine measured. It prints how many
blocks each took from which tier, and the simulated time to first token over the real one. Run it on
an idle machine: on a busy one the rates vary, and single ratios mean nothing.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.books.stack import Limits
from penstock.config import Config, DiskConfig, HostConfig, TransferConfig
from penstock.costs.meters import PrefillMeter
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel, load_model
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig
from penstock.sim.compute import ComputeRates, DecodeRate
from penstock.sim.instance import InstanceConfig
from penstock.sim.links import LinkSpec
from penstock.sim.simulator import simulate
from penstock.sim.tally import Simulated
from penstock.sim.trace import Trace, TraceRequest
from penstock.types import Tier

# Rounds of requests are far enough apart that everything is saved before the next one.
_ROUND_SECONDS = 1000.0
_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the workload and of the tiers, in tokens and blocks."""

    block_tokens: int = 16
    num_device_blocks: int = 48
    num_host_blocks: int = 64
    num_disk_blocks: int = 256
    max_num_batched_tokens: int = 128
    system_tokens: int = 70
    turn_tokens: int = 60
    answer_tokens: int = 9
    num_sessions: int = 6
    num_turns: int = 4
    policy: str = "lru"


@dataclass(frozen=True, slots=True)
class Played:
    """One request's result in the real engine. Blocks are those of its prompt."""

    num_device_blocks: int
    num_loaded_blocks: int
    num_computed_blocks: int
    first_token_seconds: float


def open_engine(loaded: LoadedModel, folder: Path, sizes: Sizes) -> Engine:
    token_bytes = (
        2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * loaded.dtype.itemsize
    )
    block_bytes = token_bytes * sizes.block_tokens
    page = 4096
    stride_bytes = -(-block_bytes // page) * page
    tiers = Config(
        HostConfig(size_bytes=sizes.num_host_blocks * stride_bytes, policy=sizes.policy),
        DiskConfig(
            path=str(folder),
            size_bytes=sizes.num_disk_blocks * (stride_bytes + page) + 65_536,
            policy=sizes.policy,
            # One thread gives a fixed order of blocks; the page cache gives a steady rate.
            threads=1,
            direct=False,
        ),
        TransferConfig(copy_threads=1),
    )
    config = EngineConfig(
        sizes.num_device_blocks * block_bytes,
        sizes.block_tokens,
        sizes.max_num_batched_tokens,
        residency=ResidencyConfig(cold=False),
    )
    return Engine(loaded, config, tiers)


def play(
    engine: Engine, sizes: Sizes, *, num_at_once: int = 1, in_step: bool = False, seed: int = 7
) -> tuple[Trace, list[Played]]:
    """Run conversations through the engine, `num_at_once` at a time; return them as a trace.

    With `in_step`, each step waits for all transfers of the one before, so that the order does not
    depend on how busy the machine is.
    """
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(count)]

    system = words(sizes.system_tokens)
    contexts = [list(system) for _ in range(sizes.num_sessions)]
    params = SamplingParams(temperature=0.0, max_tokens=sizes.answer_tokens, ignore_eos=True)
    order = [session for _ in range(sizes.num_turns) for session in range(sizes.num_sessions)]
    rounds = [order[at : at + num_at_once] for at in range(0, len(order), num_at_once)]
    requests: list[TraceRequest] = []
    played: list[Played] = []
    for number, sessions in enumerate(rounds):
        for session in sessions:
            contexts[session] += words(rng.randint(sizes.turn_tokens // 2, sizes.turn_tokens))
        prompts = [contexts[session] for session in sessions]
        ran = _run(engine, number, prompts, params, in_step=in_step)
        for session, request in zip(sessions, ran, strict=True):
            contexts[session] = list(request.tokens)
            requests.append(_traced(request, number * _ROUND_SECONDS, sizes.block_tokens))
            played.append(_played(request, sizes.block_tokens))
    return Trace("recorded", sizes.block_tokens, tuple(requests)), played


def mirror(
    engine: Engine, sizes: Sizes, rates: ComputeRates, host_link: LinkSpec, disk_link: LinkSpec
) -> InstanceConfig:
    """The simulator's instance of the same sizes and limits as this engine."""
    offloader = engine.offloader
    assert offloader is not None
    transfer = TransferConfig(copy_threads=1)
    block_bytes = engine.device.block_bytes
    return InstanceConfig(
        sizes.block_tokens,
        block_bytes,
        rates,
        num_device_blocks=engine.pool.num_blocks,
        num_host_blocks=offloader.num_host_blocks,
        num_disk_blocks=offloader.num_blocks,  # the larger of the two is the disk
        policy=sizes.policy,
        host_link=host_link,
        disk_link=disk_link,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        transfer=transfer,
        limits=Limits(
            max_host_blocks=max(1, transfer.batch_bytes // block_bytes),
            max_lower_blocks=max(1, transfer.batch_bytes // 2 // block_bytes),
            max_pending_saves=max(1, transfer.max_pending_save_bytes // block_bytes),
        ),
    )


def _run(
    engine: Engine,
    number: int,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    in_step: bool,
) -> list[Request]:
    requests = [
        engine.add(f"{number}-{index}", list(prompt), params)
        for index, prompt in enumerate(prompts)
    ]
    assert engine.offloader is not None
    while engine.has_work:
        engine.step()
        if in_step:
            engine.offloader.drain(60)
    if not engine.offloader.drain(60):
        raise TimeoutError("the saves did not finish within a minute")
    engine.step()  # reports the finished saves to the pool
    return requests


def _traced(request: Request, arrival_seconds: float, block_tokens: int) -> TraceRequest:
    num_input = len(request.prompt_ids)
    num_full = num_input // block_tokens
    return TraceRequest(
        arrival_seconds,
        num_input,
        len(request.tokens) - num_input,
        tuple(request.chain.keys[:num_full]),
        tuple(request.chain.keys[num_full:]),
    )


def _played(request: Request, block_tokens: int) -> Played:
    num_loaded = request.num_loaded_tokens // block_tokens
    # The last token is computed even if the whole prompt was found.
    num_device = -(-request.num_cached_tokens // block_tokens) - num_loaded
    assert request.first_token_time is not None
    return Played(
        num_device,
        num_loaded,
        len(request.prompt_ids) // block_tokens - num_device - num_loaded,
        request.first_token_time - request.arrival,
    )


class _Watch:
    """Records every step that is reported to the engine's own meter."""

    def __init__(self, engine: Engine) -> None:
        # All steps have the same weight here: the machine does not change during the run.
        self._prefill = PrefillMeter(weight=1e-9)
        self._decode_seconds: list[float] = []
        self._observe = engine._costs.observe
        engine._costs.observe = self._note  # type: ignore[method-assign]

    def _note(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        self._observe(chunks, seconds)
        if all(num_tokens > 1 for num_tokens, _ in chunks):
            self._prefill.observe(chunks, seconds)
        elif len(chunks) == 1:
            self._decode_seconds.append(seconds)

    def rates(self) -> ComputeRates:
        assert self._prefill.rate is not None
        return ComputeRates(self._prefill.rate, DecodeRate(statistics.median(self._decode_seconds)))


def _links(engine: Engine) -> tuple[LinkSpec, LinkSpec]:
    """The links to DRAM and to the disk. Saves are assumed to be as fast as loads."""
    assert engine.offloader is not None
    rates = engine.offloader.rates
    host = rates[Tier.HOST]
    disk = rates.get(Tier.DISK, host)
    return LinkSpec(host, host, num_streams=1), LinkSpec(disk, disk, num_streams=1, is_duplex=False)


def main() -> None:
    sizes = Sizes(system_tokens=150, turn_tokens=160, num_device_blocks=96, num_host_blocks=128)
    loaded = load_model("smollm2-135m", dtype="float32")
    _warm_up(loaded)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        engine = open_engine(loaded, Path(folder), sizes)
        watch = _Watch(engine)
        try:
            started = time.perf_counter()
            trace, played = play(engine, sizes)
            seconds = time.perf_counter() - started
            config = mirror(engine, sizes, watch.rates(), *_links(engine))
        finally:
            engine.close()
    started = time.perf_counter()
    found = simulate(trace, config)
    _print(trace, played, found, seconds, time.perf_counter() - started)


def _warm_up(loaded: LoadedModel) -> None:
    """Warm up: kernels are compiled at their first use, which must not count."""
    sizes = Sizes(num_sessions=3, num_turns=2, num_device_blocks=24)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        engine = open_engine(loaded, Path(folder), sizes)
        try:
            play(engine, sizes)
        finally:
            engine.close()


def _print(
    trace: Trace,
    played: Sequence[Played],
    found: Simulated,
    real_seconds: float,
    simulated_seconds: float,
) -> None:
    ratios: dict[str, list[float]] = {"computed": [], "on the device": [], "loaded": []}
    num_equal = 0
    simulated_total = real_total = 0.0
    for real, result in zip(played, found.requests, strict=True):
        blocks = (result.num_device_blocks, result.num_loaded_blocks, result.num_computed_blocks)
        num_equal += blocks == (
            real.num_device_blocks,
            real.num_loaded_blocks,
            real.num_computed_blocks,
        )
        kind = "loaded" if real.num_loaded_blocks else "on the device"
        if not real.num_loaded_blocks + real.num_device_blocks:
            kind = "computed"
        assert result.first_token_seconds is not None
        simulated_total += result.first_token_seconds
        real_total += real.first_token_seconds
        ratios[kind].append(result.first_token_seconds / real.first_token_seconds)
    print(
        f"{len(trace.requests)} requests: {real_seconds:.1f} s real, simulated in "
        f"{simulated_seconds:.2f} s"
    )
    print(f"hits equal, block for block: {num_equal} of {len(played)} requests")
    print(f"first tokens, simulated over real, all together: {simulated_total / real_total:.2f}")
    everything = [ratio for kind in ratios.values() for ratio in kind]
    for kind, found_ratios in {**ratios, "all": everything}.items():
        if not found_ratios:
            continue
        middle = statistics.median(found_ratios)
        spread = f"{min(found_ratios):.2f} to {max(found_ratios):.2f}"
        verdict = "within" if abs(middle - 1) <= _TOLERANCE else "NOT within"
        print(
            f"first token, simulated over real, {kind:>13}: median {middle:.2f} ({spread}, "
            f"{len(found_ratios)} requests); {verdict} {_TOLERANCE:.0%}"
        )


if __name__ == "__main__":
    main()
