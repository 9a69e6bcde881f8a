"""Packs bfloat16 KV without loss, on a CPU (see `lossless_format`)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from penstock.codecs.lossless_format import VALUE_BYTES, LosslessFormat
from penstock.codecs.names import LOSSLESS


class LosslessCodec:
    """A `Codec` for one part. Uses numba, or torch where numba is missing."""

    name = LOSSLESS

    def __init__(self, form: LosslessFormat, *, use_numba: bool = True) -> None:
        self.form = form
        self.version = form.version
        self.raw_bytes = form.raw_bytes
        self.packed_bytes = form.packed_bytes
        self._use_numba = use_numba

    def pack(self, raw: memoryview, packed: memoryview) -> bool:
        packed[2 * self.form.num_regions : self.form.header_bytes] = bytes(
            self.form.header_bytes - 2 * self.form.num_regions
        )
        return self._regions.pack(raw[: self.raw_bytes], packed[: self.packed_bytes], 0)

    def unpack(self, packed: memoryview, raw: memoryview) -> None:
        self.unpack_stretch(packed, raw[: self.raw_bytes], 0)

    def unpack_stretch(self, packed: memoryview, raw: memoryview, start: int) -> None:
        """Unpack whole regions, which begin at byte `start` of the raw part."""
        first = start // (self.form.region_values * VALUE_BYTES)
        self._regions.unpack(packed[: self.packed_bytes], raw, first)

    @cached_property
    def _regions(self) -> _NumbaRegions | _TorchRegions:
        # Made at first use: where a GPU packs, neither is imported.
        return _make_regions(self.form, use_numba=self._use_numba)


class _NumbaRegions:
    def __init__(self, form: LosslessFormat) -> None:
        import numpy as np

        from penstock.codecs import lossless_numba

        self._np: Any = np
        self._compiled = lossless_numba
        self._numbers = (
            form.row_values,
            form.region_rows,
            form.max_exceptions,
            form.header_bytes,
            form.region_bytes,
        )

    def pack(self, raw: memoryview, packed: memoryview, first: int) -> bool:
        np = self._np
        return bool(
            self._compiled.pack_regions(
                np.frombuffer(raw, np.uint16),
                np.frombuffer(packed, np.uint8),
                first,
                *self._numbers,
            )
        )

    def unpack(self, packed: memoryview, raw: memoryview, first: int) -> None:
        np = self._np
        self._compiled.unpack_regions(
            np.frombuffer(packed, np.uint8), np.frombuffer(raw, np.uint16), first, *self._numbers
        )


class _TorchRegions:
    def __init__(self, form: LosslessFormat) -> None:
        import torch

        from penstock.codecs import lossless_torch

        self._torch: Any = torch
        self._functions = lossless_torch
        self._form = form

    def pack(self, raw: memoryview, packed: memoryview, first: int) -> bool:
        torch = self._torch
        values = torch.frombuffer(raw, dtype=torch.int16)
        target = torch.frombuffer(packed, dtype=torch.uint8)
        return self._functions.pack_regions(values, target, first, self._form)

    def unpack(self, packed: memoryview, raw: memoryview, first: int) -> None:
        torch = self._torch
        source = torch.frombuffer(packed, dtype=torch.uint8)
        values = torch.frombuffer(raw, dtype=torch.int16)
        self._functions.unpack_regions(source, values, first, self._form)


def _make_regions(form: LosslessFormat, *, use_numba: bool) -> _NumbaRegions | _TorchRegions:
    if use_numba:
        try:
            return _NumbaRegions(form)
        except ImportError:
            pass
    return _TorchRegions(form)
