"""Report: the status of all groups, within the size of a message; long reports are cached for a moment.

Members and rounds of large groups are left out first, so that a large group does not hide a small one.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from server.core.registry import EndedJobs
from server.group.master import SyncMaster
from server.group.rounds import Round
from server.security.access import Principal
from server.security.quota import QuotaUsage
from statsd_bn import limits
from statsd_bn.messages import Figures, FiguresRequest, Status
from statsd_bn.skew import FIGURES
from statsd_bn.text import log_line
from statsd_bn.wire import encode

# Maximum msgpack sizes without texts: the server's counters, an ended job, a group, a member, a round, and a number in
# a list.
SERVER_ENTRY_BYTES, JOB_ENTRY_BYTES, GROUP_ENTRY_BYTES = 1024, 208, 552
MEMBER_ENTRY_BYTES, ROUND_ENTRY_BYTES, NUMBER_BYTES = 240, 128, 3

# Maximum sizes of the timings of a group that has had rounds, and of a finding.
TIMINGS_BYTES, FINDING_BYTES = 1536, 192

# Rounds reported for each group, oldest first, and missing members for each round.
MAX_ROUNDS, MAX_MISSING = 16, 64

# A report is cached for about twenty times its build time, which bounds the cost of frequent requests: each member or
# contribution takes about 1 µs.
CACHE_SECONDS_EACH, CACHE_SECONDS = 20e-6, 1.0

# Cached reports, one for each key, of 1 MB at most.
MAX_CACHED_REPORTS = 16

# Rate limit of a tenant in bytes: all replies wait while ZeroMQ encrypts a report (3 ms per MB), which also takes
# memory. A report of eight groups of 16 members has 8 kB, so the limit allows 500 of them per second.
BURST_BYTES, BYTES_PER_SECOND = 2**23, 2**22


def group_entries(masters: Collection[SyncMaster], now: float, ended: list[dict[str, Any]]) -> dict[str, Any]:
    """Report entries: groups, the number of groups left out, and ended jobs."""
    free = limits.MAX_HEADER_BYTES - SERVER_ENTRY_BYTES
    free -= sum(JOB_ENTRY_BYTES + sum(map(_size, (job["job"], *_lost_texts(job)))) for job in ended)
    heads: list[tuple[SyncMaster, dict[str, Any]]] = []
    for master in masters:
        head = _head(master)
        free -= GROUP_ENTRY_BYTES + _extra_bytes(head) + sum(_size(text) for text in _texts(head))
        if free < 0:
            break
        heads.append((master, head))
    # Small groups first: large groups share the space that these leave.
    for number, (master, head) in enumerate(sorted(heads, key=lambda entry: _nr_entries(entry[0]))):
        free -= _fill(head, master, now, free // (len(heads) - number))
    report: dict[str, Any] = {"groups": [head for _, head in heads], "ended": ended}
    if left_out := len(masters) - len(heads):
        report["left_out"] = left_out
    return report


def _head(master: SyncMaster) -> dict[str, Any]:
    membership = master.membership
    why = master.why_not_faster
    non_finite, seen = master.open_rounds.non_finite, (membership.reported_step, bool(membership.lost))
    return {
        "job": membership.job,
        "group": membership.group,
        "epoch": master.epoch,
        "world_size": membership.world_size,
        "min_members": membership.min_members,
        "members": [],
        "missing": membership.missing,
        "lost": log_line(membership.lost or "")[: limits.MAX_NAME_BYTES],
        **({"lost_by": membership.lost_by} if membership.lost_by else {}),
        "rounds_done": master.rounds_done,
        "rounds_failed": master.open_rounds.failed,
        **({"refused": True} if master.open_rounds.was_refused else {}),
        "non_finite": non_finite.report(*seen),
        **({"first_non_finite": first} if (first := non_finite.first(*seen)) else {}),
        "kept_bytes": master.allocated,
        "waiting": [],
        **({"why_not_faster": why} if why else {}),
        **_timings(master),
    }


def _timings(master: SyncMaster) -> dict[str, Any]:
    """Timings of a group's rounds, and its findings."""
    rounds, health = master.open_rounds, master.health
    trips, window = health.round_trips, health.pace.window
    findings, compared = health.findings.report(health.comparison), health.comparison.nr_layers
    return {
        **({"round_seconds": rounds.durations.report} if rounds.durations.total else {}),
        **({"late_seconds": rounds.lateness.report} if rounds.lateness.total else {}),
        **({"round_trip_seconds": trips.report} if trips.total else {}),
        **({"slowest": window.slowest, "held": window.delay} if window.slowest is not None else {}),
        **({"findings": findings} if findings else {}),
        **({"compared_layers": compared} if compared else {}),
    }


def _texts(head: dict[str, Any]) -> tuple[str, ...]:
    findings = (finding[text] for finding in head.get("findings", ()) for text in ("text", "layer"))
    first = head.get("first_non_finite", {"layer": "", "phase": ""})
    names = head["job"], head["group"], head.get("why_not_faster", ""), first["layer"], first["phase"]
    return *names, *_lost_texts(head), *head["non_finite"], *findings


def _lost_texts(entry: dict[str, Any]) -> tuple[str, ...]:
    by = entry.get("lost_by", {"place": "", "cause": ""})
    return entry["lost"], by["place"], by["cause"]


