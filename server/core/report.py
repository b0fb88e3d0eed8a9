"""Report: what the server says about its groups, within the size of a message; a long one is kept for a moment.

Members and rounds of large groups are left out, so that a large group does not hide another.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from server.core.registry import EndedJobs
from server.group.master import SyncMaster
from server.group.rounds import Round
from server.security.access import Tenant
from server.security.quota import Budget
from statsd_bn import limits
from statsd_bn.error_text import in_log
from statsd_bn.messages import Figures, FiguresRequest, Status
from statsd_bn.skew import FIGURES
from statsd_bn.wire import encode

# What entries take at most in msgpack, beside their texts: the server's own counts, a job that has ended, a group, a
# member, a round, and a number in a list.
HEAD_BYTES, JOB_BYTES, GROUP_BYTES, MEMBER_BYTES, ROUND_BYTES, NUMBER_BYTES = 1024, 128, 340, 240, 96, 3

# The same of what a group has only once it has had rounds, and of a finding.
PACE_BYTES, FINDING_BYTES = 1536, 64

# Rounds shown for each group, the oldest; and for each round, how many of the members that it waits for.
TOLD_ROUNDS, TOLD_MISSING = 16, 64

# A report is kept for some twenty times as long as it took to build, so that asking often takes little time: each
# member or contribution takes about a microsecond.
KEPT_SECONDS_EACH, KEPT_SECONDS = 20e-6, 1.0

# Reports that are kept, one for each tenant, each a megabyte at most.
KEPT_REPORTS = 16

# Bytes that one tenant is sent at once, and then each second: all answers wait while ZeroMQ encrypts them, some 3 ms
# for a megabyte, and take memory until then. A report of eight groups of 16 takes 8 kB, so 500 of them fit into a
# second.
SENT_AT_ONCE, SENT_EACH_SECOND = 2**23, 2**22


def groups(masters: Collection[SyncMaster], now: float, ended: list[dict[str, Any]]) -> dict[str, Any]:
    """Entries of a report about groups: the groups, how many are left out, and the jobs that have ended."""
    room = limits.MAX_HEADER_BYTES - HEAD_BYTES
    room -= sum(JOB_BYTES + _size(job["job"]) + _size(job["lost"]) for job in ended)
    told: list[tuple[SyncMaster, dict[str, Any]]] = []
    for master in masters:
        head = _head(master)
        room -= GROUP_BYTES + _more(head) + sum(_size(text) for text in _names(head))
        if room < 0:
            break
        told.append((master, head))
    # Small groups first, so that what they do not need is left for the large ones.
    for number, (master, head) in enumerate(sorted(told, key=lambda entry: _entries(entry[0]))):
        room -= _fill(head, master, now, room // (len(told) - number))
    report: dict[str, Any] = {"groups": [head for _, head in told], "ended": ended}
    if left_out := len(masters) - len(told):
        report["left_out"] = left_out
    return report


def group(master: SyncMaster, now: float) -> dict[str, Any]:
    """What a report says about a group that is the only one."""
    head = _head(master)
    _fill(head, master, now, limits.MAX_HEADER_BYTES)
    return head


def _head(master: SyncMaster) -> dict[str, Any]:
    membership = master.membership
    why = master.why_not_faster
    return {
        "job": membership.job,
        "group": membership.group,
        "epoch": master.epoch,
        "world_size": membership.world_size,
        "min_members": membership.min_members,
        "members": [],
        "missing": membership.missing,
        "lost": in_log(membership.lost or "")[: limits.MAX_NAME_BYTES],
        "rounds_done": master.rounds_done,
        "rounds_failed": master.open_rounds.failed,
        "non_finite": master.open_rounds.non_finite.told(membership.told_step, is_broken=bool(membership.lost)),
        "kept_bytes": master.kept,
        "waiting": [],
        **({"why_not_faster": why} if why else {}),
        **_pace(master),
    }


def _pace(master: SyncMaster) -> dict[str, Any]:
    """What a group has to tell of its rounds."""
    rounds, insight = master.open_rounds, master.insight
    trips, minute, findings = insight.round_trips, insight.pace.minute, insight.findings.told
    return {
        **({"round_seconds": rounds.lengths.told} if rounds.lengths.total else {}),
        **({"late_seconds": rounds.lateness.told} if rounds.lateness.total else {}),
        **({"round_trip_seconds": trips.told} if trips.total else {}),
        **({"slowest": minute.slowest, "held": minute.held} if minute.slowest is not None else {}),
        **({"findings": findings} if findings else {}),
    }


def _names(head: dict[str, Any]) -> tuple[str, ...]:
    findings = (finding[text] for finding in head.get("findings", ()) for text in ("text", "layer"))
    return head["job"], head["group"], head["lost"], head.get("why_not_faster", ""), *head["non_finite"], *findings


def _more(head: dict[str, Any]) -> int:
    """Number of bytes for what not every group has."""
    has_pace = "round_seconds" in head or "round_trip_seconds" in head
    return PACE_BYTES * has_pace + FINDING_BYTES * len(head.get("findings", ()))


def _entries(master: SyncMaster) -> int:
    return master.nr_slaves + min(len(master.open_rounds), TOLD_ROUNDS)


def _fill(head: dict[str, Any], master: SyncMaster, now: float, room: int) -> int:
    """Add as many rounds and members as fit to the entry of a group; returns how many bytes they take."""
    used = 0
    for round_ in islice(master.open_rounds, TOLD_ROUNDS):
        told = _round(round_, now)
        size = ROUND_BYTES + _size(told["round"]) + NUMBER_BYTES * len(told["missing"])
        if used + size > room // 2:
            break
        used += size
        head["waiting"].append(told)
    if left_out := len(master.open_rounds) - len(head["waiting"]):
        head["waiting_left_out"] = left_out
    contributors = master.membership.contributors
    for member, contributor in sorted(contributors.items()):
        step = master.membership.step_of(contributor)
        told = {**contributor.report(now, step), **master.insight.pace.told(member)}
        size = MEMBER_BYTES + _size(told["place"]) + _size(told.get("transport", "")) + _size(told.get("where", ""))
        if used + size > room:
            break
        used += size
        head["members"].append(told)
    if left_out := len(contributors) - len(head["members"]):
        head["members_left_out"] = left_out
    return used


def _round(round_: Round, now: float) -> dict[str, Any]:
    nr_missing = len(round_.futures) - round_.nr_waiting
    missing = (member for member, future in round_.futures.items() if not future.done)
    told = {"round": str(round_.key), "seconds": now - round_.opened, "missing": list(islice(missing, TOLD_MISSING))}
    return told if nr_missing <= TOLD_MISSING else {**told, "missing_left_out": nr_missing - TOLD_MISSING}


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


class Allowance:
    """How many bytes of one kind of answer each tenant is sent, so that asking does not take the server's time."""

    def __init__(self) -> None:
        # For each owner: bytes sent, less what it may be sent since; and when that was.
        self._sent: dict[str, tuple[float, float]] = {}

    def is_spent(self, now: float, owner: str) -> bool:
        """Whether an owner has to wait for a while."""
        return self._left_over(now, owner) > SENT_AT_ONCE

    def spend(self, now: float, owner: str, frame: bytes) -> bytes:
        """Count a frame that an owner is sent, and return it."""
        self._sent[owner] = (self._left_over(now, owner) + len(frame), now)
        return frame

    def _left_over(self, now: float, owner: str) -> float:
        sent, since = self._sent.get(owner, (0.0, now))
        return max(0.0, sent - SENT_EACH_SECOND * (now - since))


