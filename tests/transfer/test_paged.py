"""Blocks scattered over a device's layers, gathered into HOST and put back, byte for byte."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools import content, key_of, spec

from penstock.errors import ConfigError
from penstock.stores.host import HostArena
from penstock.transfer.paged import (
    PagedMemory,
    PagedMover,
    PageStretch,
    Part,
    PartPlace,
    equal_parts,
)
from penstock.transfer.seals import Seals
from penstock.types import BlockKey, Slot, Tier, Transfer, TransferId, Verdict

_ids = count(1)
Piece = tuple[int, int]  # gap before it within the layer's stride, bytes


class Device:
    """Layers with gaps between their blocks; everything that is not a block's is 0xAA."""

    def __init__(self, pieces: Sequence[Piece], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        strides = [gap + num_bytes for gap, num_bytes in pieces]
        self.memory = bytearray(b"\xaa" * (sum(strides) * num_blocks + 1))
        self._view = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        stretches = []
        start = 0
        self.places: list[tuple[int, int, int]] = []  # offset, stride, bytes
        for (gap, num_bytes), stride in zip(pieces, strides, strict=True):
            self.places.append((start + gap, stride, num_bytes))
            address = ctypes.addressof(self._view) + start + gap
            stretches.append(PageStretch(address, stride, num_bytes))
            start += stride * num_blocks
        self.paged = PagedMemory(tuple(stretches), num_blocks)

    def read(self, block: int) -> bytes:
        """A block's bytes, layer after layer."""
        return b"".join(
            bytes(self.memory[offset + block * stride :][:num_bytes])
            for offset, stride, num_bytes in self.places
        )

    def write(self, block: int, data: bytes) -> None:
        for offset, stride, num_bytes in self.places:
            start = offset + block * stride
            self.memory[start : start + num_bytes] = data[:num_bytes]
            data = data[num_bytes:]
        assert not data

    @property
    def rest(self) -> bytes:
        """All that belongs to no block."""
        left = bytearray(self.memory)
        for offset, stride, num_bytes in reversed(self.places):
            for block in reversed(range(self.num_blocks)):
                start = offset + block * stride
                left[start : start + num_bytes] = b"\xaa" * num_bytes
        return bytes(left)

    def is_untouched_between(self) -> bool:
        return self.rest == b"\xaa" * len(self.memory)


def save(keys: Sequence[BlockKey], blocks: Sequence[int], host: Sequence[int]) -> Transfer:
    return Transfer(
        TransferId(next(_ids)),
        Tier.DEVICE,
        Tier.HOST,
        tuple(keys),
        tuple(map(Slot, blocks)),
        tuple(map(Slot, host)),
    )


def load(keys: Sequence[BlockKey], host: Sequence[int], blocks: Sequence[int]) -> Transfer:
    return Transfer(
        TransferId(next(_ids)),
        Tier.HOST,
        Tier.DEVICE,
        tuple(keys),
        tuple(map(Slot, host)),
        tuple(map(Slot, blocks)),
    )


pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 700)), min_size=1, max_size=5)


@given(pieces=pieces, num_workers=st.integers(1, 2), seed=st.integers(0, 1 << 32))
def test_what_is_gathered_is_scattered_again_and_nothing_else_is_touched(
    pieces: list[Piece], num_workers: int, seed: int
) -> None:
    rng = random.Random(seed)
    num_blocks, num_slots = 6, 5
    devices = [Device(pieces, num_blocks) for _ in range(num_workers)]
    part_bytes = devices[0].paged.block_bytes
    assert part_bytes == sum(num_bytes for _, num_bytes in pieces)
    block = spec(part_bytes * num_workers)
    host = HostArena(block, num_slots * block.stride_bytes, huge_pages=False)
    host.buffer[:] = b"\xbb" * len(host.buffer)
    seals = Seals(host)
    movers = [
        PagedMover(Part(device.paged, host, place), seals)
        for device, place in zip(devices, equal_parts(part_bytes, num_workers), strict=True)
    ]
    keys = [key_of((seed, index)) for index in range(3)]
    blocks, places = rng.sample(range(num_blocks), 3), rng.sample(range(num_slots), 3)
    parts = [[content(key_of((key, rank)), part_bytes) for key in keys] for rank in range(2)]
    for rank, device in enumerate(devices):
        for number, data in zip(blocks, parts[rank], strict=True):
            device.write(number, data)
        assert movers[rank].move(save(keys, blocks, places)).verdicts == [Verdict.OK] * 3

    # A block in HOST is one run: worker 0's layers, then worker 1's; what follows is padding.
    for slot in range(num_slots):
        held = bytes(host.view(Slot(slot)))
        if slot not in places:
            assert held == b"\xbb" * host.stride_bytes
            continue
        index = places.index(slot)
        wanted = b"".join(parts[rank][index] for rank in range(num_workers))
        assert held == wanted + b"\xbb" * (host.stride_bytes - len(wanted))

    # Put back into other blocks, in another order.
    seals.seal(keys, [Slot(place) for place in places])
    order = rng.sample(range(3), 3)
    others = rng.sample(range(num_blocks), 3)
    for rank, device in enumerate(devices):
        before = [device.read(number) for number in range(num_blocks)]
        moved = movers[rank].move(
            load([keys[i] for i in order], [places[i] for i in order], others)
        )
        assert moved.verdicts == [Verdict.OK] * 3
        for number in range(num_blocks):
            wanted = before[number]
            if number in others:
                wanted = parts[rank][order[others.index(number)]]
            assert device.read(number) == wanted
        assert device.is_untouched_between()


