"""Snapshots of every state that the page shows, with their heat map and history, without a server."""

import base64
import math
import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from support import view_reports

HOSTILE = "<img src=x onerror=alert(1)>"
STATES = ("healthy", "forming", "waiting", "slow", "data", "nan", "broken", "ended", "silent", "restarted")
NOW = 1_795_795_128.0
SECONDS = 600.0
STEP = 14_230

ODD_RANK, ODD_LAYER = 2, 0
LATE_RANK = 1

SKEW = (
    "Rank 2's data look different: since step 64 its activations vary 8.5 times as much as the others' in {layer}, "
    "and less so in 22 later layers"
)
TEXTS = {
    "healthy": "Healthy: all {ranks} ranks take part, none is slow, their data look alike",
    "forming": "Starting: 2 of {ranks} ranks are missing",
    "waiting": "Waiting for rank 1 (gpu-a, pid 12271) for {waited} s in layer3.0.bn1; it is in loader.py:41 decode",
    "slow": "Rank 1 slows the job down: the others waited 31% of the last minute for it",
    "data": SKEW,
    "nan": "Rank 2 brought the first NaN: {layer}, forward, step 20, 4 of 256 channels",
    "broken": "Broken: rank 1 (gpu-a, pid 12271) raised ValueError at step 14230",
    "ended": "Ended in good order: all {ranks} ranks left after step 14230",
    "silent": "The server does not answer: no reply within 3 s",
    "restarted": "Healthy again: the server restarted at 15:58:30, and all {ranks} ranks are back",
}
ADVICE = {
    "forming": "If they do not come, look at the launcher's log.",
    "waiting": "Look at line 41 of loader.py: the others wait in the forward pass of step 14230.",
    "slow": "Compare the load and the clock of gpu-a with the other hosts'.",
    "data": "Check how rank 2 loads and scales its inputs.",
    "nan": "Look at rank 2's inputs of step 20, and lower the learning rate if they are finite.",
    "broken": "Read rank 1's traceback; the other ranks ended with ReplicaLost.",
    "silent": "See whether its process runs, and start it again: no round is lost.",
}
FACTS: dict[str, dict[str, Any]] = {
    "healthy": {"severity": 0},
    "forming": {"severity": 1},
    "waiting": {"severity": 2, "rank": LATE_RANK, "ago": 12.0},
    "slow": {"severity": 2, "rank": LATE_RANK, "ago": 180.0, "step": 900, "step_ago": 185.0, "also": [SKEW]},
    "data": {"severity": 2, "rank": ODD_RANK, "ago": 611.0, "step": 64, "step_ago": 640.0},
    "nan": {"severity": 3, "rank": ODD_RANK, "ago": 90.0, "step": 20},
    "broken": {"severity": 3, "rank": LATE_RANK, "ago": 130.0},
    "ended": {"severity": 1, "ago": 130.0},
    "silent": {"severity": 3, "ago": 14.0},
    "restarted": {"severity": 0, "ago": 18.0},
}
STATE_NAMES = {"nan": "data", "restarted": "healthy"}


def snapshot(
    state: str,
    ranks: int = 8,
    layers: int = 53,
    now: float = NOW,
    job: str = "resnet50",
    layer: str = "",
    others: Iterable[str] = (),
    endpoint: str = "tcp://10.77.0.1:5755",
) -> dict[str, Any]:
    """A snapshot as in `/events`: a job in a state, and healthy jobs `others`; `layer` renames the first layer."""
    names = layer_names(layers)
    names[ODD_LAYER] = layer or names[ODD_LAYER]
    groups = [] if state == "empty" else [group(state, ranks, names, now, job)]
    groups += [group("healthy", 4, names, now, name) for name in others]
    silent = state == "silent"
    return {
        "time": now,
        "answered": now - 14 if silent else now,
        "endpoint": endpoint,
        "server": "4ac7c9cb40185aa8",
        "seconds": 2402.6 + now - NOW,
        "error": "no reply within 3 s" if silent else "",
        "groups": groups,
        "events": events(state, ranks, names, now, job),
    }


def layer_names(count: int) -> list[str]:
    names = ["bn1"]
    for stage in range(1, 5):
        for block in range(math.ceil(count / 12)):
            names += [f"layer{stage}.{block}.bn{norm}" for norm in (1, 2, 3)]
    return [name for name in names if name in _even(names, count)]


def _even(names: list[str], count: int) -> set[str]:
    return {names[int(at * len(names) / count)] for at in range(count)}


