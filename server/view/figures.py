"""Figures: asks the server what it is doing, and what the members' data were like in each group, for the snapshot."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from server.cli.query import Ask, asking
from server.cli.status import describe, report_of
from statsd_bn import limits
from statsd_bn.errors import ProtocolError, ServerUnreachable
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import Figures, FiguresRequest, StatusRequest
from statsd_bn.skew import PART
from statsd_bn.wire import decode

# No group is asked for after this long, so that a server with many groups is still asked for its status in time.
SECONDS = 1.0


def whole_report(endpoint: str, keys: ClientKeys | None) -> dict[str, Any]:
    """Report of a server, with the figures of its groups.

    Args:
        endpoint: where it listens.
        keys: this client's, and the server's public one; None for a server that asks for none.

    Raises:
        AuthenticationRefused: server and client do not accept each other's keys.
        ServerUnreachable: the server does not answer, or what it says makes no sense.
    """
    with asking(endpoint, keys=keys) as question:
        report = report_of(endpoint, question(StatusRequest()))
        describe(report)  # raises where it makes no sense
        add_figures(question, report["groups"])
    return report


def add_figures(ask: Ask, groups: list[dict[str, Any]]) -> None:
    """Add the figures of each group that has any to its entry, as `figures`.

    That is a map with `layers`, a list in the order of a step. A layer has its `name`; `eta2`, the share of its
    variance that lies between the members; and `parts`, a float32 array of each member's part of that.

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
    # A group that begins anew between two answers may have other members.
    return found if len({len(layer["parts"]) for layer in found}) == 1 else []


def _told(answer: Figures) -> Iterator[dict[str, Any]]:
    for name, parts in zip(answer.names, answer.values[..., PART], strict=True):
        yield {"name": name, "eta2": float(parts.sum()), "parts": parts.astype(np.float32)}
