"""Dispatcher: routes each frame to its group and returns the reply frames.

This is the whole server without its socket, and pure like the groups: `receive` takes a time, a peer and a frame, and
returns the frames to send. It never raises: a bad frame costs its sender an error reply and affects no other member.

    received = dispatcher.receive(time.monotonic(), peer, frame)
    for peer, frame in received.replies:
        socket.send_multipart([peer, frame])
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from server.core import deadlock
from server.core.deadlock import DeadlockDetector
from server.core.hang_probe import HangProbe
from server.core.liveness import Session
from server.core.registry import Registry
from server.core.report import StatusReports
from server.group.rounds import Reply
from server.security.access import ANONYMOUS, REVOKED, Principal
from server.security.quota import Quota, QuotaUsage
from statsd_bn import limits, messages
from statsd_bn.errors import AuthenticationRefused, MasterStopped, ProtocolError, RegistrationRefused, StatsdBNError
from statsd_bn.members import NO_MEMBERS
from statsd_bn.messages import NO_SERVER, WORLD
from statsd_bn.text import error_summary, log_line
from statsd_bn.wire import decode_request, encode, encode_failure

logger = logging.getLogger("statsd_bn.server")

_QUERIES = (messages.StatusRequest, messages.FiguresRequest)  # without a session


@dataclass(slots=True)  # not frozen: each frame makes an object, and a frozen one takes three times as long
class Received:
    """Outcome of a frame."""

    replies: list[Reply]
    session: bytes = b""  # the registered session that sent the frame; b"" after a refusal, a query or a Leave
    is_refused: bool = False  # the frame was malformed or refused, or its sender had to be registered and is not


class Dispatcher:
    """All groups of all jobs."""

    def __init__(self, server: bytes, started: float, quota: Quota | None = None) -> None:
        self._server = server
        self._started = started
        # Sending this frame shows whether a peer is connected. Every member ignores it, since no session's digest is
        # all zeros.
        self.probe = encode(messages.Registered(NO_SERVER, server, 0, 0, 0, NO_MEMBERS))
        self._usage = usage = QuotaUsage(quota)
        silence = usage.quota.silence_seconds
        self._registry = Registry(server, started, usage)
        self._hang_probe = HangProbe(self._registry, silence)
        self._deadlocks = DeadlockDetector(silence)
        self._reports = StatusReports(self._registry, self._counts, usage)
        self.counters = usage.counters
        self.received = self.bad_frames = 0
        self._last_tick = started
        self._last_compared = 0

    def receive(self, now: float, peer: bytes, frame: bytes, principal: Principal = ANONYMOUS) -> Received:
        """Handle one frame; never raises."""
        self.received += 1
        try:
            message = decode_request(frame)
            if isinstance(message, _QUERIES):
                return Received([(peer, self._reports.answer(now, message, principal))])
            session = self._registry.sessions.get(message.session)
            if principal is not ANONYMOUS:
                _check_owner(message, session, principal)
            match message:
                case messages.Contribution() if session:
                    session.record_message(now, peer)
                    replies = session.master.contribute(now, session.contributor, message, peer)
                case messages.Leave():
                    return Received(self._registry.leave(now, message.session, message.cause))
                case messages.Register():
                    if session:  # even a member that will be refused is alive
                        session.record_message(now, peer)
                    replies = self._registry.register(now, message, peer, principal)
                case _ if session:
                    replies = self._record(now, message, session, peer)
                case _:
                    return self._refuse_unregistered(message, peer)
        except StatsdBNError as error:
            self.bad_frames += isinstance(error, ProtocolError)
            logger.warning("refused: %s", log_line(error))
            return Received([(peer, encode_failure(error))], is_refused=True)
        return Received(replies, message.session)

    def _record(self, now: float, message: messages.Request, session: Session, peer: bytes) -> list[Reply]:
        """Record a heartbeat or a report of a member."""
        master, contributor = session.master, session.contributor
        if isinstance(message, messages.StackReport):
            # Not counted as a sign of life: a rank that freezes after its report would be declared lost later.
            self._hang_probe.record_report(now, message)
        elif isinstance(message, messages.Result | messages.RoundDone | messages.NonFiniteRound):
            session.record_message(now, peer)
        else:
            session.record_heartbeat(now, peer)
        match message:
            case messages.Result():
                return master.record_result(now, contributor, message.aggregate, peer)
            case messages.RoundDone():
                master.finish_round(now, contributor, message.key)
            case messages.NonFiniteRound():
                master.record_non_finite(contributor, message)
            case messages.RoundTrips() | messages.LatenessReport():
                master.health.add_latency(contributor, message)
            case messages.SkewStats():
                master.health.add_skew(now, message)
            case messages.Heartbeat():
                master.record_heartbeat(now, contributor, message)
        if isinstance(message, messages.Heartbeat | messages.StackReport) and contributor.results_pending:
            # The error makes the member register again and send its results.
            return [(peer, encode_failure(self._registry.error_for(message.session)))]
        return []

    def _refuse_unregistered(self, message: messages.Request, peer: bytes) -> Received:
        self.counters.strangers += 1
        if not isinstance(message, messages.Contribution | messages.Heartbeat | messages.StackReport):
            # An error makes a member register and send all its results again; one error per result would request them
            # several times. So only contributions, heartbeats and stack reports are answered.
            return Received([], is_refused=True)
        key = message.key if isinstance(message, messages.Contribution) else None
        return Received([(peer, encode_failure(self._registry.error_for(message.session), key))], is_refused=True)

    def tick(self, now: float) -> list[Reply]:
        """Remove silent members, and end late rounds and deadlocks; call it every TICK_SECONDS."""
        registry, masters = self._registry, self._registry.masters.values()
        # The server itself may have been frozen or starved.
        was_delayed = now - self._last_tick > limits.HEARTBEAT_SECONDS
        self._last_tick = now
        # Members first: a lost member explains more than a timeout.
        replies = self._lose(now, registry.sessions.lost(now, was_delayed=was_delayed))
        replies += self._lose(now, [lost for master in masters for lost in master.membership.left_behind(now)])
        for master in masters:
            replies += master.expire(now)
        for master in masters:
            replies += registry.notify(now, master)
        self._compare_data(now)
        return replies + self._hang_probe.tick(now, was_delayed=was_delayed) + self._end_deadlocks(now)

    def _lose(self, now: float, lost: list[tuple[bytes, str]]) -> list[Reply]:
        return [reply for session, cause in lost for reply in self._registry.lose(now, session, cause)]

    def _compare_data(self, now: float) -> None:
        """Compare the data of the members of one group; the next tick starts at the next group."""
        masters = list(enumerate(self._registry.masters.values()))
        for number, master in sorted(masters, key=lambda entry: entry[0] <= self._last_compared):
            if master.health.compare_samples(now):
                self._last_compared = number
                return

    def _end_deadlocks(self, now: float) -> list[Reply]:
        """Report deadlocks to their members; a deadlock is always within one job."""
        replies: list[Reply] = []
        for waits in self._deadlocks.find(now, self._registry.masters):
            table = deadlock.Table(waits, now)
            logger.info("%s", log_line(table.error(waits[0])))  # INFO, because each rank raises the error anyway
            for wait in waits:
                error = table.error(wait)
                wait.master.logged_cause = error_summary(error)
                replies += self._end_wait(now, wait, error)
            if world := self._registry.masters.get((waits[0].master.membership.job, WORLD)):
                world.deadlock_at = now
        return replies

    def _end_wait(self, now: float, wait: deadlock.Wait, error: StatsdBNError) -> list[Reply]:
        if wait.blocked:
            # The member's main thread waits in torch; only its heartbeat thread can receive the error.
            address = self._registry.sessions.heartbeat_address(wait.blocked.session)
            return [(address, encode_failure(error))] if address else []
        if wait.key:
            return wait.master.fail(wait.key, error)
        if wait.master.membership.is_open:
            return [(one.peer, encode_failure(error)) for one in wait.master.membership.pause_rejoining()]
        return self._registry.dissolve(now, wait.master, error)

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

    def revoke(self, now: float, principals: Mapping[str, Principal]) -> list[Reply]:
        """Remove members with keys that are revoked (not in `principals`), or no longer valid for their jobs."""
        jobs = ((token, one.key, one.master.membership.job) for token, one in self._registry.sessions.items())
        refused = [token for token, key, job in jobs if not (key in principals and principals[key].may_access(job))]
        return self._lose(now, [(token, REVOKED) for token in refused])

    def probes(self, since: float) -> list[Reply]:
        """Probes for members that were silent since a time. If sending one fails, call `unreachable`."""
        return [(peer, self.probe) for peer in self._registry.sessions.probe_addresses(since)]

    def unreachable(self, now: float, peer: bytes) -> list[Reply]:
        """Record that a peer is disconnected; returns probes for the other addresses of its members."""
        return [(other, self.probe) for other in self._registry.sessions.unreachable(now, peer)]

    def shutdown_notices(self) -> list[Reply]:
        """Failures for all members, to send before `stop`. A busy member reads its failure before its next round."""
        stopped = MasterStopped("the server stopped because the process that started it ended")
        sessions = self._registry.sessions.values()
        return [(one.contributor.peer, encode_failure(one.master.membership.lost or stopped)) for one in sessions]

    def stop(self) -> list[Reply]:
        """End all waits, after `shutdown_notices`: this server stops and has no successor."""
        return [reply for master in self._registry.masters.values() for reply in master.stop()]

    def report(self, now: float, principal: Principal = ANONYMOUS) -> dict[str, Any]:
        """Status report of the jobs that a key may see."""
        return self._reports.report(now, principal)

    def _counts(self, now: float) -> dict[str, Any]:
        return {
            "server": self._server.hex(),
            "seconds": now - self._started,
            "received": self.received,
            "bad_frames": self.bad_frames,
            **asdict(self.counters),
        }


def _check_owner(message: messages.Request, session: Session | None, principal: Principal) -> None:
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
    if session and session.key != principal.key:
        raise AuthenticationRefused(
            f"authentication refused: the session of {principal.name!r} belongs to another key",
            reason="foreign session",
        )
