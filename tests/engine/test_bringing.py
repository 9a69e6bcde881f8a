"""Blocks that a step brings from DRAM: each layer is there when it is read, with the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine.packed_blocks import form_of, pack_into, same_bits, strange_pool
from engine.ruled_models import MODELS as RULED
from engine.ruled_models import make_model
from engine.test_node_engine import Node
from engine.test_packed_cold import (
    DEVICE,
    LAYERS,
    MANY_REGIONS,
    SHAPES,
    addresses_of,
    layer_bytes_of,
    make,
)
from engine.test_runner import BLOCK_TOKENS, SMALL, Sequence, need_interpreter
from tiny import BLOCK_BYTES, idle
from tiny import BLOCK_TOKENS as TINY_TOKENS

from penstock.codecs.base import Codec, RawCodec
from penstock.codecs.lossless import LosslessCodec
from penstock.config import Config, DiskConfig, HostConfig, NodeConfig
from penstock.costs.choose import LoadChoice
from penstock.engine import bringing, fp8
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel, load_model
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request, RequestPhase
from penstock.engine.residency import ResidencyConfig
from penstock.engine.runner import Runner, TorchRunner
from penstock.engine.table import BlockTable, arriving_in
from penstock.errors import BookError
from penstock.events import Event, Stepped
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot, Tier
from tests.node.nodes import be_patient

pytest.importorskip("triton")

from penstock.engine.attention import bring_triton
from penstock.engine.attention import packed_triton as packed
from penstock.engine.attention import triton as kernels


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, programs that have nothing to do take as long as others."""
    if DEVICE.type != "cuda":
        for name in ("_NUM_PROGRAMS", "_NUM_PACKED_PROGRAMS", "_NUM_UNPACKING"):
            monkeypatch.setattr(bringing, name, 2)


def list_of(sources: Any, targets: Any) -> torch.Tensor:
    pairs = np.stack([sources, targets], axis=1).ravel()
    return torch.tensor([len(sources), *pairs, 1, 1], device=DEVICE)


@pytest.mark.parametrize("shape", [*SHAPES, MANY_REGIONS], ids=str)
def test_packed_blocks_are_unpacked_where_they_belong(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    pool, host = make(shape, torch.bfloat16, 6)
    addresses = addresses_of(pool, host)
    target = torch.full_like(pool, 7)
    there = addresses_of(target, host)
    pins, slots = np.array([~2, ~5, ~0]), np.array([4, 1, 3])
    blocks = list_of(addresses.of(pins), there.of(slots))
    for layer in range(LAYERS):
        at = layer * layer_bytes_of(pool)
        size = packed.packed_layer_bytes(host.form, layer_bytes_of(pool))
        arrived = torch.full((4, size), 7, dtype=torch.uint8, device=DEVICE)
        source_at = packed.packed_at(host.form, at) - 1
        bring_triton.copy_blocks(
            blocks, bring_triton.words_of(arrived, size), source_at, None, size, 3
        )
        assert (arrived[3] == 7).all()
        constants = bring_triton.unpack_constants(host.form, layer_bytes_of(pool))
        bring_triton.unpack_blocks(blocks, arrived, at, 2, constants)
        assert same_bits(target[[4, 1, 3], layer], pool[[3, 0, 5], layer])
        assert (target[:, layer + 1 :] == 7).all()
    assert (target[[0, 2, 5]] == 7).all()


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((3, 1, 1), torch.uint8),  # a layer of 6 bytes
        ((5, 1, 3), torch.uint8),  # 30
        ((3, 1, 2), torch.float16),  # 24
        ((16, 8, 128), torch.bfloat16),
        ((16, 3, 80), torch.float32),
    ],
    ids=str,
)
def test_raw_blocks_are_copied_where_they_belong(
    shape: tuple[int, int, int], kind: torch.dtype
) -> None:
    size = (6, LAYERS, 2, *shape)
    pool = torch.randint(0, 255, (*size[:-1], size[-1] * kind.itemsize), dtype=torch.uint8)
    pool = pool.to(DEVICE)
    target = torch.full_like(pool, 7)
    stride = pool.stride(0)
    pins, slots = np.array([2, 5, 0]), np.array([4, 1, 3])
    blocks = list_of(pool.data_ptr() + pins * stride, target.data_ptr() + slots * stride)
    size = layer_bytes_of(pool)

    def bring(blocks: torch.Tensor, at: int) -> None:
        words = bring_triton.words_of(blocks, size)
        bring_triton.copy_blocks(blocks, words, at, at, size, 2)

    for layer in range(LAYERS):
        bring(blocks, layer * size)
        assert torch.equal(target[[4, 1, 3], layer], pool[[2, 5, 0], layer])
        assert (target[:, layer + 1 :] == 7).all()
    assert (target[[0, 2, 5]] == 7).all()
    bring(list_of(pins[:0], slots[:0]), 0)  # nothing to do


