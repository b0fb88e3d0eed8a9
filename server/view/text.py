"""Text: a snapshot for a terminal of 80 columns, in the words of the page."""

from collections.abc import Callable, Iterator
from textwrap import wrap
from typing import Any

from server.cli.status import refuses_malformed
from server.view.snapshot import Snapshot, SnapshotBuilder
from server.view.verdict import count_here, describe_finding, name_ranks, place_of, verdicts
from statsd_bn.messages import WORLD
from statsd_bn.text import duration, escape, percent, two_digits

WIDTH = 80

# Counters of the report, printed if they are not 0.
COUNTS = {
    "over_limits": "messages over a limit",
    "strangers": "messages of unknown sessions",
    "refused_connections": "connections refused",
    "flooding_connections": "flooding connections closed",
    "dropped_answers": "answers dropped",
}

WAIT_SECONDS = 0.5  # shorter waits are not printed: they are normal, because ranks arrive at different times

# Columns of a rank, with their widths; the rank's process and activity follow, wrapped.
COLUMNS = {"rank": 6, "step": 9, "steps/s": 9, "median": 8, "p99": 8, "awaited": 9}
INDENT = sum(COLUMNS.values()) + 2


@refuses_malformed()
def describe(report: dict[str, Any]) -> str:
    """A single report as text; raises ServerUnreachable if it is malformed."""
    return describe_snapshot(SnapshotBuilder("").update(0.0, report))


@refuses_malformed()
def with_verdicts(report: dict[str, Any], now: float) -> dict[str, Any]:
    """The report with the `verdict` of each group; `now` is in seconds since 1970."""
    groups = ((group, verdicts(group, now)) for group in report["groups"])
    return {**report, "groups": [{**group, "verdict": first.entry(others)} for group, (first, *others) in groups]}


def describe_snapshot(snapshot: Snapshot) -> str:
    """A snapshot as text."""
    head = f"server {snapshot['server']}, up {duration(snapshot['seconds'])}"
    head += f", {snapshot.get('received', 0)} messages, {snapshot.get('bad_frames', 0)} bad frames"
    counts = [f"{snapshot[name]} {text}" for name, text in COUNTS.items() if snapshot.get(name)]
    lines = [*_wrapped(head, "  "), *_wrapped(", ".join(counts), "  ", "  ")]
    groups = sorted(snapshot["groups"], key=lambda group: (-max(1, group["verdict"]["severity"]), "over" in group))
    for group in groups:
        lines += ["", *_group(group, snapshot)]
    if snapshot.get("left_out"):
        lines.append(f"and {snapshot['left_out']} more groups")
    elif not groups:
        lines += ["", *_wrapped(snapshot["verdict"]["text"], "  ")]
    return "\n".join(lines)


def _wrapped(text: str, indent: str, first: str = "") -> list[str]:
    return wrap(escape(text), WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _group(group: dict[str, Any], snapshot: Snapshot) -> Iterator[str]:
    verdict = group["verdict"]
    name = group["job"] if group["group"] == WORLD else f"{group['job']}, {group['group']}"
    yield from _wrapped(f"{name}: {verdict['text']}", "  ")
    texts = [verdict["text"], *verdict["also"]]
    texts += [text for finding in group.get("findings", ()) if (text := describe_finding(finding)) not in texts]
    for text in (verdict["advice"], *texts[1:], *group.get("non_finite", ())[1:]):
        yield from _wrapped(text, "    ", "  ")
    yield from _wrapped(", ".join(_facts(group, snapshot)), "    ", "  ")
    if group["members"]:
        yield "".join(f"{title:>{width}}" for title, width in COLUMNS.items()) + "  process, now"
    for member in group["members"]:
        yield from _rank(member)
    if left_out := group.get("members_left_out"):
        yield f"  and {left_out} more ranks"
    for round_ in group["waiting"]:
        if round_["seconds"] >= WAIT_SECONDS:
            whom = name_ranks(round_["missing"], round_.get("missing_left_out", 0))
            where = f"{round_['phase']} of {place_of(round_)}, step {round_['step']}"
            yield from _wrapped(f"waiting {round_['seconds']:.1f} s for {whom}: {where}", "    ", "  ")
    if left_out := group.get("waiting_left_out"):
        yield f"  and {left_out} more rounds"


def _facts(group: dict[str, Any], snapshot: Snapshot) -> Iterator[str]:
    if over := group.get("over"):
        yield f"ended {duration(snapshot['time'] - over['time'])} ago, {group['world_size']} ranks"
    else:
        yield f"{count_here(group)} ranks"
    if group["epoch"]:
        yield f"epoch {group['epoch']}"
    yield f"{group['rounds_done']} rounds done"
    # A job that broke between two rounds has no failed round; "0 failed" next to its error would be misleading.
    if group["rounds_failed"]:
        yield f"{group['rounds_failed']} failed"
    if group.get("rounds_per_second") is not None and not over:
        yield f"{two_digits(group['rounds_per_second'])} rounds/s"
    users: dict[str, list[int]] = {}
    for member in group["members"]:
        if transport := member.get("transport"):
            users.setdefault(transport, []).append(member["member"])
    if users:
        of = [f"{transport} of {name_ranks(ranks)}" for transport, ranks in users.items()]
        why = group.get("why_not_faster")
        yield f"transport {', '.join(of if len(users) > 1 else users)}" + (f": {why}" if why else "")


def _rank(member: dict[str, Any]) -> list[str]:
    def known(name: str, say: Callable[[float], str]) -> str:
        return "-" if member[name] is None else say(member[name])

    times = known("median", duration), known("p99", duration)
    counts = str(member["member"]), str(member["step"]), known("steps_per_second", two_digits)
    cells = *counts, *times, known("share", percent)
    columns = "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))
    replicas = f", {member['replicas']} replicas" if member["replicas"] > 1 else ""
    flag = f", {member['flag']}" if member["flag"] else ""
    text = f"{member['place']}{replicas}{flag}: {member['doing']}"
    return _wrapped(text, " " * INDENT, f"{columns}  ")
