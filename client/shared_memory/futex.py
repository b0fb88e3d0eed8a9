"""Futex: sleep until a word in shared memory changes, and wake whoever sleeps on it; Linux only.

A sleeper is woken in some 10 µs, and costs nothing while it sleeps. Nothing relies on being woken: whoever waits sleeps
for some milliseconds at most, and looks again.
"""

import ctypes
import platform
import sys
import threading
from collections.abc import Callable
from functools import cache
from mmap import PAGESIZE, mmap

# The number of the system call, where both it and the order of loads and stores are known; see `fence`.
_NUMBERS = {"x86_64": 202, "aarch64": 98}
_NUMBER = _NUMBERS.get(platform.machine(), 0) if sys.platform == "linux" and sys.maxsize > 2**32 else 0

_IS_X86 = platform.machine() == "x86_64"

# Whether the processor may reorder two stores, or two loads. On x86-64 nothing but a load may pass an earlier store.
IS_WEAKLY_ORDERED = not _IS_X86

_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_first, _second = threading.Lock(), threading.Lock()


def fence() -> None:
    """Keeps the loads and stores before it from passing those after it.

    Python has no fence, but its locks do. On x86-64 taking one is enough. On aarch64 giving one back and then taking
    another is: neither can pass the other, and what stands around them cannot get in between.
    """
    with _first:
        pass
    if _IS_X86:
        return
    with _second:
        pass


@cache
def _syscall() -> Callable[..., int]:
    # The library's functions let go of Python's global lock.
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    # Number, address, what to do, the value or how many, the time, and two that are not needed.
    address = ctypes.c_void_p
    call.argtypes = (ctypes.c_long, address, ctypes.c_int, ctypes.c_uint32, address, address, ctypes.c_int)
    return call


class Futex:
    """One word of 32 bits.

    Args:
        memory: shared with the other processes.
        at: where the word is, in bytes; a multiple of four.
    """

    def __init__(self, memory: mmap, at: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, at)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._call = _syscall()

    @property
    def value(self) -> int:
        """The word, now."""
        return self._word.value

    def sleep(self, value: int, seconds: float) -> None:
        """Sleeps until somebody wakes, for so many seconds at most; not at all if the word is no longer `value`."""
        at_most = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._call(_NUMBER, self._address, _WAIT, value, ctypes.byref(at_most), None, 0)

    def wake(self, value: int) -> int:
        """Sets the word, and wakes all that sleep on it; returns how many did, or -1 where the system wakes nobody."""
        self._word.value = value
        return int(self._call(_NUMBER, self._address, _WAKE, _EVERYBODY, None, None, 0))


@cache
def is_available() -> bool:
    """Whether this system has futexes; a sandbox may refuse them."""
    return bool(_NUMBER) and Futex(mmap(-1, PAGESIZE), 0).wake(1) >= 0
