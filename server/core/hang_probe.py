"""Hang probe: requests stack reports from late members.

The server sends the request to the source of a member's heartbeats, because a separate thread answers there, whatever
the training script is doing. The report is stored in the member's `StackSample` for warnings, errors and the status
report, and dropped when no other member waits for this one. If a late member is blocked in a torch collective, the
server also asks the waiting members how many operations they have launched on that process group;
`server.core.collectives` draws the conclusion.

Without a waiting member the server sends no requests, except to members of idle jobs: jobs that had rounds before and
have none for a while. A job is idle between two epochs and during validation or a checkpoint, but also if its members
deadlock in torch collectives. The reports of a healthy job have no effect.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from server.core.collectives import APART_SILENCES
from server.core.registry import GroupName, Registry
from server.group.contributor import ASK_SECONDS, Contributor, StackSample
from server.group.lifecycle import GroupState
from server.group.master import SyncMaster
from server.group.rounds import Reply
from statsd_bn import limits
from statsd_bn.messages import WORLD, StackReport, StackRequest, digest
from statsd_bn.wire import encode

# A job without a round for this long is idle. If each step takes longer than this, each member gets one request per
# step, which costs it 0.1 ms.
NO_ROUND_SECONDS = 2.0

# Members of an idle job get requests at least this often, because their state changes.
QUIET_ASKED_AT_MOST = 8.0

# Larger idle jobs get no requests: all reports would be needed, and the requests would delay rounds.
MOST_QUIET_MEMBERS = 256


class IdleJobs:
    """Finds idle jobs: their members get requests although none of them waits in a round."""

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}

    def record_mismatch(self, now: float, job: str) -> None:
        """Record that a job's deadlock was reported; its members get no requests until their next round."""
        self._reported[job] = now

    def find(self, now: float, groups: Mapping[GroupName, SyncMaster]) -> Iterator[SyncMaster]:
        """The world group of each idle job."""
        self._reported = {job: at for job, at in self._reported.items() if (job, WORLD) in groups}
        idle_since = now - NO_ROUND_SECONDS
        worlds = [
            master for (_, group), master in groups.items() if group == WORLD and _may_be_idle(master, idle_since)
        ]
        if not worlds:
            return
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in groups.items():
            jobs[job].append(master)
        for world in worlds:
            masters = jobs[world.membership.job]
            latest = max(master.last_active for master in masters)
            is_reported = self._reported.get(world.membership.job, -math.inf) >= latest
            if latest <= idle_since and not is_reported and not any(map(_waits, masters)):
                yield world


def _may_be_idle(world: SyncMaster, idle_since: float) -> bool:
    return (
        not world.membership.is_elastic
        and world.last_active <= idle_since
        and world.rounds_done > 0
        and world.nr_slaves <= MOST_QUIET_MEMBERS
    )


def _waits(master: SyncMaster) -> bool:
    return bool(len(master.open_rounds)) or master.membership.state is not GroupState.OPEN


# Members that get a request for one round, the lowest ranks: a few stacks are enough for a person.
MAX_TARGETS_PER_ROUND = 16

# Rounds examined in each group, oldest first. A member with one thread has one.
MAX_ROUNDS_SCANNED = 16

# Requests in flight in all jobs, to bound the server's time.
MAX_REQUESTS = 1024


