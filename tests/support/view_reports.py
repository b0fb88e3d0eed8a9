"""Reports of a pretended server, for the tests of the view."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from support.paths import ROOT


def member(rank: int, step: int = 5, **more: Any) -> dict[str, Any]:
    place = f"host-{rank}, pid {800 + rank}"
    return {"member": rank, "place": place, "participation": "takes_part", "step": step, "replicas": 1, **more}


def group(*members: dict[str, Any], **more: Any) -> dict[str, Any]:
    sound = {"job": "digits", "group": "world", "epoch": 0, "lost": "", "non_finite": [], "waiting": []}
    counts = {"world_size": len(members), "min_members": 0, "missing": 0, "rounds_done": 100, "rounds_failed": 0}
    return {**sound, **counts, "members": list(members), **more}


def report(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"server": "abcd", "seconds": 60.0, "received": 9, "bad_frames": 0, "groups": list(groups), **more}


def waiting(seconds: float, *missing: int, layer: str = "bn1", **more: Any) -> dict[str, Any]:
    text = f"layer {layer!r}"
    of = {"round": text, "layer": layer, "phase": "forward", "step": 7}
    return {**of, "seconds": seconds, "missing": list(missing), **more}


def ended(job: str = "digits", lost: str = "", seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"job": job, "epoch": 0, "world_size": 2, "rounds_done": 100, "lost": lost, "seconds": seconds, **more}


def skew(rank: int, layer: str = "bn1", **more: Any) -> dict[str, Any]:
    numbers = {"since": 64, "layers": 23, "variance": 8.5, "shift": 0.1, "part": 0.27, "usual": 0.0012}
    text = f"rank {rank} (host-{rank}, pid {800 + rank}): since step 64 ..."
    return {"kind": "skew", "rank": rank, "step": 70, "text": text, "layer": layer, **numbers, **more}


def straggler(rank: int, step: int = 7, **more: Any) -> dict[str, Any]:
    """A finding of a slow rank."""
    text = f"rank {rank} held the others up"
    return {"kind": "straggler", "rank": rank, "step": step, "text": text, "layer": "", **more}


def layer(name: str, *parts: float) -> dict[str, Any]:
    """Figures of a layer from the members' parts, with means of 0 and equal variances."""
    others = {"means": [0.0] * len(parts), "variances": [1.0] * len(parts)}
    return {"name": name, "eta2": sum(parts), "parts": list(parts), **others}


def figures(*layers: dict[str, Any]) -> dict[str, Any]:
    arrays = {key: np.array([one[key] for one in layers], np.float32) for key in ("parts", "means", "variances")}
    return {"layers": [one["name"] for one in layers], "eta2": [one["eta2"] for one in layers], **arrays}


@contextmanager
def view_page(
    *arguments: str, host: str = "127.0.0.1", token: str = "", **options: Any
) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Serves the page; returns the process, and the port and the token in the link that it prints."""
    command = [sys.executable, "-m", "server", "view", *arguments, "--http", f"{host}:0"]
    environ = {**os.environ, "STATSD_BN_VIEW_TOKEN": token}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            link = process.stderr.readline()
            found = re.fullmatch(rf"statsd_bn view: http://{re.escape(host)}:(\d+)/\?token=(\S+)\n", link)
            assert found, link
            yield process, int(found[1]), found[2]
        finally:
            process.kill()
