"""Dispatcher: routes each frame to its group and returns the reply frames.

This is the whole server without its socket, and pure like the groups: `receive` takes a time, a peer and a frame, and
returns the frames to send. It never raises: a bad frame costs its sender an error reply and affects no other member.

    received = dispatcher.receive(time.monotonic(), peer, frame)
    for peer, frame in received.replies:
        socket.send_multipart([peer, frame])
"""

import logging
from dataclasses import asdict, dataclass
from typing import Any

from server.core import deadlock, report
from server.core.deadlock import DeadlockDetector
from server.core.hang_probe import HangProbe
from server.core.registration import Registration
from server.core.registry import Registry, SessionRecord
from server.core.report import StatusReports
from server.group.master import SyncMaster
from server.group.rounds import Reply, failure_frame, unknown_session
from server.security.access import ANONYMOUS, REVOKED, Access, Principal
from server.security.quota import Quota, QuotaUsage
from statsd_bn import messages
from statsd_bn.errors import (
    AuthenticationRefused,
    MasterStopped,
    ProtocolError,
    RegistrationRefused,
    RoundMismatch,
    StatsdBNError,
)
from statsd_bn.members import NO_MEMBERS
from statsd_bn.messages import NO_SERVER, WORLD
from statsd_bn.text import error_summary, log_line
from statsd_bn.wire import decode_request, encode

logger = logging.getLogger("statsd_bn.server")

# Requests that need no session.
_QUERIES = (messages.StatusRequest, messages.FiguresRequest)

# Reports about rounds that a member has finished, from its heartbeat socket or its main one.
_HeartbeatReport = messages.RoundTrips | messages.LatenessReport | messages.SkewStats
RoundReport = _HeartbeatReport | messages.Result | messages.RoundDone | messages.NonFiniteRound

# Causes of the loss of a member that returned to a restarted server: the group had dropped it before, or the results
# that it announced did not arrive.
OVERTAKEN = "the others had continued without it before the server restarted"
INCOMPLETE = "its results did not arrive after the server restarted"


@dataclass(slots=True)  # not frozen, because that takes three times as long, for each frame
class Received:
    """Outcome of a frame."""

    replies: list[Reply]
    session: bytes = b""  # the registered session that sent it; b"" without one, or if it has just left
    is_refused: bool = False  # it was malformed, refused by a group, or of an unregistered session


