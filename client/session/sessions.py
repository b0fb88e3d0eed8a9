"""Sessions: this process's registrations in its groups, and the thread that sends their heartbeats.

A registration is made when the group is first used. The heartbeats show the server that this process is alive; their
thread also answers the server's stack requests. ZeroMQ's own heartbeats would not do: they continue if Python hangs.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

from client.diagnostics.broken_job import BrokenJob
from client.diagnostics.sampler import ThreadSampler
from client.session.channel_pool import ChannelPool, HeartbeatSocket, run_state_machine
from client.session.groups import Group
from client.session.protocol.heartbeats import UNUSED_SECONDS, HeartbeatScheduler
from client.session.protocol.member import BY_JOIN, Member
from client.session.protocol.registration import Registration, cause_of
from client.session.protocol.session import LastRoundDone, Session
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, ConnectionClosed, ServerUnreachable, StatsdBNError
from statsd_bn.messages import Participation, StackRequest
from statsd_bn.wire import encode

logger = logging.getLogger("statsd_bn.client")


@dataclass(slots=True, eq=False)
class _Entry:
    """A group's session; `opened` is done when the group has opened or failed to open."""

    session: Session
    opened: Future[None] = field(default_factory=Future)
    is_open: bool = False  # whether both group and connection are open: then a round needs no lock


class Sessions:
    """This process's sessions, one for each group in use."""

    def __init__(self, channel_pool: ChannelPool, member: Member) -> None:
        self.channel_pool = channel_pool
        self._member = member
        self._has_warned = False
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._closed = False
        self._last_round_done = LastRoundDone()
        sampler = ThreadSampler(reports_stacks=member.reports_stacks, rank=member.rank)
        self.broken_job = BrokenJob(sampler, f"rank {member.rank} ({member.host_and_pid})", member.abort_after)
        self._heartbeat: HeartbeatThread | None = None
        if opened := channel_pool.heartbeat_socket():
            self._heartbeat = HeartbeatThread(opened, self)

    def get(self, group: Group) -> Session:
        """Return the session of a group; the first call for a group registers, and waits until the group is open."""
        # If several threads ask at the same time, one registers and all share its result.
        entry = self._entries.get(group.name)
        if entry is not None and entry.is_open and entry.session.member.world_size == group.size:
            return entry.session
        return self._open(group)

    def _open(self, group: Group) -> Session:
        with self._lock:
            if self._closed:
                raise ConnectionClosed("expected an open connection; it was closed by another thread")
            if is_first := group.name not in self._entries:
                member = self._member.in_group(group.name, group.size)
                session = Session(os.urandom(limits.TOKEN_BYTES), member, self._last_round_done)
                self._entries[group.name] = _Entry(session)
            entry = self._entries[group.name]
        member = entry.session.member
        if member.world_size != group.size:
            raise ConfigurationError(
                f"group {group.name!r}: expected size {member.world_size}, as in this process's earlier use, "
                f"got {group.size}"
            )
        if is_first:
            try:
                self._register(entry.session, member.seconds_to_join)
            except BaseException as error:  # noqa: BLE001 - every thread that waits for the group raises it
                self._remove(entry, error)
            else:
                if self._heartbeat:
                    self._heartbeat.wake()
                entry.opened.set_result(None)
        # The registration has a timeout, so this wait ends.
        entry.opened.result()
        with self._lock:
            entry.is_open = not self._closed
        return entry.session

    def change_participation(self, group: Group, participation: Participation) -> None:
        """Register this member as PAUSED or REJOINING in a group; REJOINING waits for all other members."""
        session = self.get(group)
        session.participation = participation
        session.has_uneven_inputs = True
        session.transport.fall_back(BY_JOIN)
        try:
            self._register(session, session.member.round_timeout)
        except BaseException:
            # The others must not count on a member that no longer waits for them.
            if session.participation is Participation.REJOINING:
                session.participation = Participation.PAUSED
                with suppress(StatsdBNError), self.channel_pool.channel() as channel:
                    channel.send(session.register())
            raise

    def all(self) -> list[Session]:
        """Return all sessions, registered or about to be."""
        with self._lock:
            return [entry.session for entry in self._entries.values()]

    def warn_of_no_layer(self, when: str) -> None:
        """Warn, once, that no layer was synchronised although there are other members."""
        if self._member.world_size > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: no layer was synchronised %s; check that client.convert_model() was called and the model is in "
                "training mode",
                self._member.name,
                when,
            )

    def leave(self, cause: str) -> None:
        """Leave all groups; no further session can open."""
        # End the thread first: none of its heartbeats may follow the Leave.
        if self._heartbeat:
            self._heartbeat.stop()
        with self._lock:
            self._closed = True
            for entry in self._entries.values():
                entry.is_open = False
            self._send_leave(list(self._entries.values()), cause)

    def _register(self, session: Session, timeout: float) -> None:
        try:
            with self.channel_pool.channel() as channel:
                run_state_machine(Registration(session, self.channel_pool.endpoint, timeout), channel)
        except ServerUnreachable as error:
            seconds = cast("float", error.fields["seconds"])
            raise ServerUnreachable(self.channel_pool.diagnose_silence(seconds), **error.fields) from None

    def _remove(self, entry: _Entry, error: BaseException) -> None:
        with self._lock:
            # Under the lock, so that no Leave is sent on a channel pool that another thread has closed.
            if not self._closed:
                del self._entries[entry.session.member.group]
                self._send_leave([entry], cause_of(error))
        entry.opened.set_exception(error)

    def _send_leave(self, entries: list[_Entry], cause: str) -> None:
        if not entries:
            return
        with self.channel_pool.channel() as channel:
            for entry in entries:
                if entry.session.transport.bypassed_rounds:
                    channel.send(entry.session.heartbeat())  # so that the server counts the last bypassed rounds
                channel.send(entry.session.leave(cause))


