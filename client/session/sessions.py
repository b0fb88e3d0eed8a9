"""Sessions: this process's registrations in its groups, each made when the group is first used."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from client.diagnostics.broken_job import BrokenJob
from client.diagnostics.sampler import ThreadSampler
from client.session.channel_pool import ChannelPool, run_state_machine
from client.session.groups import Group
from client.session.heartbeat import HeartbeatThread
from client.session.protocol.member import BY_JOIN, Member
from client.session.protocol.registration import Registration, cause_of
from client.session.protocol.session import LastRoundDone, Session
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, ConnectionClosed, ServerUnreachable, StatsdBNError
from statsd_bn.messages import Participation


@dataclass(slots=True, eq=False)
class _Entry:
    """A group's session; `opened` is done when the group has opened or failed to."""

    session: Session
    opened: Future[None] = field(default_factory=Future)
    is_open: bool = False  # until the connection closes: all rounds but the first need no lock


class Sessions:
    """This process's sessions, one for each group in use."""

    def __init__(self, channel_pool: ChannelPool, member: Member, on_unused: Callable[[], None]) -> None:
        self._channel_pool = channel_pool
        self._member = member
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._closed = False
        self._last_round_done = LastRoundDone()
        sampler = ThreadSampler(reports_stacks=member.reports_stacks, rank=member.rank)
        self.broken_job = BrokenJob(sampler, f"rank {member.rank} ({member.host_and_pid})", member.abort_after)
        self._heartbeat: HeartbeatThread | None = None
        if opened := channel_pool.heartbeat_socket():
            self._heartbeat = HeartbeatThread(opened, self.all, channel_pool.close_idle, on_unused, self.broken_job)

    def get(self, group: Group) -> Session:
        """Return the session of a group; the first use of the group registers, and waits until it is open."""
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
                with suppress(StatsdBNError), self._channel_pool.channel() as channel:
                    channel.send(session.register())
            raise

    def all(self) -> list[Session]:
        """Return all sessions, registered or about to be."""
        with self._lock:
            return [entry.session for entry in self._entries.values()]

    def leave(self, cause: str) -> None:
        """Leave all groups; no further session can open."""
        # First, or a heartbeat could follow the Leave.
        if self._heartbeat:
            self._heartbeat.stop()
        with self._lock:
            self._closed = True
            for entry in self._entries.values():
                entry.is_open = False
            self._send_leave(list(self._entries.values()), cause)

    def _register(self, session: Session, timeout: float) -> None:
        try:
            with self._channel_pool.channel() as channel:
                run_state_machine(Registration(session, self._channel_pool.endpoint, timeout), channel)
        except ServerUnreachable as error:
            seconds = cast("float", error.fields["seconds"])
            raise ServerUnreachable(self._channel_pool.diagnose_silence(seconds), **error.fields) from None

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
        with self._channel_pool.channel() as channel:
            for entry in entries:
                if entry.session.transport.bypassed_rounds:
                    channel.send(entry.session.heartbeat())  # so that the server counts the last of them
                channel.send(entry.session.leave(cause))