class Reports:
    """Frames that carry reports and figures, to whoever asks; long reports are kept for a moment.

    Args:
        counts: returns what a report says beside its groups, at a given time.
        budget: where refusals are counted.
    """

    def __init__(self, counts: Callable[[float], dict[str, Any]], budget: Budget) -> None:
        self._counts = counts
        self._budget = budget
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._of_reports, self._of_figures = Allowance(), Allowance()

    def frame(self, now: float, tenant: Tenant, masters: Collection[SyncMaster], ended: EndedJobs) -> bytes:
        """Report for a tenant; the groups are left out for one that asks too often.

        Args:
            now: the time.
            tenant: who asks.
            masters: of the groups that it may see.
            ended: the jobs that have ended.
        """
        owner = tenant.owner("")
        if self._of_reports.is_spent(now, owner):
            return encode(Status({**self._counts(now), "groups": [], "ended": [], "left_out": len(masters)}))
        return self._of_reports.spend(now, owner, self._whole(now, tenant, masters, ended))

    def figures(self, now: float, tenant: Tenant, asked: FiguresRequest, master: SyncMaster | None) -> bytes:
        """What the server has seen of the members' data, in an answer of a bounded size.

        Args:
            now: the time.
            tenant: who asks.
            asked: what for.
            master: of the group; None if the tenant may see no such group.

        Raises:
            LimitExceeded: the tenant has asked for too much lately.
        """
        owner = tenant.owner("")
        if self._of_figures.is_spent(now, owner):
            text = f"figures: expected to be asked for at most {SENT_EACH_SECOND} bytes a second"
            raise self._budget.exceeded(text, SENT_EACH_SECOND, "bytes of figures a second")
        answer = Figures(asked.job, asked.group, asked.first, 0, "", np.zeros((0, 0, FIGURES)))
        if master:
            total, names, values = master.insight.comparison.averages(asked.first, limits.MAX_FIGURES_BYTES)
            answer = replace(answer, total=total, layers="\n".join(names), values=values)
        return self._of_figures.spend(now, owner, encode(answer))

    def _whole(self, now: float, tenant: Tenant, masters: Collection[SyncMaster], ended: EndedJobs) -> bytes:
        until, frame = self._kept.get(tenant.key, (now, b""))
        if now < until:
            return frame
        frame = encode(Status({**self._counts(now), **groups(masters, now, ended.told(now, tenant))}))
        looked_at = sum(master.nr_slaves * (1 + min(len(master.open_rounds), TOLD_ROUNDS)) for master in masters)
        self._kept.pop(tenant.key, None)
        self._kept[tenant.key] = now + min(KEPT_SECONDS, looked_at * KEPT_SECONDS_EACH), frame
        if len(self._kept) > KEPT_REPORTS:
            del self._kept[next(iter(self._kept))]
        return frame
