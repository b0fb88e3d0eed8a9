"""Loader of the native core, with the types of its functions; core/sbn.h describes them."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from statsd_bn.environment import boolean

# Constants of core/sbn.h.
VERSION = 4
F32, BF16, F16, F64 = range(4)
DONE, WAITS, CLOSED, DIFFERS, TOO_MANY, NOT_FINITE, NO_MEMORY = range(7)
MEASURE, EXCHANGE, FINISH = range(3)
LEVELS = ("baseline", "AVX2")

PATH = Path(__file__).resolve().parent / "libsbn.so"

_AT: TypeAlias = ctypes.c_void_p
_LONG: TypeAlias = ctypes.c_int64
_INT: TypeAlias = ctypes.c_int
_PARAMETER = (_AT, _INT)
_ROUND = (_INT, _AT, ctypes.c_uint64, _LONG)  # stage, group, digest, nanoseconds to wait

_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "sbn_version": (),
    "sbn_level": (_INT,),
    "sbn_moments": (_AT, _AT, _AT),
    "sbn_normalize": (_AT, _AT, _AT, _AT, *_PARAMETER, *_PARAMETER),
    "sbn_forward": (*(_AT,) * 9, *_ROUND),
    "sbn_backward_sums": (_AT, _AT, _AT, _AT, _AT),
    "sbn_input_grad": (_AT, _AT, _AT, _AT, _AT, _AT, *_PARAMETER),
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