def test_a_table_knows_what_arrives() -> None:
    table = BlockTable([Slot(7)])
    assert not table.arriving
    table.extend_arriving([Slot(3), Slot(5)], [Slot(20), Slot(21)])
    assert table.arriving == range(1, 3)
    assert table.num_cold == 0
    assert table.slots(0, 3) == [7, 3, 5]
    with pytest.raises(BookError, match="arrive already"):
        table.extend_arriving([Slot(1)], [Slot(2)])
    with pytest.raises(BookError, match="2 blocks arrive, but 1"):
        BlockTable().extend_arriving([Slot(1), Slot(2)], [Slot(2)])
    pins, slots = arriving_in([BlockTable([Slot(1)]), table])
    assert (pins.tolist(), slots.tolist()) == ([20, 21], [3, 5])
    assert table.end_arriving() == [20, 21]
    assert not table.arriving
    table.extend_arriving([Slot(4)], [Slot(9)])
    assert table.take_all() == ([7, 3, 5, 4], [9])  # both are given back
    assert arriving_in([table])[0].size == 0
    table.extend([Slot(7)])
    table.extend_arriving([Slot(3), Slot(5)], [Slot(20), Slot(21)])
    assert table.chill_arriving() == [3, 5]
    assert (list(table), table.num_cold) == ([7, ~20, ~21], 2)
    assert table.take_all() == ([7], [20, 21])
    assert not table.arriving
    assert len(table) == 0


def make_runner(
    name: str, loaded: LoadedModel, pool: DevicePool, host: HostArena, form: Any = None
) -> Runner:
    if name == "torch":
        return TorchRunner(loaded.model, pool, BLOCK_TOKENS, loaded.num_heads, host, host_form=form)
    need_interpreter()
    from penstock.engine.triton_runner import TritonRunner

    return TritonRunner(
        loaded, pool, BLOCK_TOKENS, host, max_num_seqs=4, host_form=form, brings=True
    )


class Rig:
    """A pool with the KV of two sequences, some of which is taken away and left in DRAM."""

    def __init__(
        self, name: str, loaded: LoadedModel, *, packed: bool = False, kind: Any = None
    ) -> None:
        shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
        self.pool = DevicePool(32, *shape, kind or loaded.dtype)
        if packed:
            values = strange_pool(self.pool.tensor.shape, loaded.dtype)
            self.pool.tensor.copy_(values.nan_to_num(0.5, 1.5, -1.5))
        else:
            values = torch.randn(self.pool.tensor.shape, generator=torch.Generator().manual_seed(1))
            self.pool.tensor.copy_(values.to(self.pool.tensor.dtype))
        self.before = self.pool.tensor.clone()
        form = form_of(self.pool.tensor) if packed else None
        self.codec: Codec = RawCodec(self.pool.block_bytes) if form is None else LosslessCodec(form)
        spec = BlockSpec(bytes(32), self.codec.packed_bytes, BLOCK_TOKENS)
        self.host = HostArena(spec, 16 * (self.codec.packed_bytes + 4096))
        self.runner = make_runner(name, loaded, self.pool, self.host, form)
        assert self.runner.max_brought > 8
        tokens = [[(i * step + 3) % 60 + 3 for i in range(51)] for step in (7, 11)]
        self.sequences = [
            Sequence(tokens[0], [5, 3, 9, 1, 0, 2, 30]),
            Sequence(tokens[1], [10, 11, 12, 13, 14, 15, 16]),
            Sequence(tokens[0][:48], [17, 18, 19, 20, 21, 22, 23]),  # it ends with a block
        ]

    def put(self, slot: int, pin: int) -> None:
        """Move a block to DRAM. What is left on the device is nonsense."""
        pack_into(self.codec, self.before[slot], self.host.view(Slot(pin)))
        self.pool.tensor[slot].view(torch.uint8).fill_(0xFF)  # NaN, in every type

    def arrive(self, number: int, start: int, first_pin: int) -> None:
        """The sequence's blocks from `start` on arrive in the next step, but for its last."""
        table = self.sequences[number].table
        slots = table.slots(0, len(table))
        last = len(slots) - 1
        pins = [Slot(first_pin + n) for n in range(last - start)]
        for slot, pin in zip(slots[start:last], pins, strict=True):
            self.put(slot, pin)
        table.take_all()
        table.extend(slots[:start])
        table.extend_arriving(slots[start:last], pins)
        table.extend(slots[last:])

    def arrived(self) -> None:
        for each in self.sequences:
            each.table.end_arriving()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # no bf16 on this CPU