class HeartbeatThread:
    """The thread that sends heartbeats. It runs until `stop`, and then closes its socket."""

    def __init__(self, socket: HeartbeatSocket, sessions: Sessions) -> None:
        self._socket = socket
        self._sessions = sessions
        self._scheduler = HeartbeatScheduler()
        self._stopping = False
        # A daemon, so that a process that never calls `stop` can end.
        self._thread = threading.Thread(target=self._run, name="statsd_bn heartbeat", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Announce new sessions to the server now."""
        self._socket.wake()

    def stop(self) -> None:
        """End the thread now; harmless when repeated."""
        self._stopping = True
        self._socket.wake()
        self._thread.join()

    def _run(self) -> None:
        scheduler, was_connected = self._scheduler, False
        try:
            while not self._stopping:
                seconds = scheduler.seconds_until_due(time.monotonic(), self._sessions.all())
                has_connected = self._socket.wait(seconds)
                now, sessions = time.monotonic(), self._sessions.all()
                if has_connected:
                    scheduler.on_reconnected()
                for frame in self._socket.received():
                    self._send(scheduler.on_unsolicited(frame, sessions))
                    with _errors_logged():
                        self._handle_request(frame, sessions)
                for session in scheduler.sessions_due(now, sessions):
                    if self._socket.send(session.heartbeat()):
                        scheduler.mark_sent(session)
                with _errors_logged():
                    is_connected = self._socket.is_connected
                    if text := scheduler.outage_warning(now, sessions, is_connected=is_connected):
                        logger.warning("%s", text)
                with _errors_logged():
                    if scheduler.is_unused(now, sessions):
                        self._sessions.warn_of_no_layer(f"in the first {UNUSED_SECONDS:.0f} s")
                with _errors_logged():
                    self._send(scheduler.skew_frames(now, sessions))
                with _errors_logged():
                    self._send(scheduler.timing_frames(now, sessions))
                if has_connected:
                    # After the heartbeat: the server must know this connection before it sees the idle channels close.
                    if was_connected:
                        self._sessions.channel_pool.close_idle()
                    was_connected = True
                with _errors_logged():
                    self._sessions.broken_job.check(time.monotonic())
        finally:
            self._socket.close()

    def _send(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self._socket.send(frame)

    def _handle_request(self, frame: bytes, sessions: list[Session]) -> None:
        job = self._sessions.broken_job
        match self._scheduler.request(frame, sessions):
            case session, StackRequest(number=number, torch_group=group):
                self._socket.send(encode(job.sampler.sample(group).report(session.member_token, number)))
            case _, StatsdBNError() as error:
                job.report(error)


@contextmanager
def _errors_logged() -> Iterator[None]:
    """Log errors, which must not end the heartbeats."""
    try:
        yield
    except Exception:
        logger.debug("the heartbeat thread continues after an error", exc_info=True)
