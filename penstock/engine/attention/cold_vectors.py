"""Unpacks neighboring values of packed blocks with vectors written by hand, for numba.

The compiler does not find them by itself: values are pairs of half a byte, which it would unpack
with scattered reads. This takes less than half of the time.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types

from penstock.codecs.lossless_format import EXCEPTION_CODE, ZERO_CODE

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _make_unpack(count: int) -> Any:
    half = count // 2

    def vector(item: Any, size: int, number: int) -> Any:
        return ir.Constant(ir.VectorType(item, size), [number] * size)

    def read(builder: Any, address: Any, size: int) -> Any:
        kind = ir.VectorType(_I8, size)
        loaded = builder.load(builder.inttoptr(address, kind.as_pointer()), typ=kind)
        loaded.align = 1
        return loaded

    def bytes_of(number: int) -> Any:
        return vector(_I8, count, number)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        plain_at, codes_at, largest, out = arguments
        plain = read(builder, plain_at, count)
        pairs = builder.zext(read(builder, codes_at, half), ir.VectorType(_I16, half))
        first = builder.and_(pairs, vector(_I16, half, 0x0F))
        second = builder.shl(builder.and_(pairs, vector(_I16, half, 0xF0)), vector(_I16, half, 4))
        codes = builder.bitcast(builder.or_(first, second), ir.VectorType(_I8, count))
        nothing = ir.Constant(ir.VectorType(_I8, count), ir.Undefined)
        only = builder.insert_element(nothing, builder.trunc(largest, _I8), ir.Constant(_I32, 0))
        every = builder.shuffle_vector(only, nothing, vector(_I32, count, 0))
        exponents = builder.sub(every, codes)
        is_zero = builder.icmp_unsigned("==", codes, bytes_of(ZERO_CODE))
        exponents = builder.select(is_zero, bytes_of(0), exponents)
        sign = builder.and_(plain, bytes_of(0x80))
        high = builder.or_(sign, builder.lshr(exponents, bytes_of(1)))
        mantissa = builder.and_(plain, bytes_of(0x7F))
        low = builder.or_(mantissa, builder.shl(exponents, bytes_of(7)))
        words = ir.VectorType(_I32, count)
        high = builder.shl(builder.zext(high, words), vector(_I32, count, 24))
        low = builder.shl(builder.zext(low, words), vector(_I32, count, 16))
        target = builder.inttoptr(out, words.as_pointer())
        builder.store(builder.or_(high, low), target).align = 4
        are_exceptions = builder.icmp_unsigned("==", codes, bytes_of(EXCEPTION_CODE))
        mask = builder.bitcast(are_exceptions, ir.IntType(count))
        return builder.zext(mask, _I64) if count < 64 else mask

    @numba.extending.intrinsic
    def unpack(_context: Any, plain: Any, codes: Any, largest: Any, out: Any) -> Any:
        return types.int64(types.int64, types.int64, types.int64, types.int64), generate

    return unpack


# The addresses of values and codes, the row's largest exponent, and where the bits of float32
# belong. Returns a mask of the exceptions, whose exponents must be replaced.
unpack_64 = _make_unpack(64)
unpack_16 = _make_unpack(16)
