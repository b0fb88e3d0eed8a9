"""Dispatcher: from a frame to the group it is for, and back to frames.

This is the whole server without its socket. It is pure like the masters it holds: `receive` takes a time, a peer and a
frame, and returns the frames to send. No frame makes it raise: a bad one costs its sender an error, and others nothing.

    received = dispatcher.receive(time.monotonic(), peer, frame)
    for peer, frame in received.replies:
        socket.send_multipart([peer, frame])
"""

import logging
from dataclasses import asdict
from typing import Any

from server.core import deadlock, report
from server.core.deadlock import Mismatches
from server.core.hang_probe import Inquiry
from server.core.registration import Registration
from server.core.registry import Registry, SessionRecord
from server.core.report import Reports
from server.group.master import SyncMaster
from server.group.rounds import Reply, failure, unknown
from server.security.access import ANYBODY, REVOKED, Access, Tenant
from server.security.quota import Budget, Quota
from statsd_bn.error_text import in_brief, in_log
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
    WORLD,
    Contribution,
    FiguresRequest,
    Heartbeat,
    LatenessReport,
    Leave,
    NonFiniteRound,
    Register,
    Registered,
    Request,
    Result,
    RoundDone,
    RoundTrips,
    SkewStats,
    StackReport,
    StatusRequest,
)
from statsd_bn.wire import decode_request, encode

logger = logging.getLogger("statsd_bn.server")

# What anybody may ask.
_QUESTIONS = (StatusRequest, FiguresRequest)

# Why a member that came back after a restart is lost: it had been lost before; or its results did not arrive, and
# without them nobody knows what to give the others.
OVERTAKEN = "the others had gone on without it before the server was restarted"
INCOMPLETE = "what it was given did not come back after the server was restarted"


class Received:
    """What became of a frame.

    Attributes:
        replies: the frames to send.
        session: the registered session that sent it; b"" if none did, or if it has just left.
        is_refused: whether it was unsound, or refused in a group's name, or named a session that is not registered.
    """

    # One is made for each frame, in a third of the time that a frozen dataclass takes.
    __slots__ = ("is_refused", "replies", "session")

    def __init__(self, replies: list[Reply], session: bytes = b"", is_refused: bool = False) -> None:
        self.replies = replies
        self.session = session
        self.is_refused = is_refused


