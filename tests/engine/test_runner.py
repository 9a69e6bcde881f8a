"""Every architecture that is accepted gives the logits of plain transformers, however it is cut."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.models import ATTENTION, LoadedModel, load_model
from penstock.engine.runner import Runner, TorchRunner
from penstock.engine.scheduler import Chunk
from penstock.engine.table import BlockTable
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL, use_sliding_window=False),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16
    ),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "phi": transformers.PhiConfig(**SMALL),
    "phi3": transformers.Phi3Config(**SMALL, sliding_window=None),
    "gemma": transformers.GemmaConfig(**SMALL, head_dim=32),
    "gpt2": transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=256, bos_token_id=1
    ),
}
BLOCK_TOKENS = 8


@dataclass
class Sequence:
    """As much of a request as the runner looks at."""

    tokens: list[int]
    blocks: InitVar[list[int]]
    table: BlockTable = field(init=False)
    is_fill: bool = False

    def __post_init__(self, blocks: list[int]) -> None:
        self.table = BlockTable([Slot(block) for block in blocks])

    def chunk(self, start: int, end: int) -> Chunk:
        return Chunk(cast(Any, self), start, end - start)

    def scattered(self, *positions: int) -> Chunk:
        at = np.array(positions)
        return Chunk(cast(Any, self), positions[0], len(positions), positions=at)


def make(name: str, loaded: LoadedModel, pool: DevicePool, host: HostArena) -> Runner:
    if name == "torch":
        return TorchRunner(loaded.model, pool, BLOCK_TOKENS, loaded.num_heads, host)
    need_interpreter()
    from penstock.engine.triton_runner import TritonRunner

    return TritonRunner(loaded, pool, BLOCK_TOKENS, host, max_num_seqs=4)


def need_interpreter() -> None:
    """Skip where kernels run on a GPU: they cannot read these pools. `test_cuda` has others."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the pool is in DRAM")


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "phi"])
def test_scattered_tokens_attend_to_all_before_them(kind: str, name: str, tmp_path: Path) -> None:
    """What lies between them has its KV from before, as placed segments have."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    sequence = Sequence([(i * 7 + 3) % 60 + 3 for i in range(51)], [5, 3, 9, 1, 0, 2, 30])
    other = Sequence([(i * 11 + 5) % 60 + 3 for i in range(34)], [10, 11, 12, 13, 14])
    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    pool = DevicePool(32, *shape, torch.float32)
    pool.tensor.fill_(float("nan"))
    host = HostArena(BlockSpec(bytes(32), pool.block_bytes, BLOCK_TOKENS), 1 << 20)
    runner = make(name, loaded, pool, host)
    expected = runner.run([sequence.chunk(0, 51)]).clone()
    before = pool.tensor.clone()
    again = [0, 7, 8, 9, 23, 40, 41]
    blocks = torch.tensor([5, 3, 9, 1, 0, 2, 30])[torch.tensor(again) // BLOCK_TOKENS]
    pool.tensor[blocks, :, :, torch.tensor(again) % BLOCK_TOKENS] = float("nan")
    beside = runner.run([sequence.scattered(*again, 50), other.chunk(0, 34)])
    assert torch.allclose(beside[0], expected[0], atol=1e-5)
    kept = [5, 3, 9, 1, 0, 2]
    assert torch.allclose(pool.tensor[kept], before[kept], atol=1e-5)
    changes = runner.key_changes(sequence.chunk(0, 51))
    assert float(changes.abs().max()) < 1e-6
    pool.tensor[3, 1, 0, 2] += 1.0  # the keys of token 10 in the second layer
    assert int(runner.key_changes(sequence.chunk(8, 51)).argmax()) == 10 - 8


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[kind]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    model = loaded.model
    one = Sequence([(i * 7 + 3) % 60 + 3 for i in range(51)], [5, 3, 9, 1, 0, 2, 30])
    two = Sequence([(i * 11 + 5) % 60 + 3 for i in range(34)], [10, 11, 12, 13, 14])
    model.config._attn_implementation = "eager"
    with torch.inference_mode():
        expected = [model(torch.tensor([each.tokens])).logits[0] for each in (one, two)]
    model.config._attn_implementation = ATTENTION

    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    pool = DevicePool(32, *shape, torch.float32)
    pool.tensor.fill_(float("nan"))  # whatever was not written must not be read
    host = HostArena(BlockSpec(bytes(32), pool.block_bytes, BLOCK_TOKENS), 1 << 20)
    runner = make(name, loaded, pool, host)
    runner.warm_up(lambda _: None)
    assert pool.tensor.isnan().all()  # nor written

    whole_one, whole_two = one.tokens, two.tokens
    assert runner.run([one.chunk(0, 20)]).shape[0] == 0
    runner.run([one.chunk(20, 35), two.chunk(0, 10)])
    for sequence, index, pin in ((one, 1, 7), (one, 2, 3), (two, 0, 11)):
        slot = sequence.table.chill(index, Slot(pin))
        host.view(Slot(pin))[: pool.block_bytes] = bytes(pool.view(slot))
        pool.tensor[slot] = float("nan")
    runner.run([two.chunk(10, 32), one.chunk(35, 36)])
    one.tokens, two.tokens = whole_one[:50], whole_two[:33]
    logits = runner.run([one.chunk(36, 50), two.chunk(32, 33)])
    compare(logits, [expected[0][49], expected[1][32]])
    one.tokens, two.tokens = whole_one, whole_two
    compare(runner.run([one.chunk(50, 51), two.chunk(33, 34)]), [expected[0][50], expected[1][33]])


def compare(logits: Tensor, expected: list[Tensor]) -> None:
    for found, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_known_decoders_take_the_faster_way() -> None:
    pytest.importorskip("triton")
    from penstock.engine.fused import can_fuse

    able = {
        kind
        for kind, config in MODELS.items()
        if can_fuse(transformers.AutoModelForCausalLM.from_config(config))
    }
    assert able == {"llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize(("num_rooms", "num_waves"), [(2, 2), (100, 1)])
def test_cold_blocks_are_fetched_once_for_all_who_read_them(
    num_rooms: int, num_waves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_interpreter()
    from penstock.engine import fetching
    from penstock.engine.attention import triton as kernels
    from penstock.engine.triton_runner import TritonRunner

    monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**MODELS["llama"].to_dict(), "num_hidden_layers": 5})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    pool = DevicePool(32, *shape, torch.float32)
    pool.tensor.normal_()
    host = HostArena(BlockSpec(bytes(32), pool.block_bytes, BLOCK_TOKENS), 1 << 20)
    room_bytes = num_rooms * pool.block_bytes // loaded.num_layers
    monkeypatch.setattr(fetching, "_BUFFER_BYTES", room_bytes)
    runner = TritonRunner(loaded, pool, BLOCK_TOKENS, host, max_num_seqs=4)
    tokens = [(i * 7 + 3) % 60 + 3 for i in range(33)]
    sequences = [Sequence(tokens, [1, 2, 3, 4, last]) for last in (5, 6, 7)]
    expected = runner.run([each.chunk(32, 33) for each in sequences])
    alone = runner.run([sequences[0].chunk(32, 33)])
    assert not runner.num_fetched
    # The first block is cold for one, the second for two, the third for all.
    for index, pin, readers in ((0, 9, 1), (1, 4, 2), (2, 11, 3)):
        for each in sequences[:readers]:
            slot = each.table.chill(index, Slot(pin))
            host.view(Slot(pin))[: pool.block_bytes] = bytes(pool.view(slot))
    host.view(Slot(0))[:] = b"\xff" * host.stride_bytes
    assert torch.equal(runner.run([each.chunk(32, 33) for each in sequences]), expected)
    assert runner.num_fetched == 3
    assert runner._plan.num_waves == num_waves
    assert torch.equal(runner.run([sequences[0].chunk(32, 33)]), alone)


def test_rows_that_fill_up_a_batch_have_room_for_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_interpreter()
    from penstock.engine import triton_runner
    from penstock.engine.runner import PackedRow

    monkeypatch.setattr(triton_runner, "_MAX_PARTS", 3)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS["llama"]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    pool = DevicePool(4, *shape, torch.float32)
    runner = triton_runner.TritonRunner(loaded, pool, BLOCK_TOKENS, max_num_seqs=8)
    chunks = [Sequence([5, 6, 7], [block]).chunk(2, 3) for block in range(3)]
    runner.fill(PackedRow.of(chunks, BLOCK_TOKENS), 8)  # three parts, as many as are allowed
    runner._plan.send()
    last = runner._plan.first_items[:8].max()
    assert last < len(runner._decode._room.sums)


@pytest.mark.parametrize("room_blocks", [2, 100])
def test_steps_give_the_same_whatever_was_brought_ahead_of_them(
    room_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_interpreter()
    from engine.cold_steps import ColdSteps

    from penstock.engine import fetching
    from penstock.engine.attention import triton as kernels
    from penstock.engine.triton_runner import TritonRunner

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**{**SMALL, **shape, "hidden_size": 32})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    pool = DevicePool(12, loaded.num_layers, BLOCK_TOKENS, 1, loaded.head_dim, torch.float32)
    pool.tensor.normal_()
    host = HostArena(BlockSpec(bytes(32), pool.block_bytes, BLOCK_TOKENS), 1 << 16)
    room_bytes = room_blocks * pool.block_bytes // loaded.num_layers
    monkeypatch.setattr(fetching, "_BUFFER_BYTES", room_bytes)
    monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
    runner = TritonRunner(loaded, pool, BLOCK_TOKENS, host, max_num_seqs=2)
    ColdSteps(runner, pool, host, [33, 20, 26], 60, seed=room_blocks).run(30)
    assert runner.num_fetched > runner.num_ahead > 10


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # no bf16 on this CPU
@pytest.mark.parametrize(
    ("name", "room_blocks"), [("torch", 0), ("triton", 2), ("triton", 100)], ids=str
)
def test_steps_give_the_same_if_cold_blocks_are_packed(
    name: str, room_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter cannot multiply bfloat16: there float16 stands for it."""
    if name == "triton":
        need_interpreter()
    pytest.importorskip("triton")
    from engine.cold_steps import ColdSteps
    from engine.packed_blocks import form_of, strange_pool

    from penstock.engine import fetching
    from penstock.engine.attention import triton as kernels
    from penstock.engine.triton_runner import TritonRunner

    torch.manual_seed(0)
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 128}
    config = transformers.LlamaConfig(**{**SMALL, **shape, "num_hidden_layers": 4})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    kind = torch.bfloat16 if name == "torch" else torch.float16
    loaded = load_model(str(tmp_path), dtype=str(kind).removeprefix("torch."))
    pool = DevicePool(12, loaded.num_layers, BLOCK_TOKENS, 2, 64, kind)
    pool.tensor.copy_(strange_pool(pool.tensor.shape, kind).nan_to_num(0.5, 1.5, -1.5))
    form = form_of(pool.tensor)
    host = HostArena(BlockSpec(bytes(32), form.packed_bytes, BLOCK_TOKENS), 1 << 17)
    runner: Any
    if name == "torch":
        runner = TorchRunner(
            loaded.model, pool, BLOCK_TOKENS, loaded.num_heads, host, host_form=form
        )
    else:
        room_bytes = room_blocks * pool.block_bytes // loaded.num_layers
        monkeypatch.setattr(fetching, "_BUFFER_BYTES", room_bytes)
        monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
        # In the interpreter, programs that have nothing to do take as long as others.
        monkeypatch.setattr(fetching, "_NUM_PACKED_PROGRAMS", 2)
        monkeypatch.setattr(fetching, "_NUM_UNPACKING", 2)
        runner = TritonRunner(loaded, pool, BLOCK_TOKENS, host, max_num_seqs=2, host_form=form)
    ColdSteps(runner, pool, host, [33, 20, 26], 60, seed=room_blocks, form=form).run(8)
    assert name == "torch" or runner.num_fetched > 5


