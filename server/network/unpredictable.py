"""Unpredictable: random numbers in C that nobody can foretell.

ZeroMQ counts the routing ids of its peers up from libc's `rand()`, which it never seeds: each server would begin with
the same number.
"""

import ctypes
import os

# The largest state that glibc's `random()` takes, and from which its `rand()` comes.
_STATE_BYTES = 256

# How it is arranged; what `initstate` writes there stays.
_ARRANGEMENT_BYTES = 4

# libc reads and writes it for as long as the process lives.
_state = ctypes.create_string_buffer(_STATE_BYTES)


def seed() -> None:
    """Seeds libc's `rand()` from the system; to be called before any ZeroMQ socket is made."""
    libc = ctypes.CDLL(None)
    libc.srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))
    if hasattr(libc, "gnu_get_libc_version"):
        # A seed has 32 bits, so some numbers come more often than others; the state has 1,984.
        libc.initstate(ctypes.c_uint(int.from_bytes(os.urandom(4))), _state, ctypes.c_size_t(_STATE_BYTES))
        fresh = os.urandom(_STATE_BYTES - _ARRANGEMENT_BYTES)
        ctypes.memmove(ctypes.byref(_state, _ARRANGEMENT_BYTES), fresh, len(fresh))
