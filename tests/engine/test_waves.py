"""Steps whose cold blocks come in waves: what runs between them, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import transformers
from engine.test_runner import SMALL, Sequence, need_interpreter

from penstock.engine.models import LoadedModel, load_model
from penstock.engine.scheduler import Chunk
from penstock.engine.triton_runner import TritonRunner
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot

BLOCK_TOKENS = 8
TOKENS = [(i * 7 + 3) % 60 + 3 for i in range(70)]


class Rig(NamedTuple):
    runner: TritonRunner
    pool: DevicePool
    host: HostArena

    def chill(self, sequence: Sequence, index: int, pin: int) -> None:
        slot = sequence.table.chill(index, Slot(pin))
        self.host.view(Slot(pin))[: self.pool.block_bytes] = bytes(self.pool.view(slot))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    need_interpreter()
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**{**SMALL, **shape, "hidden_size": 32})
    folder = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_model(str(folder), dtype="float32")


@pytest.fixture
def rig(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    from penstock.engine import fetching
    from penstock.engine.attention import triton as kernels

    made: list[Rig] = []  # a runner knows only the addresses of its memory

    def make(room_blocks: int = 2) -> Rig:
        shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
        pool = DevicePool(24, *shape, torch.float32)
        pool.tensor.normal_(generator=torch.Generator().manual_seed(1))
        host = HostArena(BlockSpec(bytes(32), pool.block_bytes, BLOCK_TOKENS), 1 << 16)
        layer_bytes = pool.block_bytes // loaded.num_layers
        monkeypatch.setattr(fetching, "_BUFFER_BYTES", room_blocks * layer_bytes)
        monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
        runner = TritonRunner(loaded, pool, BLOCK_TOKENS, host, max_num_seqs=2)
        made.append(Rig(runner, pool, host))
        return made[-1]

    return make


def last(sequence: Sequence) -> Chunk:
    return sequence.chunk(len(sequence.tokens) - 1, len(sequence.tokens))


@pytest.mark.parametrize(("room_blocks", "num_waves"), [(2, 3), (100, 1)])
@pytest.mark.parametrize("with_prompt", [False, True])
def test_a_step_of_many_waves_lets_others_work_between_them(
    rig: Callable[..., Rig], room_blocks: int, num_waves: int, with_prompt: bool
) -> None:
    runner, *_ = one = rig(room_blocks)
    sequence = Sequence(TOKENS[:50], list(range(7)))
    for index in range(6):
        one.chill(sequence, index, index)
    chunks = [last(sequence)]
    if with_prompt:
        chunks.append(Sequence(TOKENS[:9], [10, 11]).chunk(0, 9))
    calls = []
    runner.run(chunks, lambda: calls.append(1))
    assert runner._plan.num_waves == num_waves
    assert len(calls) == (num_waves * 4 if num_waves > 1 else 0)  # in each layer


@pytest.mark.parametrize("fails_at", [1, 3, 7])
def test_nothing_of_a_step_that_failed_halfway_is_believed(
    rig: Callable[..., Rig], fails_at: int
) -> None:
    """After it comes a prompt, and then the same sequence again."""
    runner, *_ = one = rig()
    sequence = Sequence(TOKENS[:50], list(range(7)))
    wanted = runner.run([last(sequence)])
    for index in range(2, 6):
        one.chill(sequence, index, index)
    assert torch.equal(runner.run([last(sequence)]), wanted)
    one.chill(sequence, 0, 9)  # now the first wave fetches another block
    calls = []

    def fail() -> None:
        calls.append(1)
        if len(calls) == fails_at:
            raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        runner.run([last(sequence)], fail)
    runner.run([Sequence(TOKENS[:9], [10, 11]).chunk(0, 9)])
    for _ in range(3):
        assert torch.equal(runner.run([last(sequence)]), wanted)
    assert runner.num_ahead > 0  # it is trusted again


def test_a_sequence_longer_than_the_usual_room_for_parts_is_decoded(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engine import triton_runner

    sequences = [Sequence(TOKENS, list(range(9))), Sequence(TOKENS[:60], list(range(10, 18)))]
    usual = rig().runner
    wanted = [usual.run([last(each)]) for each in sequences]
    together = usual.run([last(each) for each in sequences])
    monkeypatch.setattr(triton_runner, "_MAX_PARTS", 3)
    runner, *_ = one = rig()
    for index in range(7):
        one.chill(sequences[0], index, index)
    for each, logits in zip(sequences, wanted, strict=True):
        assert torch.equal(runner.run([last(each)]), logits)
    runner._max_parts = 5  # one of them at a time
    found = runner.run([last(each) for each in sequences])
    torch.testing.assert_close(found, together)


def test_a_sequence_that_can_have_no_room_is_refused(rig: Callable[..., Rig]) -> None:
    runner = rig().runner
    runner._max_parts = 4
    with pytest.raises(ValueError, match="70 tokens is longer than"):
        runner.run([last(Sequence(TOKENS, list(range(9))))])


def test_without_room_for_a_span_nothing_cold_is_read(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engine import fetching

    sequence = Sequence(TOKENS, list(range(9)))
    usual = rig().runner
    assert usual.reads_host
    monkeypatch.setattr(fetching, "_MIN_ROOM_BYTES", 1)
    monkeypatch.setattr(fetching, "_POOL_SHARE", 64)  # one layer of one block, of a pool so small
    runner = rig().runner
    assert not runner.reads_host
    assert torch.equal(runner.run([last(sequence)]), usual.run([last(sequence)]))
