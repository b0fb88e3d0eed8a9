"""Snapshot: what is known now, as one dictionary for the page and `/metrics`, with what has happened.

The heat map has the parts of a group's layers and ranks, packed: as text, 200,000 of them would take 2 MB. Pure.
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

    The first report has only what it says has happened: losses, failed rounds, non-finite rows and findings.

    Args:
        before: the report before; None for the first one.
        now: the newest one.
    """
    told: list[dict[str, str]] = []
    restarted = before is not None and before["server"] != now["server"]
    if restarted:
        told.append(_event("restart", {}, f"the server started again as {now['server']}"))
    known = {_name(group): group for group in (before or {}).get("groups", ())}
    for group in now["groups"]:
        old = known.pop(_name(group), None)
        told += [_event(kind, group, text) for kind, text in _of_group(old, group, first=before is None)]
    running = {group["job"] for group in now["groups"]}
    # The latest comes first: a run of the same name may have ended before.
    ended = {job["job"]: job for job in reversed(now.get("ended", ())) if job["job"] not in running}
    # A server that has just started again knows no group until its members are back.
    if not restarted and not now.get("left_out"):
        for group in known.values():
            how = ended.get(group["job"], {}).get("lost")
            told.append(_event("lost" if how else "ended", group, how or "ended"))
    return told


def _name(group: Report) -> tuple[str, str]:
    return group["job"], group["group"]


def _event(kind: str, group: Report, text: str) -> dict[str, str]:
    return {"kind": kind, "job": group.get("job", ""), "group": group.get("group", ""), "text": text}


def _of_group(old: Report | None, group: Report, *, first: bool) -> Iterator[tuple[str, str]]:
    old = old or {}
    if not first:
        yield from _membership(old, group)
    if group["lost"] and group["lost"] != old.get("lost"):
        yield "lost", group["lost"]
    # The count begins again with a new epoch.
    failed = group["rounds_failed"] - (old.get("rounds_failed", 0) if old.get("epoch") == group["epoch"] else 0)
    if failed > 0:
        yield "mismatch", f"{failed} round{'s' * (failed != 1)} failed"
    known = set(old.get("non_finite", ()))
    yield from (("non-finite", text) for text in group.get("non_finite", ()) if text not in known)
    known = {_finding(finding) for finding in old.get("findings", ())}
    new = (finding for finding in group.get("findings", ()) if _finding(finding) not in known)
    yield from ((finding["kind"], finding["text"]) for finding in new)


def _membership(old: Report, group: Report) -> Iterator[tuple[str, str]]:
    before = {member["member"]: member for member in old.get("members", ())}
    after = {member["member"]: member for member in group["members"]}
    # Members that a report has no room for have not left.
    whole = not old.get("members_left_out") and not group.get("members_left_out")
    for rank, member in after.items():
        if rank not in before:
            if whole:
                yield "joined", f"rank {rank} ({member['place']}) joined"
        elif before[rank]["place"] != member["place"]:
            yield "joined", f"rank {rank} is now {member['place']}, before {before[rank]['place']}"
        elif before[rank]["participation"] != member["participation"] == "paused":
            yield "left", f"rank {rank} ({member['place']}) is away"
    if whole:
        gone = [before[rank] for rank in before if rank not in after]
        yield from (("left", f"rank {member['member']} ({member['place']}) left") for member in gone)


def _finding(finding: Report) -> tuple[Any, ...]:
    return tuple(finding.get(name) for name in ("kind", "rank", "layer", "step"))


# Events that are kept: an hour of one each four seconds.
MAX_EVENTS = 900

Snapshot = dict[str, Any]


class Watcher:
    """Makes snapshots of the reports of one server.

    Example usage:

        watcher = Watcher("tcp://127.0.0.1:4555")
        snapshot = watcher.take(time.time(), ask(endpoint))
        snapshot = watcher.fail(time.time(), "no answer")

    A snapshot has `time` (seconds since 1970), `endpoint`, `error` ("" while the server answers), `server`, `seconds`
    (since its start), `groups`, `ended`, `events` and `counts`, how many events there were of each kind. A group is
    that of the report with `rounds_per_second`, and with `figures` where there are any, see `server.view.figures`; a
    member that of the report with `steps_per_second` and `doing`, what it waits for. A rate is None before the second
    report of the group or member.

    Args:
        endpoint: of the server, for people.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._before: tuple[float, Report] | None = None
        self._error = ""
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._counts: Counter[str] = Counter()
        self._snapshot: Snapshot = {"server": "", "seconds": 0.0, "groups": [], "ended": []}

    def take(self, now: float, report: Report) -> Snapshot:
        """Snapshot after a report.

        Args:
            now: seconds since 1970.
            report: the server's answer.
        """
        before = self._before[1] if self._before else None
        told = events(before, report)
        seconds = now - self._before[0] if self._before else 0.0
        known = {_life(group): group for group in (before or {}).get("groups", ())}
        groups = [_shown(group, known.get(_life(group)), seconds) for group in report["groups"]]
        # Nothing has changed if the report made no sense.
        if self._error:
            told.insert(0, {"kind": "answers", "job": "", "group": "", "text": "the server answers again"})
        for event in told:
            self._add(now, event)
        self._before, self._error = (now, report), ""
        self._snapshot = {
            **{name: value for name, value in report.items() if isinstance(value, int | float | str)},
            "groups": groups,
            "ended": report.get("ended", []),
        }
        return self._with_head(now)

    def fail(self, now: float, error: str) -> Snapshot:
        """Snapshot after a question that had no answer: the last one, with the error.

        Args:
            now: seconds since 1970.
            error: what was wrong.
        """
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


def _life(group: Report) -> tuple[str, str, int]:
    return group["job"], group["group"], group["epoch"]


def _shown(group: Report, before: Report | None, seconds: float) -> Report:
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
    """What each member does of whom the open rounds tell: the oldest round that it waits in, or that waits for it."""
    doing: dict[int, str] = {}
    for round_ in group["waiting"]:
        missing = set(round_["missing"])
        # Of a round whose list of missing members is cut off it is not known who waits in it.
        for member in group["members"]:
            rank = member["member"]
            if rank in missing:
                doing.setdefault(rank, f"awaited {round_['seconds']:.1f} s: {round_['round']}")
            elif not round_.get("missing_left_out"):
                doing.setdefault(rank, f"waits {round_['seconds']:.1f} s: {round_['round']}")
    return doing


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
