"""Torch's own threads, lent to functions that are not torch's.

From 2.10 on `torch_parallel_for` is part of torch's stable interface for C (torch/csrc/stable/c/shim.h). It deals a
range to as many threads as torch.set_num_threads says, and to the caller's alone inside another such loop.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Numbers = ctypes.Array[ctypes.c_int64]

_Function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)

# Takes begin, end, grain, the function and what it is given; answers 0 if it went well.
_Loop = Callable[[int, int, int, int, Numbers], int]


def _alone(begin: int, end: int, _: int, function: int, given: Numbers) -> int:
    _Function(function)(begin, end, given)
    return 0


@cache
def _loop() -> _Loop:
    # The symbol is another library's, which this one needs; where that is not searched there is none.
    loop: Any = getattr(ctypes.CDLL(torch._C.__file__), "torch_parallel_for", None)  # noqa: SLF001 - a library like others
    if loop is None:
        return _alone
    loop.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2
    loop.restype = ctypes.c_int32
    found: _Loop = loop
    return found


def share(units: int, grain: int, function: int, given: Numbers) -> None:
    """Deals units to threads, without Python's lock.

    Args:
        units: how many there are.
        grain: how many of them are worth another thread.
        function: the address of a C function of the beginning and the end of a range, and a pointer.
        given: what the pointer points to.

    Raises:
        RuntimeError: torch could not start a thread.
    """
    if _loop()(0, units, grain, function, given) != 0:
        raise RuntimeError("torch's threads did not do their part")
