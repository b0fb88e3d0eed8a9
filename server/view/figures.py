"""Figures: requests the status and the skew figures of each group, for the snapshot."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from server.cli.query import Query, query_connection
from server.cli.status import describe, report_of
from statsd_bn import limits
from statsd_bn.errors import ProtocolError, ServerUnreachable
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import Figures, FiguresRequest, StatusRequest
from statsd_bn.skew import PART
from statsd_bn.wire import decode

# Time limit for the figures of all groups, so that the status stays current.
FIGURES_SECONDS = 1.0


def fetch_report(endpoint: str, keys: ClientKeys | None) -> dict[str, Any]:
    """Report of a server, with the figures of its groups.

    Raises:
        AuthenticationRefused: server and client do not accept each other's keys.
        ServerUnreachable: no answer, or a malformed one.
    """
    with query_connection(endpoint, keys=keys) as question:
        report = report_of(endpoint, question(StatusRequest()))
        describe(report)  # raises for a malformed report
        add_figures(question, report["groups"])
    return report


def add_figures(ask: Query, groups: list[dict[str, Any]]) -> None:
    """Add `figures` to the entries of the groups that have any.

    `figures` has `layers`, a list in the order of a step. A layer has its `name`; `eta2`, the share of its variance
    between the members; and `parts`, a float32 array with the part of each member.

    Raises:
        ServerUnreachable: no answer, or a malformed one.
    """
    ends = time.monotonic() + FIGURES_SECONDS
    # The server has figures of strict groups only.
    for group in (one for one in groups if not one.get("min_members")):
        if time.monotonic() > ends:
            return
        try:
            layers = _layers(ask, group["job"], group["group"])
        except ProtocolError as error:
            raise ServerUnreachable(f"expected figures of this version, got others: {error.message}") from error
        if layers:
            group["figures"] = {"layers": layers}


def _layers(ask: Query, job: str, group: str) -> list[dict[str, Any]]:
    """All layers of a group; empty if the server does not send all of them."""
    found: list[dict[str, Any]] = []
    while len(found) < limits.MAX_FIGURES_LAYERS:
        answer = decode(ask(FiguresRequest(job, group, len(found))))
        if not isinstance(answer, Figures):
            return []
        found += _entries(answer)
        if not answer.names or len(found) >= answer.total:
            break
    # A group may restart with other members between two answers.
    return found if len({len(layer["parts"]) for layer in found}) == 1 else []


def _entries(answer: Figures) -> Iterator[dict[str, Any]]:
    for name, parts in zip(answer.names, answer.values[..., PART], strict=True):
        yield {"name": name, "eta2": float(parts.sum()), "parts": parts.astype(np.float32)}
