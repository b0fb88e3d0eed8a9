"""Packing: the state of a model, an optimizer or a training <-> bytes.

    offset  size   content
    0       4      S, the structure's length, unsigned little-endian
    4       S      structure: msgpack, in which an extension stands for each array, tuple and counter
    4+S     ...    the arrays, see `client.arrays`

Only plain values travel, and no pickle.
"""

import struct
from collections import Counter
from itertools import zip_longest
from typing import Any

import msgpack
import numpy as np
from torch import Tensor

from client import arrays
from statsd_bn.errors import ProtocolError

# msgpack's extension types.
TUPLE, ARRAY, COUNTER = 1, 2, 3

_LENGTH = struct.Struct("<I")


def pack(state: Any) -> bytes:
    """Returns the bytes that carry a state.

    Args:
        state: None, numbers, text, bytes, tensors and numpy arrays, and lists, tuples and dicts of these.

    Raises:
        TypeError: there is something else in it.
    """
    found: list[arrays.Array] = []

    def extension(value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            found.append(value)
            return msgpack.ExtType(ARRAY, _plain(len(found) - 1))
        if isinstance(value, tuple):
            return msgpack.ExtType(TUPLE, msgpack.packb(list(value), default=extension, strict_types=True))
        if isinstance(value, Counter):
            return msgpack.ExtType(COUNTER, msgpack.packb(dict(value), default=extension, strict_types=True))
        if isinstance(value, dict):
            return dict(value)
        if isinstance(value, np.generic):
            return value.item()
        if type(value) is int:
            raise TypeError(f"state: expected integers of 64 bits, got one of {value.bit_length()}")
        raise TypeError(
            "state: expected None, numbers, text, bytes, tensors, and lists, tuples and dicts of these, got "
            f"{type(value).__module__}.{type(value).__qualname__}"
        )

    # Strict, because it would make lists of tuples.
    structure = msgpack.packb(state, default=extension, strict_types=True)
    return b"".join([_LENGTH.pack(len(structure)), structure, arrays.encode(found)])


def unpack(data: bytes) -> Any:
    """Returns the state that `pack` was given; tensors are on the CPU, and dicts and numbers of Python's own types.

    Raises:
        ProtocolError: `data` is none of `pack`.
    """
    if len(data) < _LENGTH.size:
        raise ProtocolError(f"state: expected at least {_LENGTH.size} bytes, got {len(data)}")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > len(data):
        raise ProtocolError(f"state: {end} bytes announced, {len(data)} came")
    found = arrays.decode(data[end:])

    def value(code: int, packed: bytes) -> Any:
        if code == TUPLE:
            return tuple(msgpack.unpackb(packed, ext_hook=value, strict_map_key=False))
        if code == ARRAY:
            return found[msgpack.unpackb(packed)]
        if code == COUNTER:
            counts = msgpack.unpackb(packed, ext_hook=value, strict_map_key=False)
            if not isinstance(counts, dict):
                raise ProtocolError(f"state: expected the counts of a counter, got {type(counts).__name__}")
            return Counter(counts)
        raise ProtocolError(f"state: expected the extensions {TUPLE}, {ARRAY} and {COUNTER}, got {code}")

    try:
        return msgpack.unpackb(data[_LENGTH.size : end], ext_hook=value, strict_map_key=False)
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise ProtocolError(f"state: expected one that was packed, got {error or type(error).__name__}") from error


def placed_like(state: Any, mine: Any) -> Any:
    """Returns a state whose tensors are on the devices of those that are in the same places of `mine`."""
    if isinstance(state, Tensor) and isinstance(mine, Tensor):
        return state.to(mine.device)
    if type(state) is dict and isinstance(mine, dict):
        return {name: placed_like(part, mine.get(name)) for name, part in state.items()}
    if type(state) in (list, tuple) and isinstance(mine, list | tuple):
        return type(state)(placed_like(part, other) for part, other in zip_longest(state, mine[: len(state)]))
    return state


def _plain(number: int) -> bytes:
    packed: bytes = msgpack.packb(number)
    return packed
