"""Decode attention on a CPU. It reads blocks in place, by address, in the pool or in DRAM.

Blocks in DRAM may be packed (see `penstock.codecs.lossless_format`): then their address is odd
(see `penstock.engine.table`), and the rows that are needed are unpacked.

Each sequence is split into parts of `_PART_TOKENS`, which are distributed over the cores. Each part
keeps its largest score, its sum of weights and its weighted values; the parts are merged at the
end. The split depends only on a sequence's length, so the result is the same, bit for bit, wherever
its blocks are and whatever else is in the batch.

Compiled by numba at first use (a few seconds, then cached on disk).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from penstock.codecs.lossless_format import LosslessFormat
from penstock.codecs.lossless_numba import unpack_rows
from penstock.compiling import compiled
from penstock.engine import fp8
from penstock.engine.attention.rules import CAUSAL, LayerRules
from penstock.engine.table import Places

_PART_TOKENS = 128
# Sums may be reordered, else nothing is vectorised; infinities must keep their meaning.
_FAST = {"contract", "reassoc", "nsz", "arcp", "nnan"}
# The value of each e4m3 byte, as the bits of a float32.
_E4M3 = torch.arange(256, dtype=torch.uint8).view(fp8.DTYPE).float().numpy().view(np.uint32)
_NO_SINKS = torch.empty(0)
# Two engines must not enter numba's thread pool at the same time.
_ONE_AT_A_TIME = threading.Lock()


@numba.extending.intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """Convert an address to a pointer, for `carray`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], numba.core.cgutils.voidptr_t)

    return numba.types.voidptr(address), generate


