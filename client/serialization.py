"""The state of a model, an optimizer or a training <-> bytes, without pickle: what came can do no more than be refused.

    offset  size   content
    0       4      S, the structure's length, unsigned little-endian
    4       S      structure: msgpack values one behind the other
    4+S     ...    the elements of the arrays one behind the other

A list, tuple, dict or counter is an extension that says how many items it has, and these follow; a dict's are keys and
values in turn. An array is an extension that describes it. So nothing nests in msgpack itself: a reader decides how
deep it goes. An array's description is

    offset  size   content
    0       1      dtype, its place in `DTYPES`
    1       8·d    shape: the length of each dimension, unsigned little-endian

and its elements are little-endian, in C order: raw bytes, so that bfloat16 and the bits of a NaN arrive as they were.
What bytes are sent for is not known here.
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
from statsd_bn.checks import shown
from statsd_bn.error_text import broken
from statsd_bn.errors import ProtocolError

Array = Tensor | np.ndarray[Any, Any]

# msgpack's extension types: of containers, and of arrays.
LIST, TUPLE, DICT, COUNTER = 1, 2, 3, 4
TENSOR, NDARRAY = 5, 6

# One takes some 700 bytes of memory, whatever it took to say so. A large model with its optimizer has 30,000.
MAX_ARRAYS = 65_536

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

_PLAIN = {type(None), bool, int, float, str, bytes}
_KEYS = {*_PLAIN, tuple}

_LENGTH = struct.Struct("<I")


def pack(state: Any) -> bytes:
    """Returns the bytes that carry a state.

    Args:
        state: None, numbers, text, bytes, tensors and numpy arrays, and lists, tuples and dicts of these.

    Raises:
        TypeError: there is something else in it.
        ValueError: it nests more than 32 deep, or there are too many arrays in it, or one of too many dimensions.
    """
    writer = _Writer()
    writer.add(state, 0)
    structure = writer.packer.bytes()
    return b"".join([_LENGTH.pack(len(structure)), structure, *writer.elements])


def check(state: dict[str, Any]) -> None:
    """Raises what `pack` would raise, and names the part of the state; it copies no arrays."""
    checker = _Writer(copies=False)
    for name, part in state.items():
        try:
            checker.add(part, 1)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"state.{name}: {str(error).removeprefix('state: ')}") from None


def unpack(data: bytes) -> Any:
    """Returns the state that `pack` was given; tensors are on the CPU, and dicts and numbers of Python's own types.

    Raises:
        ProtocolError: `data` was not made by `pack`.
    """
    if len(data) < _LENGTH.size:
        raise ProtocolError(f"state: expected at least {_LENGTH.size} bytes, got {len(data)}")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > len(data):
        raise ProtocolError(f"state: {end} bytes announced, {len(data)} came")
    view = memoryview(data)
    reader = _Reader(view[_LENGTH.size : end], view[end:])
    try:
        state = reader.value(0)
        reader.check_end()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"state: expected one that was packed, got {error or type(error).__name__}") from error
    return state


def placed_like(state: Any, mine: Any) -> Any:
    """Returns a state whose tensors are on the devices of those that are in the same places of `mine`."""
    if isinstance(state, Tensor) and isinstance(mine, Tensor):
        return state.to(mine.device)
    if type(state) is dict and isinstance(mine, dict):
        return {name: placed_like(part, mine.get(name)) for name, part in state.items()}
    if type(state) in (list, tuple) and isinstance(mine, list | tuple):
        return type(state)(placed_like(part, other) for part, other in zip_longest(state, mine[: len(state)]))
    return state


class _Writer:
    """What becomes of a state: the structure in a packer, and the elements of its arrays, unless these only count."""

    def __init__(self, *, copies: bool = True) -> None:
        self.elements: list[bytes] = []
        self.packer = msgpack.Packer(autoreset=False)
        self._copies = copies

    def add(self, value: Any, depth: int) -> None:
        """Adds a value that is inside so many others."""
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
                broken(
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
        self.packer.pack_ext_type(kind, struct.pack(f"<B{array.ndim}Q", _PLACES[dtype], *array.shape))
        self.elements.append(_bytes(array, dtype) if self._copies else b"")

    def _add_items(self, code: int, number: int, items: list[Any] | tuple[Any, ...], depth: int) -> None:
        if depth == limits.MAX_DEPTH:
            raise ValueError(f"state: expected one that nests at most {limits.MAX_DEPTH} deep, got a deeper one")
        self.packer.pack_ext_type(code, _LENGTH.pack(number))
        for item in items:
            self.add(item, depth + 1)


class _Reader:
    """Reads a state, and takes no more memory than what has come calls for."""

    def __init__(self, structure: memoryview, elements: memoryview) -> None:
        self._size = len(structure)
        # msgpack makes room for as many items as are announced, so it is not given any that has some.
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(1, self._size), max_array_len=0, max_map_len=0)
        self._unpacker.feed(structure)
        self._elements = elements
        self._nr_arrays = 0

    def value(self, depth: int) -> Any:
        """Returns the next value, which is inside so many others."""
        value = self._unpacker.unpack()
        if type(value) is not msgpack.ExtType:
            if type(value) not in _PLAIN:
                raise ProtocolError(f"state: expected plain values, got {shown(value)}")
            return value
        if value.code in (TENSOR, NDARRAY):
            return self._array(value.code, value.data)
        if depth == limits.MAX_DEPTH:
            raise ProtocolError(f"state: expected one that nests at most {limits.MAX_DEPTH} deep, got a deeper one")
        return self._items(value.code, value.data, depth + 1)

    def check_end(self) -> None:
        """Raises ProtocolError unless everything has been read."""
        if (read := self._unpacker.tell()) != self._size:
            raise ProtocolError(f"state: expected {read} bytes of structure, got {self._size}")
        if self._elements:
            raise ProtocolError(f"state: expected no more after the last array, got {len(self._elements)} bytes")

    def _array(self, kind: int, description: bytes) -> Array:
        if self._nr_arrays == MAX_ARRAYS:
            raise ProtocolError(f"state: expected at most {MAX_ARRAYS} arrays, got more")
        array, size = _restored(self._nr_arrays, kind, description, self._elements)
        self._nr_arrays += 1
        self._elements = self._elements[size:]
        return array

    def _items(self, code: int, packed: bytes, depth: int) -> Any:
        if len(packed) != _LENGTH.size:
            raise ProtocolError(f"state: expected a number of {_LENGTH.size} bytes, got {len(packed)}")
        (number,) = _LENGTH.unpack(packed)
        if code == LIST:
            return [self.value(depth) for _ in range(number)]
        if code == TUPLE:
            return tuple([self.value(depth) for _ in range(number)])  # a generator would be one call more per level
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


def _kind_and_dtype(place: int, array: Array) -> tuple[int, str]:
    """Returns an array's kind and the name of its dtype; `place` is how many arrays come before it, for errors."""
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


