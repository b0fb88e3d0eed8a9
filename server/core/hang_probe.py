"""Inquiry: asks the members that others wait for where they are.

The question goes to where a member's heartbeats come from, because a thread of its own answers there, whatever the
training script is doing. What comes back is kept in the member's `Sighting`, from which warnings, errors and the
status report take it, and is dropped when nobody waits for the member any more. A member that waits in a collective of
torch makes the server ask those that wait here how far they are on that process group; `server.core.collectives` says
what follows.

While nobody waits nobody is asked, but for the members of quiet jobs, which have had rounds and have none for a while.
A job is quiet between two epochs, while it validates or saves a checkpoint, and also where its members wait for one
another in collectives of torch. Of a healthy job nothing follows from the answers.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from server.core.collectives import APART_SILENCES
from server.core.registry import Name, Registry
from server.group.contributor import ASK_SECONDS, Contributor, Sighting
from server.group.lifecycle import GroupState
from server.group.master import SyncMaster
from server.group.rounds import Reply
from statsd_bn import limits
from statsd_bn.messages import WORLD, StackReport, StackRequest
from statsd_bn.tokens import digest
from statsd_bn.wire import encode

# How long a job has had no round when its members are asked first. Steps may take as long: then each member is asked
# once in each of them, which takes it a tenth of a millisecond.
NO_ROUND_SECONDS = 2.0

# The members of a quiet job are asked so often at least, since what they do has changed meanwhile.
QUIET_ASKED_AT_MOST = 8.0

# A larger job is not asked: all answers are needed, and its rounds are not to wait for its questions.
MOST_QUIET_MEMBERS = 256


class QuietJobs:
    """Finds the jobs whose members are to be asked although nobody waits."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def tell(self, now: float, job: str) -> None:
        """Note that the members of a job are told of a mismatch; they are asked again once they have had a round."""
        self._told[job] = now

    def find(self, now: float, groups: Mapping[Name, SyncMaster]) -> Iterator[SyncMaster]:
        """The group of all members of each such job."""
        self._told = {job: at for job, at in self._told.items() if (job, WORLD) in groups}
        quiet = now - NO_ROUND_SECONDS
        worlds = [master for (_, group), master in groups.items() if group == WORLD and _may_be_asked(master, quiet)]
        if not worlds:
            return
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in groups.items():
            jobs[job].append(master)
        for world in worlds:
            masters = jobs[world.membership.job]
            latest = max(master.active for master in masters)
            is_told = self._told.get(world.membership.job, -math.inf) >= latest
            if latest <= quiet and not is_told and not any(map(_waits, masters)):
                yield world


def _may_be_asked(world: SyncMaster, quiet: float) -> bool:
    return (
        not world.membership.is_elastic
        and world.active <= quiet
        and world.rounds_done > 0
        and world.nr_slaves <= MOST_QUIET_MEMBERS
    )


def _waits(master: SyncMaster) -> bool:
    return bool(len(master.open_rounds)) or master.membership.state is not GroupState.OPEN


# Members that are asked for one round, the lowest ranks; a person needs to know of a few.
ASKED_OF_A_ROUND = 16

# Rounds that are looked at in each group, the oldest. A member with one thread has one.
LOOKED_AT = 16

# Members that are asked at the same time, in all jobs, so that asking takes no noticeable time of the server.
ASKED_AT_ONCE = 1024


