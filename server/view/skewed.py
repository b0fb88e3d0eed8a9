"""Skewed: the layers of a group whose data differ most between the members, and who brings most of that. Pure."""

from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from statsd_bn.messages import WORLD

# Nobody can be named among fewer.
LEAST_MEMBERS = 3


@dataclass(frozen=True, slots=True)
class Skewed:
    """A layer.

    Attributes:
        name: of the layer.
        eta2: the share of its variance that lies between the members.
        rank: that brings most of it; None where nobody can be named.
        part: what that one brings.
    """

    name: str
    eta2: float
    rank: int | None
    part: float


def most_skewed(group: dict[str, Any], number: int) -> list[Skewed]:
    """The most skewed layers of a snapshot's group, the first one most; none where there are no figures.

    Args:
        group: of the snapshot.
        number: how many, at most.
    """
    layers = group.get("figures", {}).get("layers", ())
    return [_skewed(group, layer) for layer in nlargest(number, layers, key=lambda layer: layer["eta2"])]


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


def _skewed(group: dict[str, Any], layer: dict[str, Any]) -> Skewed:
    parts = layer["parts"]
    part = max(parts)
    rank = ranks_of(group, len(parts))[parts.index(part)] if len(parts) >= LEAST_MEMBERS else None
    return Skewed(layer["name"], layer["eta2"], rank, part)
