"""Dispatcher: from a frame to the group it is for, and back to frames.

The whole server minus its socket. It is pure like the masters it holds: `receive` takes a time, a peer and a
frame and returns the frames to send. Nothing that comes from a peer raises out of it: a bad frame costs its sender an
error and nobody else anything.
"""

import logging
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from server import deadlock
from server.access import ANYBODY, REVOKED, Access, Tenant
from server.admission import too_late
from server.liveness import Liveness
from server.master import Reply, SyncMaster, unknown
from server.past import Past
from server.quota import Budget, Quota
from server.rounds import failure
from server.slave import Slave
from statsd_bn.errors import (
    AuthenticationRefused,
    LimitExceeded,
    MasterStopped,
    ProtocolError,
    RegistrationRefused,
    ReplicaLost,
    RoundMismatch,
    StaleEpoch,
    StatsdBNError,
)
from statsd_bn.members import NOBODY
from statsd_bn.messages import (
    NO_SERVER,
    WORLD,
    Contribution,
    Heartbeat,
    Leave,
    Message,
    Register,
    Registered,
    Result,
    Status,
    StatusRequest,
)
from statsd_bn.wire import decode, encode

logger = logging.getLogger("statsd_bn.server")

# Why a member is lost that has come back after a restart: it had been lost before; or its results did not arrive, and
# without them nobody knows what the others are to be given.
OVERTAKEN = "the others had gone on without it before the server was restarted"
INCOMPLETE = "what it was given did not come back after the server was restarted"


@dataclass(slots=True)
class Seat:
    """Where a session sits: its master, its slave there, and with which key it has come."""

    master: SyncMaster
    slave: Slave
    key: str = ANYBODY.key


