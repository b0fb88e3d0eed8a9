"""Heat: the parts of a group's layers and ranks now, packed for the page. As text, 200,000 of them would take 2 MB."""

import base64
from typing import Any

import numpy as np

from server.view.snapshot import Snapshot
from statsd_bn.messages import WORLD


def heat(snapshot: Snapshot, job: str, group: str) -> dict[str, Any] | None:
    """How much of the variance between ranks each one brings to each layer, or None where that is not known.

    Args:
        snapshot: what is known.
        job: the training run.
        group: which of its groups.

    Returns:
        `layers` (names, in the order of a step), `eta2` of each, `members` (how many), `ranks` (of each member, None
        where it is not known), and `parts`: little-endian float32 in base64, of shape (layers, members).
    """
    for told in snapshot["groups"]:
        layers = told.get("figures", {}).get("layers", [])
        if (told["job"], told["group"]) == (job, group) and layers:
            parts = np.array([layer["parts"] for layer in layers], "<f4")
            return {
                "job": job,
                "group": group,
                "layers": [layer["name"] for layer in layers],
                "eta2": [layer["eta2"] for layer in layers],
                "members": parts.shape[1],
                "ranks": ranks_of(told, parts.shape[1]),
                "parts": base64.b64encode(parts.tobytes()).decode(),
            }
    return None


def ranks_of(group: dict[str, Any], members: int) -> list[int | None]:
    """Rank of each of a group's members, in their order; None for those that are not known.

    Args:
        group: of the snapshot.
        members: how many the figures are of.
    """
    if group["group"] == WORLD:
        return list(range(members))
    known = sorted(member["member"] for member in group["members"])
    left_out = group.get("members_left_out", 0)
    # Where some have left, nobody knows whose place is whose.
    return [*known, *[None] * left_out] if len(known) + left_out == members else [None] * members


def without_figures(snapshot: Snapshot) -> Snapshot:
    """The snapshot with `has_figures` in the place of each group's figures, which a reader asks for by themselves."""
    groups = [
        {name: value for name, value in group.items() if name != "figures"}
        | {"has_figures": bool(group.get("figures"))}
        for group in snapshot["groups"]
    ]
    return {**snapshot, "groups": groups}
