"""Numba's kernels, which `client.jit` calls: importing this module compiles them, or loads them from numba's cache.

They work on flat memory, in planes, rows or parts of the given length, in values. In the vectors of a call, shape (4,
columns or C), the rows are: center, factor (of sums: shift), addend, by_grad.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# bfloat16, which numpy lacks, comes as its bits.
_OF_PLANES, _OF_ROWS = (types.float32, types.uint16), (types.uint16,)

# Values of a plane that are added in float32, in 64 columns or so, before their sum goes to float64.
GROUP = 2**12

_EXACT = {"contract"}
_IN_ANY_ORDER = {"contract", "reassoc"}  # within a plane, so that it is added in as many columns as the machine has


@intrinsic
def _wide(_: Any, value: Any) -> Any:
    """Returns float32 or the bits of bfloat16 as float32."""

    def generate(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
        if value == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return types.float32(value), generate


@intrinsic
def _narrow(_: Any, value: Any, like: Any) -> Any:
    """Returns a float32 in the type of `like`, rounded to the nearest, of two the even one; NaN stays NaN."""

    def generate(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
        if like == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        is_odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(builder.add(bits, word(0x7FFF)), is_odd)
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        kept = builder.select(is_nan, word(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, word(16)), ir.IntType(16))

    return like(value, like), generate


def _compiled(kinds: tuple[Any, ...], flags: set[str], *signature: Any) -> Any:
    """Compiles for each kind of values; `None` in the signature stands for an array of them."""
    signatures = [
        types.void(*(types.Array(kind, 1, "C") if part is None else part for part in signature)) for kind in kinds
    ]
    return njit(signatures, nogil=True, cache=True, fastmath=flags, error_model="numpy")


_Sums = types.Array(types.float64, 3, "C")
_Vectors = types.Array(types.float32, 2, "C")
_Given = types.Array(types.float64, 1, "A", readonly=True)
_int = types.int64


@_compiled(_OF_PLANES, _IN_ANY_ORDER, None, None, _Vectors, _Sums, _int)
def sum_planes(grad, x, vectors, sums, length):
    """Σ(g - shift) and Σ(g - shift)·(x - center) of planes; vectors: shape (4, C), sums: shape (2, planes, 1)."""
    for plane in range(sums.shape[1]):
        c = plane % vectors.shape[1]
        center, shift = vectors[0, c], vectors[1, c]
        firsts = seconds = 0.0
        for part in range(plane * length, (plane + 1) * length, GROUP):
            end = min(part + GROUP, (plane + 1) * length)
            g, v = grad[part:end], x[part:end]
            first = second = np.float32(0)
            for i in range(len(v)):
                shifted = _wide(g[i]) - shift
                first += shifted
                second += shifted * (_wide(v[i]) - center)
            firsts += first
            seconds += second
        sums[0, plane, 0] = firsts
        sums[1, plane, 0] = seconds


@_compiled(_OF_ROWS, _EXACT, None, None, _Vectors, _Sums, _int)
def sum_rows(grad, x, vectors, sums, length):
    """As `sum_planes`, of parts of rows; vectors: shape (4, columns), sums: shape (2, parts, columns)."""
    columns = sums.shape[2]
    center, shift = vectors[0], vectors[1]
    first, second = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for part in range(sums.shape[1]):
        end = min((part + 1) * length, len(x))
        first[:] = 0
        second[:] = 0
        for row in range(part * length, end, columns):
            g, v = grad[row : row + columns], x[row : row + columns]
            for c in range(len(v)):
                shifted = _wide(g[c]) - shift[c]
                first[c] += shifted
                second[c] += shifted * (_wide(v[c]) - center[c])
        for c in range(columns):
            sums[0, part, c] = first[c]
            sums[1, part, c] = second[c]


@_compiled(_OF_PLANES, _EXACT, None, None, _Vectors, _int)
def scale_planes(x, output, vectors, length):
    """Into output, (x - center) * factor + addend of planes; vectors: shape (4, C)."""
    for plane in range(len(x) // length):
        c = plane % vectors.shape[1]
        center, factor, addend = vectors[0, c], vectors[1, c], vectors[2, c]
        v, into = x[plane * length : (plane + 1) * length], output[plane * length : (plane + 1) * length]
        for i in range(len(v)):
            into[i] = _narrow((_wide(v[i]) - center) * factor + addend, v[i])


@_compiled(_OF_ROWS, _EXACT, None, None, _Vectors, _int)
def scale_rows(x, output, vectors, length):
    """As `scale_planes`, of rows; vectors: shape (4, length)."""
    center, factor, addend = vectors[0], vectors[1], vectors[2]
    for row in range(0, len(x), length):
        v, into = x[row : row + length], output[row : row + length]
        for c in range(len(v)):
            into[c] = _narrow((_wide(v[c]) - center[c]) * factor[c] + addend[c], v[c])


@_compiled(_OF_PLANES, _EXACT, None, None, None, _Vectors, _int)
def combine_planes(grad, x, output, vectors, length):
    """Into output, g * by_grad + ((x - center) * factor + addend) of planes; vectors: shape (4, C)."""
    for plane in range(len(x) // length):
        c = plane % vectors.shape[1]
        center, factor, addend, by_grad = vectors[0, c], vectors[1, c], vectors[2, c], vectors[3, c]
        g, v = grad[plane * length : (plane + 1) * length], x[plane * length : (plane + 1) * length]
        into = output[plane * length : (plane + 1) * length]
        for i in range(len(v)):
            into[i] = _narrow(_wide(g[i]) * by_grad + ((_wide(v[i]) - center) * factor + addend), v[i])


@_compiled(_OF_ROWS, _EXACT, None, None, None, _Vectors, _int)
def combine_rows(grad, x, output, vectors, length):
    """As `combine_planes`, of rows; vectors: shape (4, length)."""
    center, factor, addend, by_grad = vectors[0], vectors[1], vectors[2], vectors[3]
    for row in range(0, len(x), length):
        g, v = grad[row : row + length], x[row : row + length]
        into = output[row : row + length]
        for c in range(len(v)):
            into[c] = _narrow(_wide(g[c]) * by_grad[c] + ((_wide(v[c]) - center[c]) * factor[c] + addend[c]), v[c])


@njit(_Vectors(_Given, _Given, _Given, _Given, _int), cache=True)
def in_float32(mean, factor, addend, by_grad, fold):
    """Returns shape (4, fold * C): `fold` times the vectors; the addend has what rounding took from the centre."""
    vectors = np.empty((4, fold * len(mean)), np.float32)
    for i in range(fold):
        for c in range(len(mean)):
            k = i * len(mean) + c
            center = np.float32(mean[c])
            vectors[0, k] = center
            vectors[1, k] = factor[c]
            vectors[2, k] = addend[c] + factor[c] * (np.float64(center) - mean[c])
            vectors[3, k] = by_grad[c]
    return vectors