@numba.njit(fastmath={"contract", "nsz"}, inline="always")
def _exp(x: Any) -> Any:
    """exp(x) for x <= 0, accurate to the last bits of a float32 (Cephes), and vectorisable."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    x = x - n * np.float32(0.693359375)
    x = x + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * x + np.float32(1.3981999507e-3)
    p = p * x + np.float32(8.3334519073e-3)
    p = p * x + np.float32(4.1665795894e-2)
    p = p * x + np.float32(1.6666665459e-1)
    p = p * x + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return (p * x * x + x + np.float32(1)) * power.view(np.float32)


@compiled(fastmath=_FAST, nogil=True)
def _score(query: Any, rows: Any, start: int, step: int, count: int, scores: Any) -> None:
    """scores[j, o] = query[j] . row o, four rows at a time to read each query only once for them"""
    group, dim = query.shape
    o = 0
    while o + 4 <= count:
        at = start + o * step
        k0, k1 = rows[at : at + dim], rows[at + step : at + step + dim]
        at += 2 * step
        k2, k3 = rows[at : at + dim], rows[at + step : at + step + dim]
        for j in range(group):
            q, out = query[j], scores[j]
            s0 = s1 = s2 = s3 = np.float32(0)
            for x in range(dim):
                s0 += q[x] * k0[x]
                s1 += q[x] * k1[x]
                s2 += q[x] * k2[x]
                s3 += q[x] * k3[x]
            out[o], out[o + 1], out[o + 2], out[o + 3] = s0, s1, s2, s3
        o += 4
    while o < count:
        k0 = rows[start + o * step : start + o * step + dim]
        for j in range(group):
            q = query[j]
            s0 = np.float32(0)
            for x in range(dim):
                s0 += q[x] * k0[x]
            scores[j, o] = s0
        o += 1


@compiled(fastmath=_FAST, nogil=True)
def _soften(scores: Any, scale: Any, count: int, cap: Any) -> None:
    """Turn scores into cap * tanh(score * scale / cap)."""
    factor = np.float32(2) * scale / cap
    for j in range(len(scores)):
        row = scores[j]
        for o in range(count):
            x = row[o] * factor
            power = _exp(-abs(x))
            row[o] = np.copysign(cap * (np.float32(1) - power) / (np.float32(1) + power), x)


@compiled(fastmath=_FAST, nogil=True)
def _weigh(scores: Any, scale: Any, count: int, largest: Any, total: Any, values: Any) -> None:
    """Turn scores into weights relative to the largest so far, and rescale the earlier sums."""
    group, dim = values.shape
    for j in range(group):
        row, value = scores[j], values[j]
        most = row[0]
        for o in range(1, count):
            most = max(most, row[o])
        most = max(largest[j], most * scale)
        shrink = np.exp(largest[j] - most)
        largest[j] = most
        for x in range(dim):
            value[x] *= shrink
        added = np.float32(0)
        for o in range(count):
            weight = _exp(row[o] * scale - most)
            row[o] = weight
            added += weight
        total[j] = total[j] * shrink + added


@compiled(fastmath=_FAST, nogil=True)
def _gather(weights: Any, rows: Any, start: int, step: int, count: int, values: Any) -> None:
    """values[j] += weights[j, o] * row o"""
    group, dim = values.shape
    o = 0
    while o + 4 <= count:
        at = start + o * step
        v0, v1 = rows[at : at + dim], rows[at + step : at + step + dim]
        at += 2 * step
        v2, v3 = rows[at : at + dim], rows[at + step : at + step + dim]
        for j in range(group):
            w, value = weights[j], values[j]
            w0, w1, w2, w3 = w[o], w[o + 1], w[o + 2], w[o + 3]
            for x in range(dim):
                value[x] += w0 * v0[x] + w1 * v1[x] + w2 * v2[x] + w3 * v3[x]
        o += 4
    while o < count:
        v0 = rows[start + o * step : start + o * step + dim]
        for j in range(group):
            w0, value = weights[j, o], values[j]
            for x in range(dim):
                value[x] += w0 * v0[x]
        o += 1


@compiled(fastmath=_FAST, nogil=True)
def _widen(block: Any, start: int, count: int, wide: Any) -> None:
    """Convert to float32: the bits of a bfloat16 are the upper half, and e4m3 has a table."""
    narrow = block[start : start + count]
    if narrow.itemsize == 1:
        for x in range(count):
            wide[x] = _E4M3[np.uint8(narrow[x])]
    else:
        for x in range(count):
            wide[x] = np.uint32(narrow[x]) << np.uint32(16)


@compiled(nogil=True)
def _unpack(block: int, form: Any, first_row: int, raw: Any) -> None:
    """Unpack neighboring rows of the packed block at an address; rows count from its beginning."""
    header_bytes, region_bytes, row_values, region_rows, max_exceptions = form
    num_rows = len(raw) // row_values
    done = 0
    while done < num_rows:
        region, row = divmod(first_row + done, region_rows)
        count = min(region_rows - row, num_rows - done)
        address = block + header_bytes + region * region_bytes
        data = carray(_pointer(address), (region_bytes,), np.uint8)  # type: ignore[call-arg]
        out = raw[done * row_values : (done + count) * row_values]
        unpack_rows(data, row, out, row_values, region_rows, max_exceptions)
        done += count


@compiled(fastmath=_FAST, nogil=True)
def _attend_part(
    query: Any,  # [heads, dim]
    sample: Any,  # of the dtype at the addresses; uint16 stands for bfloat16, uint8 for e4m3
    shape: Any,  # block_tokens, kv_heads
    form: Any,  # the numbers of the packed blocks' form, for `_unpack`
    layer: int,
    table: Any,  # addresses of blocks
    begin: int,
    end: int,
    scale: Any,
    cap: Any,  # of scores (see `LayerRules`), or 0
    largest: Any,  # [heads]
    total: Any,  # [heads]
    values: Any,  # [heads, dim]
) -> None:
    block_tokens, kv_heads = shape
    heads, dim = query.shape
    group = heads // kv_heads
    step = kv_heads * dim
    largest[:] = -np.inf
    total[:] = 0
    values[:] = 0
    scores = np.empty((group, block_tokens), np.float32)
    size = 2 * block_tokens * step  # elements of one layer's keys and values in a block
    wide = np.empty(size if sample.itemsize < 4 else 0, np.uint32)
    unpacked = np.empty(block_tokens * step if form[0] else 0, np.uint16)
    token = begin
    while token < end:
        offset = token % block_tokens
        count = min(block_tokens - offset, end - token)
        place = table[token // block_tokens]
        address = place + layer * size * sample.itemsize
        block = carray(_pointer(address), (size,), sample.dtype)  # type: ignore[call-arg]
        keys = offset * step
        rows_of_values = keys + block_tokens * step
        if sample.itemsize < 4:
            if place & 1:
                row = (layer * 2 * block_tokens + offset) * kv_heads
                _unpack(place - 1, form, row, unpacked[: count * step])
                _widen(unpacked, 0, count * step, wide)
                row += block_tokens * kv_heads
                _unpack(place - 1, form, row, unpacked[: count * step])
                _widen(unpacked, 0, count * step, wide[block_tokens * step :])
            else:
                _widen(block, keys, count * step, wide)
                _widen(block, rows_of_values, count * step, wide[block_tokens * step :])
            keys, rows_of_values = 0, block_tokens * step
            rows = wide.view(np.float32)
        else:
            rows = block.view(np.float32)
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            at = head * dim
            _score(query[mine], rows, keys + at, step, count, scores)
            factor = scale
            if cap > 0:
                _soften(scores, scale, count, cap)
                factor = np.float32(1)
            _weigh(scores, factor, count, largest[mine], total[mine], values[mine])
            _gather(scores, rows, rows_of_values + at, step, count, values[mine])
        token += count


@compiled(fastmath=_FAST, nogil=True, parallel=True)
def _decode(
    query: Any,
    sample: Any,
    shape: Any,
    form: Any,
    layer: int,
    tables: Any,
    lengths: Any,
    scale: Any,
    window: int,  # see `LayerRules`
    cap: Any,
    sinks: Any,  # [heads], or empty
    largest: Any,
    total: Any,
    values: Any,
    out: Any,
) -> None:
    num_parts = largest.shape[1]
    for task in numba.prange(len(lengths) * num_parts):
        sequence, part = task // num_parts, task % num_parts
        begin = part * _PART_TOKENS
        end = min(lengths[sequence], begin + _PART_TOKENS)
        if window:
            begin = max(begin, lengths[sequence] - window)
        if begin < end:
            _attend_part(
                query[sequence],
                sample,
                shape,
                form,
                layer,
                tables[sequence],
                begin,
                end,
                scale,
                cap,
                largest[sequence, part],
                total[sequence, part],
                values[sequence, part],
            )
    for sequence in numba.prange(len(lengths)):
        used = (lengths[sequence] + _PART_TOKENS - 1) // _PART_TOKENS
        first = max(0, lengths[sequence] - window) // _PART_TOKENS if window else 0
        for head in range(query.shape[1]):
            row = out[sequence, head]
            row[:] = 0
            most = largest[sequence, first, head]
            for part in range(first + 1, used):
                most = max(most, largest[sequence, part, head])
            weight = np.float32(0)
            if len(sinks):
                most = max(most, sinks[head])
                weight = np.exp(sinks[head] - most)
            for part in range(first, used):
                share = np.exp(largest[sequence, part, head] - most)
                weight += share * total[sequence, part, head]
                value = values[sequence, part, head]
                for x in range(len(row)):
                    row[x] += share * value[x]
            for x in range(len(row)):
                row[x] /= weight


class DecodeBatch:
    """The sequences of a step that add one token each; `attend` is called for every layer."""

    def __init__(
        self,
        pool: Tensor,
        tables: Sequence[Places],
        lengths: Sequence[int],
        num_heads: int,
        host_form: LosslessFormat | None = None,
    ) -> None:
        """`tables` hold the addresses of blocks that are laid out like the pool's, or packed.

        pool [blocks, layers, 2, block_tokens, kv_heads, head_dim], float32, bfloat16 or e4m3.
        """
        self._form = (0, 0, 0, 0, 0)
        if host_form is not None:
            self._form = (
                host_form.header_bytes,
                host_form.region_bytes,
                host_form.row_values,
                host_form.region_rows,
                host_form.max_exceptions,
            )
        kinds: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.float32}
        self._sample = np.empty(0, kinds[pool.itemsize])
        self._shape = (pool.shape[3], pool.shape[4])
        self._tables = np.zeros((len(tables), max(map(len, tables))), np.int64)
        for row, table in zip(self._tables, tables, strict=True):
            row[: len(table)] = table
        self._lengths = np.array(lengths, np.int64)
        room = (len(tables), -(-max(lengths) // _PART_TOKENS), num_heads)
        self._largest = np.empty(room, np.float32)
        self._total = np.empty(room, np.float32)
        self._values = np.empty((*room, pool.shape[5]), np.float32)
        self._num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]

    def attend(self, query: Tensor, layer: int, scale: float, rules: LayerRules = CAUSAL) -> Tensor:
        """query [sequences, heads, head_dim]; their last tokens' KV must be in the pool."""
        wide = query.to(torch.float32).contiguous()
        out = torch.empty_like(wide)
        sinks = _NO_SINKS if rules.sinks is None else rules.sinks.detach().float().contiguous()
        with _ONE_AT_A_TIME:
            numba.set_num_threads(self._num_threads)
            _decode(
                wide.numpy(),
                self._sample,
                self._shape,
                self._form,
                layer,
                self._tables,
                self._lengths,
                np.float32(scale),
                rules.window,
                np.float32(rules.cap),
                sinks.numpy(),
                self._largest,
                self._total,
                self._values,
                out.numpy(),
            )
        return out.to(query.dtype)
