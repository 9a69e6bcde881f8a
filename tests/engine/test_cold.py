"""Part of a running sequence's KV lies in HOST and is read there: the tokens are the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load, idle
from tools import flip_bit

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine import scheduler
from penstock.engine.admission import TooLong
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.residency import ResidencyConfig
from penstock.engine.runner import TorchRunner
from penstock.engine.scheduler import Chunk
from penstock.engine.table import BlockTable
from penstock.keys import KeyChain
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import NO_PARENTS, BlockKey, BlockSpec, Slot, TicketId

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
NEVER_COLD = replace(GREEDY, kv_residency={"never_cold": True})
SMALL = ResidencyConfig(prefix_tokens=16, tail_tokens=16)

Engines = Callable[..., Engine]


@pytest.fixture
def engines(loaded: LoadedModel) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(
        num_blocks: int,
        num_host: int = 256,
        residency: ResidencyConfig = SMALL,
        *,
        batch: int = 64,
        disk: Path | None = None,
    ) -> Engine:
        config = EngineConfig(num_blocks * BLOCK_BYTES, BLOCK_TOKENS, batch, residency=residency)
        below = DiskConfig()
        if disk is not None:
            below = DiskConfig(path=str(disk), size_bytes=1024 * (BLOCK_BYTES + 512))
        tiers = Config(HostConfig(size_bytes=num_host * BLOCK_BYTES), below) if num_host else None
        made.append(Engine(loaded, config, tiers))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompts(num: int, longest: int = 260, seed: int = 1, shared: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1, 40_000) for _ in range(shared)]
    return [
        head + [rng.randrange(1, 40_000) for _ in range(rng.randint(1, longest))]
        for _ in range(num)
    ]


class Watch:
    """What happened on the way."""

    def __init__(self) -> None:
        self.max_cold = 0
        self.max_running = 0


def run(engine: Engine, questions: list[list[int]], **options: Any) -> tuple[list[Any], Watch]:
    watch = Watch()
    requests = [
        engine.add(str(number), ids, GREEDY, **options) for number, ids in enumerate(questions)
    ]
    for _ in range(100_000):
        if not engine.has_work:
            break
        engine.step()
        watch.max_cold = max(watch.max_cold, engine.scheduler.placement.num_cold)
        watch.max_running = max(watch.max_running, engine.scheduler.num_running)
    assert all(request.finish_reason == "length" for request in requests), "one never ended"
    idle(engine)
    return [request.output_ids for request in requests], watch


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel) -> list[list[int]]:
    """With room for everything, one prompt at a time."""
    engine = Engine(loaded, EngineConfig(64 * BLOCK_BYTES, BLOCK_TOKENS))
    found = []
    for question in prompts(8):
        found += run(engine, [question])[0]
    engine.close()
    return found


@pytest.mark.parametrize("num_blocks", [40, 24, 12, 8])
def test_tokens_are_the_same_whatever_leaves_the_device(
    engines: Engines, answers: list[list[int]], num_blocks: int
) -> None:
    found, watch = run(engines(num_blocks), prompts(8))
    assert found == answers
    assert watch.max_cold > 0


def test_more_sequences_run_at_once_than_the_device_holds(
    engines: Engines, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_MAX_STALLS", 10**6)  # a busy machine may save slowly
    hot, cold = engines(24, residency=ResidencyConfig(cold=False)), engines(24)
    assert run(hot, prompts(8))[1].max_running < 4
    found, watch = run(cold, prompts(8))
    assert watch.max_running >= 6
    assert cold.scheduler.num_preemptions == 0
    assert found == answers


def test_one_sequence_may_be_larger_than_the_device(
    engines: Engines, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_MAX_STALLS", 10**6)  # a busy machine may save slowly
    question = prompts(1, 1, shared=900)[0]
    roomy = Engine(loaded, EngineConfig(128 * BLOCK_BYTES, BLOCK_TOKENS))
    wanted = run(roomy, [question])[0]
    roomy.close()
    engine = engines(10)
    found, watch = run(engine, [question])
    assert found == wanted
    assert watch.max_cold >= 45
    assert engine.scheduler.num_preemptions == 0
    # It comes back: nearly all of it is read where it lies.
    always_load(engine)
    again = engine.add("again", question, GREEDY)
    while engine.has_work:
        engine.step()
    assert again.output_ids == wanted[0]
    assert again.num_cached_tokens >= 880
    idle(engine)


def test_a_budget_larger_than_the_device_keeps_nobody_waiting(
    engines: Engines, loaded: LoadedModel
) -> None:
    question = prompts(1, 1, shared=300)[0]
    roomy = Engine(loaded, EngineConfig(128 * BLOCK_BYTES, BLOCK_TOKENS))
    wanted = run(roomy, [question])[0]
    roomy.close()
    assert run(engines(12, batch=512), [question])[0] == wanted


def test_a_disk_feeds_sequences_larger_than_the_device(
    engines: Engines, tmp_path: Path, answers: list[list[int]]
) -> None:
    first = engines(12, disk=tmp_path)
    assert run(first, prompts(8))[0] == answers
    first.close()
    second = engines(12, disk=tmp_path)
    assert second.offloader is not None
    assert second.offloader.recover(30)
    found, watch = run(second, prompts(8))
    assert found == answers
    assert watch.max_cold > 0


def test_a_corrupt_disk_under_cold_sequences_is_recomputed(
    engines: Engines, tmp_path: Path, answers: list[list[int]]
) -> None:
    first = engines(12, disk=tmp_path)
    run(first, prompts(8))
    first.close()
    rng = random.Random(5)
    for file in tmp_path.rglob("*.kv"):
        for _ in range(200):
            flip_bit(file, rng.randrange(file.stat().st_size - 8192) + 4096)
    second = engines(12, disk=tmp_path)
    assert second.offloader is not None
    second.offloader.recover(30)
    assert run(second, prompts(8))[0] == answers


def test_blocks_that_come_back_to_nobody_are_freed(engines: Engines) -> None:
    engine = engines(24)
    names = [engine.add(str(n), ids, GREEDY).id for n, ids in enumerate(prompts(8))]
    assert engine.offloader is not None
    while not engine.scheduler.placement._returning:
        assert engine.has_work, "nothing ever came back"
        engine.step()
    for name in names:
        engine.abort(name)
    assert engine.offloader.drain(30)
    assert not engine.scheduler.idle
    engine.step()
    assert engine.scheduler.idle
    idle(engine)


@pytest.mark.parametrize("num_host", [4, 12, 30])
def test_little_dram_only_makes_it_slower(
    engines: Engines, answers: list[list[int]], num_host: int
) -> None:
    assert run(engines(24, num_host), prompts(8))[0] == answers


def test_a_bound_on_cold_bytes_makes_some_wait(engines: Engines, answers: list[list[int]]) -> None:
    bound = ResidencyConfig(
        prefix_tokens=16, tail_tokens=16, max_cold_bytes_per_step=8 * BLOCK_BYTES
    )
    found, watch = run(engines(24, residency=bound), prompts(8))
    assert found == answers
    assert 0 < watch.max_cold <= 24


def test_who_must_not_be_cold_never_is(engines: Engines, answers: list[list[int]]) -> None:
    engine = engines(24)
    urgent = engine.add("urgent", prompts(8)[0], NEVER_COLD)
    others = [engine.add(str(n), ids, GREEDY) for n, ids in enumerate(prompts(8)[1:])]
    was_cold = False
    while engine.has_work:
        engine.step()
        assert urgent.table.num_cold == 0
        was_cold |= any(other.table.num_cold for other in others)
    assert was_cold
    assert [urgent.output_ids, *(other.output_ids for other in others)] == answers
    with pytest.raises(TooLong, match="the device pool holds 24"):
        engine.add("huge", [5] * 500, NEVER_COLD)
    idle(engine)
    with pytest.raises(TooLong, match="the device pool and DRAM hold 28 "):
        engines(24, 4).add("vast", [5] * 500, GREEDY)


def test_a_session_keeps_within_its_budget_when_others_come(
    engines: Engines, answers: list[list[int]]
) -> None:
    budget = ResidencyConfig(prefix_tokens=16, tail_tokens=16, session_tokens=64)
    found, watch = run(engines(24, residency=budget), prompts(8))
    assert found == answers
    assert watch.max_running >= 6


def test_cold_blocks_come_back_when_there_is_room(engines: Engines) -> None:
    engine = engines(24)
    long = engine.add("long", prompts(1, 1, shared=250)[0], GREEDY)
    short = [engine.add(str(n), ids, GREEDY) for n, ids in enumerate(prompts(3, seed=2))]
    was_cold = 0
    while engine.has_work:
        engine.step()
        was_cold = max(was_cold, long.table.num_cold)
        if all(request.finish_reason for request in short) and was_cold:
            break
    assert was_cold
    while engine.has_work:
        engine.step()
    assert engine.scheduler.placement.num_returned > 0
    idle(engine)


def test_aborted_at_any_moment_pins_and_blocks_come_back(
    engines: Engines, answers: list[list[int]]
) -> None:
    rng = random.Random(3)
    for _ in range(6):
        engine = engines(12)
        for number, ids in enumerate(prompts(8)):
            engine.add(str(number), ids, GREEDY)
        gone = {str(n) for n in rng.sample(range(8), 4)}
        ends: dict[str, list[int]] = {}
        while engine.has_work:
            for progress in engine.step():
                ends[progress.request.id] = progress.request.output_ids
            if gone and rng.random() < 0.05:
                engine.abort(gone.pop())
        for number, answer in enumerate(answers):
            if str(number) in ends and len(ends[str(number)]) == len(answer):
                assert ends[str(number)] == answer
        idle(engine)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # no bf16 on this CPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_moving_between_steps_change_no_bit_of_any_logit(
    loaded: LoadedModel, dtype: str
) -> None:
    """Chunks of prompts and single tokens, with every block but the last anywhere, at random."""
    kind = getattr(torch, dtype)
    model = loaded.model.to(kind)
    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    block_bytes = BLOCK_BYTES * kind.itemsize // 4
    rng = random.Random(7)
    tokens = [rng.randrange(1, 40_000) for _ in range(200)]
    cuts = [0, 50, 90, 91, 92, 93, 150, 151, 152, 153, 154, 199, 200]

    def play(share: float) -> list[torch.Tensor]:
        pool = DevicePool(16, *shape, kind)
        host = HostArena(BlockSpec(bytes(32), block_bytes, BLOCK_TOKENS), 64 * (block_bytes + 4096))
        runner = TorchRunner(model, pool, BLOCK_TOKENS, loaded.num_heads, host)
        request = Request("r", tuple(tokens), GREEDY, KeyChain(_namespace()))
        request.table = BlockTable([Slot(slot) for slot in rng.sample(range(16), 13)])
        seen = []
        for start, end in pairwise(cuts):
            for index in range(start // BLOCK_TOKENS):  # all complete ones are thrown about
                wants_cold = rng.random() < share
                if wants_cold and request.table.places[index] >= 0:
                    pin = Slot(index * 3)
                    slot = request.table.chill(index, pin)
                    host.view(pin)[:block_bytes] = bytes(pool.view(slot)[:block_bytes])
                    pool.tensor[slot] = float("nan")
                elif not wants_cold and request.table.places[index] < 0:
                    free = set(range(16)) - set(request.table)
                    slot = Slot(rng.choice(sorted(free)))
                    pin = request.table.warm(index, slot)
                    pool.view(slot)[:block_bytes] = bytes(host.view(pin)[:block_bytes])
            request.tokens = tokens[:end]
            seen.append(runner.run([Chunk(request, start, end - start)]))
        return seen

    wanted = play(0.0)
    for share in (0.1, 0.5, 0.9, 1.0):
        for found, expected in zip(play(share), wanted, strict=True):
            assert torch.equal(found, expected)
    model.to(torch.float32)


def _namespace() -> Any:
    from penstock.keys import Namespace

    return Namespace("m", "w", "d", "l", BLOCK_TOKENS)


def test_what_is_saved_again_is_saved_in_its_tenants_name(engines: Engines) -> None:
    """DRAM has lost blocks that must leave the device: they are copied there once more."""
    engine = engines(24)
    offloader = engine.offloader
    assert offloader is not None
    saved: dict[BlockKey, list[tuple[str, BlockKey | None]]] = {}
    save = offloader.save

    def watched(
        keys: Sequence[BlockKey],
        source: Sequence[Slot],
        *,
        tenant: str = "",
        parents: Mapping[int, BlockKey | None] = NO_PARENTS,
    ) -> TicketId:
        for position, key in enumerate(keys):
            parent = parents.get(position, keys[position - 1] if position else None)
            saved.setdefault(key, []).append((tenant, parent))
        return save(keys, source, tenant=tenant, parents=parents)

    offloader.save = watched  # type: ignore[method-assign]
    tenants = ["north", "south", "", "east"]
    requests = [
        engine.add(str(n), ids, GREEDY, tenant=tenants[n % 4]) for n, ids in enumerate(prompts(8))
    ]
    while engine.has_work:
        engine.step()
        assert offloader.drain(30)
        offloader.empty_host()
    again = 0
    for request in requests:
        for index, key in enumerate(request.chain.keys):
            owners = saved.get(key, [])
            assert {owner for owner, _ in owners} <= {request.tenant}
            assert {parent for _, parent in owners} <= {request.chain.key_before(index)}
            again += len(owners) > 1 and request.tenant != ""
    assert again > 3