def test_a_slot_whose_seal_is_another_or_none_is_missing_and_its_neighbours_are_not() -> None:
    device = Device([(0, 64), (8, 32)], 8)
    block = spec(96)
    host = HostArena(block, 8 * block.stride_bytes)
    seals = Seals(host)
    mover = PagedMover(Part(device.paged, host, PartPlace(0, 96)), seals)
    keys = [key_of(index) for index in range(4)]
    mover.move(save(keys, range(4), range(4)))
    order = load(keys, range(4), range(4, 8))
    assert mover.move(order).verdicts == [Verdict.MISSING] * 4, "a save does not seal by itself"
    seals.seal(keys, order.source_slots)
    assert mover.move(order).verdicts == [Verdict.OK] * 4
    seals.open([Slot(1)])
    seals.seal([key_of("another")], [Slot(3)])
    wanted = [Verdict.OK, Verdict.MISSING, Verdict.OK, Verdict.MISSING]
    assert mover.move(order).verdicts == wanted


@pytest.mark.parametrize("place", [PartPlace(0, 100), PartPlace(8, 96), PartPlace(0, 48)])
def test_parts_that_do_not_lie_within_a_block_are_refused(place: PartPlace) -> None:
    host = HostArena(spec(100), 4 * spec(100).stride_bytes)
    with pytest.raises(ConfigError, match=r"100 bytes .* but its device needs 96"):
        Part(Device([(0, 96)], 2).paged, host, place)


def test_of_workers_with_the_same_bytes_one_writes_and_all_read() -> None:
    devices = [Device([(0, 64)], 4) for _ in range(2)]
    host = HostArena(spec(64), 4 * spec(64).stride_bytes)
    seals = Seals(host)
    places = [PartPlace(0, 64), PartPlace(0, 64, writes=False)]
    movers = [
        PagedMover(Part(device.paged, host, place), seals)
        for device, place in zip(devices, places, strict=True)
    ]
    keys = [key_of(1)]
    for mover in movers:
        assert mover.move(save(keys, [0], [0])).verdicts == [Verdict.OK]
    assert bytes(host.view(Slot(0))[:64]) == devices[0].read(0)
    seals.seal(keys, [Slot(0)])
    for mover, device in zip(movers, devices, strict=True):
        assert mover.move(load(keys, [0], [3])).verdicts == [Verdict.OK]
        assert device.read(3) == devices[0].read(0)


def bytes_of(memory: PagedMemory, block: int) -> list[int]:
    """The addresses of a block's bytes, in order."""
    return [
        stretch.address + block * stretch.stride_bytes + index
        for stretch in memory.stretches
        for index in range(stretch.num_bytes)
    ]


def test_neighbouring_layers_become_one_stretch() -> None:
    layers = tuple(PageStretch(1000 + 16 * layer, 64, 16) for layer in range(4))
    assert PagedMemory(layers, 8).merged() == PagedMemory((PageStretch(1000, 64, 64),), 8)


def test_layers_that_only_look_like_neighbours_stay_apart() -> None:
    other_stride = (PageStretch(1000, 64, 16), PageStretch(1016, 32, 16))
    other_order = (PageStretch(1016, 64, 16), PageStretch(1000, 64, 16))
    gap = (PageStretch(1000, 64, 16), PageStretch(1017, 64, 16))
    for stretches in (other_stride, other_order, gap):
        assert PagedMemory(stretches, 8).merged() == PagedMemory(stretches, 8)


@given(
    st.lists(
        st.builds(
            PageStretch,
            st.integers(0, 6).map(lambda place: 8 * place),
            st.sampled_from([64, 128]),
            st.sampled_from([8, 16]),
        ),
        max_size=6,
    )
)
def test_merging_keeps_every_byte_in_its_place(stretches: list[PageStretch]) -> None:
    memory = PagedMemory(tuple(stretches), 3)
    merged = memory.merged()
    assert merged.block_bytes == memory.block_bytes
    assert len(merged.stretches) <= len(memory.stretches)
    assert merged.merged() == merged
    for block in range(3):
        assert bytes_of(merged, block) == bytes_of(memory, block)