@pytest.mark.parametrize("held", ["raw", "packed", "fp8"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_step_gives_the_same_with_blocks_that_it_brings(
    name: str, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter cannot multiply bfloat16: there float16 stands for it."""
    torch.manual_seed(0)
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 128}
    config = transformers.LlamaConfig(**{**SMALL, **shape})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    dtype = {"raw": "float32", "fp8": "float32"}.get(
        held, "bfloat16" if name == "torch" else "float16"
    )
    loaded = load_model(str(tmp_path), dtype=dtype)
    kind = fp8.DTYPE if held == "fp8" else None
    monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
    rig = Rig(name, loaded, packed=held == "packed", kind=kind)
    one, two, whole = rig.sequences
    steps = [
        [replace(whole.chunk(47, 48), num_present=1)],  # its KV is present, and not written
        [one.chunk(50, 51)],  # the prompt's last token alone
        [one.chunk(48, 51)],  # the last few
        [one.chunk(50, 51), two.chunk(50, 51)],
        [one.chunk(50, 51), two.chunk(48, 51)],
    ]
    for number, chunks in enumerate(steps):
        wanted = rig.runner.run(chunks).clone()
        resident = rig.pool.tensor.clone()
        rig.arrive(2 if number == 0 else 0, number, 0)
        if len(chunks) > 1:
            rig.arrive(1, 5 - number, 8)
        assert torch.equal(rig.runner.run(chunks), wanted), number
        assert same_bits(rig.pool.tensor, resident), number
        rig.arrived()
    rig.runner.close()


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "deepseek_v3", "mistral"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_every_layer_of_every_kind_of_model_waits(kind: str, name: str, tmp_path: Path) -> None:
    make_model(RULED[kind]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    rig = Rig(name, loaded)
    one, *_ = rig.sequences
    for start in (50, 48):
        wanted = rig.runner.run([one.chunk(start, 51)]).clone()
        resident = rig.pool.tensor.clone()
        rig.arrive(0, 0, 0)
        assert torch.equal(rig.runner.run([one.chunk(start, 51)]), wanted)
        rig.arrived()
        assert same_bits(rig.pool.tensor, resident)  # also what a window does not reach
    rig.runner.close()


def test_blocks_arrive_beside_cold_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 5})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rig = Rig("triton", load_model(str(tmp_path), dtype="float32"))
    one, two, _ = rig.sequences
    for chunks in ([one.chunk(50, 51), two.chunk(50, 51)], [one.chunk(48, 51), two.chunk(50, 51)]):
        wanted = rig.runner.run(chunks).clone()
        rig.arrive(0, 1, 0)
        slot = two.table.chill(2, Slot(9))
        rig.put(slot, 9)
        for _ in range(2):  # then once more without any that arrive
            assert torch.equal(rig.runner.run(chunks), wanted)
            rig.arrived()
        two.table.warm(2, slot)
        rig.pool.tensor[slot] = rig.before[slot]


# The engine: what is told is, bit for bit, what is told if blocks are loaded before the step.


@dataclass
class Watch:
    """What the engine's steps brought."""

    num_brought: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.num_brought += event.num_cold_blocks

    def step(self, engine: Engine) -> None:
        for progress in engine.step():
            name, sampled = progress.request.id, progress.sampled
            self.tokens.setdefault(name, []).append(sampled.token_id)
            assert sampled.logprob is not None
            self.logprobs.setdefault(name, []).append(sampled.logprob)


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)


@contextmanager
def opened(
    loaded: LoadedModel,
    watch: Watch,
    *,
    host: bool = True,
    disk: Path | None = None,
    ahead: bool = True,
    in_step: bool | None = True,
    num_blocks: int = 64,
) -> Iterator[Engine]:
    below = DiskConfig()
    if disk is not None:
        below = DiskConfig(path=str(disk), size_bytes=256 * (BLOCK_BYTES + 512) + 65536)
    tiers = Config(HostConfig(size_bytes=128 * BLOCK_BYTES, huge_pages=False), below)
    config = EngineConfig(
        num_blocks * BLOCK_BYTES, TINY_TOKENS, 64, 4, launch_ahead=ahead, load_in_step=in_step
    )
    engine = Engine(loaded, config, tiers if host else None, (watch,))
    prepare(engine)
    try:
        yield engine
    finally:
        engine.close()


def prepare(engine: Engine) -> None:
    """As on a GPU. All that is found is loaded: it seems to take less time than to compute it."""
    engine.runner.only_queues = True
    engine.scheduler._choose = lambda match, num_past: LoadChoice(match.num_blocks, 0.0, 60.0)


def forget(engine: Engine) -> None:
    """Leave nothing on the device but nonsense."""
    idle(engine)
    engine.pool.forget()
    engine.device.tensor.fill_(float("nan"))


def run(engine: Engine, watch: Watch, prompts: dict[str, list[int]]) -> list[Request]:
    requests = [engine.add(name, ids, GREEDY) for name, ids in prompts.items()]
    for _ in range(10_000):
        if not engine.has_work:
            return requests
        watch.step(engine)
    raise AssertionError("requests never ended")


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 40_000) for _ in range(num_tokens)]


