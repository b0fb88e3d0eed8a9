"""Snapshot: the latest report with verdicts, rates, trends and events, as one dictionary.

The page, `status --watch` and `/metrics` show it. The heat map packs the figures of all layers and ranks as binary:
200,000 numbers as text would take 2 MB. Pure.
"""

import base64
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.group.health import MAX_DELAY_SHARE, WINDOW_SECONDS
from server.view.history import INTERVAL_SECONDS, MAX_BYTES, LayerHistory, Trend
from server.view.verdict import (
    Verdict,
    awaited,
    cards,
    describe_finding,
    is_broken,
    is_finishing,
    of_server,
    verdicts,
    with_flag,
)
from statsd_bn.messages import WORLD
from statsd_bn.skew import MAX_RATIO

Report = dict[str, Any]
Snapshot = dict[str, Any]
Key = tuple[str, str]


def events(before: Report | None, now: Report) -> list[dict[str, Any]]:
    """Events between two reports; the first report yields only losses, failed rounds, non-finite rows and findings."""
    found: list[dict[str, Any]] = []
    known = {_group_name(group): group for group in (before or {}).get("groups", ())}
    for group in now["groups"]:
        old = known.pop(_group_name(group), {})
        found += [_event(group, *event) for event in _group_events(old, group, first=before is None)]
    if before is not None and before["server"] != now["server"]:
        # A restarted server knows no group before the members have reconnected.
        return [_event({}, "restart", None, "The server restarted"), *found]
    for group in () if now.get("left_out") else known.values():
        end = ended_group(group, now, 0.0)
        if not end["lost"]:
            found.append(_event(group, "ended", None, "Finished in good order"))
        elif end["lost"] != group["lost"] or is_finishing(group):
            found.append(_event(end, "lost", *_told(end, "broken")))
    return found


def _group_name(group: Report) -> tuple[str, str]:
    return group["job"], group["group"]


def _event(group: Report, kind: str, rank: int | None, text: str) -> dict[str, Any]:
    return {"kind": kind, "job": group.get("job", ""), "group": group.get("group", ""), "rank": rank, "text": text}


def _told(group: Report, state: str) -> tuple[int | None, str]:
    """Rank and text of a group's verdict."""
    return next((verdict.rank, verdict.text) for verdict in verdicts(group, 0.0) if verdict.state == state)


def ended_group(group: Report, report: Report, now: float) -> Report:
    """The last state of a group that a report no longer has, with its end."""
    running = {entry["job"] for entry in report["groups"]}
    # Latest first: an earlier run of the same name may have ended before.
    ends = (end for end in report.get("ended", ()) if end["job"] == group["job"] and end["job"] not in running)
    end: Report = next(ends, {})
    lost = end.get("lost", "" if is_finishing(group) else group["lost"])
    by = end.get("lost_by") or (group.get("lost_by") if lost == group["lost"] else None)
    over = {"time": now - end.get("seconds", 0.0), "reason": lost or "in good order"}
    return {**group, "missing": 0, "waiting": [], "lost": lost, "lost_by": by, "over": over}


def unseen_group(end: Report, report: Report, now: float) -> Report:
    """An ended job of a report as a group without members, for a reader that did not see it running."""
    sizes = {name: end[name] for name in ("job", "epoch", "world_size", "rounds_done", "lost")}
    empty = {"min_members": 0, "members": [], "missing": 0, "rounds_failed": 0, "non_finite": [], "waiting": []}
    return ended_group({**sizes, "group": WORLD, **empty}, report, now)


def _group_events(old: Report, group: Report, *, first: bool) -> Iterator[tuple[str, int | None, str]]:
    if not first:
        yield from _membership_events(old, group)
    is_news = group["lost"] != old.get("lost") or is_finishing(old)
    if group["lost"] and is_news and not is_finishing(group):
        yield "lost", *_told(group, "broken")
    # The count restarts with each epoch.
    failed = group["rounds_failed"] - (old.get("rounds_failed", 0) if old.get("epoch") == group["epoch"] else 0)
    if failed > 0:
        yield "mismatch", None, f"{failed} round{'s' * (failed != 1)} failed"
    if group.get("first_non_finite") and not old.get("first_non_finite"):
        yield "non-finite", *_told(group, "data")
    known = {_finding_key(finding) for finding in old.get("findings", ())}
    new = (finding for finding in group.get("findings", ()) if _finding_key(finding) not in known)
    yield from ((finding["kind"], finding["rank"], describe_finding(finding)) for finding in new)


