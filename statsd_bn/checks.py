"""Checks of message fields, before their use.

An error contains the expected value, and the received value shortened, because any process may have sent it.
"""

import reprlib
from typing import Any

import numpy as np

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.text import escape, is_printable_text

_FLOAT64 = np.dtype(np.float64)

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def short_repr(value: object) -> str:
    """Returns a printable repr, short enough for an error, of a value of any length and depth."""
    try:
        return escape(_repr.repr(value))
    except ValueError:
        # Python formats no integer of more than 4,300 digits.
        return f"{type(value).__name__} with too many digits"


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raises ProtocolError unless `value` is an int in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name}: expected an integer in [{low}, {high}], got {short_repr(value)}")


def check_name(name: str, value: object, longest: int) -> None:
    """Raises ProtocolError unless `value` is a printable str of 1 to `longest` bytes in UTF-8."""
    # Names appear in errors, logs and reports, where a control character could control a terminal or forge a line.
    # Nearly all names are ASCII: the fast path.
    if type(value) is str and value.isascii() and value.isprintable() and 1 <= len(value) <= longest:
        return
    if type(value) is not str or not value.isprintable() or not 1 <= len(value.encode()) <= longest:
        raise ProtocolError(f"{name}: expected printable text of 1 to {longest} bytes, got {short_repr(value)}")


def check_text(name: str, value: object, longest: int, shortest: int = 1) -> None:
    """Raises ProtocolError unless `value` is a str of `shortest` to `longest` bytes in UTF-8."""
    # Unlike a name, a text may contain line feeds and tabs.
    if type(value) is not str or not is_printable_text(value) or not shortest <= len(value.encode()) <= longest:
        raise ProtocolError(
            f"{name}: expected text of {shortest} to {longest} bytes, printable but for line feeds and tabs, got "
            f"{short_repr(value)}"
        )


def check_depth(name: str, value: Any, depth: int = 0) -> Any:
    """Returns `value`; raises ProtocolError if its lists and dicts are nested more than MAX_DEPTH deep."""
    if isinstance(value, list | dict):
        if depth == limits.MAX_DEPTH:
            raise ProtocolError(f"{name}: expected values nested at most {limits.MAX_DEPTH} deep, got deeper ones")
        for part in value.values() if isinstance(value, dict) else value:
            check_depth(name, part, depth + 1)
    return value


def check_token(name: str, value: object) -> None:
    """Raises ProtocolError unless `value` is a token: TOKEN_BYTES bytes."""
    if type(value) is not bytes or len(value) != limits.TOKEN_BYTES:
        raise ProtocolError(f"{name}: expected {limits.TOKEN_BYTES} bytes, got {short_repr(value)}")


def check_array(name: str, values: Any, dimensions: int) -> None:
    """Raises ProtocolError unless `values` is a float64 array with this number of dimensions."""
    if not (isinstance(values, np.ndarray) and values.dtype == _FLOAT64 and values.ndim == dimensions):
        got = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ProtocolError(f"{name}: expected float64 of {dimensions} dimensions, got {got}")


def check_values(values: Any, dimensions: int) -> None:
    """Raises ProtocolError unless `values` is a float64 array of shape (..., vectors, channels)."""
    check_array("values", values, dimensions)
    vectors, channels = values.shape[-2:]
    if not (1 <= vectors <= limits.MAX_VECTORS and 1 <= channels <= limits.MAX_CHANNELS):
        check_integer("vectors", vectors, 1, limits.MAX_VECTORS)
        check_integer("channels", channels, 1, limits.MAX_CHANNELS)