def expected(loaded: LoadedModel, prompts: dict[str, list[int]]) -> Watch:
    """What is told if blocks are loaded first, as an engine without lower tiers tells it."""
    plain, watch = Watch(), Watch()
    with opened(loaded, plain, host=False) as engine:
        for name, ids in prompts.items():
            run(engine, plain, {name: ids})
    with opened(loaded, watch, in_step=False) as engine:
        run(engine, Watch(), prompts)
        forget(engine)
        for name, ids in prompts.items():
            run(engine, watch, {name: ids})
    assert watch.num_brought == 0
    assert watch.tokens == plain.tokens
    for name, logprobs in watch.logprobs.items():  # chunks of other sizes are rounded otherwise
        assert logprobs == pytest.approx(plain.logprobs[name], abs=1e-3)
    return watch


LENGTHS = [2 * TINY_TOKENS, 5 * TINY_TOKENS + 1, 7 * TINY_TOKENS + 9, 9 * TINY_TOKENS]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_prompt_in_dram_is_answered_as_if_it_were_computed(
    loaded: LoadedModel, ahead: bool
) -> None:
    prompts = {str(n): prompt_of(n, n) for n in LENGTHS}
    plain, watch = expected(loaded, prompts), Watch()
    with opened(loaded, watch, ahead=ahead) as engine:
        run(engine, Watch(), prompts)
        forget(engine)
        for name, ids in prompts.items():  # one after the other
            before = watch.num_brought
            (request,) = run(engine, watch, {name: ids})
            assert watch.num_brought - before == len(ids) // TINY_TOKENS
            assert request.found[Tier.HOST] == len(ids) // TINY_TOKENS
            assert request.num_loaded_tokens == len(ids) // TINY_TOKENS * TINY_TOKENS
            assert request.num_cached_tokens == min(request.num_loaded_tokens, len(ids) - 1)
        idle(engine)
        assert (watch.tokens, watch.logprobs) == (plain.tokens, plain.logprobs)
        # They are on the device now, under their names.
        (request,) = run(engine, Watch(), {"again": prompts[str(LENGTHS[2])]})
        assert request.found[Tier.DEVICE] == LENGTHS[2] // TINY_TOKENS


