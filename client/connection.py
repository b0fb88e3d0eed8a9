"""connect(): this process's place among the replicas.

A process has at most one current connection, which its synchronised layers use. Without one they synchronise over the
replicas of their own process. A connection may be used by any thread; it must not be used by a forked child,
which would share its sockets, and says so.
"""

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from client.session import Member, Session
from client.transport import Channel, Transport, ZmqTransport
from statsd_bn import limits
from statsd_bn.errors import (
    ConfigurationError,
    ConnectionClosed,
    DuplicateMember,
    GroupIncomplete,
    ProtocolError,
    RoundTimeout,
    ServerUnreachable,
)
from statsd_bn.messages import WORLD, Aggregate, Registered, RoundKey, Rows, missing_members

logger = logging.getLogger("statsd_bn.client")

DEFAULT_DEADLINE = 600.0

# A server that is there answers a registration in milliseconds; a loaded network may take seconds.
ANSWER_SECONDS = 5.0

# A master notices that a killed process has left its place when a newcomer asks for it, so asking again helps.
TAKEN_SECONDS = 1.0
TAKEN_PAUSE_SECONDS = 0.05

# The master ends a late round itself and says who is missing; only if nothing comes this long after that, the
# member gives up on the master.
GRACE_SECONDS = 5.0

# Round trips remembered for `median_round_trip`.
REMEMBERED_ROUND_TRIPS = 4096


