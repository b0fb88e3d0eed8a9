"""Loader of the native core, with the types of its functions, which core/sbn.h describes; and a layer's pass by it."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from statsd_bn.environment import boolean
from statsd_bn.reduction import FloatArray, Rows

# Constants of core/sbn.h.
VERSION = 5
F32, BF16, F16, F64 = range(4)
DONE, WAITS, CLOSED, DIFFERS, TOO_MANY, NOT_FINITE, NO_MEMORY = range(7)
MEASURE, EXCHANGE, FINISH = range(3)
LEVELS = ("baseline", "AVX2")

PATH = Path(__file__).resolve().parent / "libsbn.so"

_AT: TypeAlias = ctypes.c_void_p
_LONG: TypeAlias = ctypes.c_int64
_INT: TypeAlias = ctypes.c_int
_ROUND = (_INT, _AT, ctypes.c_uint64, _LONG)  # stage, group, digest, nanoseconds to wait

_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "sbn_version": (),
    "sbn_level": (_INT,),
    "sbn_moments": (_AT,) * 3,
    "sbn_normalize": (_AT,) * 6,
    "sbn_forward": (*(_AT,) * 9, *_ROUND),
    "sbn_backward_sums": (_AT,) * 5,
    "sbn_input_grad": (_AT,) * 7,
    "sbn_backward": (*(_AT,) * 9, *_ROUND),
}


class SliceStruct(ctypes.Structure):
    """`sbn_slice`; functions take its address, so it must outlive the call."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "c", "l")),
        *((name, ctypes.c_int32) for name in ("dtype", "rows", "threads", "reserved")),
    )


class PlanStruct(ctypes.Structure):
    """`sbn_plan`."""

    _fields_ = (
        ("slice", SliceStruct),
        *((name, ctypes.c_int32) for name in ("weight_dtype", "bias_dtype", "running_dtype", "clamp")),
        *((name, ctypes.c_double) for name in ("eps", "momentum")),
    )


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
        core.holding.sbn_version.argtypes = ()
        version = core.holding.sbn_version()
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    if version != VERSION:
        return None, f"expected version {VERSION} of its interface in {path}, got {version}; install statsd_bn again"
    for functions in core:
        for name, arguments in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = _INT, arguments
    return core, ""


class Pass(NamedTuple):
    """The functions of one pass, forward or backward, for calls with equal plans."""

    new_buffer: Any  # allocates the buffer of a pass
    alone: Any  # the function for a single rank; it may hold the GIL
    together: Any  # for one of several ranks; it releases the GIL, since others may be threads of this process
    values: int  # per channel
    channels: int


class NativeRow:
    """One pass: the own row and the sum of all rows, each of two vectors and the count.

    `arguments` are the function's arguments before the stage. `is_finished`: whether the pass is complete.
    """

    __slots__ = ("_arguments", "_buffer", "_pass", "is_finished")

    def __init__(self, of: Pass, buffer: Any, *arguments: Any) -> None:
        self._pass, self._buffer, self._arguments = of, buffer, arguments
        self.is_finished = False

    def run(self, stage: int, group: Any = None, digest: int = 0, wait: int = 0) -> int:
        """Run the pass up to a stage, for `wait` nanoseconds at most, and return the state of its round.

        EXCHANGE without a group, the pointer to an `sbn_group`, uses the own row as the sum.
        """
        function = self._pass.alone if group is None else self._pass.together
        state: int = function(*self._arguments, stage, group, digest, wait)
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
        own: FloatArray = np.frombuffer(self._buffer, count=2 * self._pass.channels)
        return Rows((self._pass.values,), own.reshape(1, 2, -1))

    @property
    def total(self) -> FloatArray:
        """Sum of all rows, shape (2, C): a view of the buffer."""
        size = 2 * self._pass.channels
        return np.frombuffer(self._buffer, offset=8 * (size + 1), count=size).reshape(2, -1)

    @property
    def total_at(self) -> int:
        """Address of `total`."""
        return ctypes.addressof(self._buffer) + 8 * (2 * self._pass.channels + 1)

    def finish(self, total: FloatArray, count: int) -> None:
        """Finish the pass with the sum of all rows and their count; with a count of 1 the caller raises instead."""
        self.total[:] = total
        self._buffer[4 * self._pass.channels + 1] = count
        if count > 1:
            self.run(FINISH)