def test_nobody_shares_blocks_before_their_step_is_queued(loaded: LoadedModel) -> None:
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    plain, watch = expected(loaded, {"a": ids, "b": ids}), Watch()
    with opened(loaded, watch) as engine:
        run(engine, Watch(), {"first": ids})
        for gap in range(8):
            forget(engine)
            watch.tokens, watch.logprobs = {}, {}
            before = watch.num_brought
            engine.add("a", ids, GREEDY)
            for _ in range(gap):
                watch.step(engine)
            run(engine, watch, {"b": ids})
            # Together they would wait for the link.
            assert watch.num_brought - before == (6 if gap else 0)
            assert watch.tokens == plain.tokens
            for name, found in watch.logprobs.items():  # batches differ
                assert found == pytest.approx(plain.logprobs[name], abs=1e-3)
        idle(engine)


def test_a_sequence_that_sits_out_offers_nothing(loaded: LoadedModel) -> None:
    """Its grammar is late, for example: its blocks have slots, but nothing is in them yet."""
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    wanted, watch = expected(loaded, {"a": ids, "b": ids}), Watch()
    with opened(loaded, watch) as engine:
        run(engine, Watch(), {"first": ids})
        forget(engine)
        request = engine.add("a", ids, GREEDY)
        may_run = False
        request.is_ready = lambda: may_run
        while request.phase is not RequestPhase.RUNNING:
            watch.step(engine)
        assert len(request.table.arriving) == 6
        other = engine.add("b", ids, GREEDY)
        while other.finish_reason is None:
            watch.step(engine)
        may_run = True
        while engine.has_work:
            watch.step(engine)
        assert (watch.tokens, watch.logprobs) == (wanted.tokens, wanted.logprobs)
        idle(engine)


def test_others_are_not_made_to_wait_for_the_link(loaded: LoadedModel) -> None:
    ids, other = prompt_of(6 * TINY_TOKENS, 1), prompt_of(40, 2)
    watch = Watch()
    with opened(loaded, watch) as engine:
        run(engine, watch, {"first": ids})
        forget(engine)
        run(engine, watch, {"other": other, "a": ids})
        assert watch.num_brought == 0
        forget(engine)
        run(engine, watch, {"again": ids, "another": other})
        assert watch.num_brought == 0


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_gives_everything_back(loaded: LoadedModel, num_steps: int) -> None:
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    plain, watch = expected(loaded, {"b": ids}), Watch()
    with opened(loaded, watch) as engine:
        run(engine, Watch(), {"first": ids})
        forget(engine)
        engine.add("a", ids, GREEDY)
        for _ in range(num_steps):
            watch.step(engine)
        engine.abort("a")
        watch.tokens, watch.logprobs = {}, {}
        run(engine, watch, {"b": ids})
        assert (watch.tokens, watch.logprobs) == (plain.tokens, plain.logprobs)
        idle(engine)