def group(state: str, ranks: int, names: list[str], now: float, job: str) -> dict[str, Any]:
    facts = FACTS[state]
    fill = {"ranks": ranks, "layer": names[2 if state == "nan" else ODD_LAYER], "waited": 12 + int(now) % 60}
    found = {
        "state": STATE_NAMES.get(state, state),
        "severity": facts["severity"],
        "text": TEXTS[state].format(**fill),
        "since": now - facts["ago"] if "ago" in facts else None,
        "step": facts.get("step"),
        "step_time": now - facts["step_ago"] if "step_ago" in facts else None,
        "rank": facts.get("rank"),
        "advice": ADVICE.get(state, ""),
        "also": [text.format(**fill) for text in facts.get("also", ())],
    }
    skew = view_reports.skew(ODD_RANK, names[ODD_LAYER], step=64, text="", is_present=True)
    slow = view_reports.straggler(LATE_RANK, 900, text="", median=0.041, p99=0.655)
    late = {"seconds": 12.0, "missing": [LATE_RANK], "layer": "layer3.0.bn1", "phase": "forward", "step": STEP}
    nan = {"layer": names[2], "phase": "forward", "step": 20, "ranks": [ODD_RANK], "channels": 4, "of": 256}
    lost = {"rank": LATE_RANK, "place": "gpu-a, pid 12271", "how": "fails", "cause": "ValueError: loss is nan"}
    over = {"broken": "broken", "ended": "ended"}.get(state)
    missing = 2 if state == "forming" else 0
    return view_reports.group(*(member(rank, state) for rank in range(ranks - missing))) | {
        "job": job,
        "world_size": ranks,
        "missing": missing,
        "lost": "rank 1 (gpu-a, pid 12271) failed with ValueError: loss is nan" if state == "broken" else "",
        "rounds_done": 1_508_380,
        "rounds_per_second": 0.0 if over else 191.0,
        "findings": {"data": [skew], "slow": [slow, skew]}.get(state, []),
        "slowest": LATE_RANK,
        "held": 0.31 if state == "slow" else 0.02,
        "waiting": [late] if state == "waiting" else [],
        "has_figures": state != "forming",
        "layers": names,
        "verdict": found,
        "cards": cards(state, ranks, names),
        "trend": trend(state, now),
        "first_non_finite": nan | {"what": "NaN"} if state == "nan" else None,
        "lost_by": lost | {"step": STEP, "time": now - 130} if state == "broken" else None,
        # Rounded: successive snapshots show the same time.
        "over": {"time": now // 1000 * 1000 - 130, "reason": "broken"} if over else None,
    }


def member(rank: int, state: str) -> dict[str, Any]:
    chance = random.Random(rank)
    flag, severity, share, doing = "", 0, 0.0, "computes"
    waits = 0.08 + 0.03 * chance.random()
    if rank == LATE_RANK:
        flag, severity = {"waiting": ("awaited", 2), "slow": ("slow", 2), "broken": ("failed", 3)}.get(state, ("", 0))
        doing = {
            "waiting": "in loader.py:41 decode, called from train.py:57 main",
            "broken": "raised ValueError: loss is nan",
        }.get(state, doing)
        share = 0.31 if state in {"waiting", "slow"} else 0.004
    elif state in {"waiting", "slow"}:
        waits += 0.31
        doing = f"waits 12 s for rank {LATE_RANK} in layer3.0.bn1" if state == "waiting" else doing
    if rank == ODD_RANK:
        odd = {"data": ("differs", 2), "slow": ("differs", 2), "nan": ("NaN", 3)}
        flag, severity = odd.get(state, (flag, severity))
    place = f"gpu-{'ab'[rank // 4 % 2]}, pid {12264 + 7 * rank}"
    fields = {"place": place, "state": "takes_part", "doing": doing, "flag": flag, "severity": severity}
    late = {"median": 0.00032, "p99": 0.0026}
    times = {"waiting": waits, "share": share, "median": 0.0026, "p99": 0.0104, "late": late}
    return view_reports.member(rank, STEP, **fields, **times, steps_per_second=1.79)


def cards(state: str, ranks: int, names: list[str]) -> list[dict[str, str]]:
    layers, odd = len(names), names[ODD_LAYER]
    contents = {
        "Ranks": (f"{ranks} of {ranks}", "all take part", "good"),
        "Speed": ("191 rounds/s", "usually 190", "good"),
        "Waiting": ("None", "all keep the same pace", "good"),
        "Data": ("All alike", f"{ranks} ranks in {layers} layers", "good"),
        "Numbers": ("All finite", "in 1\u202f508\u202f380 rounds", "good"),
    }
    unknown, stopped = ("Not known yet", "", "watch"), ("0", "usually 190", "watch")
    differs = ("Rank 2 differs", f"in 23 of {layers} layers, first in {odd}", "watch")
    changes = {
        "forming": {"Ranks": (f"{ranks - 2} of {ranks}", "2 are missing", "watch"), "Data": unknown},
        "waiting": {"Waiting": ("12 s for rank 1", "in layer3.0.bn1", "watch"), "Speed": stopped},
        "slow": {"Waiting": ("31% for rank 1", "of the last minute", "watch"), "Data": differs},
        "data": {"Data": differs},
        "nan": {"Numbers": ("Rank 2: NaN", "layer1.0.bn2, step 20, 4 of 256 channels", "bad")},
        "broken": {"Ranks": ("Rank 1 failed", "ValueError: loss is nan", "bad"), "Speed": stopped},
    }
    contents |= changes.get(state, {})
    return [{"name": name, "value": value, "note": note, "state": of} for name, (value, note, of) in contents.items()]


def trend(state: str, now: float) -> dict[str, list[float]]:
    chance = random.Random(7)
    seconds = [now - SECONDS + 2 * at for at in range(301)]
    slow = [state == "slow" and time > now - 180 for time in seconds]
    return {
        "seconds": seconds,
        "rounds_per_second": [(131 if is_slow else 191) + chance.uniform(-3, 3) for is_slow in slow],
        "median": [(0.0035 if is_slow else 0.0027) * chance.uniform(0.95, 1.05) for is_slow in slow],
        "p99": [(0.349 if is_slow else 0.0064) * chance.uniform(0.8, 1.3) for is_slow in slow],
    }


def events(state: str, ranks: int, names: list[str], now: float, job: str) -> list[dict[str, Any]]:
    world, other = ({"job": name, "group": "world"} for name in (job, "resnet50-lr0.4"))
    no_job = {"job": "", "group": ""}
    entries = [
        {"time": now - 8000, "kind": "joined", **world, "rank": None, "text": f"{ranks} ranks joined"},
        {"time": now - 7980, "kind": "ended", **other, "rank": None, "text": "Ended in good order"},
        {"time": now - 2400, "kind": "restart", **no_job, "rank": None, "text": "The server started again"},
    ]
    if state not in {"healthy", "forming", "empty"}:
        kind = {"data": "skew", "slow": "straggler", "nan": "non-finite", "broken": "lost"}.get(state, state)
        text = TEXTS[state].format(ranks=ranks, layer=names[2 if state == "nan" else 0], waited=12)
        entries.append({"time": now - FACTS[state].get("ago", 0), "kind": kind, **world, "rank": None, "text": text})
    return entries


def heat(snapshot: dict[str, Any], job: str, group: str) -> dict[str, Any] | None:
    for found in snapshot["groups"]:
        if (found["job"], found["group"]) == (job, group) and found["has_figures"]:
            numbers = _figures(found, int(snapshot["time"]))
            eta2, ranks = numbers[0].sum(1).tolist(), [member["member"] for member in found["members"]]
            heads = {"job": job, "group": group, "layers": found["layers"], "eta2": eta2, "members": len(ranks)}
            packed = zip(("parts", "ratios", "means", "variances"), map(pack, numbers), strict=True)
            return {**heads, "ranks": ranks, **dict(packed)}
    return None


def history(snapshot: dict[str, Any], job: str, group: str, layer: str) -> dict[str, Any] | None:
    for found in snapshot["groups"]:
        if (found["job"], found["group"]) == (job, group) and layer in found["layers"]:
            at, until = found["layers"].index(layer), (found["over"] or snapshot)["time"]
            _, ratios, means, variances = _figures(found, 0)
            seconds = [until - SECONDS + 4 * step for step in range(151)]
            walk = np.random.default_rng(at).standard_normal((len(seconds), ratios.shape[1])).cumsum(0) * 0.004
            early = np.where(np.arange(len(seconds)) < 40, 1.0, 0.0)[:, None]
            drawn = variances[at] * (1 + walk) / np.where(early, np.maximum(1, ratios[at]), 1)
            ranks = [member["member"] for member in found["members"]]
            return {"seconds": seconds, "ranks": ranks, "means": pack(means[at] + walk), "variances": pack(drawn)}
    return None


def _figures(of: dict[str, Any], seed: int) -> tuple[np.ndarray, ...]:
    """Parts, ratios, means and variances, each of shape (layers, members)."""
    size = layers, ranks = len(of["layers"]), len(of["members"])
    chance = np.random.default_rng(seed)
    parts = 0.004 * chance.uniform(0.4, 1.6, size) * 8 / ranks
    means = chance.normal(0.05, 0.02, size)
    ratios = chance.uniform(0.95, 1.05, size)
    if any(finding["kind"] == "skew" for finding in of["findings"]):
        fade = np.exp(-np.arange(layers) / (layers / 6))
        parts[:, ODD_RANK] += 0.27 * fade
        ratios[:, ODD_RANK] += 7.5 * fade
        means[:, ODD_RANK] += 0.2 * fade
    return parts, ratios, means, 0.5 * ratios


def pack(values: np.ndarray) -> str:
    """Little-endian float32 in base64."""
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()
