"""The byte format of a disk store: its files, and the record that vouches for each slot.

A disk folder holds one such store for each namespace (see `folder`):

    STORE/
      MANIFEST      JSON: format version, namespace, geometry, what it is for in words; replaced
                    whole, never edited
      LOCK          held with flock by the one writer; names it for people
      index         one 128-byte record a slot, in slot order
      slab-00000    payloads: `slots_per_slab` slots of `stride_bytes` each; slab-00001, ...

A record (little-endian):

    offset  size
         0     4  magic "PKV1"
         4     4  state: 0 empty, 1 holds a block
         8     8  generation: epoch of the writer << 40 | its count of writes; newer is larger
        16    32  key
        48    32  namespace (physical, see keys.Namespace)
        80     8  length of the payload in bytes
        88    16  XXH3-128 of the payload
       104    16  reserved, zero
       120     8  XXH3-64 of the 120 bytes before

A slot is written in three steps: its record is made empty, the payload is written, the record is
written. Whenever a writer dies, a record that names a block was written after its payload; and
should the machine lose power and reorder the writes, the payload's checksum tells. A record that
is all zero, or whose own checksum fails, holds nothing.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import struct
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from penstock.errors import ConfigError, Foreign
from penstock.types import PAGE_BYTES, BlockKey, BlockSpec, Slot
from penstock.units import format_bytes, printable

FORMAT_VERSION = 2
MAGIC = b"PKV1"
RECORD_BYTES = 128
SLAB_BYTES = 16 << 30
EMPTY, HELD = 0, 1
_MAX_EPOCH = 1 << 23  # a generation has 64 bits, 40 of them for the count
NAMESPACE_DIGITS = 32  # of a namespace, that name its store within a folder
NAMESPACE_NAME = rf"[0-9a-f]{{{NAMESPACE_DIGITS}}}"
_BODY = struct.Struct("<4sIQ32s32sQ16s16x")
_SUM = struct.Struct("<Q")
_RECORD = struct.Struct("<4sIQ32s32sQ16s16xQ")
_ZERO = bytes(RECORD_BYTES)
# MANIFEST and LOCK, and the manifest's temporary while it is replaced: a page each.
FIXED_BYTES = 3 * PAGE_BYTES
# What a filesystem may count to a slab for its extent tree, when slots are written here and there.
EXTENT_BYTES = 32


class SlabRecord(NamedTuple):
    held: bool
    generation: int
    key: BlockKey
    namespace: bytes
    length: int
    checksum: bytes


def pack_record(record: SlabRecord) -> bytes:
    body = _BODY.pack(
        MAGIC,
        HELD if record.held else EMPTY,
        record.generation,
        record.key,
        record.namespace,
        record.length,
        record.checksum,
    )
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def empty_record(generation: int) -> bytes:
    return pack_record(SlabRecord(False, generation, BlockKey(bytes(32)), bytes(32), 0, bytes(16)))


def unpack_record(data: bytes | memoryview) -> SlabRecord | None:
    """The record, or None where there is none: never written, torn, or damaged."""
    if data == _ZERO or len(data) != RECORD_BYTES:
        return None
    body = data[: _BODY.size]
    magic, state, generation, key, namespace, length, checksum = _BODY.unpack(body)
    if magic != MAGIC or _SUM.unpack(data[_BODY.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    return SlabRecord(state == HELD, generation, BlockKey(key), namespace, length, checksum)


def find_keys(data: bytes, namespace: bytes, length: int) -> list[tuple[int, BlockKey | None]]:
    """Generation and key of each record in `data`; no key where it does not vouch for a block.

    The same judgement as `unpack_record`, for whole stretches of an index at a time.
    """
    found: list[tuple[int, BlockKey | None]] = []
    digest = xxhash.xxh3_64_intdigest
    body, offset = _BODY.size, 0
    for (
        magic,
        state,
        generation,
        key,
        held_namespace,
        held_length,
        _,
        checksum,
    ) in _RECORD.iter_unpack(data):
        if (
            state == HELD
            and magic == MAGIC
            and held_length == length
            and held_namespace == namespace
            and checksum == digest(data[offset : offset + body])
        ):
            found.append((generation, key))
        else:
            found.append((0, None))
        offset += RECORD_BYTES
    return found


def find_damage(data: bytes, found: Sequence[tuple[int, BlockKey | None]]) -> list[int]:
    """Which records of `data`, in which `find_keys` found this, are neither blocks nor empty."""
    damaged = []
    for index, (_, key) in enumerate(found):
        if key is None:
            record = data[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
            unpacked = unpack_record(record)
            if record != _ZERO and (unpacked is None or unpacked.held):
                damaged.append(index)
    return damaged


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a store was made for. It is opened again only for the same."""

    format_version: int
    namespace: str
    block_bytes: int
    block_tokens: int
    stride_bytes: int
    slots_per_slab: int
    # Counts the writers that opened the store: makes generations grow without trusting a clock.
    epoch: int = field(default=1, compare=False)
    # What the namespace stands for, for people: a digest tells them nothing.
    description: dict[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, spec: BlockSpec, slab_bytes: int = SLAB_BYTES) -> Geometry:
        return cls(
            FORMAT_VERSION,
            spec.namespace.hex(),
            spec.block_bytes,
            spec.block_tokens,
            spec.stride_bytes,
            max(1, slab_bytes // spec.stride_bytes),
            description=dict(spec.description),
        )

    @property
    def spec(self) -> BlockSpec:
        return BlockSpec(
            bytes.fromhex(self.namespace),
            self.block_bytes,
            self.block_tokens,
            tuple(self.description.items()),
        )

    def num_slots(self, cap_bytes: int) -> int:
        """Slots that fit under the cap together with everything else the store writes."""
        per_slot = self.stride_bytes + RECORD_BYTES + EXTENT_BYTES
        per_slab = self.slots_per_slab * per_slot + PAGE_BYTES
        # The index and its own extents are rounded up to pages.
        room = max(0, cap_bytes - FIXED_BYTES - 2 * PAGE_BYTES)
        num_slabs, rest = divmod(room, per_slab)
        return num_slabs * self.slots_per_slab + max(0, rest - PAGE_BYTES) // per_slot

    def footprint_bytes(self, num_slots: int, slab_sizes: Collection[int]) -> int:
        """The most that a store of `num_slots` takes with slabs of these sizes.

        With all its slabs full it is not more than the cap that `num_slots` was asked with.
        """
        slots_in_slabs = sum(size // self.stride_bytes for size in slab_sizes)
        payload = sum(slab_sizes) + slots_in_slabs * EXTENT_BYTES + len(slab_sizes) * PAGE_BYTES
        return FIXED_BYTES + 2 * PAGE_BYTES + num_slots * RECORD_BYTES + payload

    @property
    def min_cap_bytes(self) -> int:
        """The smallest cap under which there is a slot."""
        return FIXED_BYTES + 3 * PAGE_BYTES + self.stride_bytes + RECORD_BYTES + EXTENT_BYTES

    def place(self, slot: Slot) -> tuple[int, int]:
        """Number of the slab, and offset of the slot's payload in it."""
        slab, index = divmod(slot, self.slots_per_slab)
        return slab, index * self.stride_bytes


def slab_path(directory: Path, slab: int) -> Path:
    return directory / f"slab-{slab:05d}"


def slab_paths(directory: Path) -> list[tuple[int, Path]]:
    """The slabs there are, by number."""
    return sorted(
        (int(path.name[5:]), path)
        for path in directory.glob("slab-*")
        if re.fullmatch(r"slab-[0-9]{5,9}", path.name)
    )


def read_manifest(directory: Path) -> Geometry | None:
    """The geometry a directory was made for, or None where there is no store."""
    try:
        text = (directory / "MANIFEST").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise Foreign(f"{directory}/MANIFEST cannot be read: {error}.") from None
    try:
        fields = json.loads(text)
        refuse_other_version(directory, fields["format_version"])
        geometry = Geometry(**fields)
        words = ("namespace", "description")
        numbers = [value for name, value in fields.items() if name not in words]
        valid = all(type(number) is int and 0 < number < 1 << 62 for number in numbers)
        valid &= all(type(text) is str for text in geometry.description.values())
        if not valid or len(bytes.fromhex(geometry.namespace)) != 32:
            raise ValueError("a field is out of range")
        if geometry.epoch >= _MAX_EPOCH or geometry.stride_bytes != geometry.spec.stride_bytes:
            raise ValueError("a number cannot be right")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Foreign(
            f"{directory}/MANIFEST is damaged ({printable(str(error))}); nothing in the store "
            f"can be trusted: empty it with `{clear_command(directory)}`."
        ) from None
    return geometry


def clear_command(directory: Path) -> str:
    """What a user runs to empty a store, or the folder in which stores lie."""
    if re.fullmatch(NAMESPACE_NAME, directory.name):
        return f"penstock store clear {directory.parent} --namespace {directory.name}"
    return f"penstock store clear {directory}"


def too_small(cap_bytes: int, min_bytes: int) -> ConfigError:
    return ConfigError(
        f"disk.size is {format_bytes(cap_bytes)}, too little for one block; "
        f"set it to at least {format_bytes(min_bytes)}."
    )


def refuse_other_version(directory: Path, version: object) -> None:
    if version != FORMAT_VERSION:
        raise Foreign(
            f"{directory} holds a store of format version {reprlib.repr(version)}, and this "
            f"Penstock reads version {FORMAT_VERSION}; use another path, or empty it with "
            f"`{clear_command(directory)}`."
        )


def write_manifest(directory: Path, geometry: Geometry) -> None:
    write_whole(directory, asdict(geometry))


def write_whole(directory: Path, fields: Mapping[str, object]) -> None:
    """Replace the manifest whole: it is the old one or the new one, never a part."""
    text = json.dumps(fields, indent=2) + "\n"  # ASCII: a path need not be valid Unicode
    descriptor, temporary = tempfile.mkstemp(prefix=".MANIFEST-", dir=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / "MANIFEST")
    except BaseException:
        os.unlink(temporary)
        raise
