"""Serialization of the state of a model, an optimizer or a training, without pickle: received bytes cannot run code.

    offset  size   content
    0       4      S, the length of the structure, unsigned little-endian
    4       S      structure: concatenated msgpack values
    4+S     ...    the concatenated elements of the arrays: raw bytes, little-endian, in C order

A list, tuple, dict or counter is a msgpack extension with the number of its items, followed by the items; a dict has
alternating keys and values. So msgpack itself never nests, and the reader limits the depth. An array is an extension:
one byte for the dtype, an index into `DTYPES`, then each dimension in 8 bytes, unsigned little-endian.
"""

import math
import struct
from collections import Counter
from itertools import chain, zip_longest
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

MAX_ARRAYS = 65_536  # even an empty array takes 700 bytes of memory; a large model with its optimizer has 30,000
MAX_DIMENSIONS = 32  # the limit of numpy 1.26; numpy 2 and torch allow 64
MAX_BYTES = 2**63 - 1  # of an array, with dimensions of length 0 counted as 1: a size is a signed 64-bit integer

_NUMBERS = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
_NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]

# A dtype is sent as its index in this list: append only. The last five are torch's alone.
DTYPES = ["bool", *_NUMBERS, "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
NUMPY_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ["bool", *_NUMBERS]}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}

_PLAIN = {type(None), bool, int, float, str, bytes}
_CONTAINERS = {LIST: list, TUPLE: tuple, COUNTER: Counter, DICT: dict}  # Counter before dict, its base class

_LENGTH = struct.Struct("<I")


def pack(state: Any) -> bytes:
    """Serialize None, numbers, text, bytes, tensors, arrays, and lists, tuples and dicts of these.

    Raises TypeError for other types, and ValueError for too many levels of nesting, arrays or dimensions.
    """
    writer = _Writer()
    writer.add(state, 0)
    structure = writer.packer.bytes()
    return b"".join([_LENGTH.pack(len(structure)), structure, *writer.elements])


def check(state: dict[str, Any]) -> None:
    """Raise the error that `pack` would raise, with the name of the part; copies no arrays."""
    checker = _Writer(copies=False)
    for name, part in state.items():
        try:
            checker.add(part, 1)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"state.{name}: {str(error).removeprefix('state: ')}") from None


def unpack(data: bytes) -> Any:
    """Return the state from the bytes of `pack`, with tensors on the CPU; raise ProtocolError for other bytes."""
    if len(data) < _LENGTH.size:
        raise _error(f"expected at least {_LENGTH.size} bytes, got {len(data)}")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > len(data):
        raise _error(f"expected {end} bytes, got {len(data)}")
    view = memoryview(data)
    reader = _Reader(view[_LENGTH.size : end], view[end:])
    try:
        state = reader.value(0)
        reader.check_end()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _error(f"expected packed bytes, got {error or type(error).__name__}") from error
    return state


def to_devices_of(state: Any, reference: Any) -> Any:
    """Return the state with each tensor on the device of the corresponding tensor of `reference`."""
    if isinstance(state, Tensor) and isinstance(reference, Tensor):
        return state.to(reference.device)
    if type(state) is dict and isinstance(reference, dict):
        return {name: to_devices_of(part, reference.get(name)) for name, part in state.items()}
    if type(state) in (list, tuple) and isinstance(reference, list | tuple):
        return type(state)(to_devices_of(part, other) for part, other in zip_longest(state, reference[: len(state)]))
    return state


def _container(value: Any) -> int | None:
    """Code of a container; a subclass of tuple or dict has that of its base class, a subclass of list has none."""
    for code, kind in _CONTAINERS.items():
        if type(value) is kind or (kind is not list and isinstance(value, kind)):
            return code
    return None


class _Writer:
    """Writes the structure to a packer, and copies the elements of the arrays unless `copies` is false."""

    def __init__(self, *, copies: bool = True) -> None:
        self.elements: list[bytes] = []
        self.packer = msgpack.Packer(autoreset=False)
        self._copies = copies

    def add(self, value: Any, depth: int) -> None:
        """Add a value at a nesting depth."""
        if isinstance(value, bytearray | memoryview):
            value = bytes(value)
        elif isinstance(value, np.generic):
            value = value.item()
        if type(value) in _PLAIN:
            try:
                self.packer.pack(value)
            except OverflowError:
                raise TypeError(f"state: expected integers of 64 bits, got {value.bit_length()} bits") from None
        elif isinstance(value, Tensor | np.ndarray):
            self._add_array(value)
        elif (code := _container(value)) is not None:
            if depth == limits.MAX_DEPTH:
                raise ValueError(f"state: expected at most {limits.MAX_DEPTH} levels of nesting, got more")
            self.packer.pack_ext_type(code, _LENGTH.pack(len(value)))
            for item in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
                self.add(item, depth + 1)
        else:
            expected = "None, numbers, text, bytes, tensors, and lists, tuples and dicts of these"
            found = f"{type(value).__module__}.{type(value).__qualname__}"
            raise TypeError(wrap(f"state: expected {expected}, got {found}"))

    def _add_array(self, array: Array) -> None:
        number = len(self.elements)
        if number == MAX_ARRAYS:
            raise ValueError(f"state: expected at most {MAX_ARRAYS} arrays, got more")
        if array.ndim > MAX_DIMENSIONS:
            raise ValueError(f"array {number}: expected at most {MAX_DIMENSIONS} dimensions, got {array.ndim}")
        if isinstance(array, Tensor):
            kind, dtype = TENSOR, str(array.dtype).removeprefix("torch.")
            if array.layout is not torch.strided or dtype not in TORCH_DTYPES:
                found = f"{array.layout} of {array.dtype}"
                raise TypeError(wrap(f"array {number}: expected a dense tensor of numbers or bool, got {found}"))
        else:
            kind, dtype = NDARRAY, array.dtype.name
            if dtype not in NUMPY_DTYPES:
                raise TypeError(f"array {number}: expected numbers or bool, got dtype {array.dtype}")
        self.packer.pack_ext_type(kind, struct.pack(f"<B{array.ndim}Q", DTYPES.index(dtype), *array.shape))
        self.elements.append(_bytes(array, dtype) if self._copies else b"")


