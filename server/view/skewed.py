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


def _skewed(group: dict[str, Any], layer: dict[str, Any]) -> Skewed:
    parts = layer["parts"]
    part = max(parts)
    return Skewed(layer["name"], layer["eta2"], _rank(group, parts.index(part), len(parts)), part)


def _rank(group: dict[str, Any], index: int, members: int) -> int | None:
    if members < LEAST_MEMBERS:
        return None
    if group["group"] == WORLD:
        return index
    known = sorted(member["member"] for member in group["members"])
    are_all = len(known) + group.get("members_left_out", 0) == members
    return known[index] if are_all and index < len(known) else None
