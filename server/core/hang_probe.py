"""Hang probe: requests stack reports from late members.

The server sends the request to the source of a member's heartbeats, because a separate thread answers there, whatever
the training script is doing. The report is stored in the member's `StackSample` for warnings, errors and the status
report. If a late member is blocked in a torch collective, the server also asks the waiting members how many operations
they have launched on its process group; `server.core.deadlock` draws the conclusion.

Members of idle strict jobs get requests too. A job is idle if it had rounds, but none for a while: it validates or
writes a checkpoint, or its members are deadlocked in torch collectives.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from server.core.deadlock import APART_SILENCES
from server.core.registry import Registry
from server.group.contributor import ASK_SECONDS, Contributor, StackSample
from server.group.master import SyncMaster
from server.group.rounds import Reply
from statsd_bn import limits
from statsd_bn.messages import WORLD, StackReport, StackRequest, digest
from statsd_bn.wire import encode

# A job without a round for this long is idle. If each step takes longer than this, each member gets some requests
# per step, which cost it 0.1 ms each.
NO_ROUND_SECONDS = 2.0

QUIET_ASKED_AT_MOST = 8.0  # longest interval between requests to a member of an idle job, unless a collective blocks it

# Larger idle jobs get no requests: finding a deadlock needs all members' reports, and so many requests delay rounds.
MOST_QUIET_MEMBERS = 256

MAX_TARGETS_PER_ROUND = 16  # the lowest ranks get a request: a few stacks are enough for a person
MAX_ROUNDS_SCANNED = 16  # in each group, oldest first; a member with one thread has one open round
MAX_REQUESTS = 1024  # members with a request in all jobs, to bound the server's time

Target = tuple[Contributor, str]  # a member to ask, and the process group to report on


class HangProbe:
    """Which members get a stack request, and when."""

    def __init__(self, registry: Registry, silence: float) -> None:
        self._registry = registry
        self._apart = APART_SILENCES * silence
        self._sampled: dict[bytes, Contributor] = {}
        self._number = 0

    def tick(self, now: float, *, was_delayed: bool) -> list[Reply]:
        """Requests to send now."""
        requests = {one.session: (one, torch_group) for one, torch_group in islice(self._targets(now), MAX_REQUESTS)}
        members = (one for world in self._idle_worlds(now) for one in world.membership.contributors.values())
        others = (one for one in members if one.session not in requests)
        idle = {one.session: (one, "") for one in islice(others, MAX_REQUESTS - len(requests))}
        requests |= idle
        # A member without a request may have moved: drop its report. After a delay of the server, drop all reports.
        for session in list(self._sampled) if was_delayed else self._sampled.keys() - requests.keys():
            self._sampled.pop(session).stack_sample = None
        replies = (self._request(now, *target, is_idle=session in idle) for session, target in requests.items())
        return [reply for reply in replies if reply]

    def record_report(self, now: float, answer: StackReport) -> None:
        """Store a stack report; a report without a request is ignored."""
        contributor = self._sampled.get(answer.session)
        if contributor and contributor.stack_sample:
            contributor.stack_sample.record_report(now, answer)

    def _targets(self, now: float) -> Iterator[Target]:
        masters, asked_since = self._registry.masters, now - ASK_SECONDS
        for (job, _), master in masters.items():
            contributors = master.membership.contributors
            old = [one for one in islice(master.open_rounds.values(), MAX_ROUNDS_SCANNED) if one.opened <= asked_since]
            # These members wait in a round, so their position is known.
            waiting = {member for round_ in old for member in round_.waiting}
            for round_ in old:
                late = (contributors.get(member) for member in round_.missing if member not in waiting)
                yield from _requests(late, map(contributors.get, round_.waiting))
            if returning := [one for one in master.membership.rejoining if one.since <= asked_since]:
                not_back = contributors.keys() - {one.member for one in returning}
                yield from _requests(map(contributors.get, sorted(not_back)), returning)
            # Members that have not joined the world yet are unknown and cannot get a request.
            world = masters.get((job, WORLD))
            if world is None or world is master or not master.membership.is_filling:
                continue
            if any(one.since <= asked_since for one in contributors.values()):
                others = (one for one in world.membership.contributors.values() if one.member not in contributors)
                yield from _requests(others, contributors.values())

    def _idle_worlds(self, now: float) -> Iterator[SyncMaster]:
        """The world group of each idle job."""
        groups, idle_since = self._registry.masters, now - NO_ROUND_SECONDS
        worlds = [one for (_, group), one in groups.items() if group == WORLD and _may_be_idle(one, idle_since)]
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in groups.items() if worlds else ():
            jobs[job].append(master)
        for world in worlds:
            masters = jobs[world.membership.job]
            latest = max(master.last_active for master in masters)
            # After a report of a deadlock the job gets no requests until its next round.
            is_waiting = any(master.open_rounds or not master.membership.is_open for master in masters)
            if world.deadlock_at < latest <= idle_since and not is_waiting:
                yield world

    def _request(self, now: float, contributor: Contributor, torch_group: str, *, is_idle: bool) -> Reply | None:
        address = self._registry.sessions.heartbeat_address(contributor.session)
        if not address:
            return None
        if contributor.stack_sample is None:
            contributor.stack_sample = StackSample(now)
        self._sampled[contributor.session] = contributor
        if now < contributor.stack_sample.due:
            return None
        self._number = (self._number + 1) % limits.MAX_COUNTER
        contributor.stack_sample.record_request(now, self._number)
        if is_idle:
            # Ask a blocked member again once it has been blocked for `apart`, and others soon enough to see a change.
            latest, known = contributor.stack_sample.latest, contributor.stack_sample.since + self._apart
            soon = known if latest and latest.in_collective and known > now else now + QUIET_ASKED_AT_MOST
            contributor.stack_sample.due = min(contributor.stack_sample.due, soon)
        return address, encode(StackRequest(digest(contributor.session), self._number, torch_group))


def _may_be_idle(world: SyncMaster, idle_since: float) -> bool:
    is_candidate = not world.membership.is_elastic and world.nr_slaves <= MOST_QUIET_MEMBERS
    return is_candidate and world.last_active <= idle_since and world.rounds_done > 0


def _requests(late: Iterable[Contributor | None], waiting: Iterable[Contributor | None]) -> Iterator[Target]:
    """Targets for late and for waiting members; None stands for a member that has left.

    Each request to a waiting member asks for its operation count on one of the late members' process groups, in turn.
    """
    asked = list(islice(filter(None, late), MAX_TARGETS_PER_ROUND))
    yield from ((contributor, "") for contributor in asked)
    answers = [one.stack_sample.latest for one in asked if one.stack_sample and one.stack_sample.latest]
    needed = {answer.torch_group: answer.members for answer in answers if answer.in_collective and answer.torch_group}
    for contributor in islice(filter(None, waiting), MAX_TARGETS_PER_ROUND):
        names = [name for name, members in needed.items() if contributor.member in members]
        if names:
            turn = contributor.stack_sample.requests if contributor.stack_sample else 0
            yield contributor, names[turn % len(names)]