class Inquiry:
    """The questions under way.

    Args:
        registry: the members, and where they can be asked.
        silence: how long a member may be silent, in seconds.
    """

    def __init__(self, registry: Registry, silence: float) -> None:
        self._registry = registry
        self._apart = APART_SILENCES * silence
        self._asked: dict[bytes, Contributor] = {}
        self._quiet = QuietJobs()
        self._of_quiet: set[bytes] = set()
        self._number = 0
        self._looked = math.inf

    def tick(self, now: float) -> list[Reply]:
        """Questions to ask now."""
        # If the server itself was held up, answers have come long after they were given, and others may have moved.
        held_up = now - self._looked >= limits.HEARTBEAT_SECONDS
        self._looked = now
        questions = dict(islice(self._whom_to_ask(now), ASKED_AT_ONCE))
        of_quiet = dict(islice(self._of_quiet_jobs(now, questions), ASKED_AT_ONCE - len(questions)))
        self._of_quiet = set(of_quiet)
        questions |= of_quiet
        for session in list(self._asked) if held_up else self._asked.keys() - questions.keys():
            self._asked.pop(session).sighting = None
        replies = (self._ask(now, contributor, torch_group) for contributor, torch_group in questions.values())
        return [reply for reply in replies if reply]

    def tell(self, now: float, job: str) -> None:
        """Note that members of a job are told of a mismatch."""
        self._quiet.tell(now, job)

    def answer(self, now: float, answer: StackReport) -> None:
        """Take an answer; one to no question is ignored."""
        contributor = self._asked.get(answer.session)
        if contributor and contributor.sighting:
            contributor.sighting.take(now, answer)

    def asked(self) -> dict[str, list[Contributor]]:
        """The members that are asked, by job."""
        jobs: dict[str, list[Contributor]] = {}
        for session, contributor in self._asked.items():
            if record := self._registry.sessions.get(session):
                jobs.setdefault(record.master.membership.job, []).append(contributor)
        return jobs

    def _whom_to_ask(self, now: float) -> Iterator[tuple[bytes, tuple[Contributor, str]]]:
        masters = self._registry.masters
        for (job, _), master in masters.items():
            contributors = master.membership.contributors
            old = [round_ for round_ in islice(master.open_rounds, LOOKED_AT) if now - round_.opened >= ASK_SECONDS]
            # Where these are is known.
            waiting = {member for round_ in old for member in round_.waiting}
            for round_ in old:
                late = (member for member in round_.missing if member not in waiting)
                yield from _asked(_some(contributors, late), _some(contributors, round_.waiting))
            if returning := [one for one in master.membership.returning if one.since <= now - ASK_SECONDS]:
                not_back = contributors.keys() - {one.member for one in returning}
                yield from _asked(_some(contributors, sorted(not_back)), returning[:ASKED_OF_A_ROUND])
            # Nobody can be asked before the world is open: whoever is missing there is not known yet.
            world = masters.get((job, WORLD))
            if world and world is not master and _fills_since(master, now) <= now - ASK_SECONDS:
                others = (member for member in world.membership.contributors if member not in contributors)
                yield from _asked(_some(world.membership.contributors, others), _some(contributors, contributors))

    def _of_quiet_jobs(
        self, now: float, others: Mapping[bytes, object]
    ) -> Iterator[tuple[bytes, tuple[Contributor, str]]]:
        for world in self._quiet.find(now, self._registry.masters):
            for contributor in world.membership.contributors.values():
                if contributor.session not in others:
                    yield contributor.session, (contributor, "")

    def _ask(self, now: float, contributor: Contributor, torch_group: str) -> Reply | None:
        address = self._registry.liveness.beacon(contributor.session)
        if not address:
            return None
        if contributor.sighting is None:
            contributor.sighting = Sighting(now)
        self._asked[contributor.session] = contributor
        if now < contributor.sighting.due:
            return None
        self._number = (self._number + 1) % limits.MAX_COUNTER
        contributor.sighting.ask(now, self._number)
        if contributor.session in self._of_quiet:
            # Soon enough to see what has changed, and as soon as it is known to have been held for long.
            latest, known = contributor.sighting.latest, contributor.sighting.since + self._apart
            soon = known if latest and latest.held and known > now else now + QUIET_ASKED_AT_MOST
            contributor.sighting.due = min(contributor.sighting.due, soon)
        return address, encode(StackRequest(digest(contributor.session), self._number, torch_group))


def _fills_since(master: SyncMaster, now: float) -> float:
    """Since when members wait for a group to open; now if none do."""
    if master.membership.state is not GroupState.FILLING:
        return now
    return min((contributor.since for contributor in master.membership.contributors.values()), default=now)


def _some(contributors: Mapping[int, Contributor], members: Iterable[int]) -> list[Contributor]:
    """The first of some members, as far as they are registered."""
    return list(islice((contributors[member] for member in members if member in contributors), ASKED_OF_A_ROUND))


def _asked(late: list[Contributor], waiting: list[Contributor]) -> Iterator[tuple[bytes, tuple[Contributor, str]]]:
    """Whom to ask because some are late, by session, each with the process group to tell of.

    Of those that wait it is asked how far they are on the process groups of the late ones' collectives, in turns.
    """
    for contributor in late:
        yield contributor.session, (contributor, "")
    answers = [
        contributor.sighting.latest for contributor in late if contributor.sighting and contributor.sighting.latest
    ]
    needed = {answer.torch_group: answer.members for answer in answers if answer.held and answer.torch_group}
    for contributor in waiting:
        names = [name for name, members in needed.items() if contributor.member in members]
        if names:
            turn = contributor.sighting.times if contributor.sighting else 0
            yield contributor.session, (contributor, names[turn % len(names)])
