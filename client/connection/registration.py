"""Registration: how this process comes to belong to its groups.

It has a session for each group, made and registered when the group is first used: a group that nobody uses costs
nothing, and one that does not fill disturbs no other.
"""

import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from client.connection.groups import Group
from client.connection.heartbeat import Heartbeat
from client.connection.member import Member
from client.connection.session import Session
from client.connection.transport import Channel, Transport
from statsd_bn import limits
from statsd_bn.errors import (
    ConfigurationError,
    ConnectionClosed,
    DuplicateMember,
    GroupIncomplete,
    ServerUnreachable,
)
from statsd_bn.messages import WORLD, Registered, Stand, missing_members

logger = logging.getLogger("statsd_bn.client")

# A server that is there answers a registration in milliseconds; a loaded network may take seconds.
ANSWER_SECONDS = 5.0

# Asking again sooner than that finds an answer that was lost, or a group that has opened.
ASK_AGAIN_SECONDS = 1.0

# From when on, and then in growing intervals, a wait is worth a warning.
WARN_SECONDS = 10.0

# A master notices within a second that a killed process has left its place, so asking again helps.
TAKEN_SECONDS = 1.0
TAKEN_PAUSE_SECONDS = 0.05


def cause_of(error: BaseException | None) -> str:
    """Returns what the other members are told about an exception; empty for none."""
    return "" if error is None else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class _Seat:
    """A group's session; `opened` is done when the group has opened, or has failed to."""

    group: Group
    session: Session
    opened: Future[None] = field(default_factory=Future)


class Sessions:
    """This process's sessions, one for each group that it has used.

    Args:
        transport: how to reach the master.
        member: who this process is.
    """

    def __init__(self, transport: Transport, member: Member) -> None:
        self._transport = transport
        self._member = member
        self._lock = threading.Lock()
        self._seats: dict[str, _Seat] = {}
        self._closed = False
        # Those that need no lock and no wait any more, which is what all rounds but the first find.
        self._open_sessions: dict[Group, Session] = {}
        beacon = transport.beacon()
        self._heartbeat = Heartbeat(beacon, self.all, transport.close_idle) if beacon else None

    def of(self, group: Group) -> Session:
        """Returns the session of a group; the first use of the group registers, and waits until it is open.

        Of threads that ask at the same time one registers, and all share what comes of it.

        Raises:
            ConfigurationError: the group has been used with another size.
            ServerUnreachable: nobody answers at the endpoint.
            RegistrationRefused: the master does not take this member, or the group did not fill in time. A later use
                tries again.
            ConnectionClosed: the sessions have ended.
        """
        session = self._open_sessions.get(group)
        return session or self._of_a_new_one(group)

    def _of_a_new_one(self, group: Group) -> Session:
        with self._lock:
            if self._closed:
                raise ConnectionClosed("expected an open connection; it was closed by another thread")
            seat = self._seats.get(group.name)
            is_first = seat is None
            if seat is None:
                seat = self._seats[group.name] = _Seat(group, self._session(group))
        if seat.group.size != group.size:
            raise ConfigurationError(
                f"group {group.name!r}: expected size {seat.group.size}, with which this process uses it already, "
                f"got {group.size}"
            )
        if is_first:
            self._open(seat)
        # Whoever opens it has a deadline, so this ends.
        seat.opened.result()
        with self._lock:
            if not self._closed:
                self._open_sessions[group] = seat.session
        return seat.session

    def change_stand(self, group: Group, stand: Stand) -> None:
        """Tells the master how this member stands to a group's rounds from now on; BACK waits for all others.

        Raises:
            GroupIncomplete: the others did not come back in time.
            ReplicaLost: one of them has left for good, or the group is broken.
        """
        session = self.of(group)
        session.stand = stand
        join(self._transport, session, session.member.deadline)

    def all(self) -> list[Session]:
        """Returns the sessions there are, registered or about to be."""
        with self._lock:
            return [seat.session for seat in self._seats.values()]

    def leave(self, cause: str) -> None:
        """Says goodbye for every session; there will be no further ones."""
        # Before the goodbye, or a heartbeat could come after it.
        if self._heartbeat:
            self._heartbeat.stop()
        with self._lock:
            self._closed = True
            self._open_sessions.clear()
            self._say_goodbye(list(self._seats.values()), cause)

    def _session(self, group: Group) -> Session:
        who = self._member
        min_members = min(who.min_members, group.size)
        who = replace(who, group=group.name, world_size=group.size, min_members=min_members)
        return Session(os.urandom(limits.TOKEN_BYTES), who)

    def _open(self, seat: _Seat) -> None:
        try:
            join(self._transport, seat.session, seat.session.member.patience)
        except BaseException as error:  # noqa: BLE001 - every thread that waits for the group raises it
            self._give_up(seat, error)
        else:
            if self._heartbeat:
                self._heartbeat.look()
            seat.opened.set_result(None)

    def _give_up(self, seat: _Seat, error: BaseException) -> None:
        with self._lock:
            # Under the lock, so that no goodbye is said on a transport that another thread has closed meanwhile.
            if not self._closed:
                del self._seats[seat.group.name]
                self._say_goodbye([seat], cause_of(error))
        seat.opened.set_exception(error)

    def _say_goodbye(self, seats: list[_Seat], cause: str) -> None:
        if not seats:
            return
        with self._transport.channel() as channel:
            for seat in seats:
                channel.send(seat.session.leave(cause))


