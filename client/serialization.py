"""Serialization of the state of a model, an optimizer or a training, without pickle: received bytes cannot run code.

    offset  size   content
    0       4      S, the length of the structure, unsigned little-endian
    4       S      structure: concatenated msgpack values
    4+S     ...    the concatenated elements of the arrays

A list, tuple, dict or counter is a msgpack extension with the number of its items, followed by the items; a dict has
alternating keys and values. So msgpack itself never nests, and the reader limits the depth. An array is an
extension with a description:

    offset  size   content
    0       1      dtype: an index into `DTYPES`
    1       8·d    shape: the length of each dimension, unsigned little-endian

The elements of an array are raw bytes, little-endian, in C order: bfloat16 and the bits of a NaN stay the same.
"""

import math
import struct
from collections import Counter
from itertools import zip_longest
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from statsd_bn import limits
from statsd_bn.checks import short_repr
from statsd_bn.errors import ProtocolError
from statsd_bn.text import wrap

Array = Tensor | np.ndarray[Any, Any]

# msgpack's extension types for containers and arrays.
LIST, TUPLE, DICT, COUNTER = 1, 2, 3, 4
TENSOR, NDARRAY = 5, 6

# An array takes about 700 bytes of memory, however short its description. A large model with its optimizer has 30,000.
MAX_ARRAYS = 65_536

# The limit of numpy 1.26; numpy 2 and torch allow 64.
MAX_DIMENSIONS = 32

# The largest size of an array, with dimensions of length 0 counted as 1: a size is a signed 64-bit integer.
MAX_BYTES = 2**63 - 1

_LENGTH_BYTES = 8

_NUMBERS = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
_NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]
_TORCH_ONLY = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]

# A dtype is sent as its index in this list: append only.
DTYPES = ["bool", *_NUMBERS, *_TORCH_ONLY]

NUMPY_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ["bool", *_NUMBERS]}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_DTYPE_INDEX = {name: index for index, name in enumerate(DTYPES)}

_PLAIN = {type(None), bool, int, float, str, bytes}
_KEYS = {*_PLAIN, tuple}

_LENGTH = struct.Struct("<I")


def pack(state: Any) -> bytes:
    """Returns the bytes of a state.

    Args:
        state: None, numbers, text, bytes, tensors and numpy arrays, and lists, tuples and dicts of these.

    Raises:
        TypeError: the state contains another type.
        ValueError: it nests more than 32 levels, has too many arrays, or an array has too many dimensions.
    """
    writer = _Writer()
    writer.add(state, 0)
    structure = writer.packer.bytes()
    return b"".join([_LENGTH.pack(len(structure)), structure, *writer.elements])


def check(state: dict[str, Any]) -> None:
    """Raises the errors of `pack`, with the name of the part; copies no arrays."""
    checker = _Writer(copies=False)
    for name, part in state.items():
        try:
            checker.add(part, 1)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"state.{name}: {str(error).removeprefix('state: ')}") from None


def unpack(data: bytes) -> Any:
    """Returns the state from the bytes of `pack`, with tensors on the CPU, and Python's dicts and numbers.

    Raises:
        ProtocolError: `data` is not the result of `pack`.
    """
    if len(data) < _LENGTH.size:
        raise ProtocolError(f"state: expected at least {_LENGTH.size} bytes, got {len(data)}")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > len(data):
        raise ProtocolError(f"state: expected {end} bytes, got {len(data)}")
    view = memoryview(data)
    reader = _Reader(view[_LENGTH.size : end], view[end:])
    try:
        state = reader.value(0)
        reader.check_end()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"state: expected packed bytes, got {error or type(error).__name__}") from error
    return state


def to_devices_of(state: Any, reference: Any) -> Any:
    """Returns the state with each tensor on the device of the corresponding tensor of `reference`."""
    if isinstance(state, Tensor) and isinstance(reference, Tensor):
        return state.to(reference.device)
    if type(state) is dict and isinstance(reference, dict):
        return {name: to_devices_of(part, reference.get(name)) for name, part in state.items()}
    if type(state) in (list, tuple) and isinstance(reference, list | tuple):
        return type(state)(to_devices_of(part, other) for part, other in zip_longest(state, reference[: len(state)]))
    return state


