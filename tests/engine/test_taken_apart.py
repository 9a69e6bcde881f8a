"""Short chunks of prompts are taken apart: each token is a row, as in a decode step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from engine.test_runner import BLOCK_TOKENS, MODELS, SMALL, Sequence, need_interpreter

from penstock.engine.models import LoadedModel, load_model
from penstock.engine.scheduler import Chunk
from penstock.engine.taken_apart import MAX_APART, ShortChunks
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot

TOKENS = [(i * 7 + 3) % 60 + 3 for i in range(60)]


class Rig:
    """A runner, and two sequences in its pool. `apart`: whether it may take chunks apart."""

    def __init__(self, folder: Path, kind: str = "llama", *, apart: bool = True) -> None:
        need_interpreter()
        from penstock.engine.triton_runner import TritonRunner

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**MODELS[kind].to_dict())
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        loaded = load_model(str(folder), dtype="float32")
        shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
        self.pool = DevicePool(32, *shape, torch.float32)
        self.pool.tensor.fill_(float("nan"))
        self.host = HostArena(BlockSpec(bytes(32), self.pool.block_bytes, BLOCK_TOKENS), 1 << 20)
        self.runner: Any = TritonRunner(loaded, self.pool, BLOCK_TOKENS, self.host, max_num_seqs=8)
        if not apart:
            self.runner._short_chunks.max_parts_apart = -1
        self.sequences = [
            Sequence(TOKENS, [5, 3, 9, 1, 0, 2, 30, 12]),
            Sequence(TOKENS[::-1], [10, 11, 17, 13, 14, 15, 16, 20]),
        ]
        for each in self.sequences:
            self.runner.run([each.chunk(0, 40)])

    def chill(self, number: int, index: int, pin: int) -> None:
        """Move a block to DRAM. What is left on the device is nonsense."""
        slot = self.sequences[number].table.chill(index, Slot(pin))
        self.host.view(Slot(pin))[: self.pool.block_bytes] = bytes(self.pool.view(slot))
        self.pool.tensor[slot] = float("nan")


def steps(one: Sequence, two: Sequence) -> list[list[Any]]:
    return [
        [one.chunk(40, 43)],
        [two.chunk(40, 41), one.chunk(43, 46)],  # beside a sequence that decodes
        [one.chunk(46, 49), two.chunk(41, 45)],
        [one.chunk(49, 56)],  # its logits are not needed
        [replace(one.chunk(54, 60), num_present=2), two.chunk(45, 46), two.chunk(46, 47)],
        [one.chunk(56, 60), two.chunk(47, 60)],  # the second has too many rows, so both stay whole
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi", "gemma"])
def test_they_give_the_same_as_in_one_piece(kind: str, tmp_path: Path) -> None:
    apart, whole = Rig(tmp_path / "apart", kind), Rig(tmp_path / "whole", kind, apart=False)
    num_rows = []
    for mine, other in zip(steps(*apart.sequences), steps(*whole.sequences), strict=True):
        num_rows.append(len(apart.runner._short_chunks.taken_apart(mine)))
        found, wanted = apart.runner.run(mine), whole.runner.run(other)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            apart.pool.tensor, whole.pool.tensor, rtol=1e-4, atol=1e-4, equal_nan=True
        )
        assert whole.runner._short_chunks.taken_apart(other) == other
    assert num_rows == [3, 4, 7, 7, 8, 2]


def test_what_is_present_is_not_written_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    one = rig.sequences[0]
    before = rig.pool.tensor.clone()
    rig.runner.run([replace(one.chunk(36, 40), num_present=4)])
    assert torch.equal(rig.pool.tensor.nan_to_num(), before.nan_to_num())


def test_where_blocks_are_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("penstock.engine.attention.triton")
    monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
    hot, cold = Rig(tmp_path / "hot"), Rig(tmp_path / "cold")
    cold.chill(0, 0, 4)
    cold.chill(0, 3, 1)
    cold.chill(1, 1, 7)
    for mine, other in zip(steps(*cold.sequences), steps(*hot.sequences), strict=True):
        assert torch.equal(cold.runner.run(mine), hot.runner.run(other))
    assert cold.runner.num_fetched > 3
    for slot in (3, 9, 0, 2, 30, 12):  # on the device in both
        assert torch.equal(cold.pool.tensor[slot].nan_to_num(), hot.pool.tensor[slot].nan_to_num())


def test_a_step_that_would_read_too_much_stays_whole() -> None:
    one, two = Sequence(TOKENS, []), Sequence(TOKENS[::-1], [])
    short = ShortChunks(256, max_rows=8, max_parts=100, max_parts_apart=100)
    chunks = [one.chunk(40, 44), two.chunk(40, 42)]
    assert len(short.taken_apart(chunks)) == 6
    assert short.suits(8, 48)
    assert not short.suits(9, 48)
    fewer = replace(short, max_parts_apart=5)  # a part for each row but one
    assert fewer.taken_apart(chunks) == chunks
    assert fewer.suits(5, 48)
    assert not fewer.suits(6, 48)
    assert not fewer.suits(3, 300)  # two parts each
    beside = [one.chunk(40, 41), two.chunk(40, 43)]
    assert len(replace(short, max_parts=4).taken_apart(beside)) == 4
    assert replace(short, max_parts=3).taken_apart(beside) == beside
    assert replace(short, max_rows=3).taken_apart(beside) == beside
    placed = [one.scattered(40, 42), two.chunk(40, 42)]
    assert short.taken_apart(placed) == placed
    many = replace(short, max_rows=100)
    assert many.suits(MAX_APART, 100)
    assert not many.suits(MAX_APART + 1, 100)
    long = [Sequence(TOKENS * 2, []).chunk(0, MAX_APART + 1)]
    assert many.taken_apart(long) == long


def test_the_order_of_the_logits_is_that_of_the_chunks(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    one, two = rig.sequences
    for each in (one, two):
        rig.runner.run([each.chunk(40, 57)])
    first = rig.runner.run([one.chunk(57, 60)]).clone()
    rig.runner.run([two.chunk(57, 59)])
    alone = rig.runner.run([two.chunk(59, 60)]).clone()
    for chunks, wanted in (
        ([one.chunk(57, 60), two.chunk(59, 60)], [first, alone]),
        ([two.chunk(59, 60), one.chunk(57, 60)], [alone, first]),
    ):
        found = rig.runner.run(chunks)
        torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-4, atol=1e-4)


TINY = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
}
WINDOWED = {
    "llama": transformers.LlamaConfig(**TINY),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=20),
    "gpt_oss": transformers.GptOssConfig(
        **TINY, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=12
    ),
}
LENGTH = 56
NUM_SEQUENCES = 2
NUM_BLOCKS = LENGTH // BLOCK_TOKENS
TOKENS_OF = [random.Random(n).choices(range(3, 60), k=LENGTH) for n in range(NUM_SEQUENCES)]


class Chosen(NamedTuple):
    """A chunk of a random step."""

    number: int  # of the sequence
    start: int
    end: int
    num_present: int
    num_known: int  # tokens of the sequence: if there are more than `end`, nothing is sampled


class Copy:
    """One of three runners that compute the same steps, with sequences of its own."""

    def __init__(self, loaded: LoadedModel, room_blocks: int, *, apart: bool) -> None:
        from penstock.engine import fetching
        from penstock.engine.triton_runner import TritonRunner

        shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
        self.pool = DevicePool(NUM_SEQUENCES * NUM_BLOCKS, *shape, torch.float32)
        self.pool.tensor.fill_(float("nan"))
        self.host = HostArena(BlockSpec(bytes(32), self.pool.block_bytes, BLOCK_TOKENS), 1 << 18)
        with pytest.MonkeyPatch.context() as patch:
            room = room_blocks * self.pool.block_bytes // loaded.num_layers
            patch.setattr(fetching, "_BUFFER_BYTES", room)
            self.runner: Any = TritonRunner(
                loaded, self.pool, BLOCK_TOKENS, self.host, max_num_seqs=12, brings=True
            )
        if not apart:
            self.runner._short_chunks.max_parts_apart = -1
        self.sequences = [
            Sequence([], [slot_of(number, index) for index in range(NUM_BLOCKS)])
            for number in range(NUM_SEQUENCES)
        ]

    def chunks(self, step: list[Chosen]) -> list[Chunk]:
        found = []
        for each in step:
            mine = self.sequences[each.number]
            mine.tokens = TOKENS_OF[each.number][: each.num_known]
            found.append(replace(mine.chunk(each.start, each.end), num_present=each.num_present))
        return found

    def run(self, step: list[Chosen]) -> torch.Tensor:
        logits: torch.Tensor = self.runner.run(self.chunks(step))
        return logits.clone()


def slot_of(number: int, index: int) -> int:
    return number * NUM_BLOCKS + index


class Wandering(Copy):
    """Its blocks wander between the device and DRAM. What is left behind is nonsense."""

    def __init__(self, loaded: LoadedModel, room_blocks: int, rng: random.Random) -> None:
        super().__init__(loaded, room_blocks, apart=True)
        self._rng = rng
        self._free = [Slot(pin) for pin in range(self.host.num_slots)]
        self.num_arrived = 0

    def _put(self, slot: int) -> Slot:
        pin = self._free.pop()
        self.host.view(pin)[: self.pool.block_bytes] = bytes(self.pool.view(Slot(slot)))
        self.pool.tensor[slot] = float("nan")
        return pin

    def _release(self, pins: list[Slot]) -> None:
        for pin in pins:
            self.host.view(pin)[:] = b"\xff" * self.host.stride_bytes
        self._free += pins

    def wander(self, ends: list[int]) -> None:
        """Move some blocks that are complete."""
        for number, end in enumerate(ends):
            table = self.sequences[number].table
            for index in range(max(0, end - 4) // BLOCK_TOKENS):  # a step may write the last ones
                if self._rng.random() > 0.3:
                    continue
                slot = Slot(slot_of(number, index))
                if table.places[index] >= 0:
                    table.chill(index, self._put(slot))
                else:
                    pin = Slot(~int(table.places[index]))
                    self.pool.view(slot)[:] = self.host.view(pin)[: self.pool.block_bytes]
                    self._release([table.warm(index, slot)])

    def arrive(self, number: int, start: int) -> None:
        """Some blocks before `start` arrive in the next step."""
        table = self.sequences[number].table
        last = start // BLOCK_TOKENS
        first = self._rng.randint(0, last)
        if table.cold(first, last):
            return
        slots = [Slot(slot_of(number, index)) for index in range(NUM_BLOCKS)]
        places = table.places.tolist()
        pins = [self._put(slot) for slot in slots[first:last]]
        made = Sequence([], [])
        made.table.extend_places(places[:first])
        made.table.extend_arriving(slots[first:last], pins)
        made.table.extend(slots[last:])
        self.sequences[number] = made
        self.num_arrived += len(pins)

    def arrived(self) -> None:
        for each in self.sequences:
            self._release(each.table.end_arriving())


def random_step(rng: random.Random, ends: list[int]) -> list[Chosen]:
    """One chunk or two. Some begin with tokens whose KV is present."""
    left = [number for number in range(NUM_SEQUENCES) if ends[number] < LENGTH]
    step = []
    for number in rng.sample(left, rng.randint(1, len(left))):
        num_present = rng.randint(0, min(3, ends[number])) if rng.random() < 0.3 else 0
        end = min(LENGTH, ends[number] + rng.choice([1, 2, 4, 5, 6, 13]))
        start = ends[number] - num_present
        step.append(Chosen(number, start, end, num_present, rng.choice([end, LENGTH])))
    return step


@pytest.mark.parametrize("room_blocks", [2, 100], ids=["in waves", "at once"])
@pytest.mark.parametrize("kind", list(WINDOWED))
def test_random_steps(
    kind: str, room_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as with everything on the device, and nearly as with every chunk in one piece."""
    need_interpreter()
    kernels = pytest.importorskip("penstock.engine.attention.triton")
    monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(WINDOWED[kind]).save_pretrained(tmp_path)
    loaded = [load_model(str(tmp_path), dtype="float32") for _ in range(3)]
    rng = random.Random(room_blocks)
    mine = Wandering(loaded[0], room_blocks, rng)
    resident, whole = (Copy(loaded[n], room_blocks, apart=n == 1) for n in (1, 2))
    ends, num_apart, num_waves = [0] * NUM_SEQUENCES, 0, []
    while min(ends) < LENGTH:
        step = random_step(rng, ends)
        if len(step) == 1 and rng.random() < 0.7:
            mine.arrive(step[0].number, step[0].start)
        num_apart += len(mine.runner._short_chunks.taken_apart(mine.chunks(step))) > len(step)
        found = mine.run(step)
        num_waves.append(mine.runner._plan.num_waves)
        mine.arrived()
        assert torch.equal(found, resident.run(step)), step
        torch.testing.assert_close(found, whole.run(step), rtol=1e-4, atol=1e-4)
        for each in step:
            ends[each.number] = each.end
        for number, end in enumerate(ends):
            for index in range(end // BLOCK_TOKENS):
                slot = slot_of(number, index)
                if mine.sequences[number].table.places[index] >= 0:
                    assert torch.equal(mine.pool.tensor[slot], resident.pool.tensor[slot])
                torch.testing.assert_close(
                    resident.pool.tensor[slot], whole.pool.tensor[slot], rtol=1e-4, atol=1e-4
                )
        mine.wander(ends)
    assert num_apart > 3
    assert mine.num_arrived > 0
    assert mine.runner.num_fetched > 3
    if kind == "llama":  # a window reaches few blocks
        assert (max(num_waves) > 1) is (room_blocks == 2)
