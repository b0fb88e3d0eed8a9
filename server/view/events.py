"""Events: what has happened between two reports of a server. Pure."""

from collections.abc import Iterator
from typing import Any

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
