"""Figures: asks the server what the members' data were like in each group, for the snapshot."""

import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from server.cli.asking import Ask
from statsd_bn import limits
from statsd_bn.errors import ProtocolError, ServerUnreachable
from statsd_bn.messages import Figures, FiguresRequest
from statsd_bn.reduction import FloatArray
from statsd_bn.skew import MEAN, PART, VARIANCE
from statsd_bn.wire import decode

# No group is asked for after this long, so that a server with many groups is still asked for its status in time.
SECONDS = 1.0

# Digits of a number: a page and a recording need no more.
DIGITS = 6

# Powers of ten that a float64 can be multiplied by; 0 has no first digit.
_MOST_PLACES = 300


def add_figures(ask: Ask, groups: list[dict[str, Any]]) -> None:
    """Add the figures of each group that has any to its entry, as `figures`.

    That is a map with `layers`, a list in the order of a step. A layer has its `name`; `eta2`, the share of its
    variance that lies between the members; and arrays of each member's `parts` of it, `means` and `variances`, which
    take a quarter of the room of lists.

    Args:
        ask: the connection to the server.
        groups: the entries of its report.

    Raises:
        ServerUnreachable: the server does not answer, or what it says makes no sense.
    """
    ends = time.monotonic() + SECONDS
    # The server compares the members of strict groups alone.
    for group in (one for one in groups if not one.get("min_members")):
        if time.monotonic() > ends:
            return
        try:
            layers = _layers(ask, group["job"], group["group"])
        except ProtocolError as error:
            raise ServerUnreachable(f"expected figures of this version, got others: {error.message}") from error
        if layers:
            group["figures"] = {"layers": layers}


def _layers(ask: Ask, job: str, group: str) -> list[dict[str, Any]]:
    """All layers of a group; none where the server does not tell of all."""
    found: list[dict[str, Any]] = []
    while len(found) < limits.MAX_FIGURES_LAYERS:
        answer = decode(ask(FiguresRequest(job, group, len(found))))
        if not isinstance(answer, Figures):
            return []
        found += _told(answer)
        if not answer.names or len(found) >= answer.total:
            break
    return found


def _told(answer: Figures) -> Iterator[dict[str, Any]]:
    eta2 = _rounded(answer.values[..., PART].sum(axis=1)).tolist()
    columns = _rounded(answer.values[..., [PART, MEAN, VARIANCE]]).swapaxes(1, 2)
    for name, share, layer in zip(answer.names, eta2, columns, strict=True):
        parts, means, variances = (array("d", column.tobytes()) for column in layer)
        yield {"name": name, "eta2": share, "parts": parts, "means": means, "variances": variances}


def _rounded(values: FloatArray) -> FloatArray:
    """The values with so many digits; all at once, since a large group has 200,000 of them each second."""
    with np.errstate(divide="ignore"):
        places = DIGITS - 1 - np.floor(np.log10(abs(values)))
    places = places.clip(-_MOST_PLACES, _MOST_PLACES)
    # By whole powers of ten, so that what is printed is short.
    up, down = 10.0 ** places.clip(min=0), 10.0 ** -places.clip(max=0)
    found: FloatArray = np.round(values * up / down) / up * down
    return found
