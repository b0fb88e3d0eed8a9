"""Snapshot: what is known now, as one dictionary for the page and `/metrics`. Pure."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from server.view.events import Report, events

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
        known = {_name(group): group for group in (before or {}).get("groups", ())}
        groups = [_shown(group, known.get(_name(group)), seconds) for group in report["groups"]]
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


def _name(group: Report) -> tuple[str, str, int]:
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