class HangProbe:
    """The requests in flight."""

    def __init__(self, registry: Registry, silence: float) -> None:
        self._registry = registry
        self._apart = APART_SILENCES * silence
        self._sampled: dict[bytes, Contributor] = {}
        self._idle_jobs = IdleJobs()
        self._idle_sessions: set[bytes] = set()
        self._number = 0
        self._last_tick = math.inf

    def tick(self, now: float) -> list[Reply]:
        """Requests to send now."""
        # If the server itself was delayed, reports are stale and other members may have moved.
        was_delayed = now - self._last_tick >= limits.HEARTBEAT_SECONDS
        self._last_tick = now
        requests = dict(islice(self._targets(now), MAX_REQUESTS))
        idle = dict(islice(self._idle_targets(now, requests), MAX_REQUESTS - len(requests)))
        self._idle_sessions = set(idle)
        requests |= idle
        for session in list(self._sampled) if was_delayed else self._sampled.keys() - requests.keys():
            self._sampled.pop(session).stack_sample = None
        replies = (self._request(now, contributor, torch_group) for contributor, torch_group in requests.values())
        return [reply for reply in replies if reply]

    def record_mismatch(self, now: float, job: str) -> None:
        """Record that a job's deadlock was reported."""
        self._idle_jobs.record_mismatch(now, job)

    def record_report(self, now: float, answer: StackReport) -> None:
        """Store a stack report; a report without a request is ignored."""
        contributor = self._sampled.get(answer.session)
        if contributor and contributor.stack_sample:
            contributor.stack_sample.record_report(now, answer)

    def sampled(self) -> dict[str, list[Contributor]]:
        """Members with a stack sample, by job."""
        jobs: dict[str, list[Contributor]] = {}
        for session, contributor in self._sampled.items():
            if record := self._registry.sessions.get(session):
                jobs.setdefault(record.master.membership.job, []).append(contributor)
        return jobs

    def _targets(self, now: float) -> Iterator[tuple[bytes, tuple[Contributor, str]]]:
        masters = self._registry.masters
        for (job, _), master in masters.items():
            contributors = master.membership.contributors
            old = [
                round_
                for round_ in islice(master.open_rounds, MAX_ROUNDS_SCANNED)
                if now - round_.opened >= ASK_SECONDS
            ]
            # These wait in a round, so their place is known.
            waiting = {member for round_ in old for member in round_.waiting}
            for round_ in old:
                late = (member for member in round_.missing if member not in waiting)
                yield from _requests(_first(contributors, late), _first(contributors, round_.waiting))
            if returning := [one for one in master.membership.rejoining if one.since <= now - ASK_SECONDS]:
                not_back = contributors.keys() - {one.member for one in returning}
                yield from _requests(_first(contributors, sorted(not_back)), returning[:MAX_TARGETS_PER_ROUND])
            # Members that the world itself still waits for are unknown and cannot get a request.
            world = masters.get((job, WORLD))
            if world and world is not master and _filling_since(master, now) <= now - ASK_SECONDS:
                others = (member for member in world.membership.contributors if member not in contributors)
                yield from _requests(_first(world.membership.contributors, others), _first(contributors, contributors))

    def _idle_targets(
        self, now: float, others: Mapping[bytes, object]
    ) -> Iterator[tuple[bytes, tuple[Contributor, str]]]:
        for world in self._idle_jobs.find(now, self._registry.masters):
            for contributor in world.membership.contributors.values():
                if contributor.session not in others:
                    yield contributor.session, (contributor, "")

    def _request(self, now: float, contributor: Contributor, torch_group: str) -> Reply | None:
        address = self._registry.liveness.heartbeat_address(contributor.session)
        if not address:
            return None
        if contributor.stack_sample is None:
            contributor.stack_sample = StackSample(now)
        self._sampled[contributor.session] = contributor
        if now < contributor.stack_sample.due:
            return None
        self._number = (self._number + 1) % limits.MAX_COUNTER
        contributor.stack_sample.record_request(now, self._number)
        if contributor.session in self._idle_sessions:
            # Soon enough to see a change, and as soon as the member has been blocked for long.
            latest, known = contributor.stack_sample.latest, contributor.stack_sample.since + self._apart
            soon = known if latest and latest.in_collective and known > now else now + QUIET_ASKED_AT_MOST
            contributor.stack_sample.due = min(contributor.stack_sample.due, soon)
        return address, encode(StackRequest(digest(contributor.session), self._number, torch_group))


def _filling_since(master: SyncMaster, now: float) -> float:
    """Start of the wait for a group to open; `now` if no member waits."""
    if master.membership.state is not GroupState.FILLING:
        return now
    return min((contributor.since for contributor in master.membership.contributors.values()), default=now)


def _first(contributors: Mapping[int, Contributor], members: Iterable[int]) -> list[Contributor]:
    """The first of the given members that are registered."""
    return list(islice((contributors[member] for member in members if member in contributors), MAX_TARGETS_PER_ROUND))


def _requests(late: list[Contributor], waiting: list[Contributor]) -> Iterator[tuple[bytes, tuple[Contributor, str]]]:
    """Request targets because some members are late, by session, each with the process group to report on.

    A waiting member reports its operation count on one process group of the late members per request, in rotation.
    """
    for contributor in late:
        yield contributor.session, (contributor, "")
    answers = [
        contributor.stack_sample.latest
        for contributor in late
        if contributor.stack_sample and contributor.stack_sample.latest
    ]
    needed = {answer.torch_group: answer.members for answer in answers if answer.in_collective and answer.torch_group}
    for contributor in waiting:
        names = [name for name, members in needed.items() if contributor.member in members]
        if names:
            turn = contributor.stack_sample.requests if contributor.stack_sample else 0
            yield contributor.session, (contributor, names[turn % len(names)])
