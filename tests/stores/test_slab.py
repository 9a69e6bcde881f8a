from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tools import ODD_BLOCK_BYTES, key_of, spec

from penstock.errors import Foreign
from penstock.stores.slab import (
    FIXED_BYTES,
    FORMAT_VERSION,
    RECORD_BYTES,
    Geometry,
    SlabRecord,
    empty_record,
    pack_record,
    read_manifest,
    slab_path,
    slab_paths,
    unpack_record,
    write_manifest,
)
from penstock.types import BlockKey, Slot

KEY = BlockKey(bytes(range(32)))
NAMESPACE = bytes(range(100, 132))
CHECKSUM = bytes(range(200, 216))
RECORD = SlabRecord(True, 0x0000_0102_0304_0506, KEY, NAMESPACE, 0x20_0000, CHECKSUM)

# Written out by hand: the format is a promise to the files that are on disk already.
GOLDEN_BODY = (
    b"PKV1"
    b"\x01\x00\x00\x00"
    b"\x06\x05\x04\x03\x02\x01\x00\x00"
    + KEY
    + NAMESPACE
    + b"\x00\x00\x20\x00\x00\x00\x00\x00"
    + CHECKSUM
    + bytes(16)
)
GOLDEN = GOLDEN_BODY + struct.pack("<Q", xxhash.xxh3_64_intdigest(GOLDEN_BODY))


def test_the_bytes_of_a_record_are_the_golden_ones() -> None:
    assert len(GOLDEN) == RECORD_BYTES == 128
    assert pack_record(RECORD) == GOLDEN
    assert unpack_record(GOLDEN) == RECORD
    assert GOLDEN[120:].hex() == "39d71171cb2842c1"


@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (0, "<4s", b"PKV1"),
        (4, "<I", 1),
        (8, "<Q", RECORD.generation),
        (16, "<32s", KEY),
        (48, "<32s", NAMESPACE),
        (80, "<Q", RECORD.length),
        (88, "<16s", CHECKSUM),
        (104, "<16s", bytes(16)),
    ],
)
def test_every_field_lies_where_the_docstring_says(offset: int, layout: str, value: object) -> None:
    assert struct.unpack_from(layout, pack_record(RECORD), offset) == (value,)


def test_an_empty_record_is_sealed_and_holds_nothing() -> None:
    record = unpack_record(empty_record(7))
    assert record is not None
    assert (record.held, record.generation) == (False, 7)


@given(
    st.booleans(),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
)
def test_round_trip(
    held: bool, generation: int, key: bytes, namespace: bytes, length: int, checksum: bytes
) -> None:
    record = SlabRecord(held, generation, BlockKey(key), namespace, length, checksum)
    assert unpack_record(pack_record(record)) == record
    assert unpack_record(memoryview(pack_record(record))) == record


@pytest.mark.parametrize("sound", [GOLDEN, empty_record(3)], ids=["held", "empty"])
def test_every_single_bit_flip_is_recognised(sound: bytes) -> None:
    for bit in range(8 * RECORD_BYTES):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack_record(bytes(damaged)) is None, f"bit {bit}"


@pytest.mark.parametrize("length", [0, 1, 64, 127, 129, 256])
def test_a_record_of_another_length_is_none(length: int) -> None:
    assert unpack_record((GOLDEN + GOLDEN)[:length]) is None


def test_zeros_are_a_slot_never_written() -> None:
    assert unpack_record(bytes(RECORD_BYTES)) is None
    assert unpack_record(memoryview(bytes(RECORD_BYTES))) is None


@pytest.mark.parametrize("cut", range(16, RECORD_BYTES, 8))
def test_a_torn_record_is_none(cut: int) -> None:
    other = pack_record(replace_record(RECORD, key_of("other"), generation=9))
    assert unpack_record(GOLDEN[:cut] + other[cut:]) is None
    assert unpack_record(GOLDEN[:cut] + bytes(RECORD_BYTES - cut)) is None


def replace_record(record: SlabRecord, key: BlockKey, generation: int) -> SlabRecord:
    return record._replace(key=key, generation=generation, checksum=bytes(16))


