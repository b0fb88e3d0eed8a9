"""Dispatcher: from a frame to the group it is for, and back to frames.

The whole server minus its socket. It is pure like the masters it holds: `receive` takes a time, a peer and a
frame and returns the frames to send. Nothing that comes from a peer raises out of it: a bad frame costs its sender an
error and nobody else anything.
"""

import logging
from dataclasses import asdict
from typing import Any

from server.core import deadlock, report
from server.core.eviction import Eviction
from server.core.mismatches import Mismatches
from server.core.registration import Registration
from server.core.registry import Registry, Seat
from server.core.report import Reports
from server.group.master import SyncMaster, unknown
from server.group.rounds import Reply, failure
from server.group.seals import Seals
from server.limits.access import ANYBODY, REVOKED, Access, Tenant
from server.limits.account import FUTURE_BYTES, ROUND_BYTES, Account
from server.limits.fair_share import STRANGERS
from server.limits.quota import Budget, Quota, size_of
from statsd_bn.errors import (
    AuthenticationRefused,
    LimitExceeded,
    MasterStopped,
    ProtocolError,
    RegistrationRefused,
    RoundMismatch,
    StatsdBNError,
)
from statsd_bn.members import NOBODY
from statsd_bn.messages import (
    NO_SERVER,
    Contribution,
    Heartbeat,
    Leave,
    Register,
    Registered,
    Request,
    Result,
    StatusRequest,
)
from statsd_bn.wire import decode_request, encode, named_session

logger = logging.getLogger("statsd_bn.server")

# Why a member is lost that has come back after a restart: it had been lost before; or its results did not arrive, and
# without them nobody knows what the others are to be given.
OVERTAKEN = "the others had gone on without it before the server was restarted"
INCOMPLETE = "what it was given did not come back after the server was restarted"