def test_an_abort_between_the_load_and_its_step(loaded: LoadedModel) -> None:
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    with opened(loaded, Watch()) as engine:
        run(engine, Watch(), {"first": ids})
        forget(engine)
        request = engine.add("a", ids, GREEDY)
        while not request.table.arriving:
            engine._settle()
            if request.phase is RequestPhase.WAITING:
                engine.scheduler.schedule()
        assert engine.offloader is not None
        assert engine.offloader.num_pinned == 6
        engine.abort("a")
        idle(engine)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_that_fails_loses_nothing(loaded: LoadedModel, is_late: bool) -> None:
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    plain, watch = expected(loaded, {"b": ids}), Watch()
    with opened(loaded, watch) as engine:
        run(engine, Watch(), {"first": ids})
        forget(engine)
        compute = engine.runner.run

        def fail(chunks: Any, *more: Any) -> Any:
            if not any(chunk.request.table.arriving for chunk in chunks):
                return compute(chunks, *more)
            engine.runner.run = compute  # type: ignore[method-assign]
            if is_late:
                compute(chunks, *more)
            raise RuntimeError("a fault")

        engine.runner.run = fail  # type: ignore[method-assign]
        engine.add("a", ids, GREEDY)
        while engine.has_work:
            watch.step(engine)
        ((failed, _),) = engine.take_failed()
        assert failed.id == "a"
        watch.tokens, watch.logprobs = {}, {}
        run(engine, watch, {"b": ids})
        assert (watch.tokens, watch.logprobs) == (plain.tokens, plain.logprobs)
        idle(engine)


def test_blocks_on_disk_are_loaded_as_before(loaded: LoadedModel, tmp_path: Path) -> None:
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    plain, watch = expected(loaded, {"a": ids}), Watch()
    with opened(loaded, watch, disk=tmp_path) as engine:
        run(engine, Watch(), {"first": ids})
        forget(engine)
        assert engine.offloader is not None
        engine.offloader.empty_host()
        (request,) = run(engine, watch, {"a": ids})
        assert request.found[Tier.DISK] == 6
        assert watch.num_brought == 0
        assert (watch.tokens, watch.logprobs) == (plain.tokens, plain.logprobs)


def test_a_short_load_is_not_worth_a_step_without_a_graph(loaded: LoadedModel) -> None:
    asked: list[tuple[int, int]] = []

    def takes_apart(num_tokens: int, end: int) -> bool:
        asked.append((num_tokens, end))
        return num_tokens <= 4

    for rest, seconds, is_brought in ((4, 0.001, True), (5, 0.001, False), (5, 0.01, True)):
        ids, watch = prompt_of(6 * TINY_TOKENS + rest, 1), Watch()
        with opened(loaded, watch) as engine:
            engine.runner.takes_apart = takes_apart
            run(engine, watch, {"first": ids})
            forget(engine)
            choice = LoadChoice(6, seconds, 60.0)
            engine.scheduler._choose = lambda match, num_past, choice=choice: choice
            run(engine, watch, {"again": ids})
            assert watch.num_brought == (6 if is_brought else 0)
            assert asked[-1] == (rest, len(ids))


@pytest.mark.parametrize("wish", [None, False])  # None: on a GPU only
def test_on_a_cpu_it_is_off_unless_asked_for(loaded: LoadedModel, wish: bool | None) -> None:
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    watch = Watch()
    with opened(loaded, watch, in_step=wish) as engine:
        run(engine, watch, {"first": ids})
        forget(engine)
        (request,) = run(engine, watch, {"a": ids})
        assert request.found[Tier.HOST] == 6
        assert watch.num_brought == 0


def test_random_requests_are_told_what_they_should_be(loaded: LoadedModel) -> None:
    """Requests come while others load, run, or have just ended; some are aborted."""
    rng = random.Random(5)
    heads = [prompt_of(rng.choice((32, 80, 130)), n) for n in range(3)]
    prompts = {
        f"{n}": (rng.choice(heads) + prompt_of(rng.choice((1, 5, 17, 40)), 100 + n))[:180]
        for n in range(12)
    }
    plain, watch = expected(loaded, prompts), Watch()
    with opened(loaded, watch) as engine:
        for turn in range(60):
            if rng.random() < 0.5:
                forget(engine)
            for name in rng.sample(sorted(prompts), rng.choice((1, 1, 2))):
                watch.tokens.pop(name, None)
                engine.add(name, prompts[name], GREEDY)
                for _ in range(rng.randrange(4)):
                    watch.step(engine)
                if rng.random() < 0.2:
                    engine.abort(name)
                    watch.tokens.pop(name, None)
            while engine.has_work:
                watch.step(engine)
            for name, tokens in watch.tokens.items():
                assert tokens == plain.tokens[name], (turn, name)
            watch.tokens = {}
        idle(engine)
    assert watch.num_brought > 50


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("num_found", [6, 7, 8])
@pytest.mark.parametrize("num_more", [1, 9, 40])
def test_a_prompt_as_large_as_the_pool(
    loaded: LoadedModel, num_found: int, num_more: int, in_step: bool
) -> None:
    """A pool of 8 blocks: what arrives cannot leave it again to make room for the rest."""
    ids = prompt_of(num_found * TINY_TOKENS + num_more, 1)
    head = ids[: num_found * TINY_TOKENS + 1]
    watch = Watch()
    with opened(loaded, Watch(), host=False) as engine:
        run(engine, watch, {"a": ids})
    wanted, watch = watch.tokens, Watch()
    with opened(loaded, watch, num_blocks=8, in_step=in_step) as engine:
        run(engine, Watch(), {"first": head})
        forget(engine)
        (request,) = run(engine, watch, {"a": ids})
        assert request.finish_reason == "length"
        assert request.found[Tier.HOST] == num_found
        assert watch.tokens == wanted
        idle(engine)


