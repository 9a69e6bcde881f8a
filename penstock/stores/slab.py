"""The byte format of a disk store: its files, and the record of each slot.

A disk folder has one such store per namespace (see `folder`):

    STORE/
      MANIFEST      JSON: format version, namespace, geometry, a description; always replaced
                    whole
      LOCK          held with flock by the only writer; its text names the process
      index         one 128-byte record per slot, in slot order
      slab-00000    payloads: `slots_per_slab` slots of `stride_bytes` each; slab-00001, ...

A record (little-endian):

    offset  size
         0     4  magic "PKV1"
         4     4  state: 0 empty, 1 holds a block
         8     8  generation: epoch of the writer << 40 | number of its writes; grows
        16    32  key
        48    32  namespace (physical, see keys.Namespace)
        80     8  length of the payload in bytes
        88    16  XXH3-128 of the payload
       104    16  reserved, zero
       120     8  XXH3-64 of the 120 bytes before

A slot is written in three steps: its record is emptied, the payload is written, the record is
written. If the writer is killed at any point, every record that names a block was written after
its payload. If the machine loses power and the writes were reordered, the payload's checksum does
not match. A slot is empty if its record is all zero or fails its own checksum.
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
NAMESPACE_DIGITS = 32  # of the namespace, in the name of its store's directory
NAMESPACE_NAME = rf"[0-9a-f]{{{NAMESPACE_DIGITS}}}"
_BODY = struct.Struct("<4sIQ32s32sQ16s16x")
_SUM = struct.Struct("<Q")
_RECORD = struct.Struct("<4sIQ32s32sQ16s16xQ")
_ZERO = bytes(RECORD_BYTES)
# MANIFEST, LOCK, and the temporary file while MANIFEST is replaced: a page each.
FIXED_BYTES = 3 * PAGE_BYTES
# Bytes per slot that a filesystem may need for a slab's extent tree if writes are scattered.
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
    """The record, or None if it was never written, or is torn or damaged."""
    if data == _ZERO or len(data) != RECORD_BYTES:
        return None
    body = data[: _BODY.size]
    magic, state, generation, key, namespace, length, checksum = _BODY.unpack(body)
    if magic != MAGIC or _SUM.unpack(data[_BODY.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    return SlabRecord(state == HELD, generation, BlockKey(key), namespace, length, checksum)


def find_keys(data: bytes, namespace: bytes, length: int) -> list[tuple[int, BlockKey | None]]:
    """Generation and key of each record in `data`; the key is None unless the record is valid.

    The same checks as `unpack_record`, for many records at a time.
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
    """Indices of damaged records. `found` is the result of `find_keys` for the same `data`."""
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
    """The layout and namespace of a store. It can be opened only with the same ones."""

    format_version: int
    namespace: str
    block_bytes: int
    block_tokens: int
    stride_bytes: int
    slots_per_slab: int
    # Number of writers that have opened the store: generations grow without trusting a clock.
    epoch: int = field(default=1, compare=False)
    # What the namespace is for, in words that people understand.
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
        """Slots that fit under the cap, counting everything else that the store writes."""
        per_slot = self.stride_bytes + RECORD_BYTES + EXTENT_BYTES
        per_slab = self.slots_per_slab * per_slot + PAGE_BYTES
        # The index and its own extents are rounded up to pages.
        room = max(0, cap_bytes - FIXED_BYTES - 2 * PAGE_BYTES)
        num_slabs, rest = divmod(room, per_slab)
        return num_slabs * self.slots_per_slab + max(0, rest - PAGE_BYTES) // per_slot

    def footprint_bytes(self, num_slots: int, slab_sizes: Collection[int]) -> int:
        """The most disk space that a store of `num_slots` takes with slabs of these sizes.

        With full slabs it is at most the cap for which `num_slots` was computed.
        """
        slots_in_slabs = sum(size // self.stride_bytes for size in slab_sizes)
        payload = sum(slab_sizes) + slots_in_slabs * EXTENT_BYTES + len(slab_sizes) * PAGE_BYTES
        return FIXED_BYTES + 2 * PAGE_BYTES + num_slots * RECORD_BYTES + payload

    @property
    def min_cap_bytes(self) -> int:
        """The smallest cap with room for one slot."""
        return FIXED_BYTES + 3 * PAGE_BYTES + self.stride_bytes + RECORD_BYTES + EXTENT_BYTES

    def place(self, slot: Slot) -> tuple[int, int]:
        """The slab's number, and the offset of the slot's payload in it."""
        slab, index = divmod(slot, self.slots_per_slab)
        return slab, index * self.stride_bytes


def slab_path(directory: Path, slab: int) -> Path:
    return directory / f"slab-{slab:05d}"


def slab_paths(directory: Path) -> list[tuple[int, Path]]:
    """Number and path of each existing slab, sorted."""
    return sorted(
        (int(path.name[5:]), path)
        for path in directory.glob("slab-*")
        if re.fullmatch(r"slab-[0-9]{5,9}", path.name)
    )


def read_manifest(directory: Path) -> Geometry | None:
    """The geometry of the store in a directory, or None if there is no store."""
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
            raise ValueError("a number is impossible")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Foreign(
            f"{directory}/MANIFEST is damaged ({printable(str(error))}), so nothing in the store "
            f"can be trusted; clear it with `{clear_command(directory)}`."
        ) from None
    return geometry


def clear_command(directory: Path) -> str:
    """The command that clears a store or a disk folder."""
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
            f"{directory} has format version {reprlib.repr(version)}, but this Penstock reads "
            f"version {FORMAT_VERSION}; use another path, or clear it with "
            f"`{clear_command(directory)}`."
        )


def write_manifest(directory: Path, geometry: Geometry) -> None:
    write_whole(directory, asdict(geometry))


def write_whole(directory: Path, fields: Mapping[str, object]) -> None:
    """Replace the manifest atomically: readers see the old one or the new one."""
    text = json.dumps(fields, indent=2) + "\n"  # ASCII, because a path need not be valid Unicode
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