def _membership_events(old: Report, group: Report) -> Iterator[tuple[str, int | None, str]]:
    """Events of single ranks; several ranks that do the same are counted together."""
    found = sorted(_member_events(old, group), key=lambda event: event[:2])
    for (kind, did), of in groupby(found, key=lambda event: event[:2]):
        (_, _, rank, place), *others = ranks = list(of)
        if others:
            yield kind, None, f"{len(ranks)} ranks {did}"
        else:
            yield kind, rank, f"Rank {rank} ({place}) {did}"


def _member_events(old: Report, group: Report) -> Iterator[tuple[str, str, int, str]]:
    before = {member["member"]: member for member in old.get("members", ())}
    after = {member["member"]: member for member in group["members"]}
    # Members that the report leaves out have not left.
    whole = not old.get("members_left_out") and not group.get("members_left_out")
    for rank in {**after, **before}:
        old_one, new_one = before.get(rank), after.get(rank)
        if old_one is None or new_one is None:
            is_told = is_broken(group) and rank == group.get("lost_by", {}).get("rank")  # the loss has an event
            if whole and not is_told:
                kind, there = ("joined", after[rank]) if new_one else ("left", before[rank])
                yield kind, kind, rank, there["place"]
        elif old_one["place"] != new_one["place"]:
            yield "joined", "started again", rank, f"{new_one['place']}, before {old_one['place']}"
        elif old_one["participation"] != new_one["participation"] == "paused":
            yield "left", "paused", rank, new_one["place"]


def _finding_key(finding: Report) -> tuple[Any, ...]:
    return tuple(finding.get(name) for name in ("kind", "rank", "layer", "step"))


MAX_EVENTS = 900  # one hour of one event every four seconds
OVER_SECONDS, MAX_OVER = 600.0, 16  # ended groups are kept this long, at most this many
MAX_TRENDS = 32  # groups with a trend: each takes 10 kB of a snapshot
RESTART_SECONDS = 60.0  # for this long after a server's restart, groups may return and verdicts mention the restart


class _Rates:
    """Rounds and steps per second, counted over `INTERVAL_SECONDS` as in a `Trend`; the first rates over less time."""

    def __init__(self) -> None:
        self.group: float | None = None
        self.members: dict[int, float | None] = {}
        self._base: tuple[float, int, dict[int, int]] | None = None  # time, rounds and steps from which rates count
        self._is_whole = False

    def update(self, now: float, group: Report) -> None:
        """Count a report's entry of the group; `now` is in seconds since 1970."""
        rounds, steps = group["rounds_done"], {member["member"]: member["step"] for member in group["members"]}
        then, old_rounds, old = self._base = self._base or (now, rounds, steps)
        seconds = now - then
        is_over = seconds >= INTERVAL_SECONDS - 0.5
        if is_over or not self._is_whole:
            self.group = _rate(rounds, old_rounds, seconds)
            self.members = {member: _rate(step, old.get(member), seconds) for member, step in steps.items()}
        if is_over:
            self._base, self._is_whole = (now, rounds, steps), True