class _Writer:
    """Writes the structure to a packer, and copies the elements of the arrays unless `copies` is false."""

    def __init__(self, *, copies: bool = True) -> None:
        self.elements: list[bytes] = []
        self.packer = msgpack.Packer(autoreset=False)
        self._copies = copies

    def add(self, value: Any, depth: int) -> None:
        """Adds a value at a nesting depth."""
        if type(value) in _PLAIN:
            self._add_plain(value)
        elif isinstance(value, Tensor | np.ndarray):
            self._add_array(value)
        elif type(value) is list:
            self._add_items(LIST, len(value), value, depth)
        elif isinstance(value, tuple):
            self._add_items(TUPLE, len(value), value, depth)
        elif isinstance(value, bytearray | memoryview):
            self._add_plain(bytes(value))
        elif isinstance(value, dict):
            items = [part for item in value.items() for part in item]
            self._add_items(COUNTER if isinstance(value, Counter) else DICT, len(value), items, depth)
        elif isinstance(value, np.generic) and type(value.item()) in _PLAIN:
            self._add_plain(value.item())
        else:
            raise TypeError(
                wrap(
                    "state: expected None, numbers, text, bytes, tensors, and lists, tuples and dicts of these, got "
                    f"{type(value).__module__}.{type(value).__qualname__}"
                )
            )

    def _add_plain(self, value: Any) -> None:
        try:
            self.packer.pack(value)
        except OverflowError:
            raise TypeError(f"state: expected integers of 64 bits, got one of {value.bit_length()}") from None

    def _add_array(self, array: Array) -> None:
        if len(self.elements) == MAX_ARRAYS:
            raise ValueError(f"state: expected at most {MAX_ARRAYS} arrays, got more")
        kind, dtype = _kind_and_dtype(len(self.elements), array)
        self.packer.pack_ext_type(kind, struct.pack(f"<B{array.ndim}Q", _DTYPE_INDEX[dtype], *array.shape))
        self.elements.append(_bytes(array, dtype) if self._copies else b"")

    def _add_items(self, code: int, number: int, items: list[Any] | tuple[Any, ...], depth: int) -> None:
        if depth == limits.MAX_DEPTH:
            raise ValueError(f"state: expected at most {limits.MAX_DEPTH} levels of nesting, got more")
        self.packer.pack_ext_type(code, _LENGTH.pack(number))
        for item in items:
            self.add(item, depth + 1)


class _Reader:
    """Reads a state; its memory is bounded by the length of the bytes, whatever they announce."""

    def __init__(self, structure: memoryview, elements: memoryview) -> None:
        self._size = len(structure)
        # msgpack allocates the announced number of items, so its own arrays and maps must be empty.
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(1, self._size), max_array_len=0, max_map_len=0)
        self._unpacker.feed(structure)
        self._elements = elements
        self._nr_arrays = 0

    def value(self, depth: int) -> Any:
        """Returns the next value, at a nesting depth."""
        value = self._unpacker.unpack()
        if type(value) is not msgpack.ExtType:
            if type(value) not in _PLAIN:
                raise ProtocolError(f"state: expected plain values, got {short_repr(value)}")
            return value
        if value.code in (TENSOR, NDARRAY):
            return self._array(value.code, value.data)
        if depth == limits.MAX_DEPTH:
            raise ProtocolError(f"state: expected at most {limits.MAX_DEPTH} levels of nesting, got more")
        return self._items(value.code, value.data, depth + 1)

    def check_end(self) -> None:
        """Raises ProtocolError unless everything has been read."""
        if (read := self._unpacker.tell()) != self._size:
            raise ProtocolError(f"state: expected {read} bytes of structure, got {self._size}")
        if self._elements:
            raise ProtocolError(f"state: expected nothing after the last array, got {len(self._elements)} bytes")

    def _array(self, kind: int, description: bytes) -> Array:
        """Returns an array on the CPU, with a copy of its elements."""
        number = self._nr_arrays
        if number == MAX_ARRAYS:
            raise ProtocolError(f"state: expected at most {MAX_ARRAYS} arrays, got more")
        dtype, shape = _described(number, kind, description)
        itemsize = NUMPY_DTYPES[dtype].itemsize if kind == NDARRAY else TORCH_DTYPES[dtype].itemsize
        if math.prod(max(1, length) for length in shape) * itemsize > MAX_BYTES:
            raise ProtocolError(f"array {number}: expected a shape within {MAX_BYTES} bytes, got {shape} of {dtype}")
        size = math.prod(shape) * itemsize
        if size > len(self._elements):
            raise ProtocolError(
                f"array {number}: expected {size} bytes for {shape} of {dtype}, got {len(self._elements)}"
            )
        elements = np.frombuffer(self._elements, np.uint8, size).copy()
        self._nr_arrays += 1
        self._elements = self._elements[size:]
        return _built(number, kind, dtype, shape, elements)

    def _items(self, code: int, packed: bytes, depth: int) -> Any:
        if len(packed) != _LENGTH.size:
            raise ProtocolError(f"state: expected a number of {_LENGTH.size} bytes, got {len(packed)}")
        (number,) = _LENGTH.unpack(packed)
        if code == LIST:
            return [self.value(depth) for _ in range(number)]
        if code == TUPLE:
            return tuple([self.value(depth) for _ in range(number)])  # a generator would add a call per level
        if code == DICT:
            return self._pairs(number, depth)
        if code == COUNTER:
            return Counter(self._pairs(number, depth))
        raise ProtocolError(f"state: expected one of the extensions {LIST} to {NDARRAY}, got {code}")

    def _pairs(self, number: int, depth: int) -> dict[Any, Any]:
        pairs: dict[Any, Any] = {}
        for _ in range(number):
            key = self.value(depth)
            if type(key) not in _KEYS:
                raise ProtocolError(f"state: expected keys of plain values and tuples, got {type(key).__name__}")
            pairs[key] = self.value(depth)
        return pairs