def test_what_arrives_stays_in_dram_if_there_is_no_room_for_the_rest(loaded: LoadedModel) -> None:
    """Others took the room since the load began."""
    ids = prompt_of(6 * TINY_TOKENS + 40, 1)
    wanted, watch = expected(loaded, {"a": ids}), Watch()
    with opened(loaded, watch, num_blocks=10) as engine:
        run(engine, Watch(), {"first": ids[: 6 * TINY_TOKENS + 1]})
        forget(engine)
        request = engine.add("a", ids, GREEDY)
        may_run = False
        request.is_ready = lambda: may_run
        while not request.table.arriving:
            watch.step(engine)
        taken = engine.pool.take(engine.pool.num_available)
        assert taken is not None
        may_run = True
        while engine.has_work:
            watch.step(engine)
        assert request.finish_reason == "length"
        assert watch.tokens == wanted.tokens
        assert engine.scheduler.num_preemptions == 0
        engine.pool.release(taken)
        idle(engine)


def test_while_dram_is_being_pinned_for_a_gpu(loaded: LoadedModel) -> None:
    """A copy waits for it. A pin would be refused, and the block computed."""
    ids = prompt_of(7 * TINY_TOKENS + 3, 1)
    watch = Watch()
    with opened(loaded, watch) as engine:
        run(engine, Watch(), {"first": ids})
        forget(engine)
        assert engine.offloader is not None
        host = engine.offloader.host
        assert host is not None
        host.num_for_device = 2
        (request,) = run(engine, watch, {"a": ids})
        assert (request.found[Tier.HOST], watch.num_brought) == (7, 0)
        assert not request.lost
        host.num_for_device = host.num_slots
        forget(engine)
        (request,) = run(engine, watch, {"b": ids})
        assert (request.found[Tier.HOST], watch.num_brought) == (7, 7)


def test_the_link_is_still_measured(loaded: LoadedModel) -> None:
    ids = prompt_of(12 * TINY_TOKENS + 3, 1)
    watch = Watch()
    with opened(loaded, watch) as engine:
        run(engine, watch, {"first": ids})
        assert engine.offloader is not None

        def num_ordinary(choice: LoadChoice, rounds: int) -> int:
            engine.scheduler._choose = lambda match, num_past: choice
            watch.num_brought = 0
            for number in range(rounds):
                forget(engine)
                (request,) = run(engine, watch, {f"{choice}-{number}": ids})
                assert request.found[Tier.HOST] == 12
            return rounds - watch.num_brought // 12

        assert num_ordinary(LoadChoice(12), 2) == 2  # its rate is unknown
        assert num_ordinary(LoadChoice(12, 2.0, 1.0), 2) == 2  # tried although it seems slow
        assert num_ordinary(LoadChoice(12, 0.1, 1.0), 32) == 1  # now and then