def _bytes(array: Array, dtype: str) -> bytes:
    if not isinstance(array, Tensor):
        return array.astype(NUMPY_DTYPES[dtype], copy=False).tobytes()
    # An empty tensor may have stride 0, and then cannot be viewed as bytes.
    if not array.numel():
        return b""
    plain = array.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not `numpy()`: it makes the storage fixed in size, and FSDP resizes the storage of parameters.
    return np.from_dlpack(plain.reshape(-1).view(torch.uint8)).tobytes()


class _Reader:
    """Reads a state; the number of received bytes bounds its memory, whatever sizes they announce."""

    def __init__(self, structure: memoryview, elements: memoryview) -> None:
        self._size = len(structure)
        # msgpack allocates the announced number of items, so its own arrays and maps must be empty.
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(1, self._size), max_array_len=0, max_map_len=0)
        self._unpacker.feed(structure)
        self._elements = elements
        self._nr_arrays = 0

    def value(self, depth: int) -> Any:
        """Return the next value, at a nesting depth."""
        value = self._unpacker.unpack()
        if type(value) in _PLAIN:
            return value
        if type(value) is not msgpack.ExtType:
            raise _error(f"expected plain values, got {short_repr(value)}")
        code, packed = value
        if code in (TENSOR, NDARRAY):
            return self._array(code, packed)
        if depth == limits.MAX_DEPTH:
            raise _error(f"expected at most {limits.MAX_DEPTH} levels of nesting, got more")
        if len(packed) != _LENGTH.size:
            raise _error(f"expected a number of {_LENGTH.size} bytes, got {len(packed)}")
        if code not in _CONTAINERS:
            raise _error(f"expected one of the extensions {LIST} to {NDARRAY}, got {code}")
        (number,) = _LENGTH.unpack(packed)
        if code in (LIST, TUPLE):
            return _CONTAINERS[code]([self.value(depth + 1) for _ in range(number)])
        pairs = dict(self._pair(depth + 1) for _ in range(number))
        return Counter(pairs) if code == COUNTER else pairs

    def _pair(self, depth: int) -> tuple[Any, Any]:
        key = self.value(depth)
        if type(key) not in {*_PLAIN, tuple}:
            raise _error(f"expected keys of plain values and tuples, got {type(key).__name__}")
        return key, self.value(depth)

    def check_end(self) -> None:
        """Raise ProtocolError unless everything has been read."""
        if (read := self._unpacker.tell()) != self._size:
            raise _error(f"expected {read} bytes of structure, got {self._size}")
        if self._elements:
            raise _error(f"expected nothing after the last array, got {len(self._elements)} bytes")

    def _array(self, kind: int, description: bytes) -> Array:
        """Return an array on the CPU, with a copy of its elements."""
        number = self._nr_arrays
        if number == MAX_ARRAYS:
            raise _error(f"expected at most {MAX_ARRAYS} arrays, got more")
        name, shape = _described(number, kind, description)
        itemsize = NUMPY_DTYPES[name].itemsize if kind == NDARRAY else TORCH_DTYPES[name].itemsize
        if math.prod(max(1, length) for length in shape) * itemsize > MAX_BYTES:
            raise ProtocolError(f"array {number}: expected a shape within {MAX_BYTES} bytes, got {shape} of {name}")
        size = math.prod(shape) * itemsize
        if size > len(self._elements):
            expected = f"{size} bytes for {shape} of {name}"
            raise ProtocolError(f"array {number}: expected {expected}, got {len(self._elements)}")
        elements = np.frombuffer(self._elements, np.uint8, size).copy()
        self._nr_arrays += 1
        self._elements = self._elements[size:]
        # In torch and numpy a bool is undefined if its byte is neither 0 nor 1.
        if name == "bool" and size and elements.max() > 1:
            raise ProtocolError(f"array {number}: expected bytes 0 and 1 for bool, got {elements.max()}")
        if kind == NDARRAY:
            return elements.view(NUMPY_DTYPES[name]).astype(name, copy=False).reshape(shape)
        if not size:
            return torch.empty(shape, dtype=TORCH_DTYPES[name])
        return torch.from_numpy(elements).view(TORCH_DTYPES[name]).reshape(shape)


def _described(number: int, kind: int, description: bytes) -> tuple[str, list[int]]:
    """Return the name of an array's dtype, and its shape."""
    dimensions, rest = divmod(len(description) - 1, 8)
    if rest or not 0 <= dimensions <= MAX_DIMENSIONS:
        expected = f"a dtype and a shape of at most {MAX_DIMENSIONS} dimensions"
        raise ProtocolError(f"array {number}: expected {expected}, got {len(description)} bytes")
    index, *shape = struct.unpack(f"<B{dimensions}Q", description)
    dtype = DTYPES[index] if index < len(DTYPES) else str(index)
    known = NUMPY_DTYPES if kind == NDARRAY else TORCH_DTYPES
    if dtype not in known:
        raise ProtocolError(f"array {number}: expected a dtype of {sorted(known)}, got {dtype!r}")
    return dtype, shape


def _error(problem: str) -> ProtocolError:
    return ProtocolError(f"state: {problem}")