class _Watched:
    """A group and its history; a later epoch of the group gets a new record."""

    def __init__(self, group: Report | None = None) -> None:
        self.group: Report = group or {}  # as reported, with rates; an ended one has `over`
        self.seen: float | None = None  # time of the latest report with it
        self.is_returning = False  # a restarted server does not know it yet
        self.restarted: float | None = None  # time of the server's restart, if recent and later than this record
        self.silence = 0.0  # seconds from the last answer before that restart to the first after it
        self.trend = Trend()
        self.layers = LayerHistory()
        self._rates = _Rates()
        self._was_compared = False  # a report named the slowest rank
        # The rank that delays the others; the start of the first window that shows the delay, None if the
        # group's first report shows it; and whether no earlier report named a slowest rank.
        self._slow: tuple[int, float | None, bool] | None = None
        self.members: dict[int, Report] = {}  # of the latest report before the group broke
        # What its verdict is about, since when, and the time of the verdict's step.
        self._told: tuple[object, float | None, float | None] | None = None

    def report(self, now: float, group: Report) -> None:
        """Record the group's entry of a report, and add rates to it."""
        if self.is_returning:
            self._rates = _Rates()  # no rate spans the restart of the server
            self.trend.interrupt()
        rates = self._rates
        rates.update(now, group)
        self._find_slow(now, group)
        members = [{**one, "steps_per_second": rates.members.get(one["member"])} for one in group["members"]]
        self.group = {**group, "rounds_per_second": rates.group, "members": members}
        if not group["lost"]:
            self.members = {member["member"]: member for member in self.group["members"]}
        self.seen, self.is_returning = now, False

    def _find_slow(self, now: float, group: Report) -> None:
        rank = group.get("slowest")
        if rank is None or group["held"] < MAX_DELAY_SHARE:
            self._slow = None
        elif not self._slow or self._slow[0] != rank:
            start = now - group.get("held_seconds", WINDOW_SECONDS) if self.seen is not None else None
            self._slow = rank, start, not self._was_compared
        self._was_compared |= rank is not None

    def shown(self, now: float, *, is_first: bool) -> Report:
        """The group with verdict, cards, trend, and the flags of its members."""
        findings = [_with_present_numbers(self.group, finding) for finding in self.group.get("findings", ())]
        group = {**self.group, "findings": findings}
        if self.is_returning:
            group |= {"missing": group["world_size"], "waiting": [], "lost": ""}
        elif group["lost"] or "over" in group:
            gone = {rank: {**one, "is_gone": True} for rank, one in self.members.items()}
            there = {member["member"]: member for member in group["members"]}
            group["members"] = [member for _, member in sorted((gone | there).items())]
            if not is_finishing(group):
                # In a strict group all ranks reach the step of the rank that broke it.
                last = by["step"] if (by := group.get("lost_by")) and not group["min_members"] else 0
                ends = ({**one, "step": max(one["step"], last), "steps_per_second": None} for one in group["members"])
                group["members"] = list(ends)
        elif awaited(group):
            group = _stopped(group, "rounds_per_second")
            group["members"] = [_stopped(member, "steps_per_second") for member in group["members"]]
        if self.restarted is not None:
            group["silence"] = self.silence
        verdict, *others = found = verdicts(group, now, self.restarted)
        since, step_time = self._first_seen(now, verdict, is_first=is_first)
        by = group.get("lost_by")
        return {
            **group,
            "verdict": {
                **verdict.entry(others),
                "since": since,
                "step_time": step_time,
                "from_start": bool(verdict.state == "slow" and self._slow and self._slow[2]),
            },
            "cards": cards(group, found),
            "trend": self.trend.entry,
            "lost_by": {**by, "time": group["over"]["time"] if "over" in group else since} if by else None,
            "first_non_finite": group.get("first_non_finite"),
            "members": [with_flag(group, member, found) for member in group["members"]],
        }

    def _first_seen(self, now: float, verdict: Verdict, *, is_first: bool) -> tuple[float | None, float | None]:
        """When a verdict was first true, None if before the first report; and the time of its step if known."""
        about = verdict.state, verdict.rank, verdict.step
        seen, since, step_time = self._told or (None, None, None)
        # Some verdicts compute `since` as `now` minus a duration, so it varies slightly with each report.
        if seen != about or (verdict.since and abs(verdict.since - (since or 0.0)) > 1):
            since, step_time = None if is_first else now - verdict.lag, None
            since = since if verdict.since is None else verdict.since
        if step_time is None and verdict.step is not None:
            step_time = self.trend.time_of(verdict.step)
        if since and verdict.state == "broken" and "over" in self.group:
            since = min(since, self.group["over"]["time"])
        self._told = about, since, step_time
        return self._slow[1] if verdict.state == "slow" and self._slow else since, step_time


