"""Reports of a pretended server, for the tests of the view."""

from collections.abc import Sequence
from typing import Any


def member(rank: int, step: int = 5, **more: Any) -> dict[str, Any]:
    place = f"host-{rank}, pid {800 + rank}"
    return {"member": rank, "place": place, "stand": "takes_part", "step": step, "replicas": 1, **more}


def group(*members: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "job": "digits",
        "group": "world",
        "epoch": 0,
        "world_size": len(members),
        "min_members": 0,
        "members": list(members),
        "missing": 0,
        "lost": "",
        "rounds_done": 100,
        "rounds_failed": 0,
        "non_finite": [],
        "waiting": [],
        **more,
    }


def report(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"server": "abcd", "seconds": 60.0, "received": 9, "bad_frames": 0, "groups": list(groups), **more}


def layer(name: str, *parts: float) -> dict[str, Any]:
    """A layer's figures in a snapshot."""
    ones = [1.0] * len(parts)
    return {"name": name, "eta2": sum(parts), "parts": list(parts), "means": ones, "variances": ones}


def figures(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"layers": list(layers)}


def figures_of(layers: Sequence[str], members: int, mean: float = 0.0, odd: int | None = None) -> dict[str, Any]:
    """What a snapshot says of layers.

    Means count up from `mean`, and from 10 more in each next layer; `odd` is the index of a skewed member.
    """
    parts = [0.2 if at == odd else 0.01 for at in range(members)]
    variances = [25.0 if at == odd else 1.0 for at in range(members)]
    told = {"eta2": 0.25, "parts": parts, "variances": variances}
    means = [[mean + 10 * layer + at for at in range(members)] for layer, _ in enumerate(layers)]
    return {"layers": [{"name": name, "means": own, **told} for name, own in zip(layers, means, strict=True)]}