# Geometry.


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 22), st.integers(0, 1 << 34))
def test_slots_and_all_else_fit_under_the_cap(
    block_bytes: int, slab_bytes: int, cap_bytes: int
) -> None:
    geometry = Geometry.of(spec(block_bytes), slab_bytes)
    num_slots = geometry.num_slots(cap_bytes)
    assert num_slots >= 0
    if num_slots:
        index_bytes = -(-num_slots * RECORD_BYTES // 4096) * 4096
        assert FIXED_BYTES + index_bytes + num_slots * geometry.stride_bytes <= cap_bytes


def test_places_neither_overlap_nor_leave_their_slab() -> None:
    geometry = Geometry.of(spec(ODD_BLOCK_BYTES), slab_bytes=50_000)
    assert (geometry.stride_bytes, geometry.slots_per_slab) == (12_288, 4)
    assert [geometry.place(Slot(slot)) for slot in range(9)] == [
        (slab, index * 12_288) for slab in range(2) for index in range(4)
    ] + [(2, 0)]
    assert geometry.spec == spec(ODD_BLOCK_BYTES)


def test_a_block_larger_than_a_slab_gets_a_slab_of_its_own() -> None:
    geometry = Geometry.of(spec(1 << 20), slab_bytes=4096)
    assert [geometry.place(Slot(slot)) for slot in range(3)] == [(0, 0), (1, 0), (2, 0)]


def test_slabs_are_found_in_order_and_strangers_are_not(tmp_path: Path) -> None:
    for number in (10, 2, 0, 100_001):
        slab_path(tmp_path, number).touch()
    for name in ("slab-", "slab-x", "slab-00001.bak", "other"):
        (tmp_path / name).touch()
    assert [number for number, _ in slab_paths(tmp_path)] == [0, 2, 10, 100_001]


# The manifest.


def sound_manifest() -> dict[str, Any]:
    return asdict(Geometry.of(spec()))


def write_raw(directory: Path, data: bytes) -> None:
    (directory / "MANIFEST").write_bytes(data)


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    geometry = replace(Geometry.of(spec()), epoch=41)
    write_manifest(tmp_path, geometry)
    found = read_manifest(tmp_path)
    assert found == geometry
    assert found is not None
    assert found.epoch == 41
    assert stat.S_IMODE((tmp_path / "MANIFEST").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["MANIFEST"]


def test_the_fields_of_a_manifest_are_a_promise(tmp_path: Path) -> None:
    about = (("model", "m2/s.gguf"), ("dtype", "bfloat16"))
    write_manifest(tmp_path, Geometry.of(replace(spec(), description=about)))
    assert json.loads((tmp_path / "MANIFEST").read_text()) == {
        "format_version": 2,
        "namespace": spec().namespace.hex(),
        "block_bytes": 8192,
        "block_tokens": 16,
        "stride_bytes": 8192,
        "slots_per_slab": (16 << 30) // 8192,
        "epoch": 1,
        "description": {"model": "m2/s.gguf", "dtype": "bfloat16"},
    }


def test_no_manifest_is_no_store(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_a_manifest_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path, Geometry.of(spec()))
    before = (tmp_path / "MANIFEST").read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_manifest(tmp_path, replace(Geometry.of(spec()), epoch=2))
    assert (tmp_path / "MANIFEST").read_bytes() == before
    assert os.listdir(tmp_path) == ["MANIFEST"]


@pytest.mark.parametrize("version", [0, 1, FORMAT_VERSION + 1, -1, "2", None, 1.5])
def test_another_version_is_foreign_and_named(tmp_path: Path, version: object) -> None:
    write_raw(tmp_path, json.dumps(sound_manifest() | {"format_version": version}).encode())
    with pytest.raises(Foreign, match=f"version {version}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 300,
        b"\xff\xfe\xfd",
        b"{",
        b"null",
        b"17",
        b'"text"',
        b"[1, 2]",
        b"{}",
        b'{"format_version": 2}',
        json.dumps(sound_manifest()).encode()[:-20],
        json.dumps(sound_manifest()).encode() + b"}",
    ],
)
def test_a_damaged_manifest_is_foreign(tmp_path: Path, data: bytes) -> None:
    write_raw(tmp_path, data)
    with pytest.raises(Foreign, match="MANIFEST"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"namespace": "00"},
        {"namespace": "zz" * 32},
        {"namespace": 5},
        {"namespace": None},
        {"block_bytes": 0},
        {"block_bytes": -8192},
        {"block_bytes": "8192"},
        {"block_tokens": 0},
        {"stride_bytes": 0},
        {"slots_per_slab": 0},
        {"slots_per_slab": None},
        {"epoch": 0},
        {"epoch": -1},
        {"stranger": 1},
    ],
    ids=str,
)
def test_a_field_out_of_range_is_foreign(tmp_path: Path, damage: dict[str, object]) -> None:
    write_raw(tmp_path, json.dumps(sound_manifest() | damage).encode())
    with pytest.raises(Foreign, match="damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("field", ["slots_per_slab", "epoch"])
@pytest.mark.parametrize("value", ["2.5", "Infinity"])
def test_a_field_that_is_no_whole_number_is_foreign(tmp_path: Path, field: str, value: str) -> None:
    manifest = json.dumps(sound_manifest() | {field: "@"}).replace('"@"', value)
    write_raw(tmp_path, manifest.encode())
    with pytest.raises(Foreign, match="damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "field", ["namespace", "block_bytes", "block_tokens", "stride_bytes", "slots_per_slab"]
)
def test_a_field_left_out_is_foreign(tmp_path: Path, field: str) -> None:
    fields = sound_manifest()
    del fields[field]
    write_raw(tmp_path, json.dumps(fields).encode())
    with pytest.raises(Foreign, match="damaged"):
        read_manifest(tmp_path)


def test_a_manifest_nested_without_end_is_foreign(tmp_path: Path) -> None:
    write_raw(tmp_path, b"[" * 100_000)
    with pytest.raises(Foreign):
        read_manifest(tmp_path)


def test_a_manifest_that_is_a_directory_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "MANIFEST").mkdir()
    with pytest.raises(Foreign, match="cannot be read"):
        read_manifest(tmp_path)


def test_any_flipped_bit_of_a_manifest_is_foreign_or_a_valid_geometry(tmp_path: Path) -> None:
    sound = (json.dumps(sound_manifest(), indent=2) + "\n").encode()
    write_raw(tmp_path, sound)
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        with (tmp_path / "MANIFEST").open("r+b") as file:  # in place: truncating is slow
            file.write(damaged)
        try:
            found = read_manifest(tmp_path)
        except Foreign:
            continue
        assert found is not None
        words = ("namespace", "description")
        numbers = [value for name, value in asdict(found).items() if name not in words]
        assert all(type(number) is int and number > 0 for number in numbers), f"bit {bit}"
