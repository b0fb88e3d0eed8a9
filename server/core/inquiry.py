"""Inquiry: asks the members that others wait for where they are.

The question goes to where a member's heartbeats come from, because a thread of its own answers there, whatever the
training script is doing. Nobody is asked while nobody waits. What comes back is kept in a `Sighting` of the member's
slave, from which warnings, errors and the status report take it, and is dropped when nobody waits for the member any
more. A member that waits in a collective of torch makes the server ask those that wait here how far they are on that
process group; `server.core.collectives` says what follows.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from server.core.collectives import Held, held_members
from server.core.registry import Registry
from server.group.life import GroupState
from server.group.master import SyncMaster
from server.group.rounds import Reply
from server.group.sighting import ASK_SECONDS, Sighting
from server.group.slave import Slave
from statsd_bn import limits
from statsd_bn.messages import WORLD, Question, Whereabouts
from statsd_bn.tokens import digest
from statsd_bn.wire import encode

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
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._asked: dict[bytes, Slave] = {}
        self._number = 0

    def tick(self, now: float) -> list[Reply]:
        """Questions to ask now."""
        questions = dict(islice(self._whom_to_ask(now), ASKED_AT_ONCE))
        for session in self._asked.keys() - questions.keys():
            self._asked.pop(session).sighting = None
        replies = (self._ask(now, slave, torch_group) for slave, torch_group in questions.values())
        return [reply for reply in replies if reply]

    def answer(self, now: float, answer: Whereabouts) -> None:
        """Take an answer; one to no question is ignored."""
        slave = self._asked.get(answer.session)
        if slave and slave.sighting:
            slave.sighting.take(now, answer)

    def held(self) -> dict[str, list[Held]]:
        """The members that wait in a collective of torch for others, by job."""
        jobs: dict[str, list[Slave]] = {}
        for session, slave in self._asked.items():
            if record := self._registry.sessions.get(session):
                jobs.setdefault(record.master.membership.job, []).append(slave)
        return {job: held for job, slaves in jobs.items() if (held := held_members(slaves))}

    def _whom_to_ask(self, now: float) -> Iterator[tuple[bytes, tuple[Slave, str]]]:
        masters = self._registry.masters
        for (job, _), master in masters.items():
            slaves = master.membership.slaves
            old = [round_ for round_ in islice(master.open_rounds, LOOKED_AT) if now - round_.opened >= ASK_SECONDS]
            # Where these are is known.
            waiting = {member for round_ in old for member in round_.waiting}
            for round_ in old:
                late = (member for member in round_.missing if member not in waiting)
                yield from _asked(_some(slaves, late), _some(slaves, round_.waiting))
            # Nobody can be asked before the world is open: whoever is missing there is not known yet.
            world = masters.get((job, WORLD))
            if world and world is not master and _fills_since(master, now) <= now - ASK_SECONDS:
                others = (member for member in world.membership.slaves if member not in slaves)
                yield from _asked(_some(world.membership.slaves, others), _some(slaves, slaves))

    def _ask(self, now: float, slave: Slave, torch_group: str) -> Reply | None:
        address = self._registry.liveness.beacon(slave.session)
        if not address:
            return None
        if slave.sighting is None:
            slave.sighting = Sighting(now)
        self._asked[slave.session] = slave
        if now < slave.sighting.due:
            return None
        self._number = (self._number + 1) % limits.MAX_COUNTER
        slave.sighting.ask(now, self._number)
        return address, encode(Question(digest(slave.session), self._number, torch_group))


def _fills_since(master: SyncMaster, now: float) -> float:
    """Since when members wait for a group to open; now if none do."""
    if master.membership.state is not GroupState.FILLING:
        return now
    return min((slave.since for slave in master.membership.slaves.values()), default=now)


def _some(slaves: Mapping[int, Slave], members: Iterable[int]) -> list[Slave]:
    """The first of some members, as far as they are registered."""
    return list(islice((slaves[member] for member in members if member in slaves), ASKED_OF_A_ROUND))


def _asked(late: list[Slave], waiting: list[Slave]) -> Iterator[tuple[bytes, tuple[Slave, str]]]:
    """Whom to ask because some are late, by session, each with the process group to tell of.

    Of those that wait it is asked how far they are on the process groups of the late ones' collectives, in turns.
    """
    for slave in late:
        yield slave.session, (slave, "")
    answers = [slave.sighting.latest for slave in late if slave.sighting and slave.sighting.latest]
    needed = {answer.torch_group: answer.members for answer in answers if answer.held and answer.torch_group}
    for slave in waiting:
        names = [name for name, members in needed.items() if slave.member in members]
        if names:
            turn = slave.sighting.times if slave.sighting else 0
            yield slave.session, (slave, names[turn % len(names)])