def join(transport: Transport, session: Session, patience: float) -> None:
    """Registers a session, and waits until its group is open.

    Args:
        transport: how to reach the master.
        session: the one to register.
        patience: how long the other members may take, in seconds.

    Raises:
        ServerUnreachable: nobody answers at the endpoint.
        RegistrationRefused: the master does not take this member, or the group did not fill in time.
        ReplicaLost: the group is broken.
    """
    who = session.member
    started = time.monotonic()
    next_warning = WARN_SECONDS
    with transport.channel() as channel:
        answer = _ask(channel, session, transport.endpoint, ANSWER_SECONDS)
        while answer.missing:
            waited = time.monotonic() - started
            if waited >= patience:
                raise _incomplete(who, answer, patience)
            if waited >= next_warning:
                next_warning = waited * 2
                name, awaited = f"job {who.job!r}, group {who.group!r}", _awaited(who, answer)
                logger.warning("%s: waiting since %.0f s for %s to connect", name, waited, awaited)
            left = patience - waited
            # However little is left, a server that is there has its time to answer.
            answer = _next_registered(channel, session, min(ANSWER_SECONDS, left)) or _ask(
                channel, session, transport.endpoint, max(ANSWER_SECONDS, left)
            )


def _ask(channel: Channel, session: Session, endpoint: str, patience: float) -> Registered:
    """Registers; while an earlier process may still hold its place, tries again for a moment."""
    expiry = time.monotonic() + TAKEN_SECONDS
    while True:
        try:
            return _ask_once(channel, session, endpoint, patience)
        except DuplicateMember:
            if time.monotonic() >= expiry:
                raise
            time.sleep(TAKEN_PAUSE_SECONDS)


def _ask_once(channel: Channel, session: Session, endpoint: str, patience: float) -> Registered:
    expiry = time.monotonic() + patience
    while (left := expiry - time.monotonic()) > 0:
        channel.send(session.register())
        session.spoke = time.monotonic()
        if answer := _next_registered(channel, session, min(left, ASK_AGAIN_SECONDS)):
            return answer
    raise ServerUnreachable(
        f"no answer from {endpoint} within {patience:g} s; is `python -m server` running there?",
        endpoint=endpoint,
        seconds=patience,
    )


def _next_registered(channel: Channel, session: Session, seconds: float) -> Registered | None:
    expiry = time.monotonic() + seconds
    while (frame := channel.receive(expiry - time.monotonic())) is not None:
        if answer := session.registered(frame):
            return answer
    return None


def _incomplete(who: Member, answer: Registered, patience: float) -> GroupIncomplete:
    fields = {"job": who.job, "group": who.group, "size": who.world_size, "present": list(answer.present)}
    if who.group == WORLD:
        fields["missing"] = sorted(set(range(who.world_size)).difference(answer.present))
    return GroupIncomplete(
        f"job {who.job!r}, group {who.group!r} of {who.world_size}: {_awaited(who, answer)} did not connect within "
        f"{patience:g} s",
        **fields,
    )


def _awaited(who: Member, answer: Registered) -> str:
    return missing_members(who.group, who.world_size, answer.present, answer.missing)