def test_a_block_that_is_not_what_its_seal_says_is_computed(loaded: LoadedModel) -> None:
    """Its slot in DRAM was overwritten behind the books."""
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    wanted, watch = expected(loaded, {"a": ids}), Watch()
    with opened(loaded, watch) as engine:
        (request,) = run(engine, Watch(), {"first": ids})
        forget(engine)
        tiers: Any = engine.offloader
        (slot,) = tiers.pin(request.chain.keys[3:4])
        tiers.unpin([slot])
        tiers._pin_check._seals.open([slot])
        tiers.host.view(slot)[:] = b"\x7f" * len(tiers.host.view(slot))
        (request,) = run(engine, watch, {"a": ids})
        assert watch.num_brought == request.found[Tier.HOST] == 3  # those before it
        assert watch.tokens == wanted.tokens
        idle(engine)


def test_blocks_that_are_verified_are_loaded_as_before(loaded: LoadedModel) -> None:
    """Threads that copy verify them; a step would wait until all of them are summed."""
    ids = prompt_of(6 * TINY_TOKENS + 3, 1)
    watch = Watch()
    host = HostConfig(size_bytes=64 * BLOCK_BYTES, huge_pages=False, verify=True)
    config = EngineConfig(64 * BLOCK_BYTES, TINY_TOKENS, 64, load_in_step=True)
    engine = Engine(loaded, config, Config(host), (watch,))
    prepare(engine)
    run(engine, Watch(), {"first": ids})
    forget(engine)
    (request,) = run(engine, watch, {"a": ids})
    assert (request.found[Tier.HOST], watch.num_brought) == (6, 0)
    engine.close()


# A node: its client may pin only a share of its DRAM, and it may die at any moment.


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    be_patient(monkeypatch)
    made = Node(tmp_path / "node.sock", dram=2 << 20, pin_share=0.1)
    yield made
    made.stop()


@contextmanager
def at(node: Node, loaded: LoadedModel, watch: Watch) -> Iterator[Engine]:
    config = EngineConfig(
        64 * BLOCK_BYTES,
        TINY_TOKENS,
        64,
        4,
        residency=ResidencyConfig(cold=False),
        launch_ahead=True,
        load_in_step=True,
    )
    engine = Engine(loaded, config, Config(node=NodeConfig(url=node.url)), (watch,))
    prepare(engine)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("num_more", [-2, 2])
def test_no_more_is_brought_than_a_nodes_client_may_pin(
    loaded: LoadedModel, node: Node, num_more: int
) -> None:
    watch = Watch()
    with at(node, loaded, watch) as engine:
        assert engine.offloader is not None
        num_blocks = engine.offloader.num_pinnable_blocks + num_more
        ids = prompt_of(num_blocks * TINY_TOKENS + 3, 1)
        run(engine, watch, {"first": ids})
        forget(engine)
        (request,) = run(engine, watch, {"a": ids})
        assert watch.tokens["a"] == watch.tokens["first"]
        assert request.num_loaded_tokens == num_blocks * TINY_TOKENS
        assert watch.num_brought == (num_blocks if num_more < 0 else 0)
        idle(engine)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_node_that_dies_between_the_load_and_its_step(
    loaded: LoadedModel, node: Node, restarts: bool
) -> None:
    ids = prompt_of(7 * TINY_TOKENS + 3, 1)
    watch = Watch()
    with at(node, loaded, watch) as engine:
        run(engine, watch, {"first": ids})
        forget(engine)
        request = engine.add("a", ids, GREEDY)
        may_run = False
        request.is_ready = lambda: may_run
        while not request.table.arriving:
            watch.step(engine)
        node.stop()
        if restarts:
            node.start()
        run_beside(engine, watch, prompt_of(9 * TINY_TOKENS, 2))
        may_run = True
        while engine.has_work:
            watch.step(engine)
        assert watch.num_brought == 7
        assert watch.tokens["a"] == watch.tokens["first"]
        assert engine.offloader is not None
        assert engine.offloader.num_pinned == 0
        engine.scheduler.check()
        assert engine.pool.num_available == engine.pool.num_blocks


def run_beside(engine: Engine, watch: Watch, ids: list[int]) -> None:
    other = engine.add("other", ids, GREEDY)
    while other.finish_reason is None:
        watch.step(engine)