class Dispatcher:
    """All groups of all jobs."""

    def __init__(self, server: bytes, started: float, quota: Quota | None = None) -> None:
        self._server = server
        self._started = started
        # Every member ignores this frame, since no session has a digest of zero bytes; sending it shows whether a peer
        # is connected.
        self.probe = encode(messages.Registered(NO_SERVER, server, 0, 0, 0, NO_MEMBERS))
        self._usage = QuotaUsage(quota)
        silence = self._usage.quota.silence_seconds
        self._registry = Registry(started, silence)
        self._registration = Registration(server, self._registry, self._usage)
        self._hang_probe = HangProbe(self._registry, silence)
        self._deadlocks = DeadlockDetector(silence)
        self._reports = StatusReports(self._counts, self._usage)
        self.counters = self._usage.counters
        self.received = self.bad_frames = 0
        self._last_compared = 0

    def receive(self, now: float, peer: bytes, frame: bytes, principal: Principal = ANONYMOUS) -> Received:
        """Handle one frame; never raises."""
        self.received += 1
        try:
            return self._handle(now, peer, decode_request(frame), principal)
        except StatsdBNError as error:
            return self._refuse(peer, error)

    def tick(self, now: float) -> list[Reply]:
        """End members and rounds at their deadlines; call it every TICK_SECONDS."""
        # Members first: a lost member explains more than a timeout.
        registry = self._registry
        replies = self._lose(now, registry.liveness.lost(now))
        recovering = [master.membership for master in registry.masters.values() if master.membership.recovery]
        lost = [(one.session, INCOMPLETE) for membership in recovering for one in membership.incomplete(now)]
        lost += [(one.session, OVERTAKEN) for membership in recovering for one in membership.overtaken]
        replies += self._lose(now, lost)
        for master in registry.masters.values():
            replies += master.expire(now)
        for master in registry.masters.values():
            replies += registry.notify_waiting(master) + registry.notify_broken(now, master)
        self._compare_data(now)
        replies += self._hang_probe.tick(now)
        return replies + self._end_deadlocks(now)

    def _compare_data(self, now: float) -> None:
        """Compare the data of the members of one group; the next tick starts at the next group."""
        masters = list(self._registry.masters.values())
        for turn in range(len(masters)):
            place = (self._last_compared + 1 + turn) % len(masters)
            if masters[place].health.compare_samples(now):
                self._last_compared = place
                return

    @property
    def nr_ranks(self) -> int:
        """Number of registered ranks, each counted once per job."""
        return sum(master.nr_slaves for (_, group), master in self._registry.masters.items() if group == WORLD)

    @property
    def has_members(self) -> bool:
        """Whether any member is registered."""
        return bool(self._registry.sessions)

    @property
    def has_had_members(self) -> bool:
        """Whether any member has ever registered."""
        return self._registry.has_had_members

    def is_registered(self, session: bytes) -> bool:
        """Whether a session is registered."""
        return session in self._registry.sessions

    def revoke(self, now: float, access: Access) -> list[Reply]:
        """Remove members with keys that are revoked, or no longer valid for their jobs."""
        records = self._registry.sessions.items()
        refused = [one for one, record in records if not access.allows(record.key, record.master.membership.job)]
        return self._lose(now, [(session, REVOKED) for session in refused])

    def probes(self, since: float) -> list[Reply]:
        """Probes for members that were silent since a time. If sending one fails, call `unreachable`."""
        return [(peer, self.probe) for peer in self._registry.liveness.probe_addresses(since)]

    def unreachable(self, now: float, peer: bytes) -> list[Reply]:
        """Record that a peer is disconnected; returns probes for the other addresses of its members."""
        return [(other, self.probe) for other in self._registry.liveness.unreachable(now, peer)]

    def shutdown_notices(self) -> list[Reply]:
        """Failures for all members, because no successor follows; a busy member reads it before its next round."""
        stopped = MasterStopped("the server stopped because the process that started it ended")
        records = self._registry.sessions.values()
        return [(one.contributor.peer, failure_frame(one.master.membership.lost or stopped)) for one in records]

    def stop(self) -> list[Reply]:
        """End all waits: this server stops and has no successor."""
        return [reply for master in self._registry.masters.values() for reply in master.stop()]

    def report(self, now: float, principal: Principal = ANONYMOUS) -> dict[str, Any]:
        """Status report of the jobs that a key may see."""
        ended = self._registry.ended_jobs.report(now, principal)
        return {**self._counts(now), **report.group_entries(self._masters(principal), now, ended)}

    def _counts(self, now: float) -> dict[str, Any]:
        return {
            "server": self._server.hex(),
            "seconds": now - self._started,
            "received": self.received,
            "bad_frames": self.bad_frames,
            **asdict(self.counters),
        }

    def _handle(self, now: float, peer: bytes, message: messages.Request, principal: Principal) -> Received:
        if isinstance(message, _QUERIES):
            return Received([(peer, self._answer(now, message, principal))])
        record = self._registry.sessions.get(message.session)
        if principal is not ANONYMOUS:
            self._check_owner(message, record, principal)
        match message:
            case messages.Contribution():
                return self._contribute(now, message, record, peer)
            case messages.Heartbeat() | messages.StackReport():
                return self._heartbeat(now, message, record, peer)
            case messages.Register():
                # A refused member, as of a broken group, is alive as well.
                self._registry.liveness.record_message(now, message.session, peer)
                replies = self._registration.register(now, message, peer, principal)
                self._registry.liveness.add(now, message.session, peer)
                return Received(replies, message.session)
            case messages.Leave():
                return Received(self._registry.leave(now, message.session, message.cause))
            case _:
                return self._record(now, message, record, peer)

    def _answer(
        self, now: float, asked: messages.StatusRequest | messages.FiguresRequest, principal: Principal
    ) -> bytes:
        """Answer to a request without a session."""
        if isinstance(asked, messages.StatusRequest):
            return self._reports.frame(now, principal, self._masters(principal), self._registry.ended_jobs)
        master = self._registry.masters.get((asked.job, asked.group)) if principal.may_access(asked.job) else None
        return self._reports.figures(now, principal, asked, master)

    def _check_owner(self, message: messages.Request, record: SessionRecord | None, principal: Principal) -> None:
        """Refuse a session of another key, and a job that this key may not join."""
        if principal.read_only:
            raise RegistrationRefused(
                "expected a client's key, got the server's own, which may only ask for the status; give "
                "secrets/NAME.key_secret"
            )
        if isinstance(message, messages.Register) and not principal.may_access(message.job):
            raise RegistrationRefused(
                f"job {message.job!r}: the key of {principal.name!r} is for jobs "
                f"{' or '.join(principal.jobs)} only; rename the job, or use a key for this one"
            )
        if record and record.key != principal.key:
            raise AuthenticationRefused(
                f"authentication refused: the session of {principal.name!r} belongs to another key",
                reason="foreign session",
            )

    def _masters(self, principal: Principal) -> list[SyncMaster]:
        return [master for (job, _), master in self._registry.masters.items() if principal.may_access(job)]

    def _refuse(self, peer: bytes, error: StatsdBNError) -> Received:
        self.bad_frames += isinstance(error, ProtocolError)
        logger.warning("refused: %s", log_line(error))
        return Received([(peer, failure_frame(error))], is_refused=True)

    def _refuse_unregistered(self, replies: list[Reply]) -> Received:
        self.counters.strangers += 1
        return Received(replies, is_refused=True)

    def _contribute(
        self, now: float, contribution: messages.Contribution, record: SessionRecord | None, peer: bytes
    ) -> Received:
        session = contribution.session
        if record is None:
            return self._refuse_unregistered([(peer, failure_frame(self._error_for(session), contribution.key))])
        self._registry.liveness.record_message(now, session, peer)
        return Received(record.master.contribute(now, record.contributor, contribution, peer), session)

    def _record(self, now: float, report: RoundReport, record: SessionRecord | None, peer: bytes) -> Received:
        """Record a member's report about rounds that it has finished."""
        if record is None:
            # Such frames arrive in bulk, and an answer to each would request all of them again. The next contribution
            # gets the answer.
            return self._refuse_unregistered([])
        master, contributor, liveness = record.master, record.contributor, self._registry.liveness
        # A frame from the heartbeat socket must not replace the address of the main socket.
        is_from_heartbeat = isinstance(report, _HeartbeatReport)
        note = liveness.record_heartbeat if is_from_heartbeat else liveness.record_message
        note(now, report.session, peer)
        replies: list[Reply] = []
        match report:
            case messages.Result():
                replies = master.record_result(now, contributor, report.aggregate, peer)
            case messages.RoundDone():
                master.finish_round(now, contributor, report.key)
            case messages.RoundTrips() | messages.LatenessReport():
                master.health.add_latency(contributor, report)
            case messages.NonFiniteRound():
                master.record_non_finite(contributor, report)
            case messages.SkewStats():
                master.health.add_skew(now, report)
        return Received(replies, report.session)

    def _heartbeat(
        self, now: float, message: messages.Heartbeat | messages.StackReport, record: SessionRecord | None, peer: bytes
    ) -> Received:
        session = message.session
        if record is None:
            return self._refuse_unregistered([(peer, failure_frame(self._error_for(session)))])
        if isinstance(message, messages.StackReport):
            # This is no heartbeat: else a rank that freezes after its report would be detected later.
            self._hang_probe.record_report(now, message)
        else:
            self._registry.liveness.record_heartbeat(now, session, peer)
            record.master.record_heartbeat(now, record.contributor, message)
        # A member with results pending gets `unknown session`, registers again and sends them.
        is_pending = record.contributor.results_pending
        return Received([(peer, failure_frame(self._error_for(session)))] if is_pending else [], session)

    def _error_for(self, session: bytes) -> StatsdBNError:
        """Error for an unregistered session: the reason of its end, or `unknown session`."""
        return self._registry.tombstones.error_for(session) or unknown_session(session)

    def _lose(self, now: float, lost: list[tuple[bytes, str]]) -> list[Reply]:
        return [reply for session, cause in lost for reply in self._registry.lose(now, session, cause)]

    def _end_deadlocks(self, now: float) -> list[Reply]:
        """Report deadlocks to their members; a deadlock is always within one job."""
        replies: list[Reply] = []
        for waits in self._deadlocks.find(now, dict(self._registry.masters), self._hang_probe.sampled()):
            table = deadlock.Table(waits, now)
            logger.info("%s", log_line(table.error(waits[0])))  # INFO: each of the ranks raises it
            for wait in waits:
                wait.master.logged_cause = error_summary(table.error(wait))
            replies += [reply for wait in waits for reply in self._end_wait(now, wait, table.error(wait))]
            self._hang_probe.record_mismatch(now, waits[0].master.membership.job)
        return replies

    def _end_wait(self, now: float, wait: deadlock.Wait, error: RoundMismatch) -> list[Reply]:
        if wait.blocked:
            # Its main thread waits in torch; only its heartbeat thread can receive this.
            address = self._registry.liveness.heartbeat_address(wait.blocked.session)
            return [(address, failure_frame(error))] if address else []
        if wait.key:
            return wait.master.open_rounds.fail(wait.key, error)
        if wait.master.membership.is_open:
            return wait.master.pause_rejoining(error)
        return self._registry.dissolve(now, wait.master, error)
