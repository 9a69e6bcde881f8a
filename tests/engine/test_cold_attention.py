"""The CPU's part in attention to cold blocks: right, and the same whatever the threads do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from engine.cold_steps import ColdSteps
from engine.packed_blocks import PackedHost, strange_pool
from engine.test_runner import SMALL, Sequence, need_interpreter
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("numba")

from penstock.config.options import COLD_CPU, COLD_DEVICE, EngineOptions
from penstock.engine import cold_opening
from penstock.engine.attention.cold_serving import load_word, store_word
from penstock.engine.cold_opening import why_not
from penstock.engine.cold_threads import ColdAttentionFailed, ColdShape, ColdTasks, ColdThreads
from penstock.engine.models import LoadedModel, load_model
from penstock.engine.scheduler import Chunk
from penstock.engine.table import PACKED_MARK
from penstock.engine.triton_runner import TritonRunner
from penstock.errors import ConfigError
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot

WORD = 64


def answers(
    shape: ColdShape, work: ColdTasks, query: Tensor, num_threads: int, form: object = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of the last layer."""
    threads = ColdThreads(shape, len(query), 16, 64, num_threads, form)  # type: ignore[arg-type]
    threads.queries.copy_(query)
    try:
        for _ in range(2):  # the threads stay between steps
            assert threads.is_ready()
            threads.open(work)
            assert threads.ask_all()
            threads.check()
        assert threads.bytes_per_second()
        return threads.largest.clone(), threads.totals.clone(), threads.sums.clone()
    finally:
        threads.close()


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "dtype", "is_packed"),
    [
        (1, 2, 16, torch.float32, False),
        (2, 7, 64, torch.bfloat16, False),
        (2, 7, 64, torch.bfloat16, True),
    ],
)
def test_it_is_attention(
    kv_heads: int, group: int, dim: int, dtype: torch.dtype, is_packed: bool
) -> None:
    torch.manual_seed(0)
    block_tokens, layers = 8, 2
    shape = ColdShape(layers, group * kv_heads, kv_heads, dim, block_tokens, dtype.itemsize)
    blocks = torch.randn(12, layers, 2, block_tokens, kv_heads, dim).to(dtype)
    if is_packed:
        blocks = strange_pool(tuple(blocks.shape), dtype).nan_to_num(0.5, 1.5, -1.5)
    addresses = raw = blocks.data_ptr() + np.arange(12) * blocks[0].numel() * dtype.itemsize
    form = None
    if is_packed:
        host = PackedHost(blocks)
        for slot, block in enumerate(blocks):
            host.put(slot, block)
        addresses = host.address + PACKED_MARK + np.arange(12) * host.stride_bytes
        form = host.form
    order = np.array([5, 3, 8, 1, 0, 11, 7, 2])
    tasks = np.array([[1, 0, 4], [0, 4, 7], [1, 7, 8]])
    query = 2 * torch.randn(2, group * kv_heads, dim)
    work = ColdTasks(addresses[order], tasks)
    largest, totals, sums = answers(shape, work, query, 1, form)
    for task, (row, begin, end) in enumerate(tasks):
        mine = blocks[order[begin:end], layers - 1].double()
        for head in range(group * kv_heads):
            keys = mine[:, 0, :, head // group].flatten(0, 1)
            values = mine[:, 1, :, head // group].flatten(0, 1)
            scores = keys @ query[row, head].double()
            weights = torch.exp2(scores - scores.max())
            found = (largest[task, head], totals[task, head], sums[task, head])
            wanted = (scores.max(), weights.sum(), weights @ values)
            for ours, exact in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=2e-5)
    if is_packed:
        unpacked = answers(shape, ColdTasks(raw[order], tasks), query, 1)
        for one, other in zip((largest, totals, sums), unpacked, strict=True):
            assert torch.equal(one[:3], other[:3])
    # A task's result is the same with other threads, among other tasks, at another place.
    others = np.array([[0, 4, 8], [1, 0, 4], [0, 0, 1], [1, 7, 8], [0, 4, 7]])
    again = answers(shape, ColdTasks(work.blocks, others), query, 3, form)
    for here, there in ((0, 1), (1, 4), (2, 3)):
        for one, other in zip((largest, totals, sums), again, strict=True):
            assert torch.equal(one[here], other[there])


def make_threads(num_threads: int) -> tuple[ColdThreads, ColdTasks, Tensor]:
    blocks = torch.randn(8, 2, 2, 8, 1, 16)
    threads = ColdThreads(ColdShape(2, 2, 1, 16, 8, 4), 1, 8, 8, num_threads)
    addresses = blocks.data_ptr() + np.arange(8) * blocks[0].numel() * 4
    return threads, ColdTasks(addresses, np.array([[0, 0, 8]])), blocks


def test_threads_leave_a_step_that_is_cancelled() -> None:
    threads, work, _ = make_threads(2)
    try:
        assert threads.is_ready()
        threads.open(work)
        time.sleep(0.01)
        threads.cancel()
        assert load_word(threads.done_address + WORD) == threads.step  # nobody waits for it
        assert threads.is_ready()
        threads.open(work)
        assert threads.ask_all()
    finally:
        threads.close()


def test_without_an_answer_they_are_not_trusted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engine import cold_threads

    threads, work, _ = make_threads(1)
    assert threads.is_ready()
    threads.open(work)
    assert threads.ask_all()
    threads.check()
    store_word(threads.gave_up_address, threads.step)
    with pytest.raises(ColdAttentionFailed, match="did not attend"):
        threads.check()
    assert not threads.is_ready()
    threads.close()
    stuck, work, _ = make_threads(1)
    monkeypatch.setattr(cold_threads, "_LEAVE_SECONDS", 0.05)
    assert stuck.is_ready()
    stuck.open(work)
    while not load_word(stuck._word(3)):  # until it is inside, waiting for the GPU
        time.sleep(0.001)
    assert not stuck.is_ready()
    assert not stuck.is_ready()
    stuck.cancel()
    stuck.close()


class Rig(NamedTuple):
    runner: TritonRunner
    pool: DevicePool
    host: HostArena

    def sequence(self, tokens: int, first: int, num_cold: int) -> Sequence:
        made = Sequence(
            [(i * 7 + first) % 60 + 3 for i in range(tokens)],
            list(range(first, first - -tokens // 8 + 1)),
        )
        for index in range(num_cold):
            pin = Slot(first + index)
            slot = made.table.chill(index, pin)
            self.host.view(pin)[: self.pool.block_bytes] = bytes(self.pool.view(slot))
        return made


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    need_interpreter()
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**{**SMALL, **shape, "hidden_size": 32})
    folder = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_model(str(folder), dtype="float32")


@pytest.fixture
def rig(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    from penstock.engine import fetching
    from penstock.engine.attention import triton as kernels

    made: list[Rig] = []
    monkeypatch.setattr(kernels, "PART_TOKENS", 16)

    def make(mode: str, num_threads: int = 2, room_blocks: int = 100) -> Rig:
        pool = DevicePool(24, 2, 8, 1, 16, torch.float32)
        pool.tensor.normal_(generator=torch.Generator().manual_seed(1))
        host = HostArena(BlockSpec(bytes(32), pool.block_bytes, 8), 1 << 16)
        monkeypatch.setattr(cold_opening, "num_cores", lambda: num_threads + 2)
        monkeypatch.setattr(fetching, "_BUFFER_BYTES", room_blocks * pool.block_bytes // 2)
        runner = TritonRunner(loaded, pool, 8, host, max_num_seqs=2, cold_attention=mode)
        made.append(Rig(runner, pool, host))
        return made[-1]

    yield make
    for each in made:
        each.runner.close()


def last(sequence: Sequence) -> Chunk:
    return sequence.chunk(len(sequence.tokens) - 1, len(sequence.tokens))


def step(one: Rig, sequences: list[Sequence]) -> Tensor:
    logits = one.runner.run([last(each) for each in sequences]).clone()
    one.runner.wait()
    return logits


@pytest.mark.parametrize("room_blocks", [2, 100])
def test_a_step_gives_what_it_gives_without_the_cpu(
    rig: Callable[..., Rig], room_blocks: int
) -> None:
    device = rig(COLD_DEVICE)
    wanted = step(device, [device.sequence(77, 0, 0), device.sequence(50, 11, 0)])
    assert device.runner._cold is None
    found = []
    for num_threads in (1, 3):
        one = rig(COLD_CPU, num_threads, room_blocks)
        sequences = [one.sequence(77, 0, 7), one.sequence(50, 11, 5)]
        found += [step(one, sequences) for _ in range(2)]
        assert one.runner._cold is not None
        # Three whole spans of the first one, two of the second; the link brings the others.
        assert one.runner._cold.num_spans == 2 * 5
        assert one.runner.num_fetched == 2 * 2
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], wanted)  # the CPU took part
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_blocks_may_wander(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engine.attention import triton as kernels

    monkeypatch.setattr(kernels, "PART_TOKENS", 8)
    one = rig(COLD_CPU)
    ColdSteps(one.runner, one.pool, one.host, [57, 40, 49], 60, seed=3, tolerance=1e-5).run(10)
    assert one.runner._cold is not None
    assert one.runner._cold.num_spans > 3


def test_a_step_without_an_answer_fails_and_the_device_goes_on(rig: Callable[..., Rig]) -> None:
    device, one = rig(COLD_DEVICE), rig(COLD_CPU)
    wanted = step(device, [device.sequence(77, 0, 7)])
    cold = one.runner._cold
    assert cold is not None
    cold.threads.close()  # they will never answer
    cold.max_looks = 20
    sequence = one.sequence(77, 0, 7)
    one.runner.run([last(sequence)])
    assert one.runner.is_doubtful
    with pytest.raises(ColdAttentionFailed, match="did not attend"):
        one.runner.wait()
    assert not one.runner.is_doubtful
    for _ in range(2):
        assert torch.equal(step(one, [sequence]), wanted)


def test_a_step_that_failed_halfway_is_left(rig: Callable[..., Rig]) -> None:
    one = rig(COLD_CPU, room_blocks=2)
    sequences = [one.sequence(77, 0, 7), one.sequence(50, 11, 5)]
    sequences[0].table.warm(0, Slot(0))  # the link brings more than one wave
    sequences[0].table.warm(2, Slot(2))
    wanted = step(one, sequences)

    def fail() -> None:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        one.runner.run([last(each) for each in sequences], fail)
    assert torch.equal(step(one, sequences), wanted)


def test_a_step_that_is_computed_in_halves_hands_the_threads_one_at_a_time(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a half is only queued: its threads must not get the next one's tasks meanwhile."""
    one = rig(COLD_CPU)
    sequences = [one.sequence(77, 0, 7), one.sequence(50, 11, 5)]
    together = step(one, sequences)
    cold = one.runner._cold
    assert cold is not None
    opened: list[bool] = []

    def watched(
        work: ColdTasks, open_step: Callable[[ColdTasks], None] = cold.threads.open
    ) -> None:
        assert not cold.is_open
        opened.append(True)
        open_step(work)

    monkeypatch.setattr(cold.threads, "open", watched)
    one.runner._max_parts = 5
    torch.testing.assert_close(step(one, sequences), together, rtol=1e-5, atol=1e-6)
    assert len(opened) == 2


def test_where_numba_cannot_compile_the_device_attends_to_everything(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.engine import cold_threads

    def refuse(*_: object) -> None:
        raise RuntimeError("cannot compile for this processor")

    monkeypatch.setattr(cold_threads, "make_serve", refuse)
    one = rig(COLD_CPU)
    assert one.runner._cold is None
    assert "cannot compile for this processor" in caplog.text
    code = "import sys, penstock.engine.triton_runner; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_that_it_does_not_suit_stay_with_the_device(loaded: LoadedModel) -> None:
    assert why_not(loaded, torch.float32) == ""
    assert "float16" in why_not(loaded, torch.float16)
    config = loaded.model.config
    for name, value, word in (
        ("attn_logit_softcapping", 30.0, "caps"),
        ("sliding_window", 128, "windows"),
        ("layer_types", ["full_attention", "sliding_attention"], "windows"),
    ):
        before = getattr(config, name, None)
        setattr(config, name, value)
        assert word in why_not(loaded, torch.float32)
        setattr(config, name, before)


@pytest.mark.parametrize("value", ["gpu", "", None, 1])
def test_the_setting_is_checked(value: object) -> None:
    with pytest.raises(ConfigError, match=r"cold_attention is .*: expected auto, device or cpu"):
        EngineOptions(cold_attention=value)  # type: ignore[arg-type]
