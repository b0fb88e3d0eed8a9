"""Snapshot: the latest report with rates and events, as one dictionary for the page and `/metrics`.

The heat map packs the parts of all layers and ranks as binary: 200,000 numbers as text would take 2 MB. Pure.
"""

import base64
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from statsd_bn.messages import WORLD

Report = dict[str, Any]


def events(before: Report | None, now: Report) -> list[dict[str, str]]:
    """Events between two reports, each with `kind`, `job`, `group` and `text`.

    The first report yields only losses, failed rounds, non-finite rows and findings.
    """
    found: list[dict[str, str]] = []
    restarted = before is not None and before["server"] != now["server"]
    if restarted:
        found.append(_event("restart", {}, f"the server started again as {now['server']}"))
    known = {_group_name(group): group for group in (before or {}).get("groups", ())}
    for group in now["groups"]:
        old = known.pop(_group_name(group), None)
        found += [_event(kind, group, text) for kind, text in _group_events(old, group, first=before is None)]
    running = {group["job"] for group in now["groups"]}
    # Latest first: an earlier run of the same name may have ended before.
    ended = {job["job"]: job for job in reversed(now.get("ended", ())) if job["job"] not in running}
    # A restarted server knows no group before its members have reconnected.
    if not restarted and not now.get("left_out"):
        for group in known.values():
            how = ended.get(group["job"], {}).get("lost")
            found.append(_event("lost" if how else "ended", group, how or "ended"))
    return found


def _group_name(group: Report) -> tuple[str, str]:
    return group["job"], group["group"]


def _event(kind: str, group: Report, text: str) -> dict[str, str]:
    return {"kind": kind, "job": group.get("job", ""), "group": group.get("group", ""), "text": text}


def _group_events(old: Report | None, group: Report, *, first: bool) -> Iterator[tuple[str, str]]:
    old = old or {}
    if not first:
        yield from _membership_events(old, group)
    if group["lost"] and group["lost"] != old.get("lost"):
        yield "lost", group["lost"]
    # The count restarts with each epoch.
    failed = group["rounds_failed"] - (old.get("rounds_failed", 0) if old.get("epoch") == group["epoch"] else 0)
    if failed > 0:
        yield "mismatch", f"{failed} round{'s' * (failed != 1)} failed"
    known = set(old.get("non_finite", ()))
    yield from (("non-finite", text) for text in group.get("non_finite", ()) if text not in known)
    known = {_finding_key(finding) for finding in old.get("findings", ())}
    new = (finding for finding in group.get("findings", ()) if _finding_key(finding) not in known)
    yield from ((finding["kind"], finding["text"]) for finding in new)


def _membership_events(old: Report, group: Report) -> Iterator[tuple[str, str]]:
    before = {member["member"]: member for member in old.get("members", ())}
    after = {member["member"]: member for member in group["members"]}
    # Members that the report leaves out have not left.
    whole = not old.get("members_left_out") and not group.get("members_left_out")
    for rank, member in after.items():
        if rank not in before:
            if whole:
                yield "joined", f"rank {rank} ({member['place']}) joined"
        elif before[rank]["place"] != member["place"]:
            yield "joined", f"rank {rank} moved from {before[rank]['place']} to {member['place']}"
        elif before[rank]["participation"] != member["participation"] == "paused":
            yield "left", f"rank {rank} ({member['place']}) is away"
    if whole:
        gone = [before[rank] for rank in before if rank not in after]
        yield from (("left", f"rank {member['member']} ({member['place']}) left") for member in gone)


def _finding_key(finding: Report) -> tuple[Any, ...]:
    return tuple(finding.get(name) for name in ("kind", "rank", "layer", "step"))


# Events kept: one hour of one event every four seconds.
MAX_EVENTS = 900

Snapshot = dict[str, Any]