def _kind_and_dtype(number: int, array: Array) -> tuple[int, str]:
    """Returns an array's extension type and the name of its dtype; `number` counts the arrays before it, for errors."""
    if array.ndim > MAX_DIMENSIONS:
        raise ValueError(f"array {number}: expected at most {MAX_DIMENSIONS} dimensions, got {array.ndim}")
    if isinstance(array, Tensor):
        if array.layout is not torch.strided or array.dtype not in _TORCH_NAMES:
            raise TypeError(
                wrap(f"array {number}: expected a dense tensor of numbers or bool, got {array.layout} of {array.dtype}")
            )
        return TENSOR, _TORCH_NAMES[array.dtype]
    if array.dtype.name not in NUMPY_DTYPES:
        raise TypeError(f"array {number}: expected numbers or bool, got dtype {array.dtype}")
    return NDARRAY, array.dtype.name


def _bytes(array: Array, dtype: str) -> bytes:
    if not isinstance(array, Tensor):
        return array.astype(NUMPY_DTYPES[dtype], copy=False).tobytes()
    # An empty tensor may have stride 0, and then has no view of another size.
    if not array.numel():
        return b""
    plain = array.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # `numpy()` would prevent resizing of the storage, which FSDP needs for parameters.
    return np.from_dlpack(plain.reshape(-1).view(torch.uint8)).tobytes()


def _described(number: int, kind: int, description: bytes) -> tuple[str, list[int]]:
    """Returns an array's dtype and shape."""
    dimensions, rest = divmod(len(description) - 1, _LENGTH_BYTES)
    if rest or not 0 <= dimensions <= MAX_DIMENSIONS:
        raise ProtocolError(
            f"array {number}: expected a dtype and a shape of at most {MAX_DIMENSIONS} dimensions, got "
            f"{len(description)} bytes"
        )
    index, *shape = struct.unpack(f"<B{dimensions}Q", description)
    dtype = DTYPES[index] if index < len(DTYPES) else str(index)
    known = NUMPY_DTYPES if kind == NDARRAY else TORCH_DTYPES
    if dtype not in known:
        raise ProtocolError(f"array {number}: expected a dtype of {sorted(known)}, got {dtype!r}")
    return dtype, shape


def _built(number: int, kind: int, dtype: str, shape: list[int], elements: np.ndarray[Any, Any]) -> Array:
    # The libraries leave the value of any other byte undefined.
    if dtype == "bool" and elements.size and elements.max() > 1:
        raise ProtocolError(f"array {number}: expected bytes 0 and 1 for bool, got {elements.max()}")
    if kind == NDARRAY:
        return elements.view(NUMPY_DTYPES[dtype]).astype(np.dtype(dtype), copy=False).reshape(shape)
    if not elements.size:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(elements).view(TORCH_DTYPES[dtype]).reshape(shape)
