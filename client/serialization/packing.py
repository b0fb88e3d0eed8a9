"""Packing: the state of a model, an optimizer or a training <-> bytes.

    offset  size   content
    0       4      S, the structure's length, unsigned little-endian
    4       S      structure: msgpack values one behind the other
    4+S     ...    the elements of the arrays one behind the other, see `client.serialization.arrays`

A list, tuple, dict or counter is an extension that says how many items it has, and these follow; a dict's are keys and
values in turn. An array is an extension that says of what dtype and shape it is. So nothing nests in msgpack itself: a
reader decides how deep it goes. Only plain values travel, and no pickle.
"""

import struct
from collections import Counter
from itertools import zip_longest
from typing import Any

import msgpack
import numpy as np
from torch import Tensor

from client.serialization import arrays
from client.serialization.arrays import NDARRAY, TENSOR
from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.error_text import broken
from statsd_bn.errors import ProtocolError

# msgpack's extension types, beside those of `client.serialization.arrays`.
LIST, TUPLE, DICT, COUNTER = 1, 2, 3, 4

# One takes some 700 bytes of memory, whatever it took to say so. A large model with its optimizer has 30,000.
MAX_ARRAYS = 65_536

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
    structure = writer.structure
    return b"".join([_LENGTH.pack(len(structure)), structure, *writer.elements])


def check(state: dict[str, Any]) -> None:
    """Raises what `pack` would raise, and names the part of the state; it copies no arrays."""
    checker = _Checker()
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
    """What becomes of a state.

    Attributes:
        elements: those of its arrays.
    """

    def __init__(self) -> None:
        self.elements: list[bytes] = []
        self._packer = msgpack.Packer(autoreset=False)

    @property
    def structure(self) -> bytes:
        """Everything but the elements of arrays."""
        packed: bytes = self._packer.bytes()
        return packed

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
            self._packer.pack(value)
        except OverflowError:
            raise TypeError(f"state: expected integers of 64 bits, got one of {value.bit_length()}") from None

    def _add_array(self, array: arrays.Array) -> None:
        if len(self.elements) == MAX_ARRAYS:
            raise ValueError(f"state: expected at most {MAX_ARRAYS} arrays, got more")
        kind, description, elements = self._take(array)
        self._packer.pack_ext_type(kind, description)
        self.elements.append(elements)

    def _take(self, array: arrays.Array) -> tuple[int, bytes, bytes]:
        return arrays.flattened(len(self.elements), array)

    def _add_items(self, code: int, number: int, items: list[Any] | tuple[Any, ...], depth: int) -> None:
        if depth == limits.MAX_DEPTH:
            raise ValueError(f"state: expected one that nests at most {limits.MAX_DEPTH} deep, got a deeper one")
        self._packer.pack_ext_type(code, _LENGTH.pack(number))
        for item in items:
            self.add(item, depth + 1)


class _Checker(_Writer):
    """Leaves the arrays where they are."""

    def _take(self, array: arrays.Array) -> tuple[int, bytes, bytes]:
        kind, _ = arrays.kind_and_dtype(len(self.elements), array)
        return kind, b"", b""


class _Reader:
    """Reads a state, and takes no more memory than what has come calls for.

    Args:
        structure: everything but the elements of arrays.
        elements: those of all arrays.
    """

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

    def _array(self, kind: int, description: bytes) -> arrays.Array:
        if self._nr_arrays == MAX_ARRAYS:
            raise ProtocolError(f"state: expected at most {MAX_ARRAYS} arrays, got more")
        array, size = arrays.restored(self._nr_arrays, kind, description, self._elements)
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