class SnapshotBuilder:
    """Makes snapshots from the reports of one server.

        builder = SnapshotBuilder("tcp://127.0.0.1:4555")
        snapshot = builder.update(time.time(), ask(endpoint))
        snapshot = builder.fail(time.time(), "no answer")

    A snapshot has `time` (seconds since 1970), `endpoint`, `error` ("" while the server answers), `server`, `seconds`
    (since its start), `groups`, `ended`, `events`, and `counts` of events by kind. Groups have the fields of the report
    and `rounds_per_second`, and optionally `figures`, see `server.view.feed`. Members have the fields of the report,
    `steps_per_second` and `doing`, the round that they wait in. A rate is None before the second report of the group or
    member.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._previous: tuple[float, Report] | None = None
        self._error = ""
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._counts: Counter[str] = Counter()
        self._snapshot: Snapshot = {"server": "", "seconds": 0.0, "groups": [], "ended": []}

    def update(self, now: float, report: Report) -> Snapshot:
        """Snapshot after a report; `now` is in seconds since 1970."""
        before = self._previous[1] if self._previous else None
        found = events(before, report)
        seconds = now - self._previous[0] if self._previous else 0.0
        known = {_group_key(group): group for group in (before or {}).get("groups", ())}
        groups = [_with_rates(group, known.get(_group_key(group)), seconds) for group in report["groups"]]
        # A malformed report raises before this and changes nothing.
        if self._error:
            found.insert(0, {"kind": "answers", "job": "", "group": "", "text": "the server replies again"})
        for event in found:
            self._add(now, event)
        self._previous, self._error = (now, report), ""
        self._snapshot = {
            **{name: value for name, value in report.items() if isinstance(value, int | float | str)},
            "groups": groups,
            "ended": report.get("ended", []),
        }
        return self._with_head(now)

    def fail(self, now: float, error: str) -> Snapshot:
        """Snapshot after a failed request: the previous one, with the text of the error."""
        if not self._error:
            self._add(now, {"kind": "silent", "job": "", "group": "", "text": error})
        self._error = error
        return self._with_head(now)

    def _add(self, now: float, event: Mapping[str, str]) -> None:
        self._counts[event["kind"]] += 1
        self._events.append({"time": now, **event})

    def _with_head(self, now: float) -> Snapshot:
        head = {"time": now, "endpoint": self._endpoint, "error": self._error, "counts": dict(self._counts)}
        return {**self._snapshot, **head, "events": list(self._events)}


def _group_key(group: Report) -> tuple[str, str, int]:
    return group["job"], group["group"], group["epoch"]


def _with_rates(group: Report, before: Report | None, seconds: float) -> Report:
    steps = {member["member"]: member["step"] for member in (before or {}).get("members", ())}
    doing = _doing(group)
    return {
        **group,
        "rounds_per_second": _rate(group["rounds_done"], before["rounds_done"] if before else None, seconds),
        "members": [
            {
                **member,
                "steps_per_second": _rate(member["step"], steps.get(member["member"]), seconds),
                "doing": member.get("where") or doing.get(member["member"], ""),
            }
            for member in group["members"]
        ],
    }


def _rate(count: int, before: int | None, seconds: float) -> float | None:
    return max(0.0, (count - before) / seconds) if before is not None and seconds > 0 else None


def _doing(group: Report) -> dict[int, str]:
    """Activity of members by rank: the oldest round that a member waits in, or that waits for it."""
    doing: dict[int, str] = {}
    for round_ in group["waiting"]:
        missing = set(round_["missing"])
        # With an incomplete list of missing members the waiting ones are unknown.
        for member in group["members"]:
            rank = member["member"]
            if rank in missing:
                doing.setdefault(rank, f"awaited {round_['seconds']:.1f} s: {round_['round']}")
            elif not round_.get("missing_left_out"):
                doing.setdefault(rank, f"waits {round_['seconds']:.1f} s: {round_['round']}")
    return doing


def heat(snapshot: Snapshot, job: str, group: str) -> dict[str, Any] | None:
    """Part of each rank in each layer's variance between ranks; None if unknown.

    Returns:
        `layers` (names in the order of a step), `eta2` of each, `members` (their number), `ranks` (of each member, None
        if unknown), and `parts`: little-endian float32 in base64, of shape (layers, members).
    """
    for entry in snapshot["groups"]:
        layers = entry.get("figures", {}).get("layers", [])
        if (entry["job"], entry["group"]) == (job, group) and layers:
            parts = np.array([layer["parts"] for layer in layers], "<f4")
            return {
                "job": job,
                "group": group,
                "layers": [layer["name"] for layer in layers],
                "eta2": [layer["eta2"] for layer in layers],
                "members": parts.shape[1],
                "ranks": ranks_of(entry, parts.shape[1]),
                "parts": base64.b64encode(parts.tobytes()).decode(),
            }
    return None


def ranks_of(group: dict[str, Any], members: int) -> list[int | None]:
    """Rank of each member of the figures, in order; None if unknown."""
    if group["group"] == WORLD:
        return list(range(members))
    known = sorted(member["member"] for member in group["members"])
    left_out = group.get("members_left_out", 0)
    # After a leave the order of the members is unknown.
    return [*known, *[None] * left_out] if len(known) + left_out == members else [None] * members


def without_figures(snapshot: Snapshot) -> Snapshot:
    """The snapshot with `has_figures` instead of figures, which readers request separately."""
    groups = [
        {name: value for name, value in group.items() if name != "figures"}
        | {"has_figures": bool(group.get("figures"))}
        for group in snapshot["groups"]
    ]
    return {**snapshot, "groups": groups}
