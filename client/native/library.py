"""Loader of the native core, and a layer's passes that use it; core/sbn.h describes the functions."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from statsd_bn.environment import boolean
from statsd_bn.reduction import FloatArray, Rows

# Constants of core/sbn.h.
VERSION = 6
F32, BF16, F16, F64 = range(4)
DONE, WAITS, CLOSED, DIFFERS, TOO_MANY, NOT_FINITE, NO_MEMORY = range(7)
MEASURE, EXCHANGE, FINISH = range(3)
LEVELS = ("baseline", "AVX2")

PATH = Path(__file__).resolve().parent / "libsbn.so"

_TYPES = {"i": ctypes.c_int, "q": ctypes.c_int64, "Q": ctypes.c_uint64, "P": ctypes.c_void_p, "-": None}

# The functions of core/sbn.h: a letter for the type of the result, and one for each argument.
_FUNCTIONS = {
    "sbn_version": "i",
    "sbn_level": "ii",
    "sbn_forward": "iPPPPPPPPPPiPQq",
    "sbn_backward": "iPPPPPPPPPiPQq",
    "sbn_group_bytes": "qq",
    "sbn_has_futex": "i",
    "sbn_round": "iPQPPqqqPqq",
    "sbn_wait": "iPPq",
    "sbn_late": "QP",
    "sbn_escalate": "-P",
    "sbn_close": "-Pi",
    "sbn_closed": "iP",
    "sbn_rows": "-PPPP",
}


class Library(NamedTuple):
    """The functions of the core, loaded twice."""

    releasing: ctypes.CDLL  # functions that release the GIL
    holding: ctypes.PyDLL  # functions that hold the GIL, which is faster for slices of a few microseconds


def library() -> Library | None:
    """The core; None if it cannot be used, see `description`."""
    return _load()[0]


def description() -> str:
    """A line on whether the core is in use, with its instruction set or the reason why not."""
    core, reason = _load()
    if core is None:
        return f"native core: not in use, {reason}"
    return f"native core: in use ({LEVELS[core.holding.sbn_level(-1)]})"


@cache
def _load() -> tuple[Library | None, str]:
    if os.environ.get("STATSD_BN_NATIVE", "").strip() and not boolean(os.environ, "STATSD_BN_NATIVE"):
        return None, "STATSD_BN_NATIVE is off"
    return load(PATH)


def load(path: Path) -> tuple[Library | None, str]:
    """The core in a file, or None with the reason why it cannot be used."""
    if not path.exists():
        return None, f"it was not compiled when statsd_bn was installed: there is no {path}"
    try:
        core = Library(ctypes.CDLL(str(path)), ctypes.PyDLL(str(path)))
        version = core.holding.sbn_version()
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    if version != VERSION:
        return None, f"expected version {VERSION} of its interface in {path}, got {version}; install statsd_bn again"
    for functions in core:
        for name, letters in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, *function.argtypes = map(_TYPES.__getitem__, letters)
    return core, ""


class Pass(NamedTuple):
    """The functions of one pass, forward or backward, for calls with equal plans."""

    new_buffer: Any  # allocates the buffer of a pass, which begins with the own row and the sum of all rows
    alone: Any  # the function for a single rank; it may hold the GIL
    together: Any  # for one of several ranks; it releases the GIL, since other ranks may be threads of this process


class Plan(ctypes.Structure):
    """`sbn_plan`: the constant part of a layer's calls. Functions take its address, so it must outlive the call."""

    channels: int
    at: int  # its address
    count: int  # values per channel
    forward: Pass
    backward: Pass
    saved_offset: int  # of mean, invstd and slope in the buffer of a forward pass, in bytes

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("samples", "channels", "length")),
        *((name, ctypes.c_int32) for name in ("dtype", "is_rows", "threads")),
        *((name, ctypes.c_int32) for name in ("weight_dtype", "bias_dtype", "running_dtype", "clamp")),
        *((name, ctypes.c_double) for name in ("eps", "momentum")),
    )


class NativeRow:
    """One pass: the own row and the sum of all rows, which each have two vectors and a count.

    `addresses` are the function's arguments between plan and stage. `is_finished`: whether the pass is complete.
    """

    __slots__ = ("_addresses", "_buffer", "_pass", "_plan", "is_finished")

    def __init__(self, plan: Plan, of: Pass, buffer: Any, *addresses: int | None) -> None:
        self._plan, self._pass, self._buffer, self._addresses = plan, of, buffer, addresses
        self.is_finished = False

    def run(self, stage: int, group: int | None = None, digest: int = 0, wait: int = 0) -> int:
        """Run a stage of the pass; wait at most `wait` nanoseconds for other ranks; return the state of the round.

        `group` is the address of an `sbn_group`; without one EXCHANGE uses the own row as the sum.
        """
        function = self._pass.alone if group is None else self._pass.together
        state: int = function(self._plan.at, *self._addresses, stage, group, digest, wait)
        if state == NO_MEMORY:
            raise MemoryError("the native core could not allocate vectors of one value per channel")
        self.is_finished = state == DONE and stage != MEASURE
        return state

    def measured(self) -> Rows:
        """Compute the row, and return it in the form of the other transports."""
        self.run(MEASURE)
        return self.contribution

    @property
    def contribution(self) -> Rows:
        """The computed row, in the form of the other transports."""
        own: FloatArray = np.frombuffer(self._buffer, count=2 * self._plan.channels)
        return Rows((self._plan.count,), own.reshape(1, 2, -1))

    @property
    def total(self) -> FloatArray:
        """Sum of all rows, shape (2, C): a view of the buffer."""
        size = 2 * self._plan.channels
        return np.frombuffer(self._buffer, offset=8 * (size + 1), count=size).reshape(2, -1)

    @property
    def total_at(self) -> int:
        """Address of `total`."""
        return ctypes.addressof(self._buffer) + 8 * (2 * self._plan.channels + 1)

    def finish(self, total: FloatArray, count: int) -> None:
        """Finish the pass with the sum of all rows and their count; with a count of 1 the caller raises instead."""
        self.total[:] = total
        self._buffer[4 * self._plan.channels + 1] = count
        if count > 1:
            self.run(FINISH)
