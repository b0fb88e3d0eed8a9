"""Figures: asks the server what the members' data were like in each group, for the snapshot."""

import time
from collections.abc import Iterator
from typing import Any

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


def add_figures(ask: Ask, groups: list[dict[str, Any]]) -> None:
    """Add the figures of each group that has any to its entry, as `figures`.

    That is a map with `layers`, a list in the order of a step. A layer has its `name`; `eta2`, the share of its
    variance that lies between the members; and lists of each member's `parts` of it, `means` and `variances`.

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
            layers = list(_layers(ask, group["job"], group["group"]))
        except ProtocolError as error:
            raise ServerUnreachable(f"expected figures of this version, got others: {error.message}") from error
        if layers:
            group["figures"] = {"layers": layers}


def _layers(ask: Ask, job: str, group: str) -> Iterator[dict[str, Any]]:
    first = 0
    while first < limits.MAX_FIGURES_LAYERS:
        answer = decode(ask(FiguresRequest(job, group, first)))
        if not isinstance(answer, Figures) or not answer.names:
            return
        yield from (_layer(name, values) for name, values in zip(answer.names, answer.values, strict=True))
        first += len(answer.names)
        if first >= answer.total:
            return


def _layer(name: str, values: FloatArray) -> dict[str, Any]:
    return {
        "name": name,
        "eta2": _short(float(values[:, PART].sum())),
        "parts": [_short(value) for value in values[:, PART].tolist()],
        "means": [_short(value) for value in values[:, MEAN].tolist()],
        "variances": [_short(value) for value in values[:, VARIANCE].tolist()],
    }


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