class SnapshotBuilder:
    """Makes snapshots from the reports of one server, of which some may be missing.

    A snapshot has `time` and `answered` (seconds since 1970, of the snapshot and of the last answer), `endpoint`,
    `error` ("" while the server answers), `server`, `seconds` (since its start), `groups`, `events`, `counts`
    of events by kind, and `verdict` if there are no groups. Groups have the fields of the report, `verdict`,
    `cards`, `trend`, and optionally `rounds_per_second` and `figures`, see `server.view.feed`; an ended one has `over`:
    `time` and `reason`. Members have the fields of the report and `steps_per_second`, `median`, `p99`, `share`,
    `doing`, `flag` and `severity`. A rate is None before the second report of the group or member.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._before: Report | None = None
        self._error = ""
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._counts: Counter[str] = Counter()
        self._snapshot: Snapshot = {"server": "", "seconds": 0.0, "groups": []}
        # First the running groups in the order of the report, then groups that a restarted server does not know yet,
        # then ended groups, the latest first.
        self._watched: dict[Key, _Watched] = {}

    def update(self, now: float, report: Report) -> Snapshot:
        """Snapshot after a report; `now` is in seconds since 1970."""
        is_first, found = self._before is None, events(self._before, report)
        self._watch(now, report)
        groups = [one.shown(now, is_first=is_first) for one in self._watched.values()]
        # A malformed report raises before this and adds no event.
        if self._error and not any(event["kind"] == "restart" for event in found):
            found.insert(0, _event({}, "answers", None, "The server answers again"))
        for event in found:
            self._add(now, event)
        self._before, self._error = report, ""
        self._snapshot = {
            **{name: value for name, value in report.items() if isinstance(value, int | float | str)},
            "answered": now,
            "groups": groups,
        }
        if not groups:
            self._snapshot["verdict"] = of_server("", now).entry()
        return self._with_head(now)

    def fail(self, now: float, error: str) -> Snapshot:
        """Snapshot after a failed request: the previous one, with the text of the error."""
        verdict = of_server(error, self._snapshot.get("answered", now))
        if not self._error:
            self._add(verdict.since or now, _event({}, "silent", None, verdict.text))
        self._error = error
        entry, groups = {"verdict": verdict.entry()}, self._snapshot["groups"]
        shown = [group if "over" in group else {**group, **entry} for group in groups]
        return {**self._with_head(now), "groups": shown, **({} if shown else entry)}

    def history(self, job: str, group: str, layer: str) -> dict[str, Any] | None:
        """Mean and variance of a layer by rank over the last ten minutes; None if unknown.

        `seconds` since 1970 of each sample, `ranks` (see `ranks_of`), and `means` and `variances`: little-endian
        float32 in base64, of shape (samples, members).
        """
        watched = self._watched.get((job, group))
        found = watched.layers.of_layer(layer) if watched else None
        return {**found, "ranks": ranks_of(watched.group, found["members"])} if watched and found else None

    def _watch(self, now: float, report: Report) -> None:
        """Record the groups of a report, and keep groups that it no longer has."""
        before, earlier = self._before, self._watched
        has_restarted = before is not None and before["server"] != report["server"]
        for watched in earlier.values():
            if has_restarted:
                watched.is_returning, watched.restarted = "over" not in watched.group, now
                watched.silence = now - watched.seen if watched.seen is not None else 0.0
            elif watched.restarted is not None and now - watched.restarted >= RESTART_SECONDS:
                watched.restarted = None
        running: dict[Key, _Watched] = {}
        for group in report["groups"]:
            known = earlier.get(_group_name(group))
            is_same = known and "over" not in known.group and known.group["epoch"] == group["epoch"]
            running[_group_name(group)] = watched = known if known and is_same else _Watched()
            watched.report(now, group)
        gone = {key: watched for key, watched in earlier.items() if key not in running}
        for watched in gone.values():
            # A group that the report leaves out may still be running.
            has_ended = watched.restarted is None if watched.is_returning else not report.get("left_out")
            if has_ended and "over" not in watched.group:
                watched.group, watched.is_returning = ended_group(watched.group, report, now), False
        for end in report.get("ended", ()):
            if (key := (end["job"], WORLD)) not in {*running, *gone}:
                gone[key] = _Watched(unseen_group(end, report, now))
        times = {key: watched.group["over"]["time"] for key, watched in gone.items() if "over" in watched.group}
        latest = sorted((key for key in times if now - times[key] < OVER_SECONDS), key=lambda key: -times[key])
        returning = [key for key, watched in gone.items() if watched.is_returning]
        self._watched = {**running, **{key: gone[key] for key in (*returning, *latest[:MAX_OVER])}}
        self._record(now, running.values())

    def _record(self, now: float, running: Iterable[_Watched]) -> None:
        """Add the report's groups to their histories."""
        drawn = sum("figures" in one.group or len(one.layers) > 0 for one in self._watched.values())
        for number, watched in enumerate(running):
            if number < MAX_TRENDS:
                watched.trend.add(now, watched.group)
            else:
                watched.trend = Trend()
            if "figures" in watched.group:
                watched.layers.add(now, watched.group["figures"], MAX_BYTES // drawn)

    def _add(self, now: float, event: Mapping[str, Any]) -> None:
        self._counts[event["kind"]] += 1
        self._events.append({"time": now, **event})

    def _with_head(self, now: float) -> Snapshot:
        head = {"time": now, "endpoint": self._endpoint, "error": self._error, "counts": dict(self._counts)}
        return {"answered": now, **self._snapshot, **head, "events": list(self._events)}


def _rate(count: int, before: int | None, seconds: float) -> float | None:
    return max(0.0, (count - before) / seconds) if before is not None and seconds > 0 else None


def _stopped(entry: Report, rate: str) -> Report:
    return {**entry, rate: None if entry[rate] is None else 0.0}


def _with_present_numbers(group: Report, finding: Report) -> Report:
    """The finding; if it is about data, with the layer's present numbers where these are known."""
    figures = group.get("figures", {"layers": ()})
    if finding.get("layer") not in figures["layers"] or "variance" not in finding or finding.get("cleared"):
        return finding
    layer = figures["layers"].index(finding["layer"])
    numbers = np.array([figures[name][layer] for name in ("parts", "means", "variances")], float)
    ranks = ranks_of(group, numbers.shape[1])
    # The figures are float32: the variance of activations above 1e19 is infinite.
    if finding["rank"] not in ranks or len(ranks) == 1 or not np.isfinite(numbers).all():
        return finding
    at = ranks.index(finding["rank"])
    part, mean, variance = numbers[:, at].tolist()
    usual, usual_mean, usual_variance = np.median(np.delete(numbers, at, 1), 1).tolist()
    usual_variance = max(usual_variance, float(np.finfo(np.float32).tiny))
    return {
        **finding,
        "is_present": True,
        "variance": min(variance / usual_variance, MAX_RATIO),
        "shift": max(-MAX_RATIO, min((mean - usual_mean) / math.sqrt(usual_variance), MAX_RATIO)),
        "part": part,
        "usual": usual,
    }


def heat(snapshot: Snapshot, job: str, group: str) -> dict[str, Any] | None:
    """Figures of each layer and rank; None if unknown.

    `parts`, `ratios` (of the variance to the median of the others), `means` and `variances` are little-endian float32
    in base64, of shape (layers, members).
    """
    for entry in snapshot["groups"]:
        if _group_name(entry) == (job, group) and (figures := entry.get("figures")):
            members = figures["parts"].shape[1]
            arrays = {name: figures[name] for name in ("parts", "means", "variances")}
            arrays["ratios"] = _ratios(figures["variances"])
            packed = {name: base64.b64encode(array.astype("<f4").tobytes()).decode() for name, array in arrays.items()}
            named = {"job": job, "group": group, "layers": figures["layers"], "eta2": figures["eta2"]}
            return {**named, "members": members, "ranks": ranks_of(entry, members), **packed}
    return None


def _ratios(variances: NDArray[Any]) -> NDArray[Any]:
    """Each member's variance divided by the median of the others', shape (layers, members); 1 for a single member."""
    members = variances.shape[1]
    if members == 1:
        return np.ones_like(variances)
    order = np.argsort(variances, axis=1)
    by_size = np.take_along_axis(variances, order, 1)
    places = np.argsort(order, axis=1)
    # Positions of the others' median, counted without the member: positions in `by_size` from its own on are 1 higher.
    low, high = ((members - 2) // 2, (members - 1) // 2)
    others = sum(np.take_along_axis(by_size, at + (places <= at), 1) for at in (low, high)) / 2
    return variances / np.maximum(others, np.finfo(np.float32).tiny)


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
    groups = [{**group, "has_figures": bool(group.get("figures"))} for group in snapshot["groups"]]
    for group in groups:
        group.pop("figures", None)
    return {**snapshot, "groups": groups}
