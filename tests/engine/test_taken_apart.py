"""Short chunks of prompts are taken apart: each token is a row, as in a decode step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.test_runner import BLOCK_TOKENS, MODELS, Sequence, need_interpreter

from penstock.engine.models import load_model
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
            self.runner._max_parts_apart = -1
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
        [one.chunk(56, 60), two.chunk(47, 60)],  # the second has too many rows
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi", "gemma"])
def test_they_give_the_same_as_in_one_piece(kind: str, tmp_path: Path) -> None:
    apart, whole = Rig(tmp_path / "apart", kind), Rig(tmp_path / "whole", kind, apart=False)
    num_rows = []
    for mine, other in zip(steps(*apart.sequences), steps(*whole.sequences), strict=True):
        num_rows.append(len(apart.runner._taken_apart(mine)))
        found, wanted = apart.runner.run(mine), whole.runner.run(other)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            apart.pool.tensor, whole.pool.tensor, rtol=1e-4, atol=1e-4, equal_nan=True
        )
        assert whole.runner._taken_apart(other) == other
    assert num_rows == [3, 4, 7, 7, 8, 5]


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


def test_a_chunk_that_would_read_too_much_stays_whole(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    one, two = rig.sequences
    chunks = [one.chunk(40, 44), two.chunk(40, 42)]
    assert len(rig.runner._taken_apart(chunks)) == 6
    rig.runner._max_parts_apart = 3  # a part for each row of the second, not of the first
    assert rig.runner._taken_apart(chunks) == [chunks[0], two.chunk(40, 41), two.chunk(41, 42)]
    rig.runner._max_parts_apart, rig.runner._max_rows = 100, 5
    assert len(rig.runner._taken_apart(chunks)) == 5
    scattered = [one.scattered(40, 42)]
    assert rig.runner._taken_apart(scattered) == scattered


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
