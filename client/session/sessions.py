"""Sessions: how this process comes to belong to its groups.

It has a session for each group, made and registered when the group is first used: a group that nobody uses costs
nothing, and one that does not fill disturbs no other.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from client.diagnostics.broken_job import BrokenJob
from client.diagnostics.sampler import ThreadSampler
from client.session.channel_pool import ChannelPool, run_machine
from client.session.groups import Group
from client.session.heartbeat import Heartbeat
from client.session.protocol.member import BY_JOIN, Member
from client.session.protocol.registration import Registration, cause_of
from client.session.protocol.session import LastSettled, Session
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, ConnectionClosed, ServerUnreachable, StatsdBNError
from statsd_bn.messages import Participation


@dataclass(frozen=True, slots=True)
class _Entry:
    """A group's session; `opened` is done when the group has opened, or has failed to."""

    group: Group
    session: Session
    opened: Future[None] = field(default_factory=Future)


class Sessions:
    """This process's sessions, one for each group that it has used.

    Args:
        unused: called, from another thread, if no layer has begun a round for long after the job has opened.
    """

    def __init__(self, channel_pool: ChannelPool, member: Member, unused: Callable[[], None]) -> None:
        self._channel_pool = channel_pool
        self._member = member
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._closed = False
        self._last_settled = LastSettled()
        # Those that need no lock and no wait any more, which is what all rounds but the first find.
        self._open_sessions: dict[str, _Entry] = {}
        beacon = channel_pool.beacon()
        sampler = ThreadSampler(reports_stacks=member.reports_stacks, rank=member.rank)
        self.job = BrokenJob(sampler, f"rank {member.rank} ({member.host_and_pid})", member.abort_after)
        self._heartbeat = Heartbeat(beacon, self.all, channel_pool.close_idle, unused, self.job) if beacon else None

    def of(self, group: Group) -> Session:
        """Returns the session of a group; the first use of the group registers, and waits until it is open.

        Of threads that ask at the same time one registers, and all share what comes of it.

        Raises:
            ConfigurationError: the group has been used with another size.
            ServerUnreachable: nobody answers at the endpoint.
            RegistrationRefused: the server does not take this member, or the group did not fill in time. A later use
                tries again.
            ConnectionClosed: the sessions have ended.
        """
        entry = self._open_sessions.get(group.name)
        return entry.session if entry and entry.group.size == group.size else self._of_a_new_one(group)

    def _of_a_new_one(self, group: Group) -> Session:
        with self._lock:
            if self._closed:
                raise ConnectionClosed("expected an open connection; it was closed by another thread")
            entry = self._entries.get(group.name)
            is_first = entry is None
            if entry is None:
                entry = self._entries[group.name] = _Entry(group, self._session(group))
        if entry.group.size != group.size:
            raise ConfigurationError(
                f"group {group.name!r}: expected size {entry.group.size}, with which this process uses it already, "
                f"got {group.size}"
            )
        if is_first:
            self._open(entry)
        # Whoever opens it has a deadline, so this ends.
        entry.opened.result()
        with self._lock:
            if not self._closed:
                self._open_sessions[group.name] = entry
        return entry.session

    def change_participation(self, group: Group, participation: Participation) -> None:
        """Tells the server how this member stands to a group's rounds from now on; BACK waits for all others.

        Raises:
            GroupIncomplete: the others did not come back in time.
            ReplicaLost: one of them has left for good, or the group is broken.
        """
        session = self.of(group)
        session.participation = participation
        session.is_uneven = True
        session.transport.refuse(BY_JOIN)
        try:
            self._register(session, session.member.round_timeout)
        except BaseException:
            self._give_up_return(session)
            raise

    def _give_up_return(self, session: Session) -> None:
        """Has the others wait for a member that waits for them no longer."""
        if session.participation is Participation.REJOINING:
            session.participation = Participation.PAUSED
            with suppress(StatsdBNError), self._channel_pool.channel() as channel:
                channel.send(session.register())

    def all(self) -> list[Session]:
        """Returns the sessions there are, registered or about to be."""
        with self._lock:
            return [entry.session for entry in self._entries.values()]

    def leave(self, cause: str) -> None:
        """Says goodbye for every session; there will be no further ones."""
        # Before the goodbye, or a heartbeat could come after it.
        if self._heartbeat:
            self._heartbeat.stop()
        with self._lock:
            self._closed = True
            self._open_sessions.clear()
            self._say_goodbye(list(self._entries.values()), cause)

    def _session(self, group: Group) -> Session:
        member = self._member.in_group(group.name, group.size)
        return Session(os.urandom(limits.TOKEN_BYTES), member, self._last_settled)

    def _open(self, entry: _Entry) -> None:
        try:
            self._register(entry.session, entry.session.member.seconds_to_join)
        except BaseException as error:  # noqa: BLE001 - every thread that waits for the group raises it
            self._give_up(entry, error)
        else:
            if self._heartbeat:
                self._heartbeat.look()
            entry.opened.set_result(None)

    def _register(self, session: Session, timeout: float) -> None:
        try:
            with self._channel_pool.channel() as channel:
                run_machine(Registration(session, self._channel_pool.endpoint, timeout), channel)
        except ServerUnreachable as error:
            seconds = cast("float", error.fields["seconds"])
            raise ServerUnreachable(self._channel_pool.why_silent(seconds), **error.fields) from None

    def _give_up(self, entry: _Entry, error: BaseException) -> None:
        with self._lock:
            # Under the lock, so that no goodbye is said on a channel pool that another thread has closed meanwhile.
            if not self._closed:
                del self._entries[entry.group.name]
                self._say_goodbye([entry], cause_of(error))
        entry.opened.set_exception(error)

    def _say_goodbye(self, entries: list[_Entry], cause: str) -> None:
        if not entries:
            return
        with self._channel_pool.channel() as channel:
            for entry in entries:
                if entry.session.transport.rounds_in_memory:
                    channel.send(entry.session.heartbeat())  # the server counts the last ones too
                channel.send(entry.session.leave(cause))