class Dispatcher:
    """All groups of all jobs.

    Args:
        server: a random id of this life of the server.
        started: the time it began, on the clock that `receive` is given.
        quota: how much it takes and keeps; default: as much as the protocol allows.

    Attributes:
        tally: what was refused.
        has_had_members: whether anybody is registered, or was.
    """

    def __init__(self, server: bytes, started: float, quota: Quota | None = None) -> None:
        self._server = server
        self._started = started
        self._masters: dict[tuple[str, str], SyncMaster] = {}
        self._seats: dict[bytes, Seat] = {}
        self._past = Past()
        # Nobody has the session of zero bytes, so nobody takes it for an answer.
        self._probe = encode(Registered(NO_SERVER, server, 0, 0, 0, NOBODY))
        self._budget = Budget(quota)
        self._liveness = Liveness(started, self._budget.quota.silence_seconds)
        self.tally = self._budget.tally
        self.received = 0
        self.bad_frames = 0
        self.has_had_members = False

    def receive(self, now: float, peer: bytes, frame: bytes, tenant: Tenant = ANYBODY) -> list[Reply]:
        """Takes one frame from a peer and returns the frames to send; `tenant` is whose key the peer has."""
        self.received += 1
        try:
            self._budget.check_frame(frame)
            return self._handle(now, peer, decode(frame), tenant)
        except StatsdBNError as error:
            return [(peer, self._refuse(error))]

    def tick(self, now: float) -> list[Reply]:
        """Ends what is over its time, members and rounds; to be called several times a second."""
        # Members first: who is lost says more than who is late.
        replies = [reply for session, cause in self._liveness.lost(now) for reply in self._lose(now, session, cause)]
        memberships = [master.membership for master in self._masters.values()]
        lost = [(slave.session, INCOMPLETE) for membership in memberships for slave in membership.incomplete(now)]
        lost += [(slave.session, OVERTAKEN) for membership in memberships for slave in membership.overtaken]
        replies += [reply for session, cause in lost for reply in self._lose(now, session, cause)]
        replies += [reply for master in self._masters.values() for reply in master.expire(now)]
        replies += [reply for master in self._masters.values() for reply in self._mourn(master)]
        return replies + self._end_deadlocks(now)

    @property
    def has_members(self) -> bool:
        """Whether anybody is registered."""
        return bool(self._seats)

    @property
    def refused(self) -> int:
        """How many frames came so far that were unsound, or of no session that has a seat."""
        return self.bad_frames + self.tally.strangers

    def is_from_a_member(self, frame: bytes) -> bool:
        """Returns whether a frame names a session that has a seat."""
        try:
            return getattr(decode(frame), "session", None) in self._seats
        except ProtocolError:
            return False

    def expel(self, now: float, access: Access) -> list[Reply]:
        """Takes those for lost whose keys are no longer let in, or no longer for their job."""
        lost = [
            session for session, seat in self._seats.items() if not access.allows(seat.key, seat.master.membership.job)
        ]
        return [reply for session in lost for reply in self._lose(now, session, REVOKED)]

    def probes(self, since: float) -> list[Reply]:
        """Returns harmless frames to the members not heard since a time.

        Whoever cannot be sent one may have gone, see `unreachable`.
        """
        return [(peer, self._probe) for peer in self._liveness.addresses(since)]

    def unreachable(self, now: float, peer: bytes) -> list[Reply]:
        """Takes note that nothing can be delivered to a peer; returns harmless frames to where else its members are.

        A member that is nowhere to be reached, and is not heard again in time, is lost at a later `tick`.
        """
        return [(other, self._probe) for other in self._liveness.unreachable(now, peer)]

    def farewell(self) -> list[Reply]:
        """Tells all members that this server ends for good; those who are busy find it before their next round."""
        stopped = MasterStopped("the master stopped with the process that had started it")
        return [(seat.slave.peer, failure(seat.master.membership.lost or stopped)) for seat in self._seats.values()]

    def stop(self) -> list[Reply]:
        """Ends all waits because the server stops."""
        return [reply for master in self._masters.values() for reply in master.stop()]

    def report(self, now: float, tenant: Tenant = ANYBODY) -> dict[str, Any]:
        """Returns the status report, as far as it concerns a tenant."""
        return {
            "server": self._server.hex(),
            "seconds": now - self._started,
            "received": self.received,
            "bad_frames": self.bad_frames,
            **asdict(self.tally),
            "groups": [master.report(now) for (job, _), master in self._masters.items() if tenant.may(job)],
        }

    def _handle(self, now: float, peer: bytes, message: Message, tenant: Tenant) -> list[Reply]:
        if tenant is not ANYBODY:
            self._check_owner(message, tenant)
        match message:
            case Contribution():
                self._liveness.hear(now, message.session, peer)
                replies = self._contribute(now, message, peer)
            case Heartbeat():
                replies = self._beat(now, message, peer)
            case Register():
                replies = self._register(now, message, peer, tenant)
                self._liveness.begin(now, message.session, peer)
            case Result():
                self._liveness.hear(now, message.session, peer)
                replies = self._recall(now, message, peer)
            case Leave():
                replies = self._leave(now, message)
            case StatusRequest():
                replies = [(peer, self._status(now, tenant))]
            case _:
                raise ProtocolError(f"expected a request, got {type(message).__name__}")
        return replies

    def _check_owner(self, message: Message, tenant: Tenant) -> None:
        """What one key has begun another neither goes on with nor ends, and nobody sees or joins a foreign job."""
        if isinstance(message, Register) and not tenant.may(message.job):
            raise RegistrationRefused(
                f"job {message.job!r}: expected a job that the key of {tenant.name!r} is for, "
                f"{' or '.join(tenant.jobs)}; give the run such a name, or a key for this one"
            )
        seat = self._seats.get(getattr(message, "session", b""))
        if seat and seat.key != tenant.key:
            raise AuthenticationRefused(
                f"authentication refused: the session that {tenant.name!r} names is another key's",
                reason="foreign session",
            )

    def _status(self, now: float, tenant: Tenant) -> bytes:
        """Returns as many groups as a frame holds, and says how many it leaves out."""
        report = self.report(now, tenant)
        everything = report["groups"]
        while True:
            try:
                return encode(Status(report))
            except ProtocolError:
                if not report["groups"]:
                    raise
                report["groups"] = report["groups"][: len(report["groups"]) // 2]
                report["left_out"] = len(everything) - len(report["groups"])

    def _refuse(self, error: StatsdBNError) -> bytes:
        if isinstance(error, ProtocolError):
            self.bad_frames += 1
        logger.warning("refused: %s", error)
        return failure(error)

    def _contribute(self, now: float, contribution: Contribution, peer: bytes) -> list[Reply]:
        seat = self._seats.get(contribution.session)
        if seat is None:
            self.tally.strangers += 1
            return [(peer, failure(self._stranger(contribution.session), contribution.key))]
        if self._budget.narrows_contributions:
            try:
                self._budget.check_contribution(contribution)
            except LimitExceeded as error:
                return [(peer, failure(error, contribution.key))]
        return seat.master.contribute(now, seat.slave, contribution, peer)

    def _recall(self, now: float, result: Result, peer: bytes) -> list[Reply]:
        seat = self._seats.get(result.session)
        if seat is None:
            self.tally.strangers += 1
            # Many come together, and each answer would ask for all again. A contribution will be answered.
            return []
        return seat.master.recall(now, seat.slave, result.aggregate, peer)

    def _beat(self, now: float, heartbeat: Heartbeat, peer: bytes) -> list[Reply]:
        known = self._liveness.beat(now, heartbeat.session, peer)
        if known and not self._seats[heartbeat.session].slave.owes:
            return []
        if not known:
            self.tally.strangers += 1
        return [(peer, failure(self._stranger(heartbeat.session)))]

    def _stranger(self, session: bytes) -> StatsdBNError:
        """Returns what somebody is told who has no seat: why it has none any more, or that it is unknown."""
        return self._past.fate(session) or unknown(session)

    def _register(self, now: float, register: Register, peer: bytes, tenant: Tenant) -> list[Reply]:
        name = (register.job, register.group)
        self._budget.check_registration(register)
        if fate := self._past.fate(register.session, register.epoch):
            raise fate
        if self._is_late(register):
            return []
        self._check_end(register)
        self._check_session(register)
        self._check_world(register)
        master = self._masters.get(name)
        if master is None or self._is_replaced(master, register):
            return self._begin(now, name, register, peer, tenant)
        was_open = master.membership.is_open
        try:
            slave, told = master.register_slave(now, register, peer)
        except ReplicaLost as loss:
            self._past.end_session(register.session, register.epoch, loss)
            raise
        self._sit(now, Seat(master, slave, tenant.key), register, was_open=was_open)
        return told

    def _begin(self, now: float, name: tuple[str, str], register: Register, peer: bytes, tenant: Tenant) -> list[Reply]:
        """Begins a life of a group; one that is refused its first member never was, and replaces none."""
        if name not in self._masters:
            self._budget.check_new_group(name, list(self._masters), self._nr_groups_of(tenant))
        master = SyncMaster(self._server, register, self._budget)
        slave, told = master.register_slave(now, register, peer)
        replies = [reply for replaced in self._replaced(name) for reply in self._close(replaced, register)]
        self._masters[name] = master
        logger.info("job %r, group %r, epoch %d begins", *name, register.epoch)
        self._sit(now, Seat(master, slave, tenant.key), register, was_open=False)
        return replies + told

    def _nr_groups_of(self, tenant: Tenant) -> int:
        """Returns in how many groups a tenant has members; nobody counts for anybody."""
        if tenant is ANYBODY:
            return 0
        return len({id(seat.master) for seat in self._seats.values() if seat.key == tenant.key})

    def _sit(self, now: float, seat: Seat, register: Register, *, was_open: bool) -> None:
        """Gives a session its seat."""
        name, master, slave = (register.job, register.group), seat.master, seat.slave
        former = self._seats.get(register.session)
        if former is None or former.slave is not slave:
            slave.since = now
        self._seats[register.session] = seat
        self.has_had_members = True
        self._past.begin_session(register.session)
        if register.server not in {NO_SERVER, self._server}:
            logger.info("job %r, group %r: %s comes from an earlier life of this server", *name, slave)
        if master.membership.is_open and not was_open:
            master.answered = now
            logger.info("job %r, group %r is open with %d members", *name, master.nr_slaves)

    def _is_late(self, register: Register) -> bool:
        """Whether it was sent before something that has come since; whoever still waits for an answer asks again."""
        seat = self._seats.get(register.session)
        return seat is not None and register.step < seat.slave.step

    def _check_end(self, register: Register) -> None:
        """A run that was over with this server may have left somebody behind who knows only an earlier life of it."""
        name = (register.job, register.group)
        comes_from_before = register.server not in {NO_SERVER, self._server}
        if comes_from_before and self._past.has_ended(name, register.epoch):
            loss = too_late(register)
            self._past.end_session(register.session, register.epoch, loss)
            raise loss

    def _check_session(self, register: Register) -> None:
        """One session is one member of one group, or leaving could not end what registering began."""
        seat = self._seats.get(register.session)
        if seat is None:
            return
        membership = seat.master.membership
        now, before = (
            (register.job, register.group, register.member),
            (membership.job, membership.group, seat.slave.member),
        )
        if now != before:
            raise ProtocolError(f"session {register.session.hex()}: registered as {before}, cannot also be {now}")

    def _check_world(self, register: Register) -> None:
        """A group that is not open yet would wait in vain for a member that has failed."""
        world = self._masters.get((register.job, WORLD))
        if register.group == WORLD or world is None or world.epoch != register.epoch:
            return
        group = self._masters.get((register.job, register.group))
        stands = group is not None and group.membership.is_open and not group.membership.lost
        if (lost := _failed_member(world)) and not stands:
            raise lost

    def _replaced(self, name: tuple[str, str]) -> list[tuple[str, str]]:
        """Returns the groups whose lives a new one ends: a new world is a new run, and ends all groups of the old."""
        if name not in self._masters:
            return []
        return [other for other in self._masters if other[0] == name[0]] if name[1] == WORLD else [name]

    def _is_replaced(self, master: SyncMaster, register: Register) -> bool:
        """A later epoch replaces a life; so does any newcomer once a life is broken."""
        if register.epoch < master.epoch:
            raise StaleEpoch(
                f"job {register.job!r}, group {register.group!r}: expected epoch {master.epoch} or later, got "
                f"{register.epoch} from member {register.member} ({register.place})",
                job=register.job,
                group=register.group,
                expected=master.epoch,
                got=register.epoch,
            )
        newcomer = register.session not in self._seats
        return register.epoch > master.epoch or (newcomer and master.membership.lost is not None)

    def _close(self, name: tuple[str, str], register: Register) -> list[Reply]:
        reason = f"a new run of the group was begun by member {register.member} ({register.place})"
        lost = RegistrationRefused(f"job {name[0]!r}, group {name[1]!r}: {reason}")
        master = self._masters.pop(name)
        for session in [session for session, seat in self._seats.items() if seat.master is master]:
            self._forget(session)
            self._past.end_session(session, master.epoch, lost)
        replies = master.break_all(lambda _: lost)
        master.retire()
        return replies

    def _leave(self, now: float, leave: Leave) -> list[Reply]:
        seat = self._forget(leave.session)
        if seat is None:
            return []
        self._log_end(seat, f"leaves: {leave.cause}" if leave.cause else "leaves")
        return self._take_out(now, leave.session, seat, leave.cause)

    def _take_out(self, now: float, session: bytes, seat: Seat, cause: str) -> list[Reply]:
        """Ends what a member began that says goodbye."""
        _, replies = seat.master.remove_slave(now, seat.slave, cause)
        left = RegistrationRefused(f"session {session.hex()}: expected a new one, this one has left")
        self._past.end_session(session, seat.master.epoch, left)
        return self._end_if_empty(seat.master, replies)

    def _lose(self, now: float, session: bytes, cause: str) -> list[Reply]:
        seat = self._forget(session)
        if seat is None:
            return []
        self._log_end(seat, f"is lost: {cause}")
        loss, replies = seat.master.banish_slave(now, seat.slave, cause)
        if loss:
            self._past.end_session(session, seat.master.epoch, loss)
        return self._end_if_empty(seat.master, replies)

    def _end_deadlocks(self, now: float) -> list[Reply]:
        """Tells members that wait for one another; only the members of a job can."""
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in self._masters.items():
            jobs[job].append(master)
        replies: list[Reply] = []
        for masters in jobs.values():
            if waits := deadlock.find(masters, now):
                table = deadlock.Table(waits, now)
                logger.warning("%s", table.error(waits[0]))
                replies += [reply for wait in waits for reply in self._end_wait(now, wait, table.error(wait))]
        return replies

    def _end_wait(self, now: float, wait: deadlock.Wait, error: RoundMismatch) -> list[Reply]:
        if wait.key:
            return wait.master.fail(wait.key, error)
        # Whoever waits for a group to open is told, and is out of it again: so it is told once.
        slaves = list(wait.master.membership.slaves.values())
        replies = [(slave.peer, failure(error)) for slave in slaves]
        for slave in slaves:
            self._forget(slave.session)
            replies += self._take_out(now, slave.session, Seat(wait.master, slave), "")
        return replies

    def _forget(self, session: bytes) -> Seat | None:
        self._liveness.forget(session)
        return self._seats.pop(session, None)

    def _log_end(self, seat: Seat, how: str) -> None:
        membership = seat.master.membership
        logger.info("job %r, group %r: %s %s", membership.job, membership.group, seat.slave, how)

    def _end_if_empty(self, master: SyncMaster, replies: list[Reply]) -> list[Reply]:
        """Forgets a group without members; else tells those who wait for one of its job that can never open."""
        membership = master.membership
        name = (membership.job, membership.group)
        if not master.nr_slaves and self._masters.get(name) is master:
            del self._masters[name]
            master.retire()
            if membership.is_open:
                self._past.end_group(name, master.epoch)
        return replies + self._mourn(master)

    def _mourn(self, world: SyncMaster) -> list[Reply]:
        """Whoever waits for a group to open may wait for the member that the world has lost, and is told once."""
        job, lost = world.membership.job, _failed_member(world)
        if lost is None or world.is_mourned:
            return []
        world.is_mourned = True
        groups = [master for name, master in self._masters.items() if name[0] == job and master.epoch == world.epoch]
        return [
            (slave.peer, failure(lost))
            for master in groups
            if master is not world and not master.membership.is_open
            for slave in master.membership.slaves.values()
        ]


def _failed_member(world: SyncMaster) -> StatsdBNError | None:
    """Returns why the group of all members of a job is broken, if one has failed; None for any other group."""
    membership = world.membership
    has_failed = membership.group == WORLD and membership.lost and membership.lost.fields.get("cause")
    return membership.lost if has_failed else None
