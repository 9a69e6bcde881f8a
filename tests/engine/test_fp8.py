"""KV in 8 bits (`kv_cache_dtype="fp8"`): rounded once, and then the same bytes everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine.test_attention import decode, make_tables
from engine.test_runner import BLOCK_TOKENS as ROW_TOKENS
from engine.test_runner import MODELS, SMALL, Sequence, compare, make
from tiny import BLOCK_BYTES, BLOCK_TOKENS, always_load, idle
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from penstock import LLM, SamplingParams
from penstock.config import Config, DiskConfig, HostConfig
from penstock.config.options import EngineOptions
from penstock.engine import fp8
from penstock.engine.engine import Engine
from penstock.engine.models import ATTENTION, LoadedModel, load_model
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.engine.runner import TorchRunner
from penstock.errors import ConfigError
from penstock.events import Audited, AuditFailed, Event
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.transfer.pinning import PinnedSlots
from penstock.types import BlockSpec, Slot

BYTES = BLOCK_BYTES // 4  # of a block, in place of the model's float32
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
ALL_BFLOATS = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


# Rounding.


def test_bytes_are_those_of_torch_and_saturate() -> None:
    found = fp8.narrow(ALL_BFLOATS)
    numbers = ALL_BFLOATS.float()
    is_nan = numbers.isnan()
    wanted = numbers.clamp(-448, 448).to(fp8.DTYPE).view(torch.uint8)
    assert torch.equal(found[~is_nan], wanted[~is_nan])
    assert (found[is_nan] == 0x7F).all()
    largest = fp8.narrow(torch.tensor([448.0, 449.0, 1e30, float("inf"), -1e30, -float("inf")]))
    assert largest.tolist() == [0x7E] * 4 + [0xFE] * 2
    assert fp8.narrow(torch.tensor([0.0, -0.0, 1e-20, -1e-20])).tolist() == [0, 0x80, 0, 0x80]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_kernel_rounds_and_widens_like_torch(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from penstock.engine.attention import triton as kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    patterns = ALL_BFLOATS.view(torch.float16) if dtype is torch.float16 else ALL_BFLOATS
    # A layer of one block: 64 tokens of 8 heads, keys and values.
    numbers = patterns.to(dtype).view(2, 64, 8, 64).to(device)
    block = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    token_bytes = 8 * 64
    addresses = block.data_ptr() + torch.arange(64, device=device) * token_bytes
    with np.errstate(invalid="ignore"):  # in the interpreter: NaNs, on some processors
        kernels.store_tokens(numbers[0], numbers[1], addresses, 0, 64, is_fp8=True)
    assert torch.equal(block.cpu(), fp8.narrow(numbers.cpu()).flatten())
    assert len(block.unique()) == 255  # 0xFF is never written
    block[0] = 0xFF
    wide = torch.empty(2, 1, 64, 8, 64, dtype=dtype, device=device)
    with np.errstate(invalid="ignore"):
        kernels.copy_layer(torch.tensor([block.data_ptr()], device=device), 0, wide, is_fp8=True)
    wanted = block.cpu().view(fp8.DTYPE).to(dtype)
    assert torch.equal(wide.cpu().flatten().isnan(), wanted.isnan())
    there = ~wanted.isnan()
    assert torch.equal(wide.cpu().flatten()[there], wanted[there])
    assert torch.equal(wide.cpu().flatten()[there].signbit(), wanted[there].signbit())


# Attention.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_attends_as_to_the_same_values_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = torch.randn(40, 2, 2, BLOCK_TOKENS, 2, 32).to(fp8.DTYPE)
    lengths, query = [1, 17, 300], (3 * torch.randn(3, 4, 32)).to(dtype)
    tables = make_tables(lengths, 40)
    found = decode(pool, tables, lengths, 4).attend(query, 1, 0.2)
    assert found.dtype is dtype
    wide = pool.float()  # read by address, so it must stay
    assert torch.equal(found, decode(wide, tables, lengths, 4).attend(query, 1, 0.2))


@pytest.mark.parametrize("dim", [32, 80])
def test_a_gpus_kernel_attends_as_to_the_same_values_in_float32(dim: int) -> None:
    pytest.importorskip("triton")
    from engine import test_triton

    from penstock.engine.attention import triton as kernels

    torch.manual_seed(0)
    wide, host = test_triton.make(40, BLOCK_TOKENS, 2, dim, torch.float32)
    pool = fp8.narrow(wide)
    wide = pool.view(fp8.DTYPE).float()
    lengths, query = [1, 17, 300], torch.randn(3, 4, dim)
    tables = make_tables(lengths, 40)
    wanted = test_triton.attend(query, wide, host, tables, lengths, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "attend_wave", partial(kernels.attend_wave, is_fp8=True))
        found = test_triton.attend(query, pool, host.to(torch.uint8), tables, lengths, 1)
    assert torch.equal(found, wanted)


# Runners.


def _round(numbers: Tensor) -> Tensor:
    return fp8.narrow(numbers).view(fp8.DTYPE).to(numbers.dtype)


def _rounded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> Any:
    return sdpa_attention_forward(module, query, _round(key), _round(value), mask, **options)


def _pool(loaded: LoadedModel, num_blocks: int = 32, device: str = "cpu") -> DevicePool:
    pool = DevicePool(
        num_blocks,
        loaded.num_layers,
        ROW_TOKENS,
        loaded.num_kv_heads,
        loaded.head_dim,
        torch.float8_e4m3fn,
        device,
    )
    pool.tensor.view(torch.uint8).fill_(0x7F)  # NaN: what was not written must not be read
    return pool


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # with our forward pass and without
def test_logits_are_those_of_rounded_kv_however_a_prompt_is_cut(
    kind: str, name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    one = Sequence([(i * 7 + 3) % 60 + 3 for i in range(51)], [5, 3, 9, 1, 0, 2, 30])
    two = Sequence([(i * 11 + 5) % 60 + 3 for i in range(34)], [10, 11, 12, 13, 14])
    AttentionInterface.register("rounded", _rounded_attention)
    loaded.model.config._attn_implementation = "rounded"
    with torch.inference_mode():
        expected = [loaded.model(torch.tensor([each.tokens])).logits[0] for each in (one, two)]
    loaded.model.config._attn_implementation = ATTENTION

    pool = _pool(loaded)
    host = HostArena(BlockSpec(bytes(32), pool.block_bytes, ROW_TOKENS), 1 << 20)
    runner = make(name, loaded, pool, host)
    runner.warm_up(lambda _: None)
    assert (pool.tensor.view(torch.uint8) == 0x7F).all()
    whole_one, whole_two = one.tokens, two.tokens
    one.tokens = whole_one[:20]
    compare(runner.run([one.chunk(0, 20)]), [expected[0][19]])  # its own keys are rounded too
    one.tokens = whole_one
    runner.run([one.chunk(20, 35), two.chunk(0, 10)])
    for sequence, index, pin in ((one, 1, 7), (one, 2, 3), (two, 0, 11)):
        slot = sequence.table.chill(index, Slot(pin))
        host.view(Slot(pin))[: pool.block_bytes] = bytes(pool.view(slot))
        pool.tensor[slot].view(torch.uint8).fill_(0x7F)
    runner.run([two.chunk(10, 32), one.chunk(35, 36)])
    one.tokens, two.tokens = whole_one[:50], whole_two[:33]
    logits = runner.run([one.chunk(36, 50), two.chunk(32, 33)])
    compare(logits, [expected[0][49], expected[1][32]])
    one.tokens, two.tokens = whole_one, whole_two
    compare(runner.run([one.chunk(50, 51), two.chunk(33, 34)]), [expected[0][50], expected[1][33]])


@pytest.mark.parametrize("room_blocks", [2, 100])
def test_cold_blocks_change_no_bit_in_the_kernels_of_a_gpu(
    room_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from engine.cold_steps import ColdSteps

    from penstock.engine import fetching
    from penstock.engine.attention import triton as kernels
    from penstock.engine.triton_runner import TritonRunner

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**{**SMALL, **shape, "hidden_size": 32})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(str(tmp_path), dtype="float32", device=device)
    pool = _pool(loaded, 12, device)
    pool.tensor.view(torch.uint8).copy_(fp8.narrow(torch.randn(pool.tensor.shape)))
    host = HostArena(BlockSpec(bytes(32), pool.block_bytes, ROW_TOKENS), 1 << 16)
    pins = PinnedSlots(host, torch.device(device)) if pool.on_gpu else None
    if pins is not None:
        pins.start()
        pins.wait_for([Slot(host.num_slots - 1)])
    room_bytes = room_blocks * pool.block_bytes // loaded.num_layers
    monkeypatch.setattr(fetching, "_BUFFER_BYTES", room_bytes)
    monkeypatch.setattr(kernels, "PART_TOKENS", 2 * ROW_TOKENS)
    runner = TritonRunner(loaded, pool, ROW_TOKENS, host, max_num_seqs=2)
    ColdSteps(runner, pool, host, [33, 20, 26], 60, seed=room_blocks).run(12)
    assert runner.num_fetched > runner.num_ahead > 0
    runner.close()
    if pins is not None:
        pins.close()


# Engines.

Engines = Callable[..., Engine]


@pytest.fixture
def engines(loaded: LoadedModel) -> Iterator[Engines]:
    made: list[Engine] = []

    def open_(
        num_blocks: int = 256,
        num_host: int = 0,
        disk: Path | None = None,
        *,
        cold: bool = False,
        batch: int = 64,
        kv: str = "fp8",
        observers: tuple[Any, ...] = (),
        **options: Any,
    ) -> Engine:
        residency = ResidencyConfig(cold=cold, prefix_tokens=16, tail_tokens=16)
        config = EngineConfig(
            num_blocks * BYTES,
            BLOCK_TOKENS,
            batch,
            residency=residency,
            kv_cache_dtype=kv,
            **options,
        )
        below = DiskConfig()
        if disk is not None:
            below = DiskConfig(path=str(disk), size_bytes=1024 * (BLOCK_BYTES + 512))
        tiers = Config(HostConfig(size_bytes=num_host * BYTES), below) if num_host else None
        made.append(Engine(loaded, config, tiers, observers))
        always_load(made[-1])
        return made[-1]

    yield open_
    for engine in made:
        engine.close()


def prompts(num: int, longest: int = 260, shared: int = 40) -> list[list[int]]:
    rng = random.Random(1)
    head = [rng.randrange(1, 40_000) for _ in range(shared)]
    return [
        head + [rng.randrange(1, 40_000) for _ in range(rng.randint(1, longest))]
        for _ in range(num)
    ]


Said = list[tuple[int, float | None]]


def ask(engine: Engine, ids: list[int]) -> tuple[Said, int]:
    """The answer with its log probabilities, and the most blocks that were cold."""
    request = engine.add("r", ids, PARAMS)
    said: Said = []
    most_cold = 0
    while engine.has_work:
        for progress in engine.step():
            said.append((progress.sampled.token_id, progress.sampled.logprob))
        most_cold = max(most_cold, engine.scheduler.placement.num_cold)
    assert request.finish_reason == "length"
    idle(engine)
    return said, most_cold


def test_the_pool_has_four_times_the_blocks_of_float32(engines: Engines) -> None:
    plain, small = engines(kv="auto"), engines()
    assert small.pool.num_blocks == 4 * plain.pool.num_blocks == 256
    assert small.device.tensor.dtype is torch.float8_e4m3fn
    assert small.device.tensor.nbytes == plain.device.tensor.nbytes


def test_namespaces_differ_and_the_default_is_what_it_was(engines: Engines) -> None:
    plain, small = engines(kv="auto"), engines()
    assert plain.namespace.dtype == "float32"
    assert small.namespace.dtype == "float8_e4m3fn from float32"
    assert plain.namespace.digest() != small.namespace.digest()


def test_cold_is_bit_for_bit_hot(engines: Engines) -> None:
    hot, cold = engines(), engines(8, 64, cold=True)
    for question in prompts(4):
        wanted, _ = ask(hot, question)
        found, most_cold = ask(cold, question)
        assert found == wanted
        assert most_cold > 0 or len(question) < 6 * BLOCK_TOKENS


def test_loaded_is_bit_for_bit_resident(engines: Engines, tmp_path: Path) -> None:
    """Resident, from DRAM, and from disk after a restart."""
    question = prompts(1, shared=200)[0]
    engine = engines(64, 64, tmp_path)
    ask(engine, question)
    wanted, _ = ask(engine, question)  # finds its prefix on the device
    engine.pool.forget()
    assert ask(engine, question)[0] == wanted
    engine.close()
    again = engines(64, 64, tmp_path)
    assert again.offloader is not None
    assert again.offloader.recover(30)
    request = again.add("r", question, PARAMS)
    said: Said = []
    while again.has_work:
        for progress in again.step():
            said.append((progress.sampled.token_id, progress.sampled.logprob))
    assert request.num_loaded_tokens >= len(question) - BLOCK_TOKENS
    assert said == wanted


def test_preempted_sequences_say_the_same(engines: Engines) -> None:
    hot, crowded = engines(), engines(26, 256)
    questions = prompts(6)
    wanted = [[token for token, _ in ask(hot, question)[0]] for question in questions]
    requests = [crowded.add(str(n), ids, PARAMS) for n, ids in enumerate(questions)]
    while crowded.has_work:
        crowded.step()
    assert crowded.scheduler.num_preemptions > 0
    assert sum(request.num_loaded_tokens for request in requests) > 0
    assert [request.output_ids for request in requests] == wanted


def test_kv_does_not_depend_on_how_a_prompt_is_cut(loaded: LoadedModel) -> None:
    """A chunk attends to its own keys as they are stored. If it did not, half would differ.

    Not one byte would differ if sums did not depend on a batch's shape: a value that lies between
    two others may be rounded to either.
    """
    tokens = prompts(1, 1, shared=200)[0][:200]

    def stored(cuts: list[int]) -> Tensor:
        shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
        pool = DevicePool(13, *shape, fp8.DTYPE)
        runner = TorchRunner(loaded.model, pool, BLOCK_TOKENS, loaded.num_heads)
        sequence = Sequence(tokens, list(range(13)))
        for start, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
            runner.run([sequence.chunk(start, end)])
        return pool.tensor.view(torch.uint8)

    whole = stored([0])
    assert (whole != 0).float().mean() > 0.9
    for cuts in ([0, 7, 100, 101, 102], list(range(0, 200, 16)), list(range(200))):
        assert (stored(cuts) != whole).float().mean() < 0.002, cuts


def test_audits_pass_what_is_right_and_find_what_is_wrong(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    seen: list[Event] = []
    engine = engines(64, 256, audit_share=1.0, observers=(seen.append,))
    questions = prompts(3, shared=100)

    def again() -> None:
        engine.pool.forget()
        for question in questions:
            engine.add(str(len(seen)), question, PARAMS)
            while engine.has_work or (engine.audits is not None and engine.audits.is_busy):
                engine.step()

    again()
    again()
    assert any(isinstance(event, Audited) for event in seen)
    assert not any(isinstance(event, AuditFailed) for event in seen)
    offloader = engine.offloader
    assert offloader is not None
    assert offloader.host is not None
    kv = engine.device.like(offloader.host).view(torch.uint8)
    kv[:, 1, 0] = kv[:, 1, 0].flip(1)  # keys of other positions
    again()
    assert any(isinstance(event, AuditFailed) for event in seen)


# Options.


@pytest.mark.parametrize("value", ["fp4", "float8", "", None, 8])
def test_a_wrong_value_is_refused_with_those_that_are_right(value: Any) -> None:
    words = r"kv_cache_dtype is .*: expected auto or fp8; correct it, or leave it out"
    with pytest.raises(ConfigError, match=words):
        EngineOptions(kv_cache_dtype=value)
    with pytest.raises(ConfigError, match=words):
        EngineConfig(kv_cache_dtype=value)


def test_sizes_are_checked_before_the_weights_are_read(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(MODELS["llama"]).save_pretrained(tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "block_tokens": 64, "kv_offloading_size": 0}
    options["device_kv_gib"] = 20 / (1 << 20)  # 20 KiB
    with pytest.raises(ConfigError, match=r"less than one block \(48.0 KiB\)"):
        LLM(str(tmp_path), **options)
    with pytest.raises(ConfigError, match="no tokenizer"):  # a block has 12 KiB, which fits
        LLM(str(tmp_path), kv_cache_dtype="fp8", **options)
