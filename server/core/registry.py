"""Registry: all groups of all jobs, who has a seat in which, and how seats are lost.

A session has one seat, in one group. A group is there while it has seats; when the last one goes, it is forgotten, but
for what its members may still have to be told.
"""

import logging
from dataclasses import dataclass

from server.core.ended import Name, Past
from server.core.liveness import Liveness
from server.group.master import SyncMaster
from server.group.rounds import Reply, failure
from server.group.slave import Slave
from server.limits.access import ANYBODY
from statsd_bn.errors import RegistrationRefused, StatsdBNError
from statsd_bn.messages import WORLD
from statsd_bn.tokens import digest

logger = logging.getLogger("statsd_bn.server")


@dataclass(slots=True)
class Seat:
    """Where a session sits: its master, its slave there, and with which key it has come."""

    master: SyncMaster
    slave: Slave
    key: str = ANYBODY.key


class Registry:
    """Groups and seats.

    Args:
        started: the time it began, on the clock of all other times.
        silence_seconds: how long a member may be silent.

    Attributes:
        masters: of the groups, by job and group.
        seats: by session.
        founders: the peer that began each group.
        past: what has ended.
        liveness: when each session was heard.
        has_had_members: whether anybody has a seat, or had one.
    """

    def __init__(self, started: float, silence_seconds: float) -> None:
        self.masters: dict[Name, SyncMaster] = {}
        self.seats: dict[bytes, Seat] = {}
        self.founders: dict[Name, bytes] = {}
        self.past = Past()
        self.liveness = Liveness(started, silence_seconds)
        self.has_had_members = False

    def begin(self, name: Name, master: SyncMaster, founder: bytes) -> None:
        """Takes a life of a group in, which a peer has begun."""
        self.masters[name] = master
        self.founders[name] = founder

    def give_seat(self, session: bytes, seat: Seat) -> None:
        """Gives a session its seat."""
        self.seats[session] = seat
        self.has_had_members = True
        self.past.begin_session(session)

    def leave(self, now: float, session: bytes, cause: str) -> list[Reply]:
        """Takes the seat of a member that says goodbye, with a cause if it has failed."""
        seat = self._vacate(session)
        if seat is None:
            return []
        _log_end(seat, f"leaves: {cause}" if cause else "leaves")
        return self._take_out(now, session, seat, cause)

    def lose(self, now: float, session: bytes, cause: str) -> list[Reply]:
        """Takes the seat of a member that is lost, and why."""
        seat = self._vacate(session)
        if seat is None:
            return []
        _log_end(seat, f"is lost: {cause}")
        loss, replies = seat.master.banish_slave(now, seat.slave, cause)
        if loss:
            self.past.end_session(session, seat.master.epoch, loss)
        return self._end_if_empty(seat.master, replies)

    def dissolve(self, now: float, master: SyncMaster, error: StatsdBNError) -> list[Reply]:
        """Tells all who wait for a group to open that it will not, and takes them out, so that each is told once."""
        slaves = list(master.membership.slaves.values())
        replies = [(slave.peer, failure(error)) for slave in slaves]
        for slave in slaves:
            self._vacate(slave.session)
            replies += self._take_out(now, slave.session, Seat(master, slave), "")
        return replies

    def close(self, name: Name, reason: str) -> list[Reply]:
        """Ends a life of a group, which another one replaces."""
        return self._end(name, RegistrationRefused(f"job {name[0]!r}, group {name[1]!r}: {reason}"))

    def evict(self, name: Name, error: StatsdBNError) -> list[Reply]:
        """Ends a group because of an error, of which all its members are told."""
        peers = [slave.peer for slave in self.masters[name].membership.slaves.values()]
        replies = self._end(name, error)
        told = {peer for peer, _ in replies}
        return replies + [(peer, failure(error)) for peer in dict.fromkeys(peers) if peer not in told]

    def mourn(self, world: SyncMaster) -> list[Reply]:
        """Whoever waits for a group to open may wait for the member that the world has lost, and is told once."""
        job, lost = world.membership.job, failed_member(world)
        if lost is None or world.is_mourned:
            return []
        world.is_mourned = True
        groups = [master for name, master in self.masters.items() if name[0] == job and master.epoch == world.epoch]
        return [
            (slave.peer, failure(lost))
            for master in groups
            if master is not world and not master.membership.is_open
            for slave in master.membership.slaves.values()
        ]

    def _end(self, name: Name, error: StatsdBNError) -> list[Reply]:
        master = self.masters.pop(name)
        del self.founders[name]
        for session in [slave.session for slave in master.membership.slaves.values()]:
            seat = self.seats.get(session)
            if seat and seat.master is master:
                self._vacate(session)
                self.past.end_session(session, master.epoch, error)
        replies = master.break_all(lambda _: error)
        master.retire()
        return replies

    def _vacate(self, session: bytes) -> Seat | None:
        self.liveness.forget(session)
        return self.seats.pop(session, None)

    def _take_out(self, now: float, session: bytes, seat: Seat, cause: str) -> list[Reply]:
        """Ends what a member began that says goodbye."""
        _, replies = seat.master.remove_slave(now, seat.slave, cause)
        name = digest(session).hex()
        left = RegistrationRefused(f"the session with digest {name}: expected a new one, this one has left")
        self.past.end_session(session, seat.master.epoch, left)
        return self._end_if_empty(seat.master, replies)

    def _end_if_empty(self, master: SyncMaster, replies: list[Reply]) -> list[Reply]:
        """Forgets a group without members; else tells those who wait for one of its job that can never open."""
        membership = master.membership
        name = (membership.job, membership.group)
        if not master.nr_slaves and self.masters.get(name) is master:
            del self.masters[name], self.founders[name]
            master.retire()
            if membership.is_open:
                self.past.end_group(name, master.epoch)
        return replies + self.mourn(master)


def failed_member(world: SyncMaster) -> StatsdBNError | None:
    """Returns why the group of all members of a job is broken, if one has failed; None for any other group."""
    membership = world.membership
    has_failed = membership.group == WORLD and membership.lost and membership.lost.fields.get("cause")
    return membership.lost if has_failed else None


def _log_end(seat: Seat, how: str) -> None:
    membership = seat.master.membership
    logger.info("job %r, group %r: %s %s", membership.job, membership.group, seat.slave, how)