class Dispatcher:
    """All groups of all jobs.

    Args:
        server: a random id of this life of the server.
        started: the time it began, on the clock that `receive` is given.
        quota: how much it accepts and keeps; default: as much as the protocol allows.

    Attributes:
        probe: a frame that every member ignores; shows whether a member can be reached.
        tally: what was refused.
        received: how many frames have come.
        bad_frames: how many of them were unsound.
    """

    def __init__(self, server: bytes, started: float, quota: Quota | None = None) -> None:
        self._server = server
        self._started = started
        # No session has a digest of zero bytes, so no member takes it for an answer.
        self.probe = encode(Registered(NO_SERVER, server, 0, 0, 0, NOBODY))
        self._budget = Budget(quota)
        self._max_frame_bytes = self._budget.quota.max_frame_bytes
        self._registry = Registry(started, self._budget.quota.silence_seconds)
        self._registration = Registration(server, self._registry, self._budget)
        self._inquiry = Inquiry(self._registry, self._budget.quota.silence_seconds)
        self._mismatches = Mismatches(self._budget.quota.silence_seconds)
        self._reports = Reports(self._counts, self._budget)
        self.tally = self._budget.tally
        self.received = 0
        self.bad_frames = 0
        self._looked_at = 0

    def receive(self, now: float, peer: bytes, frame: bytes, tenant: Tenant = ANYBODY) -> Received:
        """Handle one frame.

        Args:
            now: the time.
            peer: where it came from.
            frame: its bytes.
            tenant: the owner of the peer's key.
        """
        self.received += 1
        try:
            if len(frame) > self._max_frame_bytes:
                self._budget.check_frame(frame)
            return self._handle(now, peer, decode_request(frame), tenant)
        except StatsdBNError as error:
            return self._refuse(peer, error)

    def tick(self, now: float) -> list[Reply]:
        """End members and rounds whose time is over; call it several times a second."""
        # Members first: who is lost says more than who is late.
        registry = self._registry
        replies = self._lose(now, registry.liveness.lost(now))
        memberships = [master.membership for master in registry.masters.values()]
        if recovering := [membership for membership in memberships if membership.recovery]:
            lost = [
                (contributor.session, INCOMPLETE)
                for membership in recovering
                for contributor in membership.incomplete(now)
            ]
            lost += [
                (contributor.session, OVERTAKEN) for membership in recovering for contributor in membership.overtaken
            ]
            replies += self._lose(now, lost)
        for master in registry.masters.values():
            replies += master.expire(now)
        for master in registry.masters.values():
            replies += registry.tell_of_loss(master) + registry.tell_news(now, master)
        self._look(now)
        replies += self._inquiry.tick(now)
        return replies + self._end_deadlocks(now)

    def _look(self, now: float) -> None:
        """See how far the data of one group's members differ; the next one has its turn in the next tick."""
        masters = list(self._registry.masters.values())
        for turn in range(len(masters)):
            place = (self._looked_at + 1 + turn) % len(masters)
            if masters[place].insight.look(now):
                self._looked_at = place
                return

    @property
    def nr_ranks(self) -> int:
        """How many ranks are registered, each once for all groups of its job."""
        worlds = [master for (_, group), master in self._registry.masters.items() if group == WORLD]
        return sum(len(master.membership.contributors) for master in worlds)

    @property
    def has_members(self) -> bool:
        """Whether any member is registered."""
        return bool(self._registry.sessions)

    @property
    def has_had_members(self) -> bool:
        """Whether any member is registered, or was."""
        return self._registry.has_had_members

    def is_registered(self, session: bytes) -> bool:
        """Whether a session is registered."""
        return session in self._registry.sessions

    def expel(self, now: float, access: Access) -> list[Reply]:
        """End the members whose keys are revoked, or no longer for their job."""
        records = self._registry.sessions.items()
        refused = (
            session for session, record in records if not access.allows(record.key, record.master.membership.job)
        )
        return self._lose(now, [(session, REVOKED) for session in refused])

    def probes(self, since: float) -> list[Reply]:
        """Probes for the members not heard since a time; one that cannot be sent tells `unreachable`."""
        return [(peer, self.probe) for peer in self._registry.liveness.addresses(since)]

    def unreachable(self, now: float, peer: bytes) -> list[Reply]:
        """Note that a peer cannot be reached; returns probes for the other addresses of its members.

        A member that has no address left, and is not heard again in time, is lost at a later `tick`.
        """
        return [(other, self.probe) for other in self._registry.liveness.unreachable(now, peer)]

    def farewell(self) -> list[Reply]:
        """Tell all members that this server ends for good; a busy member reads it before its next round."""
        stopped = MasterStopped("the server has ended with the process that had started it")
        records = self._registry.sessions.values()
        return [(record.contributor.peer, failure(record.master.membership.lost or stopped)) for record in records]

    def stop(self) -> list[Reply]:
        """End all waits because the server ends for good."""
        return [reply for master in self._registry.masters.values() for reply in master.stop()]

    def report(self, now: float, tenant: Tenant = ANYBODY) -> dict[str, Any]:
        """Status report of the jobs that a tenant may see."""
        ended = self._registry.ended_jobs.told(now, tenant)
        return {**self._counts(now), **report.groups(self._masters(tenant), now, ended)}

    def _counts(self, now: float) -> dict[str, Any]:
        return {
            "server": self._server.hex(),
            "seconds": now - self._started,
            "received": self.received,
            "bad_frames": self.bad_frames,
            **asdict(self.tally),
        }

    def _handle(self, now: float, peer: bytes, message: Request, tenant: Tenant) -> Received:
        if isinstance(message, _QUESTIONS):
            return Received([(peer, self._tell(now, message, tenant))])
        record = self._registry.sessions.get(message.session)
        if tenant is not ANYBODY:
            self._check_owner(message, record, tenant)
        match message:
            case Contribution():
                return self._contribute(now, message, record, peer)
            case Heartbeat() | StackReport():
                return self._beat(now, message, record, peer)
            case Register():
                # One whose registration is refused, as by a broken group, is alive as well.
                self._registry.liveness.hear(now, message.session, peer)
                replies = self._registration.register(now, message, peer, tenant)
                self._registry.liveness.begin(now, message.session, peer)
                return Received(replies, message.session)
            case Result() | RoundDone() | SkewStats() | RoundTrips() | LatenessReport() | NonFiniteRound():
                return self._hear_of(now, message, record, peer)
            case Leave():
                return Received(self._registry.leave(now, message.session, message.cause))

    def _tell(self, now: float, asked: StatusRequest | FiguresRequest, tenant: Tenant) -> bytes:
        """Frame that answers what anybody may ask."""
        if isinstance(asked, StatusRequest):
            return self._reports.frame(now, tenant, self._masters(tenant), self._registry.ended_jobs)
        master = self._registry.masters.get((asked.job, asked.group)) if tenant.may(asked.job) else None
        return self._reports.figures(now, tenant, asked, master)

    def _check_owner(self, message: Request, record: SessionRecord | None, tenant: Tenant) -> None:
        """Refuse a session that registered with another key, and a job that this key is not for."""
        if tenant.only_asks:
            raise RegistrationRefused(
                "expected a client's key, got the server's own, which may only ask for the status; give "
                "secrets/NAME.key_secret"
            )
        if isinstance(message, Register) and not tenant.may(message.job):
            raise RegistrationRefused(
                f"job {message.job!r}: expected a job that the key of {tenant.name!r} is for, "
                f"{' or '.join(tenant.jobs)}; give the run such a name, or a key for this one"
            )
        if record and record.key != tenant.key:
            raise AuthenticationRefused(
                f"authentication refused: the session that {tenant.name!r} names is another key's",
                reason="foreign session",
            )

    def _masters(self, tenant: Tenant) -> list[SyncMaster]:
        return [master for (job, _), master in self._registry.masters.items() if tenant.may(job)]

    def _refuse(self, peer: bytes, error: StatsdBNError) -> Received:
        self.bad_frames += isinstance(error, ProtocolError)
        logger.warning("refused: %s", in_log(error))
        return Received([(peer, failure(error))], is_refused=True)

    def _refuse_stranger(self, replies: list[Reply]) -> Received:
        self.tally.strangers += 1
        return Received(replies, is_refused=True)

    def _contribute(
        self, now: float, contribution: Contribution, record: SessionRecord | None, peer: bytes
    ) -> Received:
        session = contribution.session
        if record is None:
            return self._refuse_stranger([(peer, failure(self._why_not(session), contribution.key))])
        self._registry.liveness.hear(now, session, peer)
        if self._budget.narrows_contributions:
            try:
                self._budget.check_contribution(contribution.key, contribution.rows.values.shape)
            except LimitExceeded as error:
                return Received([(peer, failure(error, contribution.key))], session)
        return Received(record.master.contribute(now, record.contributor, contribution, peer), session)

    def _hear_of(
        self,
        now: float,
        told: Result | RoundDone | SkewStats | RoundTrips | LatenessReport | NonFiniteRound,
        record: SessionRecord | None,
        peer: bytes,
    ) -> Received:
        """Take what a member tells of rounds that are over for it."""
        if record is None:
            # Many come together, and each answer would ask for all again. A contribution will be answered.
            return self._refuse_stranger([])
        liveness = self._registry.liveness
        # What comes over the heartbeats' socket must not hide the other one, to which a member may be reached still.
        note = liveness.beat if isinstance(told, RoundTrips | LatenessReport | SkewStats) else liveness.hear
        note(now, told.session, peer)
        if isinstance(told, Result):
            return Received(record.master.recall(now, record.contributor, told.aggregate, peer), told.session)
        if isinstance(told, RoundDone):
            record.master.settle(now, record.contributor, told.key)
        elif isinstance(told, RoundTrips | LatenessReport):
            record.master.insight.count(record.contributor, told)
        elif isinstance(told, NonFiniteRound):
            record.master.note(record.contributor, told)
        else:
            record.master.insight.file(now, told)
        return Received([], told.session)

    def _beat(self, now: float, said: Heartbeat | StackReport, record: SessionRecord | None, peer: bytes) -> Received:
        session = said.session
        if record is None:
            return self._refuse_stranger([(peer, failure(self._why_not(session)))])
        if isinstance(said, StackReport):
            # No sign of life, or a rank that freezes once it has answered would be found out so much later.
            self._inquiry.answer(now, said)
        else:
            self._registry.liveness.beat(now, session, peer)
            record.master.hear(now, record.contributor, said)
        # A member that owes results is told that it is unknown: it then registers again, and sends them.
        return Received([(peer, failure(self._why_not(session)))] if record.contributor.owes else [], session)

    def _why_not(self, session: bytes) -> StatsdBNError:
        """Error that tells a session why it is not registered: it has ended, or was never known."""
        return self._registry.ended.why(session) or unknown(session)

    def _lose(self, now: float, lost: list[tuple[bytes, str]]) -> list[Reply]:
        return [reply for session, cause in lost for reply in self._registry.lose(now, session, cause)]

    def _end_deadlocks(self, now: float) -> list[Reply]:
        """Tell the members that wait for one another; such members are always of one job."""
        replies: list[Reply] = []
        for waits in self._mismatches.find(now, dict(self._registry.masters), self._inquiry.asked()):
            table = deadlock.Table(waits, now)
            logger.info("%s", in_log(table.error(waits[0])))  # each of the ranks raises it
            for wait in waits:
                wait.master.logged_cause = in_brief(table.error(wait))
            replies += [reply for wait in waits for reply in self._end_wait(now, wait, table.error(wait))]
            self._inquiry.tell(now, waits[0].master.membership.job)
        return replies

    def _end_wait(self, now: float, wait: deadlock.Wait, error: RoundMismatch) -> list[Reply]:
        if wait.held:
            # It hears this where its heartbeats come from: its main thread is not here.
            address = self._registry.liveness.beacon(wait.held.session)
            return [(address, failure(error))] if address else []
        if wait.key:
            return wait.master.open_rounds.fail(wait.key, error)
        if wait.master.membership.is_open:
            return wait.master.turn_back(error)
        return self._registry.dissolve(now, wait.master, error)