class Connection:
    """A member's registration with a master; also a context manager that says goodbye.

    Args:
        transport: how to reach the master.
        member: who this process is.

    Attributes:
        rounds: how many rounds it has taken part in.

    Raises:
        ServerUnreachable: nobody answers at the endpoint.
        RegistrationRefused: the master does not take this member, or the group did not fill in time.
    """

    def __init__(self, transport: Transport, member: Member) -> None:
        self.member = member
        self.rounds = 0
        self._transport = transport
        self._session = Session(os.urandom(limits.TOKEN_BYTES), member)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._round_trips: deque[float] = deque(maxlen=REMEMBERED_ROUND_TRIPS)
        try:
            self._join()
        except BaseException as error:
            self.close(cause=_cause_of(error))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cause=_cause_of(error))

    def __repr__(self) -> str:
        who = self.member
        state = "closed" if self._closed else "open"
        return (
            f"<Connection to {self._transport.endpoint}: job {who.job!r}, member {who.member} of "
            f"{who.world_size}, {state}>"
        )

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._closed

    @property
    def median_round_trip(self) -> float:
        """Seconds from sending a contribution to having the aggregate, the median of the latest; 0 before any.

        It includes the wait for the other members.
        """
        trips = sorted(self._round_trips)
        return trips[len(trips) // 2] if trips else 0.0

    def exchange(self, layer: str, rows: Rows, key: RoundKey | None = None) -> Aggregate:
        """Takes part in one round and returns its aggregate; `SlavePipe.run_slave` is the way to it.

        Args:
            layer: the layer's name.
            rows: what this process's replicas contribute.
            key: of this round; None for the layer's next forward round.

        Raises:
            StatsdBNError: the round failed, with the reason; most kinds are RoundFailed.
            ConnectionClosed: the connection was closed, or belongs to the parent process.
        """
        self._check_usable()
        with self._lock:
            key = key or self._session.forward_key(layer)
            frame = self._session.contribution(key, rows)
        started = time.perf_counter()
        with self._transport.channel() as channel:
            channel.send(frame)
            aggregate = self._await_aggregate(channel, key)
        if aggregate.values.shape != rows.values.shape[1:]:
            raise ProtocolError(
                f"{key}: expected an aggregate of shape {rows.values.shape[1:]}, got {aggregate.values.shape}"
            )
        self._round_trips.append(time.perf_counter() - started)
        self.rounds += 1
        return aggregate

    def close(self, cause: str = "") -> None:
        """Leaves the group and closes the sockets; harmless when repeated.

        Args:
            cause: what went wrong, told to the other members; empty for an orderly end.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        with self._transport.channel() as channel:
            channel.send(self._session.leave(cause))
        self._transport.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ConnectionClosed(f"{self!r}: expected an open connection")
        if os.getpid() != self._process:
            raise ConnectionClosed(
                f"{self!r} was opened by process {self._process} and cannot be used by its forked child "
                f"{os.getpid()}; call client.connect() in the child"
            )

    def _join(self) -> None:
        """Registers, and waits until the group is open."""
        expiry = time.monotonic() + self.member.deadline
        with self._transport.channel() as channel:
            answer = self._ask(channel)
            while answer.missing:
                if time.monotonic() >= expiry:
                    raise _incomplete(self.member, answer)
                logger.info(
                    "waiting for %s", missing_members(self.member.group, self.member.world_size, answer.present)
                )
                answer = self._next_registered(channel, min(ANSWER_SECONDS, expiry - time.monotonic())) or self._ask(
                    channel
                )

    def _ask(self, channel: Channel) -> Registered:
        """Registers; while an earlier process may still hold its place, tries again for a moment."""
        expiry = time.monotonic() + TAKEN_SECONDS
        while True:
            try:
                return self._ask_once(channel)
            except DuplicateMember:
                if time.monotonic() >= expiry:
                    raise
                time.sleep(TAKEN_PAUSE_SECONDS)

    def _ask_once(self, channel: Channel) -> Registered:
        channel.send(self._session.register())
        answer = self._next_registered(channel, ANSWER_SECONDS)
        if answer is None:
            raise ServerUnreachable(
                f"no answer from {self._transport.endpoint} within {ANSWER_SECONDS:g} s; is `python -m server` running "
                "there?",
                endpoint=self._transport.endpoint,
                seconds=ANSWER_SECONDS,
            )
        return answer

    def _next_registered(self, channel: Channel, seconds: float) -> Registered | None:
        expiry = time.monotonic() + seconds
        while (frame := channel.receive(expiry - time.monotonic())) is not None:
            if answer := self._session.registered(frame):
                return answer
        return None

    def _await_aggregate(self, channel: Channel, key: RoundKey) -> Aggregate:
        seconds = self.member.deadline + GRACE_SECONDS
        expiry = time.monotonic() + seconds
        while (frame := channel.receive(expiry - time.monotonic())) is not None:
            if aggregate := self._session.aggregate(key, frame):
                return aggregate
        raise RoundTimeout(
            f"{key}: no answer from the master at {self._transport.endpoint} within {seconds:g} s",
            **key.fields,
            seconds=seconds,
        )


def _incomplete(who: Member, answer: Registered) -> GroupIncomplete:
    fields: dict[str, object] = {"job": who.job, "group": who.group, "size": who.world_size}
    fields["present"] = list(answer.present)
    if who.group == WORLD:
        fields["missing"] = sorted(set(range(who.world_size)).difference(answer.present))
    return GroupIncomplete(
        f"job {who.job!r}, group {who.group!r} of {who.world_size}: "
        f"{missing_members(who.group, who.world_size, answer.present)} did not connect within {who.deadline:g} s",
        **fields,
    )


_current: Connection | None = None


def connect(
    endpoint: str | None = None,
    *,
    job: str | None = None,
    member: int | None = None,
    world_size: int | None = None,
    deadline: float = DEFAULT_DEADLINE,
) -> Connection:
    """Connects this process's synchronised layers to a master, and waits until all members are there.

    Args:
        endpoint: where `python -m server` listens, `tcp://host:port` or `ipc://path`; else STATSD_BN_ENDPOINT.
        job: the training run's name; else STATSD_BN_JOB, else TORCHELASTIC_RUN_ID, else "default".
        member: this process's number; else RANK, else 0.
        world_size: how many processes take part; else WORLD_SIZE, else 1.
        deadline: seconds that the group may take to fill, and any round to complete.

    Returns:
        The connection, also a context manager: leaving it disconnects, and tells the others why if an
        exception was the reason.

    Raises:
        ConfigurationError: an argument or variable is missing or wrong, or this process is connected already.
        ServerUnreachable: nobody answers at the endpoint, within seconds.
        DuplicateMember: another process is this member.
        WorldSizeMismatch: the members disagree on `world_size`.
        GroupIncomplete: not all members came within `deadline`.
    """
    global _current  # noqa: PLW0603 - a process has one current connection, as it has one rank
    if open_connection := current_connection():
        raise ConfigurationError(f"already connected: {open_connection!r}; call client.disconnect() first")
    endpoint = endpoint or os.environ.get("STATSD_BN_ENDPOINT")
    if not endpoint:
        raise ConfigurationError(
            "endpoint: none given and STATSD_BN_ENDPOINT is not set; start `python -m server` and pass what it prints"
        )
    who = member_from(os.environ, job=job, member=member, world_size=world_size, deadline=deadline)
    connection = Connection(ZmqTransport(endpoint), who)
    _current = connection
    return connection


def disconnect() -> None:
    """Closes the current connection; harmless without one."""
    if _current is not None:
        _current.close()


def current_connection() -> Connection | None:
    """Returns the connection this process's layers use, if there is one."""
    return None if _current is None or _current.closed else _current


def member_from(
    environ: Mapping[str, str],
    *,
    job: str | None = None,
    member: int | None = None,
    world_size: int | None = None,
    deadline: float = DEFAULT_DEADLINE,
) -> Member:
    """Returns who this process is, from arguments and, where they are None, environment variables.

    Raises:
        ConfigurationError: a value is unusable.
    """
    if job is None:
        job = environ.get("STATSD_BN_JOB") or environ.get("TORCHELASTIC_RUN_ID") or "default"
    world_size = _integer(environ, "WORLD_SIZE", 1) if world_size is None else world_size
    member = _integer(environ, "RANK", 0) if member is None else member
    if not 1 <= world_size <= limits.MAX_MEMBERS:
        raise ConfigurationError(f"world_size: expected 1 to {limits.MAX_MEMBERS}, got {world_size}")
    if not 0 <= member < world_size:
        raise ConfigurationError(f"member: expected a number in [0, world_size), here [0, {world_size}), got {member}")
    if not 0 < deadline <= limits.MAX_DEADLINE:
        raise ConfigurationError(f"deadline: expected seconds in (0, {limits.MAX_DEADLINE:g}], got {deadline}")
    if not 1 <= len(job.encode()) <= limits.MAX_NAME_BYTES:
        raise ConfigurationError(f"job: expected a name of 1 to {limits.MAX_NAME_BYTES} bytes, got {job!r:.80}")
    return Member(
        job=job,
        group=WORLD,
        epoch=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        member=member,
        world_size=world_size,
        deadline=float(deadline),
        place=f"{socket.gethostname()[:200]}, pid {os.getpid()}",
    )


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise ConfigurationError(f"{name}: expected an integer, got {text!r}") from error


def _cause_of(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _goodbye() -> None:
    """At the interpreter's end: tells the others, with the exception that ended it if there was one."""
    if connection := current_connection():
        connection.close(cause=_cause_of(getattr(sys, "last_value", None)))


atexit.register(_goodbye)