def _extra_bytes(head: dict[str, Any]) -> int:
    """Size of the optional entries in bytes."""
    has_pace = "round_seconds" in head or "round_trip_seconds" in head
    return TIMINGS_BYTES * has_pace + FINDING_BYTES * len(head.get("findings", ()))


def _nr_entries(master: SyncMaster) -> int:
    return master.nr_slaves + min(len(master.open_rounds), MAX_ROUNDS)


def _fill(head: dict[str, Any], master: SyncMaster, now: float, free: int) -> int:
    """Add as many rounds and members as fit to a group's entry; returns their size in bytes."""
    used = 0
    for round_ in islice(master.open_rounds, MAX_ROUNDS):
        entry = _round(round_, now)
        texts = entry["round"], entry["layer"], entry["phase"]
        size = ROUND_ENTRY_BYTES + sum(map(_size, texts)) + NUMBER_BYTES * len(entry["missing"])
        if used + size > free // 2:
            break
        used += size
        head["waiting"].append(entry)
    if left_out := len(master.open_rounds) - len(head["waiting"]):
        head["waiting_left_out"] = left_out
    contributors = master.membership.contributors
    for member, contributor in sorted(contributors.items()):
        step = master.membership.step_of(contributor)
        entry = {**contributor.report(now, step), **master.health.pace.report(member)}
        texts = entry["place"], entry.get("transport", ""), entry.get("where", "")
        size = MEMBER_ENTRY_BYTES + sum(map(_size, texts))
        if used + size > free:
            break
        used += size
        head["members"].append(entry)
    if left_out := len(contributors) - len(head["members"]):
        head["members_left_out"] = left_out
    return used


def _round(round_: Round, now: float) -> dict[str, Any]:
    nr_missing = len(round_.futures) - round_.nr_waiting
    missing = (member for member, future in round_.futures.items() if not future.done)
    entry = {
        "round": str(round_.key),
        "layer": round_.key.layer,
        "phase": round_.key.phase,
        "step": round_.key.step,
        "seconds": now - round_.opened,
        "missing": list(islice(missing, MAX_MISSING)),
    }
    return entry if nr_missing <= MAX_MISSING else {**entry, "missing_left_out": nr_missing - MAX_MISSING}


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


class RateLimiter:
    """Token bucket: limits the bytes of one kind of answer for each tenant."""

    def __init__(self) -> None:
        # By tenant: bytes above its rate, and the time of that count.
        self._sent: dict[str, tuple[float, float]] = {}

    def is_exhausted(self, now: float, tenant: str) -> bool:
        """Whether a tenant has to wait."""
        return self._debt(now, tenant) > BURST_BYTES

    def consume(self, now: float, tenant: str, frame: bytes) -> bytes:
        """Count a frame for a tenant; returns the frame."""
        self._sent[tenant] = (self._debt(now, tenant) + len(frame), now)
        return frame

    def _debt(self, now: float, tenant: str) -> float:
        sent, since = self._sent.get(tenant, (0.0, now))
        return max(0.0, sent - BYTES_PER_SECOND * (now - since))


class StatusReports:
    """Encoded reports and figures; long reports are cached for a moment."""

    def __init__(self, counts: Callable[[float], dict[str, Any]], usage: QuotaUsage) -> None:
        self._counts = counts
        self._usage = usage
        self._cache: dict[str, tuple[float, bytes]] = {}
        self._of_reports, self._of_figures = RateLimiter(), RateLimiter()

    def frame(self, now: float, principal: Principal, masters: Collection[SyncMaster], ended: EndedJobs) -> bytes:
        """Report for a key, without groups if its tenant exceeds the rate limit."""
        tenant = principal.tenant_of("")
        if self._of_reports.is_exhausted(now, tenant):
            return encode(Status({**self._counts(now), "groups": [], "ended": [], "left_out": len(masters)}))
        return self._of_reports.consume(now, tenant, self._report(now, principal, masters, ended))

    def figures(self, now: float, principal: Principal, asked: FiguresRequest, master: SyncMaster | None) -> bytes:
        """Skew figures of a group, in an answer of bounded size.

        Raises:
            LimitExceeded: the tenant exceeds the rate limit.
        """
        tenant = principal.tenant_of("")
        if self._of_figures.is_exhausted(now, tenant):
            text = f"figures: more than {BYTES_PER_SECOND} bytes per second requested; ask less often"
            raise self._usage.exceeded(text, BYTES_PER_SECOND, "bytes of figures a second")
        answer = Figures(asked.job, asked.group, asked.first, 0, "", np.zeros((0, 0, FIGURES)))
        if master:
            total, names, values = master.health.comparison.averages(asked.first, limits.MAX_FIGURES_BYTES)
            answer = replace(answer, total=total, layers="\n".join(names), values=values)
        return self._of_figures.consume(now, tenant, encode(answer))

    def _report(self, now: float, principal: Principal, masters: Collection[SyncMaster], ended: EndedJobs) -> bytes:
        until, frame = self._cache.get(principal.key, (now, b""))
        if now < until:
            return frame
        frame = encode(Status({**self._counts(now), **group_entries(masters, now, ended.report(now, principal))}))
        cost = sum(master.nr_slaves * (1 + min(len(master.open_rounds), MAX_ROUNDS)) for master in masters)
        self._cache.pop(principal.key, None)
        self._cache[principal.key] = now + min(CACHE_SECONDS, cost * CACHE_SECONDS_EACH), frame
        if len(self._cache) > MAX_CACHED_REPORTS:
            del self._cache[next(iter(self._cache))]
        return frame