def _bytes(array: Array, dtype: str) -> bytes:
    if not isinstance(array, Tensor):
        return array.astype(NUMPY_DTYPES[dtype], copy=False).tobytes()
    # Without any, a tensor may have stride 0, and then has no view of another size.
    if not array.numel():
        return b""
    plain = array.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not by `numpy()`, after which the storage could not be resized, as FSDP does with parameters.
    return np.from_dlpack(plain.reshape(-1).view(torch.uint8)).tobytes()


def _restored(place: int, kind: int, description: bytes, data: memoryview) -> tuple[Array, int]:
    """Returns an array, on the CPU, and how many bytes of `data` are its elements, which are copied."""
    dtype, shape = _described(place, kind, description)
    itemsize = NUMPY_DTYPES[dtype].itemsize if kind == NDARRAY else TORCH_DTYPES[dtype].itemsize
    if math.prod(max(1, length) for length in shape) * itemsize > MAX_BYTES:
        raise ProtocolError(f"array {place}: expected a shape within {MAX_BYTES} bytes, got {shape} of {dtype}")
    size = math.prod(shape) * itemsize
    if size > len(data):
        raise ProtocolError(f"array {place}: expected {size} bytes for {shape} of {dtype}, got {len(data)}")
    return _built(place, kind, dtype, shape, np.frombuffer(data, np.uint8, size).copy()), size


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
