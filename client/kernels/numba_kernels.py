"""Numba's kernels, which `client.kernels.numba_backend` calls.

Importing this module compiles them, or loads them from numba's cache.

They work on flat memory in units: planes, rows, or parts of rows. A kernel takes the beginning and the end of its range
of units, so that threads can share a tensor, and no result depends on how they do. It is a C function, for threads
that know nothing of Python, and finds the rest in an array of integers, see `Given`.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic


class Given(NamedTuple):
    """What a kernel is given, in this order; addresses that it has no use for are 0.

    Attributes:
        grad: the gradient's address; gradient, input and output are of one type.
        x: the input's address.
        output: the output's address.
        vectors: the address of float32 in shape (4, width): center, factor (of sums: shift), addend, by_grad.
        sums: the address of float32 in shape (2, units, columns), of planes one column.
        number: how many values there are.
        length: how many a unit has.
        width: columns, of planes channels.
        is_half: whether they are bfloat16, which numpy lacks and which comes as its bits, and not float32.
    """

    grad: int
    x: int
    output: int
    vectors: int
    sums: int
    number: int
    length: int
    width: int
    is_half: bool


GRAD, X, OUTPUT, VECTORS, SUMS, NUMBER, LENGTH, WIDTH, IS_HALF = range(len(Given._fields))

# Values of a plane that are added in float32, in 64 columns or so, before their sum goes to float64.
GROUP = 2**12

_EXACT = {"contract"}
_IN_ANY_ORDER = {"contract", "reassoc"}  # within a plane, so that it is added in as many columns as the machine has

_Kernel = types.void(types.int64, types.int64, types.CPointer(types.int64))
_Vectors = types.Array(types.float32, 2, "C")
_Sums = types.Array(types.float32, 3, "C")
_ByChannel = types.Array(types.float64, 2, "C")
_Vector = types.Array(types.float64, 1, "A", readonly=True)


@intrinsic
def _at(_: Any, address: Any, kind: Any) -> Any:
    """Returns an address as a pointer to values of this kind."""
    pointer = types.CPointer(kind.dtype)

    def generate(context: Any, builder: Any, ___: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, kind), generate


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


@njit
def _tensor(given, which, kind):
    return carray(_at(given[which], kind), given[NUMBER])


@njit
def _vectors(given):
    return carray(_at(given[VECTORS], np.float32), (4, given[WIDTH]))


@njit
def _sums(given, columns):
    return carray(_at(given[SUMS], np.float32), (2, -(-given[NUMBER] // given[LENGTH]), columns))


@njit(fastmath=_IN_ANY_ORDER, error_model="numpy")
def _sum_planes(begin, end, given, kind):
    grad, x = _tensor(given, GRAD, kind), _tensor(given, X, kind)
    vectors, sums, length = _vectors(given), _sums(given, 1), given[LENGTH]
    for plane in range(begin, end):
        c = plane % vectors.shape[1]
        center, shift = vectors[0, c], vectors[1, c]
        firsts = seconds = 0.0
        for group in range(plane * length, (plane + 1) * length, GROUP):
            stop = min(group + GROUP, (plane + 1) * length)
            g, v = grad[group:stop], x[group:stop]
            first = second = np.float32(0)
            for i in range(len(v)):
                shifted = _wide(g[i]) - shift
                first += shifted
                second += shifted * (_wide(v[i]) - center)
            firsts += first
            seconds += second
        sums[0, plane, 0] = firsts
        sums[1, plane, 0] = seconds


@njit(fastmath=_EXACT, error_model="numpy")
def _sum_rows(begin, end, given, kind):
    grad, x = _tensor(given, GRAD, kind), _tensor(given, X, kind)
    vectors, columns, length = _vectors(given), given[WIDTH], given[LENGTH]
    center, shift, sums = vectors[0], vectors[1], _sums(given, columns)
    for part in range(begin, end):
        first, second = sums[0, part], sums[1, part]
        first[:] = 0
        second[:] = 0
        for row in range(part * length, min((part + 1) * length, len(x)), columns):
            g, v = grad[row : row + columns], x[row : row + columns]
            for c in range(len(v)):
                shifted = _wide(g[c]) - shift[c]
                first[c] += shifted
                second[c] += shifted * (_wide(v[c]) - center[c])


@njit(fastmath=_EXACT, error_model="numpy")
def _scale_planes(begin, end, given, kind):
    x, output = _tensor(given, X, kind), _tensor(given, OUTPUT, kind)
    vectors, length = _vectors(given), given[LENGTH]
    for plane in range(begin, end):
        c = plane % vectors.shape[1]
        center, factor, addend = vectors[0, c], vectors[1, c], vectors[2, c]
        v, into = x[plane * length : (plane + 1) * length], output[plane * length : (plane + 1) * length]
        for i in range(len(v)):
            into[i] = _narrow((_wide(v[i]) - center) * factor + addend, v[i])


@njit(fastmath=_EXACT, error_model="numpy")
def _scale_rows(begin, end, given, kind):
    x, output = _tensor(given, X, kind), _tensor(given, OUTPUT, kind)
    vectors, length = _vectors(given), given[LENGTH]
    center, factor, addend = vectors[0], vectors[1], vectors[2]
    for row in range(begin * length, min(end * length, len(x)), length):
        v, into = x[row : row + length], output[row : row + length]
        for c in range(len(v)):
            into[c] = _narrow((_wide(v[c]) - center[c]) * factor[c] + addend[c], v[c])


@njit(fastmath=_EXACT, error_model="numpy")
def _combine_planes(begin, end, given, kind):
    grad, x, output = _tensor(given, GRAD, kind), _tensor(given, X, kind), _tensor(given, OUTPUT, kind)
    vectors, length = _vectors(given), given[LENGTH]
    for plane in range(begin, end):
        c = plane % vectors.shape[1]
        center, factor, addend, by_grad = vectors[0, c], vectors[1, c], vectors[2, c], vectors[3, c]
        g, v = grad[plane * length : (plane + 1) * length], x[plane * length : (plane + 1) * length]
        into = output[plane * length : (plane + 1) * length]
        for i in range(len(v)):
            into[i] = _narrow(_wide(g[i]) * by_grad + ((_wide(v[i]) - center) * factor + addend), v[i])


@njit(fastmath=_EXACT, error_model="numpy")
def _combine_rows(begin, end, given, kind):
    grad, x, output = _tensor(given, GRAD, kind), _tensor(given, X, kind), _tensor(given, OUTPUT, kind)
    vectors, length = _vectors(given), given[LENGTH]
    center, factor, addend, by_grad = vectors[0], vectors[1], vectors[2], vectors[3]
    for row in range(begin * length, min(end * length, len(x)), length):
        g, v = grad[row : row + length], x[row : row + length]
        into = output[row : row + length]
        for c in range(len(v)):
            into[c] = _narrow(_wide(g[c]) * by_grad[c] + ((_wide(v[c]) - center[c]) * factor[c] + addend[c]), v[c])


@cfunc(_Kernel, cache=True)
def sum_planes(begin, end, given):
    """Writes Σ(g - shift) and Σ(g - shift)·(x - center) of each plane."""
    if given[IS_HALF]:
        _sum_planes(begin, end, given, np.uint16)
    else:
        _sum_planes(begin, end, given, np.float32)


@cfunc(_Kernel, cache=True)
def sum_rows(begin, end, given):
    """Writes Σ(g - shift) and Σ(g - shift)·(x - center) of each part, by column."""
    if given[IS_HALF]:
        _sum_rows(begin, end, given, np.uint16)
    else:
        _sum_rows(begin, end, given, np.float32)


@cfunc(_Kernel, cache=True)
def scale_planes(begin, end, given):
    """Writes (x - center) * factor + addend."""
    if given[IS_HALF]:
        _scale_planes(begin, end, given, np.uint16)
    else:
        _scale_planes(begin, end, given, np.float32)


@cfunc(_Kernel, cache=True)
def scale_rows(begin, end, given):
    """Writes (x - center) * factor + addend."""
    if given[IS_HALF]:
        _scale_rows(begin, end, given, np.uint16)
    else:
        _scale_rows(begin, end, given, np.float32)


@cfunc(_Kernel, cache=True)
def combine_planes(begin, end, given):
    """Writes g * by_grad + ((x - center) * factor + addend)."""
    if given[IS_HALF]:
        _combine_planes(begin, end, given, np.uint16)
    else:
        _combine_planes(begin, end, given, np.float32)


@cfunc(_Kernel, cache=True)
def combine_rows(begin, end, given):
    """Writes g * by_grad + ((x - center) * factor + addend)."""
    if given[IS_HALF]:
        _combine_rows(begin, end, given, np.uint16)
    else:
        _combine_rows(begin, end, given, np.float32)


@njit(_ByChannel(_Sums, types.int64), cache=True)
def by_channel(sums, channels):
    """Returns shape (2, channels): the sums of all units of each channel."""
    found = np.zeros((2, channels))
    for which in range(2):
        flat = sums[which].reshape(-1, channels)
        for unit in range(len(flat)):
            for c in range(channels):
                found[which, c] += flat[unit, c]
    return found


@njit
def _vector(address, channels, otherwise):
    """Returns the float32 vector that lies there, as it is; or, for None, whose address is 0, one of these values."""
    if address == 0:
        return np.full(channels, np.float32(otherwise))
    return carray(_at(address, np.float32), channels)


@njit
def _repeated(vectors, channels):
    """Repeats the first channels of each row."""
    for row in vectors:
        for c in range(channels, len(row)):
            row[c] = row[c - channels]


@njit(_Vectors(_Vector, _Vector, types.int64), cache=True)
def for_sums(center, shift, columns):
    """Returns the vectors for sums."""
    vectors = np.empty((4, columns), np.float32)
    for c in range(len(center)):
        vectors[0, c] = center[c]
        vectors[1, c] = shift[c]
    _repeated(vectors[:2], len(center))
    return vectors


@njit(_Vectors(_Vector, _Vector, types.int64, types.int64, types.int64), cache=True)
def for_output(mean, invstd, weight, bias, columns):
    """Returns the vectors of (x - mean) * invstd * weight + bias, the last two by address.

    The addend has what rounding took from the centre.
    """
    vectors = np.empty((4, columns), np.float32)
    channels = len(mean)
    weights, biases = _vector(weight, channels, 1.0), _vector(bias, channels, 0.0)
    for c in range(channels):
        factor = invstd[c] * weights[c]
        vectors[0, c] = mean[c]
        vectors[1, c] = factor
        vectors[2, c] = biases[c] + factor * (np.float64(vectors[0, c]) - mean[c])
    _repeated(vectors[:3], channels)
    return vectors


@njit(_Vectors(_Vector, _Vector, _ByChannel, types.int64, types.int64), cache=True)
def for_gradient(mean, invstd, means, weight, columns):
    """Returns the vectors of invstd * weight * (g - means[0] - (x - mean) * invstd² * means[1]), as above."""
    vectors = np.empty((4, columns), np.float32)
    channels = len(mean)
    weights = _vector(weight, channels, 1.0)
    for c in range(channels):
        by_grad = invstd[c] * weights[c]
        factor = -by_grad * invstd[c] * invstd[c] * means[1, c]
        vectors[0, c] = mean[c]
        vectors[1, c] = factor
        vectors[2, c] = factor * (np.float64(vectors[0, c]) - mean[c]) - by_grad * means[0, c]
        vectors[3, c] = by_grad
    _repeated(vectors, channels)
    return vectors
