"""Reports of a pretended server, for the tests of the view."""

from typing import Any


def member(rank: int, step: int = 5, **more: Any) -> dict[str, Any]:
    place = f"host-{rank}, pid {800 + rank}"
    return {"member": rank, "place": place, "participation": "takes_part", "step": step, "replicas": 1, **more}


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
    return {"name": name, "eta2": sum(parts), "parts": list(parts)}


def figures(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"layers": list(layers)}
