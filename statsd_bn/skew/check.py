"""Check: what figures that somebody sends are held against before they are used."""

import numpy as np

from statsd_bn import limits
from statsd_bn.checks import check_integer
from statsd_bn.errors import ProtocolError
from statsd_bn.skew.figures import COUNT, PART, SHIFTS, VARIANCE

_FLOAT64 = np.dtype(np.float64)

# Layers, members, figures.
_DIMENSIONS = 3


def check_figures(values: object, layers: int, numbers: int) -> None:
    """Raises ProtocolError unless `values` are figures of so many layers, shape (layers, members, numbers)."""
    if not (isinstance(values, np.ndarray) and values.dtype == _FLOAT64 and values.ndim == _DIMENSIONS):
        found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ProtocolError(f"figures: expected float64 of {_DIMENSIONS} dimensions, got {found}")
    if values.shape[::2] != (layers, numbers):
        raise ProtocolError(f"figures: expected shape ({layers}, members, {numbers}), got {values.shape}")
    check_integer("members", values.shape[1], min(1, layers), limits.MAX_MEMBERS)
    if not layers:
        return
    from_0 = values[..., [COUNT, VARIANCE, PART]]
    are_within = values[..., COUNT].max() <= limits.MAX_COUNT and values[..., PART].max() <= 1
    are_within &= abs(values[..., SHIFTS]).max(initial=0.0) <= limits.MAX_SHIFT
    if not (np.isfinite(values).all() and from_0.min() >= 0 and are_within):
        raise ProtocolError(
            f"figures: expected finite numbers; counts of 0 to {limits.MAX_COUNT}, variances from 0, parts from 0 "
            f"to 1, shifts of {limits.MAX_SHIFT} at most"
        )
