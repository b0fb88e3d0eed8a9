"""Report: the status of all groups, within the size of a message; long reports are cached for a moment.

Members and rounds of large groups are left out first, so that a large group does not hide a small one.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

import msgpack
import numpy as np

from server.core.registry import Registry
from server.group.master import SyncMaster
from server.group.rounds import Round
from server.security.access import Principal
from server.security.quota import QuotaUsage
from statsd_bn import limits
from statsd_bn.messages import Figures, FiguresRequest, Status, StatusRequest
from statsd_bn.skew import FIGURES
from statsd_bn.text import log_line
from statsd_bn.wire import encode

# Bytes kept free for the server's counters, and in each group for the numbers of entries left out.
SERVER_ENTRY_BYTES, LEFT_OUT_BYTES = 1024, 64

# Rounds reported for each group, oldest first, and missing members for each round.
MAX_ROUNDS, MAX_MISSING = 16, 64

# A report is cached for about twenty times its build time, which bounds the cost of frequent requests: each member or
# contribution takes about 1 µs.
CACHE_SECONDS_EACH, CACHE_SECONDS = 20e-6, 1.0
MAX_CACHED_REPORTS = 16  # one for each key, of 1 MB at most

# Rate limit of a tenant in bytes: all replies wait while ZeroMQ encrypts a report (3 ms per MB), which also takes
# memory. A report of eight groups of 16 members has 8 kB, so the limit allows 500 of them per second.
BURST_BYTES, BYTES_PER_SECOND = 2**23, 2**22


def group_entries(masters: Collection[SyncMaster], now: float, ended: list[dict[str, Any]]) -> dict[str, Any]:
    """Report entries: groups, the number of groups left out, and ended jobs."""
    free = limits.MAX_HEADER_BYTES - SERVER_ENTRY_BYTES - _size(ended)
    heads: list[tuple[SyncMaster, dict[str, Any]]] = []
    for master in masters:
        head = _head(master, now)
        free -= LEFT_OUT_BYTES + _size(head)
        if free < 0:
            break
        heads.append((master, head))
    # Small groups first: large groups share the space that these leave.
    for number, (master, head) in enumerate(sorted(heads, key=lambda entry: entry[0].nr_slaves)):
        free -= _fill(head, master, now, free // (len(heads) - number))
    report: dict[str, Any] = {"groups": [head for _, head in heads], "ended": ended}
    if left_out := len(masters) - len(heads):
        report["left_out"] = left_out
    return report


def _head(master: SyncMaster, now: float) -> dict[str, Any]:
    """Entry of a group without its members and rounds."""
    membership, health = master.membership, master.health
    pace, findings, compared = health.pace, health.findings, health.comparison.nr_layers
    seconds_left = pace.seconds_left(now)
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
        "rounds_failed": master.failed,
        **({"refused": True} if master.was_refused else {}),
        **health.non_finite.report(membership.reported_step, is_broken=bool(membership.lost)),
        "kept_bytes": master.memory.allocated,
        "waiting": [],
        **({"why_not_faster": master.why_not_faster} if master.why_not_faster else {}),
        **({"round_seconds": health.durations.report} if health.durations.total else {}),
        **({"late_seconds": health.lateness.report} if health.lateness.total else {}),
        **({"round_trip_seconds": health.round_trips.report} if health.round_trips.total else {}),
        **(
            {"slowest": pace.slowest, "held": pace.delay, "held_seconds": pace.seconds}
            if pace.slowest is not None
            else {}
        ),
        **({"slowest_in": seconds_left} if seconds_left is not None else {}),
        **({"findings": findings} if findings else {}),
        **({"compared_layers": compared} if compared else {}),
    }


def _fill(head: dict[str, Any], master: SyncMaster, now: float, free: int) -> int:
    """Add as many rounds and members as fit to a group's entry; returns their size in bytes."""
    rounds, members, step_of = master.open_rounds, master.membership.contributors, master.membership.step_of
    entries = (_round(round_, now) for round_ in islice(rounds.values(), MAX_ROUNDS))
    used = _add(head, "waiting", entries, len(rounds), free // 2)
    entries = (contributor.report(now, step_of(contributor)) for _, contributor in sorted(members.items()))
    return used + _add(head, "members", entries, len(members), free - used)


def _add(head: dict[str, Any], name: str, entries: Iterable[dict[str, Any]], total: int, free: int) -> int:
    """Add as many of `total` entries as fit, and the number of those left out; returns their size in bytes."""
    used = 0
    for entry in entries:
        if used + (size := _size(entry)) > free:
            break
        used += size
        head[name].append(entry)
    if left_out := total - len(head[name]):
        head[f"{name}_left_out"] = left_out
    return used


def _round(round_: Round, now: float) -> dict[str, Any]:
    missing = round_.missing
    return {
        "round": str(round_.key),
        "layer": round_.key.layer,
        "phase": round_.key.phase,
        "step": round_.key.step,
        "seconds": now - round_.opened,
        "missing": missing[:MAX_MISSING],
        **({"missing_left_out": len(missing) - MAX_MISSING} if len(missing) > MAX_MISSING else {}),
    }


def _size(entry: Any) -> int:
    return len(msgpack.packb(entry))


class StatusReports:
    """Reports and figures for each key, encoded and at a limited rate; long reports are cached for a moment."""

    def __init__(self, registry: Registry, counts: Callable[[float], dict[str, Any]], usage: QuotaUsage) -> None:
        self._registry = registry
        self._counts = counts
        self._usage = usage
        self._cache: dict[str, tuple[float, bytes]] = {}
        # By tenant and kind of request: bytes sent in excess of the rate, and the time of this count.
        self._sent: dict[tuple[str, type], tuple[float, float]] = {}

    def report(self, now: float, principal: Principal) -> dict[str, Any]:
        """Status report of the jobs that a key may see."""
        ended = self._registry.ended_jobs(now, principal)
        return {**self._counts(now), **group_entries(self._masters(principal), now, ended)}

    def answer(self, now: float, asked: StatusRequest | FiguresRequest, principal: Principal) -> bytes:
        """Encoded answer to a request. A status has no groups if the tenant exceeds the rate limit.

        Raises:
            LimitExceeded: the tenant exceeds the rate limit of figures.
        """
        tenant = principal.tenant_of("")
        sent, since = self._sent.get((tenant, type(asked)), (0.0, now))
        sent = max(0.0, sent - BYTES_PER_SECOND * (now - since))
        if sent > BURST_BYTES and isinstance(asked, FiguresRequest):
            text = f"figures: more than {BYTES_PER_SECOND} bytes per second requested; ask less often"
            raise self._usage.exceeded(text, BYTES_PER_SECOND, "bytes of figures a second")
        if sent > BURST_BYTES:
            left_out = len(self._masters(principal))
            return encode(Status({**self._counts(now), "groups": [], "ended": [], "left_out": left_out}))
        frame = self._figures(principal, asked) if isinstance(asked, FiguresRequest) else self._status(now, principal)
        self._sent[tenant, type(asked)] = sent + len(frame), now
        return frame

    def _figures(self, principal: Principal, asked: FiguresRequest) -> bytes:
        """Skew figures of a group, in an answer of bounded size."""
        job, group, first = asked.job, asked.group, asked.first
        master = self._registry.masters.get((job, group)) if principal.may_access(job) else None
        if master is None:
            return encode(Figures(job, group, first, 0, "", np.zeros((0, 0, FIGURES))))
        total, names, values = master.health.comparison.averages(first, limits.MAX_FIGURES_BYTES)
        return encode(Figures(job, group, first, total, "\n".join(names), values))

    def _status(self, now: float, principal: Principal) -> bytes:
        until, frame = self._cache.get(principal.key, (now, b""))
        if now < until:
            return frame
        frame = encode(Status(self.report(now, principal)))
        masters = self._masters(principal)
        cost = sum(master.nr_slaves * (1 + min(len(master.open_rounds), MAX_ROUNDS)) for master in masters)
        self._cache.pop(principal.key, None)
        self._cache[principal.key] = now + min(CACHE_SECONDS, cost * CACHE_SECONDS_EACH), frame
        if len(self._cache) > MAX_CACHED_REPORTS:
            del self._cache[next(iter(self._cache))]
        return frame

    def _masters(self, principal: Principal) -> list[SyncMaster]:
        return [master for (job, _), master in self._registry.masters.items() if principal.may_access(job)]