class Dispatcher:
    """All groups of all jobs.

    Args:
        server: a random id of this life of the server.
        started: the time it began, on the clock that `receive` is given.
        quota: how much it takes and keeps; default: as much as the protocol allows.
        seals: how it knows its own aggregates again after a restart; default: it does not.

    Attributes:
        probe: a frame that means nothing to any member, to try whether it can be reached.
        tally: what was refused.
        received: how many frames have come.
        bad_frames: how many of them were unsound.
        refused: how many of them were unsound, or refused in a group's name, or of no session that has a seat.
    """

    def __init__(self, server: bytes, started: float, quota: Quota | None = None, seals: Seals | None = None) -> None:
        self._server = server
        self._started = started
        # No session has a digest of zero bytes, so nobody takes it for an answer.
        self.probe = encode(Registered(NO_SERVER, server, 0, 0, 0, NOBODY))
        self._budget = Budget(quota)
        self._registry = Registry(started, self._budget.quota.silence_seconds)
        self._eviction = Eviction(self._registry, self._budget)
        self._registration = Registration(server, self._registry, self._budget, self._eviction, seals)
        self._mismatches = Mismatches()
        self._reports = Reports(self._counts)
        self.tally = self._budget.tally
        self.received = 0
        self.bad_frames = 0
        self.refused = 0

    def receive(self, now: float, peer: bytes, frame: bytes, tenant: Tenant = ANYBODY) -> list[Reply]:
        """Takes one frame from a peer and returns the frames to send; `tenant` is whose key the peer has."""
        self.received += 1
        try:
            self._budget.check_frame(frame)
            return self._handle(now, peer, decode_request(frame), tenant)
        except StatsdBNError as error:
            return [(peer, self._refuse(error))]

    def tick(self, now: float) -> list[Reply]:
        """Ends what is over its time, members and rounds; to be called several times a second."""
        # Members first: who is lost says more than who is late.
        registry = self._registry
        replies = self._lose(now, registry.liveness.lost(now))
        memberships = [master.membership for master in registry.masters.values()]
        lost = [(slave.session, INCOMPLETE) for membership in memberships for slave in membership.incomplete(now)]
        lost += [(slave.session, OVERTAKEN) for membership in memberships for slave in membership.overtaken]
        replies += self._lose(now, lost)
        replies += [reply for master in registry.masters.values() for reply in master.expire(now)]
        replies += [reply for master in registry.masters.values() for reply in registry.mourn(master)]
        return replies + self._end_deadlocks(now)

    @property
    def has_members(self) -> bool:
        """Whether anybody is registered."""
        return bool(self._registry.seats)

    @property
    def has_had_members(self) -> bool:
        """Whether anybody is registered, or was."""
        return self._registry.has_had_members

    def payer(self, frame: bytes, tenant: Tenant) -> str:
        """Returns for whom the work is that a frame makes, see `server.limits.fair_share`."""
        if tenant is not ANYBODY:
            return tenant.owner("")
        seat = self._registry.seats.get(named_session(frame))
        return seat.master.owner if seat else STRANGERS

    @property
    def account(self) -> Account:
        """What is kept."""
        return self._budget.account

    def member_of(self, frame: bytes) -> bytes:
        """Returns the session that a frame names if it has a seat; else nothing."""
        try:
            session: bytes = getattr(decode_request(frame), "session", b"")
        except ProtocolError:
            return b""
        return session if self.has_seat(session) else b""

    def has_seat(self, session: bytes) -> bool:
        """Returns whether a session has a seat."""
        return session in self._registry.seats

    def exceeded(self, text: str, limit: int, what: str) -> LimitExceeded:
        """Counts a refusal for want of room, and returns its error."""
        return self._budget.exceeded(text, limit, what)

    def expel(self, now: float, access: Access) -> list[Reply]:
        """Takes those for lost whose keys are no longer let in, or no longer for their job."""
        seats = self._registry.seats.items()
        refused = (session for session, seat in seats if not access.allows(seat.key, seat.master.membership.job))
        return self._lose(now, [(session, REVOKED) for session in refused])

    def probes(self, since: float) -> list[Reply]:
        """Returns harmless frames to the members not heard since a time.

        Whoever cannot be sent one may have gone, see `unreachable`.
        """
        return [(peer, self.probe) for peer in self._registry.liveness.addresses(since)]

    def unreachable(self, now: float, peer: bytes) -> list[Reply]:
        """Takes note that nothing can be delivered to a peer; returns harmless frames to where else its members are.

        A member that is nowhere to be reached, and is not heard again in time, is lost at a later `tick`.
        """
        return [(other, self.probe) for other in self._registry.liveness.unreachable(now, peer)]

    def farewell(self) -> list[Reply]:
        """Tells all members that this server ends for good; those who are busy find it before their next round."""
        stopped = MasterStopped("the master stopped with the process that had started it")
        seats = self._registry.seats.values()
        return [(seat.slave.peer, failure(seat.master.membership.lost or stopped)) for seat in seats]

    def stop(self) -> list[Reply]:
        """Ends all waits because the server stops."""
        return [reply for master in self._registry.masters.values() for reply in master.stop()]

    def report(self, now: float, tenant: Tenant = ANYBODY) -> dict[str, Any]:
        """Returns the status report, as far as it concerns a tenant."""
        return {**self._counts(now), **report.groups(self._masters(tenant), now)}

    def _counts(self, now: float) -> dict[str, Any]:
        return {
            "server": self._server.hex(),
            "seconds": now - self._started,
            "received": self.received,
            "bad_frames": self.bad_frames,
            **asdict(self.tally),
        }

    def _handle(self, now: float, peer: bytes, message: Request, tenant: Tenant) -> list[Reply]:
        if tenant is not ANYBODY:
            self._check_owner(message, tenant)
        match message:
            case Contribution():
                self._registry.liveness.hear(now, message.session, peer)
                replies = self._contribute(now, message, peer)
            case Heartbeat():
                replies = self._beat(now, message, peer)
            case Register():
                replies = self._registration.register(now, message, peer, tenant)
                self._registry.liveness.begin(now, message.session, peer)
            case Result():
                self._registry.liveness.hear(now, message.session, peer)
                replies = self._recall(now, message, peer)
            case Leave():
                replies = self._registry.leave(now, message.session, message.cause)
            case StatusRequest():
                replies = [(peer, self._reports.frame(now, tenant, self._masters(tenant)))]
        return replies

    def _check_owner(self, message: Request, tenant: Tenant) -> None:
        """What one key has begun another neither goes on with nor ends, and nobody sees or joins a foreign job."""
        if isinstance(message, Register) and not tenant.may(message.job):
            raise RegistrationRefused(
                f"job {message.job!r}: expected a job that the key of {tenant.name!r} is for, "
                f"{' or '.join(tenant.jobs)}; give the run such a name, or a key for this one"
            )
        seat = self._registry.seats.get(getattr(message, "session", b""))
        if seat and seat.key != tenant.key:
            raise AuthenticationRefused(
                f"authentication refused: the session that {tenant.name!r} names is another key's",
                reason="foreign session",
            )

    def _masters(self, tenant: Tenant) -> list[SyncMaster]:
        return [master for (job, _), master in self._registry.masters.items() if tenant.may(job)]

    def _refuse(self, error: StatsdBNError) -> bytes:
        self.refused += 1
        if isinstance(error, ProtocolError):
            self.bad_frames += 1
        logger.warning("refused: %s", error)
        return failure(error)

    def _contribute(self, now: float, contribution: Contribution, peer: bytes) -> list[Reply]:
        seat = self._registry.seats.get(contribution.session)
        if seat is None:
            self._count_stranger()
            return [(peer, failure(self._stranger(contribution.session), contribution.key))]
        if self._budget.narrows_contributions:
            try:
                self._budget.check_contribution(contribution)
            except LimitExceeded as error:
                return [(peer, failure(error, contribution.key))]
        if self._budget.is_crowded:
            made_room = self._make_room(seat, contribution)
            return made_room + seat.master.contribute(now, seat.slave, contribution, peer)
        return seat.master.contribute(now, seat.slave, contribution, peer)

    def _make_room(self, seat: Seat, contribution: Contribution) -> list[Reply]:
        size = size_of(contribution.rows) + ROUND_BYTES + FUTURE_BYTES * seat.master.nr_slaves
        return self._eviction.for_bytes(seat.master.owner, size, has_key=bool(seat.key))

    def _recall(self, now: float, result: Result, peer: bytes) -> list[Reply]:
        seat = self._registry.seats.get(result.session)
        if seat is None:
            self._count_stranger()
            # Many come together, and each answer would ask for all again. A contribution will be answered.
            return []
        return seat.master.recall(now, seat.slave, result.aggregate, peer)

    def _beat(self, now: float, heartbeat: Heartbeat, peer: bytes) -> list[Reply]:
        known = self._registry.liveness.beat(now, heartbeat.session, peer)
        if known and not self._registry.seats[heartbeat.session].slave.owes:
            return []
        if not known:
            self._count_stranger()
        return [(peer, failure(self._stranger(heartbeat.session)))]

    def _count_stranger(self) -> None:
        self.tally.strangers += 1
        self.refused += 1

    def _stranger(self, session: bytes) -> StatsdBNError:
        """Returns what somebody is told who has no seat: why it has none any more, or that it is unknown."""
        return self._registry.past.fate(session) or unknown(session)

    def _lose(self, now: float, lost: list[tuple[bytes, str]]) -> list[Reply]:
        return [reply for session, cause in lost for reply in self._registry.lose(now, session, cause)]

    def _end_deadlocks(self, now: float) -> list[Reply]:
        """Tells members that wait for one another; only the members of a job can."""
        replies: list[Reply] = []
        for waits in self._mismatches.find(now, dict(self._registry.masters)):
            table = deadlock.Table(waits, now)
            logger.warning("%s", table.error(waits[0]))
            replies += [reply for wait in waits for reply in self._end_wait(now, wait, table.error(wait))]
        return replies

    def _end_wait(self, now: float, wait: deadlock.Wait, error: RoundMismatch) -> list[Reply]:
        if wait.key:
            return wait.master.open_rounds.fail(wait.key, error)
        return self._registry.dissolve(now, wait.master, error)
