"""Arrays <-> bytes: how tensors and numpy arrays travel from member to member.

    offset  size   content
    0       4      H, the header's length, unsigned little-endian
    4       H      header: a msgpack array of [kind, dtype, shape], one for each array
    4+H     ...    the elements of the arrays one behind the other, little-endian, in C order

Raw bytes, so that bfloat16 and the bits of a NaN arrive as they were; and no pickle, so that what came can do no more
than be refused.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.errors import ProtocolError

Array = Tensor | np.ndarray[Any, Any]

TENSOR, NDARRAY = "tensor", "ndarray"

# What numpy 1.26 takes; numpy 2 and torch take 64.
MAX_DIMENSIONS = 32

# What an array may span in memory, were none of its dimensions 0: a size is a signed 64-bit integer.
MAX_BYTES = 2**63 - 1

_LENGTH = struct.Struct("<I")

_NUMBERS = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
_NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]
_TORCH_ONLY = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]

NUMPY_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ["bool", *_NUMBERS]}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ["bool", *_NUMBERS, *_TORCH_ONLY]}
_TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def encode(arrays: Sequence[Array]) -> bytes:
    """Returns the bytes that carry the arrays.

    Args:
        arrays: of any shapes; tensors may be on any device, and their graph stays behind.

    Raises:
        TypeError: one is neither a dense tensor nor a numpy array, or its dtype is none of numbers or bool.
        ValueError: there are too many for the header, or one has too many dimensions.
    """
    header, bodies = [], []
    for place, array in enumerate(arrays):
        kind, dtype, body = _flattened(place, array)
        if array.ndim > MAX_DIMENSIONS:
            raise ValueError(f"array {place}: expected at most {MAX_DIMENSIONS} dimensions, got {array.ndim}")
        header.append([kind, dtype, list(array.shape)])
        bodies.append(body)
    packed: bytes = msgpack.packb(header)
    if len(packed) > limits.MAX_HEADER_BYTES:
        raise ValueError(
            f"expected at most {limits.MAX_HEADER_BYTES} bytes to say of what dtypes and shapes the arrays are, got "
            f"{len(packed)} for {len(arrays)} arrays"
        )
    return b"".join([_LENGTH.pack(len(packed)), packed, *bodies])


def decode(data: bytes) -> list[Array]:
    """Returns the arrays that `encode` was given: tensors on the CPU, arrays with memory of their own.

    Raises:
        ProtocolError: `data` is none of `encode`.
    """
    header, offset = _header(data)
    arrays = []
    for place, entry in enumerate(header):
        kind, dtype, shape = _entry(place, entry)
        itemsize = NUMPY_DTYPES[dtype].itemsize if kind == NDARRAY else TORCH_DTYPES[dtype].itemsize
        if math.prod(max(1, length) for length in shape) * itemsize > MAX_BYTES:
            raise ProtocolError(f"array {place}: expected a shape within {MAX_BYTES} bytes, got {shape} of {dtype}")
        size = math.prod(shape) * itemsize
        if size > len(data) - offset:
            raise ProtocolError(
                f"array {place}: expected {size} bytes for {shape} of {dtype}, got {len(data) - offset}"
            )
        arrays.append(_built(place, kind, dtype, shape, np.frombuffer(data, np.uint8, size, offset).copy()))
        offset += size
    if offset != len(data):
        raise ProtocolError(f"expected no more after the last array, got {len(data) - offset} bytes")
    return arrays


def _flattened(place: int, array: Array) -> tuple[str, str, bytes]:
    """Returns an array's kind, the name of its dtype, and its elements."""
    if isinstance(array, Tensor):
        if array.layout is not torch.strided or array.dtype not in _TORCH_NAMES:
            raise TypeError(
                f"array {place}: expected a dense tensor of numbers or bool, got {array.layout} of {array.dtype}"
            )
        return TENSOR, _TORCH_NAMES[array.dtype], _elements(array.detach())
    if not isinstance(array, np.ndarray):
        raise TypeError(f"array {place}: expected a tensor or a numpy array, got {type(array).__name__}")
    if array.dtype.name not in NUMPY_DTYPES:
        raise TypeError(f"array {place}: expected numbers or bool, got dtype {array.dtype}")
    return NDARRAY, array.dtype.name, array.astype(NUMPY_DTYPES[array.dtype.name], copy=False).tobytes()


def _elements(tensor: Tensor) -> bytes:
    # Without any, a tensor may have stride 0, and then has no view of another size.
    if not tensor.numel():
        return b""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    # Not by `numpy()`, after which the storage could not be resized, as FSDP does with parameters.
    return np.from_dlpack(plain.reshape(-1).view(torch.uint8)).tobytes()


def _header(data: bytes) -> tuple[list[Any], int]:
    """Returns the header, and where the first array's elements begin."""
    if len(data) < _LENGTH.size:
        raise ProtocolError(f"expected at least {_LENGTH.size} bytes, got {len(data)}")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if length > limits.MAX_HEADER_BYTES or end > len(data):
        raise ProtocolError(f"header: {length} bytes announced, {len(data) - _LENGTH.size} came")
    header = _unpacked("header", data[_LENGTH.size : end])
    if type(header) is not list:
        raise ProtocolError(f"header: expected a list of [kind, dtype, shape], got {shown(header)}")
    return header, end


def _unpacked(name: str, packed: bytes) -> Any:
    """Returns what msgpack carries.

    Raises:
        ProtocolError: it is no msgpack.
    """
    try:
        return msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{name}: expected msgpack, got {error or type(error).__name__}") from error


def _entry(place: int, entry: Any) -> tuple[str, str, list[int]]:
    """Returns an array's kind, dtype and shape."""
    match entry:
        case [("tensor" | "ndarray") as kind, str(dtype), list(shape)]:
            pass
        case _:
            raise ProtocolError(
                f"array {place}: expected [{TENSOR!r} or {NDARRAY!r}, dtype, shape], got {shown(entry)}"
            )
    known = NUMPY_DTYPES if kind == NDARRAY else TORCH_DTYPES
    if dtype not in known:
        raise ProtocolError(f"array {place}: expected a dtype of {sorted(known)}, got {shown(dtype)}")
    if len(shape) > MAX_DIMENSIONS or not all(type(length) is int and length >= 0 for length in shape):
        raise ProtocolError(
            f"array {place}: expected a shape of at most {MAX_DIMENSIONS} integers from 0 on, got {shown(shape)}"
        )
    return kind, dtype, shape


def _built(place: int, kind: str, dtype: str, shape: list[int], elements: np.ndarray[Any, Any]) -> Array:
    # Any other byte is neither true nor false, and what the libraries make of it is left open.
    if dtype == "bool" and elements.size and elements.max() > 1:
        raise ProtocolError(f"array {place}: expected bytes 0 and 1 for bool, got {elements.max()}")
    if kind == NDARRAY:
        return elements.view(NUMPY_DTYPES[dtype]).astype(np.dtype(dtype), copy=False).reshape(shape)
    if not elements.size:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(elements).view(TORCH_DTYPES[dtype]).reshape(shape)
