"""Scattered blocks of a GPU to DRAM and back, byte for byte. Needs a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from penstock.stores.host import HostArena  # noqa: E402
from penstock.transfer.cuda_copier import CudaCopier  # noqa: E402
from penstock.transfer.paged import (  # noqa: E402
    PagedMemory,
    PageStretch,
    Part,
    equal_parts,
)
from penstock.transfer.seals import Seals  # noqa: E402
from penstock.types import (  # noqa: E402
    BlockKey,
    BlockSpec,
    Outcome,
    Slot,
    Tier,
    Transfer,
    TransferId,
    Verdict,
)

NUM_BLOCKS = 300
PIECE_BYTES = 24 * 1024
GPU = torch.device("cuda:0")


class Rig:
    def __init__(self, num_layers: int, num_workers: int = 1, rank: int = 0) -> None:
        self.layers = [
            torch.randint(0, 255, (NUM_BLOCKS, PIECE_BYTES), dtype=torch.uint8, device=GPU)
            for _ in range(num_layers)
        ]
        stretches = tuple(PageStretch(t.data_ptr(), PIECE_BYTES, PIECE_BYTES) for t in self.layers)
        memory = PagedMemory(stretches, NUM_BLOCKS)
        spec = BlockSpec(bytes(32), memory.block_bytes * num_workers, 16)
        self.host = HostArena(spec, 512 * spec.stride_bytes, shared=True)
        self.seals = Seals(self.host, memory=self.host.seals)
        part = Part(memory, self.host, equal_parts(memory.block_bytes, num_workers)[rank])
        self.copier = CudaCopier(part, self.host, self.seals, GPU)

    def run(self, transfer: Transfer) -> Outcome:
        self.copier.submit([transfer])
        end = time.monotonic() + 60
        while not (outcomes := self.copier.poll()):
            assert time.monotonic() < end
        return outcomes[0]


def _keys(num: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(number.to_bytes(32, "little")) for number in range(1, num + 1))


def _save(blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
    return Transfer(
        TransferId(1),
        Tier.DEVICE,
        Tier.HOST,
        _keys(len(blocks)),
        tuple(map(Slot, blocks)),
        tuple(map(Slot, slots)),
    )


def _load(slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
    return Transfer(
        TransferId(2),
        Tier.HOST,
        Tier.DEVICE,
        _keys(len(blocks)),
        tuple(map(Slot, slots)),
        tuple(map(Slot, blocks)),
    )


@pytest.mark.parametrize("num_layers", [1, 5, 32])
@pytest.mark.parametrize(("num_workers", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("num", [1, 7, 250])
def test_blocks_come_back_as_they_were(
    num_layers: int, num_workers: int, rank: int, num: int
) -> None:
    rig = Rig(num_layers, num_workers, rank)
    torch.manual_seed(num)
    blocks = torch.randperm(NUM_BLOCKS)[:num].tolist()
    slots = torch.randperm(512)[:num].tolist()
    before = [layer.clone() for layer in rig.layers]
    assert set(rig.run(_save(blocks, slots)).verdicts) == {Verdict.OK}
    for place, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
        part = PIECE_BYTES * num_layers
        found = bytes(rig.host.view(Slot(slot))[rank * part : (rank + 1) * part])
        expected = b"".join(bytes(layer[block].cpu().numpy()) for layer in before)
        assert found == expected, place
    rig.seals.seal(_keys(num), [Slot(slot) for slot in slots])
    targets = torch.randperm(NUM_BLOCKS)[:num].tolist()
    assert set(rig.run(_load(slots, targets)).verdicts) == {Verdict.OK}
    for layer, old in zip(rig.layers, before, strict=True):
        assert torch.equal(layer[targets], old[blocks])
        others = [block for block in range(NUM_BLOCKS) if block not in targets]
        assert torch.equal(layer[others], old[others])
    rig.copier.close()


def test_a_slot_without_its_seal_is_missing() -> None:
    rig = Rig(3)
    rig.run(_save([1, 2], [5, 6]))
    rig.seals.seal(_keys(1), [Slot(5)])
    assert rig.run(_load([5, 6], [8, 9])).verdicts == (Verdict.OK, Verdict.MISSING)
    rig.copier.close()


def test_what_is_computed_after_a_fence_does_not_reach_a_save_before_it() -> None:
    rig = Rig(8)
    blocks = list(range(NUM_BLOCKS))
    before = [layer.clone() for layer in rig.layers]
    for _ in range(5):
        transfer = _save(blocks, blocks)
        rig.copier.submit([transfer])
        rig.copier.fence([transfer.id])
        for layer in rig.layers:
            layer.fill_(0)
        torch.cuda.synchronize()
        assert rig.copier.poll()
        rig.seals.seal(_keys(NUM_BLOCKS), [Slot(block) for block in blocks])
        load = _load(blocks, blocks)
        rig.copier.submit([load])
        rig.copier.fence([load.id])
        copies = [layer.clone() for layer in rig.layers]  # computed behind the fence
        torch.cuda.synchronize()
        assert rig.copier.poll()
        for copied, old in zip(copies, before, strict=True):
            assert torch.equal(copied, old)
    rig.copier.close()


def test_a_save_waits_for_what_was_computed_before_it() -> None:
    rig = Rig(4)
    big = torch.randn(8192, 8192, device=GPU)
    for _ in range(20):
        big = big @ big * 1e-4
    for index, layer in enumerate(rig.layers):
        layer.fill_(index + 1)  # behind the products
    assert set(rig.run(_save([3], [0])).verdicts) == {Verdict.OK}
    found = bytes(rig.host.view(Slot(0)))
    for index in range(4):
        assert set(found[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]) == {index + 1}
    rig.copier.close()


def test_steps_are_timed_on_the_gpu() -> None:
    rig = Rig(2)
    rig.copier.start_timer(7)
    torch.randn(4096, 4096, device=GPU) @ torch.randn(4096, 4096, device=GPU)
    rig.copier.stop_timer(7)
    torch.cuda.synchronize()
    times = rig.copier.take_times()
    assert set(times) == {7}
    assert times[7] > 0
    rig.copier.close()
