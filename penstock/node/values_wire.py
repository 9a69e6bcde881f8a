"""What a client says about the values in its blocks, as plain data."""

from __future__ import annotations

from typing import Any

from penstock.codecs.blocks import BlockValues, PartValues
from penstock.codecs.layout import KvLayout


def pack_values(values: BlockValues) -> dict[str, Any]:
    """As plain data, for `attach`."""
    return {
        "on_gpu": values.on_gpu,
        "parts": [
            {
                "num_bytes": part.num_bytes,
                "dtype": part.dtype,
                "stretches": list(part.stretches),
                "head_dim": part.head_dim,
                "layout": None if part.layout is None else [part.layout.dtype, part.layout.axes],
            }
            for part in values.parts
        ],
    }


def unpack_values(packed: Any) -> BlockValues:
    parts = tuple(
        PartValues(
            int(part["num_bytes"]),
            str(part["dtype"]),
            tuple(map(int, part["stretches"])),
            None if part["head_dim"] is None else int(part["head_dim"]),
            None if part["layout"] is None else _layout(part["layout"]),
        )
        for part in packed["parts"]
    )
    return BlockValues(parts, bool(packed["on_gpu"]))


def _layout(packed: Any) -> KvLayout:
    dtype, axes = packed
    return KvLayout(str(dtype), tuple((str(name), int(size)) for name, size in axes))