def test_a_token_that_only_the_device_knows_is_the_one_posted_last(tmp_path: Path) -> None:
    need_interpreter()
    from penstock.engine.triton_runner import TritonRunner

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS["llama"]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    pool = DevicePool(4, *shape, torch.float32)
    host = None
    for runner in (
        TritonRunner(loaded, pool, BLOCK_TOKENS, host, max_num_seqs=8),
        TorchRunner(loaded.model, pool, BLOCK_TOKENS, loaded.num_heads, host),
    ):
        for size in (1, 2):  # a single token, and the last of a longer chunk
            known, unknown = Sequence([5, 6, 7], [0]), Sequence([5, 6, ~1], [1])
            runner.run([each.chunk(0, 3 - size) for each in (known, unknown)])
            wanted = runner.run([known.chunk(3 - size, 3)]).clone()
            runner.post(torch.tensor([3, 7]))
            assert torch.equal(runner.run([unknown.chunk(3 - size, 3)]), wanted)


def test_the_first_random_token_is_drawn_before_any_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the kernel that draws takes seconds to compile."""
    need_interpreter()
    from penstock.engine import triton_runner

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS["llama"]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
    pool = DevicePool(4, *shape, torch.float32)
    drawn: list[tuple[int, ...]] = []
    monkeypatch.setattr(triton_runner, "draw", lambda scores, _: drawn.append(scores.shape))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    runner = triton_runner.TritonRunner(loaded, pool, BLOCK_TOKENS, None, max_num_seqs=8)
    runner.warm_up(lambda _: None)
    assert drawn == [(1, loaded.vocab_size)]
    assert torch.equal(torch.get_rng_state(), state)
