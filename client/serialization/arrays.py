"""Arrays <-> bytes: how tensors and numpy arrays travel from member to member.

An array is its kind, a description, and its elements. The description is

    offset  size   content
    0       1      dtype, its place in `DTYPES`
    1       8·d    shape: the length of each dimension, unsigned little-endian

and the elements are little-endian, in C order. Raw bytes, so that bfloat16 and the bits of a NaN arrive as they were;
and no pickle, so that what came can do no more than be refused.
"""

import math
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from statsd_bn.error_text import broken
from statsd_bn.errors import ProtocolError

Array = Tensor | np.ndarray[Any, Any]

# The kinds, as msgpack's extension types; below are those of `client.serialization.packing`.
TENSOR, NDARRAY = 5, 6

# What numpy 1.26 takes; numpy 2 and torch take 64.
MAX_DIMENSIONS = 32

# What an array may span in memory, were none of its dimensions 0: a size is a signed 64-bit integer.
MAX_BYTES = 2**63 - 1

_LENGTH_BYTES = 8

_NUMBERS = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
_NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]
_TORCH_ONLY = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]

# A dtype travels as its place here: append only.
DTYPES = ["bool", *_NUMBERS, *_TORCH_ONLY]

NUMPY_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ["bool", *_NUMBERS]}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PLACES = {name: place for place, name in enumerate(DTYPES)}


def flattened(place: int, array: Array) -> tuple[int, bytes, bytes]:
    """Returns an array's kind, description and elements.

    Args:
        place: how many arrays come before it, for errors.
        array: of any shape; a tensor may be on any device, and its graph stays behind.

    Raises:
        TypeError: it is neither a dense tensor nor a numpy array, or its dtype is neither of numbers nor bool.
        ValueError: it has too many dimensions.
    """
    kind, dtype = kind_and_dtype(place, array)
    if isinstance(array, Tensor):
        elements = _bytes(array.detach())
    else:
        elements = array.astype(NUMPY_DTYPES[dtype], copy=False).tobytes()
    return kind, struct.pack(f"<B{array.ndim}Q", _PLACES[dtype], *array.shape), elements


def restored(place: int, kind: int, description: bytes, data: memoryview) -> tuple[Array, int]:
    """Returns an array, and how many bytes of `data` are its elements; a tensor is on the CPU.

    Args:
        place: how many arrays come before it, for errors.
        kind: `TENSOR` or `NDARRAY`.
        description: as `flattened` gives it.
        data: begins with its elements, which are copied.

    Raises:
        ProtocolError: this is no array.
    """
    dtype, shape = _described(place, kind, description)
    itemsize = NUMPY_DTYPES[dtype].itemsize if kind == NDARRAY else TORCH_DTYPES[dtype].itemsize
    if math.prod(max(1, length) for length in shape) * itemsize > MAX_BYTES:
        raise ProtocolError(f"array {place}: expected a shape within {MAX_BYTES} bytes, got {shape} of {dtype}")
    size = math.prod(shape) * itemsize
    if size > len(data):
        raise ProtocolError(f"array {place}: expected {size} bytes for {shape} of {dtype}, got {len(data)}")
    return _built(place, kind, dtype, shape, np.frombuffer(data, np.uint8, size).copy()), size


def kind_and_dtype(place: int, array: Array) -> tuple[int, str]:
    """Returns an array's kind and the name of its dtype; raises as `flattened` where it cannot travel."""
    if array.ndim > MAX_DIMENSIONS:
        raise ValueError(f"array {place}: expected at most {MAX_DIMENSIONS} dimensions, got {array.ndim}")
    if isinstance(array, Tensor):
        if array.layout is not torch.strided or array.dtype not in _TORCH_NAMES:
            raise TypeError(
                broken(
                    f"array {place}: expected a dense tensor of numbers or bool, got {array.layout} of {array.dtype}"
                )
            )
        return TENSOR, _TORCH_NAMES[array.dtype]
    if array.dtype.name not in NUMPY_DTYPES:
        raise TypeError(f"array {place}: expected numbers or bool, got dtype {array.dtype}")
    return NDARRAY, array.dtype.name


def _bytes(tensor: Tensor) -> bytes:
    # Without any, a tensor may have stride 0, and then has no view of another size.
    if not tensor.numel():
        return b""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    # Not by `numpy()`, after which the storage could not be resized, as FSDP does with parameters.
    return np.from_dlpack(plain.reshape(-1).view(torch.uint8)).tobytes()


def _described(place: int, kind: int, description: bytes) -> tuple[str, list[int]]:
    """Returns an array's dtype and shape."""
    dimensions, rest = divmod(len(description) - 1, _LENGTH_BYTES)
    if rest or not 0 <= dimensions <= MAX_DIMENSIONS:
        raise ProtocolError(
            f"array {place}: expected a dtype and a shape of at most {MAX_DIMENSIONS} dimensions, got "
            f"{len(description)} bytes"
        )
    number, *shape = struct.unpack(f"<B{dimensions}Q", description)
    dtype = DTYPES[number] if number < len(DTYPES) else str(number)
    known = NUMPY_DTYPES if kind == NDARRAY else TORCH_DTYPES
    if dtype not in known:
        raise ProtocolError(f"array {place}: expected a dtype of {sorted(known)}, got {dtype!r}")
    return dtype, shape


def _built(place: int, kind: int, dtype: str, shape: list[int], elements: np.ndarray[Any, Any]) -> Array:
    # Any other byte is neither true nor false, and what the libraries make of it is left open.
    if dtype == "bool" and elements.size and elements.max() > 1:
        raise ProtocolError(f"array {place}: expected bytes 0 and 1 for bool, got {elements.max()}")
    if kind == NDARRAY:
        return elements.view(NUMPY_DTYPES[dtype]).astype(np.dtype(dtype), copy=False).reshape(shape)
    if not elements.size:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(elements).view(TORCH_DTYPES[dtype]).reshape(shape)
