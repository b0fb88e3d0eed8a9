"""Torch's own threads, lent to functions that are not torch's.

From 2.10 on `torch_parallel_for` is part of torch's stable interface for C (torch/csrc/stable/c/shim.h). It deals a
range to at most as many threads as torch.set_num_threads says, and to the caller's alone inside another such loop. In
a forked child it hangs as torch's own operators do, unless that has set one thread.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

_Function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)

# Takes begin, end, grain, the function and what it is given; answers 0 if it went well.
_Loop = Callable[[int, int, int, int, "ctypes.Array[ctypes.c_int64]"], int]


def _in_this_thread(begin: int, end: int, _: int, function: int, given: "ctypes.Array[ctypes.c_int64]") -> int:
    _Function(function)(begin, end, given)
    return 0


@cache
def _loop() -> _Loop:
    try:
        # The symbol is in another library, which this one needs. Some systems do not search that one.
        loop: Any = ctypes.CDLL(torch._C.__file__).torch_parallel_for  # noqa: SLF001 - a library like others
    except (OSError, AttributeError):
        return _in_this_thread
    loop.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2
    loop.restype = ctypes.c_int32
    found: _Loop = loop
    return found


def share(units: int, grain: int, function: int, given: Sequence[int]) -> None:
    """Deals units to threads, without Python's lock.

    Args:
        units: how many there are.
        grain: how many of them are worth another thread.
        function: the address of a C function of the beginning and the end of a range, int64, and a pointer.
        given: the numbers, int64, that the pointer points to.

    Raises:
        RuntimeError: torch's loop failed, such as for want of a thread.
    """
    numbers = (ctypes.c_int64 * len(given))(*given)
    if _loop()(0, units, grain, function, numbers) != 0:
        raise RuntimeError("torch's threads did not do their part")
