"""Loader of the native core, with the types of its functions; core/sbn.h describes them."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from statsd_bn.environment import boolean

# As in core/sbn.h.
VERSION = 3
F32, BF16, F16, F64 = range(4)
# The state of a round; from DIFFERS to NOT_FINITE all members have arrived, and all get the same state.
DONE, WAITS, CLOSED, DIFFERS, TOO_MANY, NOT_FINITE, NO_MEMORY = range(7)
# The last stage of a pass of a layer.
MEASURE, EXCHANGE, FINISH = range(3)
LEVELS = ("baseline", "AVX2")

PATH = Path(__file__).resolve().parent / "libsbn.so"

_AT: TypeAlias = ctypes.c_void_p
_LONG: TypeAlias = ctypes.c_int64
_INT: TypeAlias = ctypes.c_int
_PARAMETER = (_AT, _INT)
_ROUND = (_INT, _AT, ctypes.c_uint64, _LONG)  # stage, group, digest, nanoseconds to wait

_FUNCTIONS: dict[str, tuple[type[_INT] | None, tuple[type, ...]]] = {
    "sbn_version": (_INT, ()),
    "sbn_level": (_INT, (_INT,)),
    "sbn_moments": (_INT, (_AT, _AT, _AT)),
    "sbn_finish": (None, (_AT,) * 6),
    "sbn_normalize": (_INT, (_AT, _AT, _AT, _AT, *_PARAMETER, *_PARAMETER)),
    "sbn_forward": (_INT, (*(_AT,) * 9, *_ROUND)),
    "sbn_backward_sums": (_INT, (_AT, _AT, _AT, _AT, _AT)),
    "sbn_input_grad": (_INT, (_AT, _AT, _AT, _AT, _AT, _AT, *_PARAMETER)),
    "sbn_param_grads": (None, (_AT,) * 5),
    "sbn_backward": (_INT, (*(_AT,) * 9, *_ROUND)),
}


class SliceStruct(ctypes.Structure):
    """`sbn_slice`; functions take its address, so it must outlive the call."""

    _fields_ = (
        ("n", ctypes.c_int64),
        ("c", ctypes.c_int64),
        ("l", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class PlanStruct(ctypes.Structure):
    """`sbn_plan`."""

    _fields_ = (
        ("slice", SliceStruct),
        *((name, ctypes.c_int32) for name in ("weight_dtype", "bias_dtype", "running_dtype", "clamp")),
        *((name, ctypes.c_double) for name in ("eps", "momentum")),
    )


class Library(NamedTuple):
    """The functions of the core, loaded twice.

    Attributes:
        releasing: functions that release the GIL.
        holding: functions that hold the GIL, which is faster for slices of a few microseconds.
    """

    releasing: ctypes.CDLL
    holding: ctypes.PyDLL


def library() -> Library | None:
    """Returns the core; None if it cannot be used, see `description`.

    Raises:
        ConfigurationError: STATSD_BN_NATIVE is not a boolean.
    """
    return _load()[0]


def description() -> str:
    """Returns a line on whether the core is in use, with its instruction set or the reason why not.

    Raises:
        ConfigurationError: as for `library`.
    """
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
    """Returns the core in a file, or None with the reason why it cannot be used."""
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
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
    return core, ""
