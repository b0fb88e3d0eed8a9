"""Connection: a member's place among the members of its job, and all that it exchanges with them.

It may be used by any thread; it must not be used by a forked child, which would share its sockets, and says so.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from client.session import groups
from client.session.channel_pool import IN_PROCESS, ChannelPool, run_machine
from client.session.groups import Group
from client.session.protocol import all_gather
from client.session.protocol.member import OVER_PROCESS_GROUP, OVER_SERVER, SHARED_MEMORY, Member, TransportInUse
from client.session.protocol.pulse import UNUSED_SECONDS
from client.session.protocol.registration import cause_of
from client.session.protocol.round_trip import RoundTrip
from client.session.protocol.session import Session
from client.session.sessions import Sessions
from client.session.switch_interval import switching
from client.tracebacks import api_boundary, hide_internal_frames
from statsd_bn.errors import (
    ConfigurationError,
    ConnectionClosed,
    StatsdBNError,
)
from statsd_bn.messages import Aggregate, Participation
from statsd_bn.reduction import FloatArray, Rows
from statsd_bn.round_key import FORWARD, GATHER, RoundKey

logger = logging.getLogger("statsd_bn.client")

Way = Callable[[Session, RoundKey, Any], Any]
"""How a member takes part in a round; what it returns has the `seconds` of one that the native core has had."""

# What `told_non_finite` has where NaN or infinity came to a forward round.
NON_FINITE = "finding"

# Round trips remembered for `median_round_trip` and `metrics`.
REMEMBERED_ROUND_TRIPS = 4096


class Connection:
    """A member's place among the members of its job; also a context manager that says goodbye.

    It belongs to the group of all members from the beginning, and to any other group from when that is first used.

    Args:
        channel_pool: how to reach the server.
        member: who this process is.

    Attributes:
        member: who this process is.
        channel_pool: how it reaches the server.
        rounds: how many rounds it has taken part in, in all its groups.
        is_latecomer: whether the job was under way already when this member came.
        of_all: how the rows of all members of the job travel.
        is_told_alone: whether it needs no server because `connect(world_size=1)` said that its job has one member.
        at_end: called when it closes.
        told_non_finite: step and text of what was logged of aggregates that are not finite, see
            `client.ops.non_finite`.

    Raises:
        ServerUnreachable: nobody answers at the endpoint.
        RegistrationRefused: the server does not take this member, or the group did not fill in time.
    """

    def __init__(self, channel_pool: ChannelPool, member: Member) -> None:
        self.member = member
        self.rounds = 0
        self.channel_pool = channel_pool
        unused = partial(self._warn_of_no_layer, f"its connection has been open for {UNUSED_SECONDS:.0f} s")
        self._has_warned = False
        self._sessions = Sessions(channel_pool, member, unused)
        self._world = groups.world(member.world_size)
        self._of_this_host = groups.GroupOfThisHost(member, self._gather_machines)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self.at_end: list[Callable[[], None]] = []
        self.is_told_alone = False
        self.told_non_finite: dict[str, tuple[int, str]] = {}
        self._round_trips: deque[float] = deque(maxlen=REMEMBERED_ROUND_TRIPS)
        try:
            session = self._sessions.of(self._world)
        except BaseException as error:
            self.close(cause=cause_of(error))
            raise
        self.is_latecomer = session.first_step > 0
        self.of_all = session.transport

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed:
            self.explain(error)
        self.close(cause=cause_of(error))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        at = self.endpoint if self.is_in_process else f"to {self.endpoint}"
        return f"<Connection {at}: {self._name}, {state}>"

    @property
    def _name(self) -> str:
        return f"job {self.member.job!r}, rank {self.member.rank} of {self.member.world_size}"

    @property
    def endpoint(self) -> str:
        """Where its server listens, such as `ipc:///run/user/1000/statsd_bn/server`; "in process" if it has none."""
        return self.channel_pool.endpoint

    @property
    def is_in_process(self) -> bool:
        """Whether this process is alone in its job and needs no server."""
        return self.endpoint == IN_PROCESS

    @property
    def transport(self) -> str:
        """How rows reach the other members of the job now.

        "server", over the server; from the second round on "shared_memory" where they share a host, or "process_group",
        over torch's default process group; "in process" where there is no other.
        """
        if self.is_in_process:
            return IN_PROCESS
        in_use = {transport.name for transport in self._transports()}
        return next((name for name in (OVER_PROCESS_GROUP, SHARED_MEMORY) if name in in_use), OVER_SERVER)

    @property
    def why_not_faster(self) -> str:
        """Why `transport` is "server", for people; empty if it is not, or before the first round."""
        if self.transport != OVER_SERVER:
            return ""
        return next((why for transport in self._transports() if (why := transport.why_not_faster)), "")

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._closed

    @property
    def is_own(self) -> bool:
        """Whether this process has opened it; a forked child inherits one that it must not use."""
        return os.getpid() == self._process

    @property
    def members(self) -> list[int]:
        """The members of the job that the latest round covers; before any, those that were there at the beginning."""
        return list(self._sessions.of(self._world).members)

    @property
    def rank(self) -> int:
        """This process's number in the job, the same for as long as it is connected."""
        return self.member.rank

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """This process's index among the members, from 0, and how many there are; for splitting data.

        In a strict job these are `rank` and `world_size`, whoever is away. In an elastic job they count the members
        that are there now, so the index may be less than `rank`.
        """
        if not self.member.is_elastic:
            return self.member.rank, self.member.world_size
        members = self.members
        return members.index(self.member.rank), len(members)

    @property
    def first_step(self) -> int:
        """The first step that this member takes part in; more than 0 for one that joined an elastic job later."""
        return self._sessions.of(self._world).first_step

    @property
    def median_round_trip(self) -> float:
        """Seconds from sending a contribution to having the aggregate, the median of the latest; 0 before any.

        It includes the wait for the other members.
        """
        trips = sorted(self._round_trips)
        return trips[len(trips) // 2] if trips else 0.0

    def metrics(self) -> dict[str, float]:
        """Returns numbers about the exchange, by name, for a logger: TensorBoard's, W&B's, MLflow's, `self.log_dict`.

        Returns:
            `statsd_bn/members`: how many ranks the latest round covers.
            `statsd_bn/rounds`: as `rounds`.
            `statsd_bn/round_trip_ms`, `statsd_bn/round_trip_p99_ms`: median and 99th percentile of the latest 4,096
            rounds, in milliseconds; 0 before any. They include the wait for the slowest rank.
            `statsd_bn/non_finite`: 1 if NaN or infinity came into the statistics of a forward pass; always 0 with
            `connect(on_nonfinite="ignore")`.
        """
        trips = sorted(self._round_trips) or [0.0]
        return {
            "statsd_bn/members": float(len(self.members)),
            "statsd_bn/rounds": float(self.rounds),
            "statsd_bn/round_trip_ms": 1e3 * trips[len(trips) // 2],
            "statsd_bn/round_trip_p99_ms": 1e3 * trips[len(trips) * 99 // 100],
            "statsd_bn/non_finite": float(NON_FINITE in self.told_non_finite),
        }

    def group(self, group: Group | str | None) -> Group:
        """Returns the group that is meant: the whole job for None, the members of this host for "local".

        Where no launcher says how many members a host has, the first call with "local" is a round of the whole job.

        Raises:
            ConfigurationError: no group of this job is meant, or it is elastic and the environment does not say who is
                on this host.
            StatsdBNError: the round failed.
        """
        if group is None:
            return self._world
        found = group if isinstance(group, Group) else self._of_this_host.by_rule(group)
        if found.size > self.member.world_size:
            raise ConfigurationError(
                f"group {found.name!r}: expected at most the {self.member.world_size} members of the job, "
                f"got size {found.size}"
            )
        return found

    def is_alone(self, group: Group | str | None) -> bool:
        """Returns whether a group has no other members, and can have none; False while that is not known yet."""
        if self._of_this_host.known is None and isinstance(group, str):
            groups.check(group)  # its first round finds out who is in it; torch.compile follows a layer to here
            group = None
        return self.group(group).size == 1 and not self.member.is_elastic

    @api_boundary
    def stay_away(self, group: Group | str | None) -> None:
        """Takes no part in the rounds of a group until it comes back; `client.join` is the way to it."""
        self._check_usable()
        self._sessions.change_participation(self.group(group), Participation.PAUSED)

    @api_boundary
    def come_back(self, group: Group | str | None) -> None:
        """Takes part in the rounds of a group again, as soon as all its members want to.

        Raises:
            GroupIncomplete: they did not within `round_timeout`.
            ReplicaLost: one of them has left the job.
        """
        self._check_usable()
        self._sessions.change_participation(self.group(group), Participation.REJOINING)

    @api_boundary
    def end_absence(self, group: Group | str | None) -> None:
        """Comes back if it is away, for a round between two passes, in which all members of the group take part.

        Raises:
            GroupIncomplete, ReplicaLost: as in `come_back`.
        """
        self._check_usable()
        if self._sessions.of(self.group(group)).participation is Participation.PAUSED:
            self.come_back(group)

    def exchange(
        self,
        layer: str,
        rows: Any,
        key: RoundKey | None = None,
        group: Group | str | None = None,
        way: Way | None = None,
        phase: str = FORWARD,
    ) -> Any:
        """Takes part in one round and returns its aggregate; `SlavePipe.run_slave` is the way to it.

        Args:
            layer: the layer's name.
            rows: what this process's replicas contribute; with `way` what that takes.
            key: of this round; None for the layer's next forward round.
            group: who takes part; as `Connection.group` takes it. Its first use waits until all its members use it.
            way: how the rows reach the other members; None: over the server.
            phase: of a forward round, see `Transport.run_slave`.

        Returns:
            The aggregate; with `way` what that returns.

        Raises:
            StatsdBNError: the round failed, with the reason; most kinds are RoundFailed.
            RegistrationRefused: the group did not fill in time, or does not take this member; this concerns no other
                group, and a later use tries again.
            ConfigurationError: this is not a group of this job, or this process uses it with another size.
            ConnectionClosed: the connection was closed, or belongs to the parent process.
        """
        try:
            return self._round(layer, rows, key, self.group(group), phase, way)
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise

    def over_server(self, session: Session, key: RoundKey, rows: Rows) -> Aggregate:
        """Takes part in a round over the server."""
        return self.run(self.round_trip(session, key, rows))

    def run(self, trip: RoundTrip) -> Aggregate:
        """Runs what takes part in a round over the server to its end."""
        with self.channel_pool.channel() as channel:
            return run_machine(trip, channel)

    def round_trip(self, session: Session, key: RoundKey, rows: Rows) -> RoundTrip:
        """Returns what takes part in a round over the server, not yet begun."""
        trip = RoundTrip(session, self.channel_pool.endpoint, key, rows, session.contribution(key, rows))
        trip.is_gone = lambda: self.channel_pool.is_gone
        return trip

    def gather_in(self, group: Group, name: str, data: bytes) -> list[bytes]:
        """Gives this member's bytes to all members of a group, and returns theirs, in the order of their ranks."""
        return list(self._gather(group, name, data, counts=False).values())

    @api_boundary
    def all_gather(self, name: str, data: bytes) -> dict[int, bytes]:
        """Gives this member's bytes to all members of the job, and returns theirs.

        All members call it in the same order among their rounds. One that is away, see `client.join`, comes back for
        it, as for every new round, and waits until all are. It takes one round trip where each member has 8 KiB at most
        (with more than 31 members less), and one more for each 512 KiB of all members together.

        Args:
            name: what is gathered, the same on every member; chosen like the name of a layer.
            data: of any length, which may differ between the members.

        Returns:
            Each member's bytes, by rank, in order; in an elastic job of those who were there to the end.

        Raises:
            StatsdBNError: a round failed, with the reason; most kinds are RoundFailed.
        """
        self.end_absence(None)
        return self._gather(self._world, name, data)

    def _gather(self, group: Group, name: str, data: bytes, *, counts: bool = True) -> dict[int, bytes]:
        def join(part: FloatArray) -> Aggregate:
            rows = Rows((0,), part[np.newaxis, np.newaxis])
            found: Aggregate = self._round(name, rows, None, group, GATHER, counts=counts)
            return found

        return all_gather.gather(join, data, self.member.rank, len(self.session(group).members))

    @property
    def is_broken(self) -> bool:
        """Whether this process knows already that its strict job is broken."""
        return self._sessions.job.is_broken

    def check_whole(self, cause: BaseException | None = None, seconds: float = 0.0) -> None:
        """Raises why the strict job is broken, if this process knows that, or will within so many seconds.

        Args:
            cause: what torch has raised of it.
            seconds: how long to wait for the news.
        """
        if news := self._sessions.job.wait_for_cause(seconds):
            raise news from cause

    def session(self, group: Group | str | None) -> Session:
        """Returns this member's session in a group; its first use waits until all its members use it."""
        self._check_usable()
        return self._sessions.of(self.group(group))

    def _round(
        self,
        layer: str,
        rows: Any,
        key: RoundKey | None,
        group: Group,
        phase: str = FORWARD,
        way: Way | None = None,
        *,
        counts: bool = True,
    ) -> Any:
        if self._closed or os.getpid() != self._process:
            self._check_usable()
        session = self._sessions.of(group)
        if key is None and session.participation is Participation.PAUSED:  # a step behind a pass of `client.join`
            self.come_back(group)
        with self._lock:
            key = key or session.forward_key(layer, phase)
            session.begins(key)
        started = time.perf_counter()
        switching.begin()
        try:
            found = (way or self.over_server)(session, key, rows)
        except StatsdBNError as error:
            self._sessions.job.record_raised(error)
            raise
        finally:
            switching.end()
        seconds = time.perf_counter() - started if isinstance(found, Aggregate) else found.seconds
        self._round_trips.append(seconds)
        if counts:  # those of layers and of users do
            self.rounds += 1
            session.times.add(seconds)
        return found

    def explain(self, error: BaseException) -> None:
        """Adds a note to an exception that is not ours: which rank has left the strict job, and why, as far as known.

        If it comes out of a collective of torch, it waits a moment for that news.
        """
        if self.is_own and not self.member.is_elastic and self.member.world_size > 1:
            self._sessions.job.annotate(error)

    def close(self, cause: str = "") -> None:
        """Leaves all groups and closes the sockets; harmless when repeated.

        Args:
            cause: what went wrong, told to the other members; empty for an orderly end.
        """
        if self._closed or not self.is_own:
            return
        self._closed = True
        with ExitStack() as rest:
            # Whatever one of them raises, the others still see the end, the last ones first.
            rest.callback(self.channel_pool.close)
            rest.callback(self._sessions.leave, cause)
            if not (self.rounds or cause):
                rest.callback(self._warn_of_no_layer, "its connection ends")
            for call in reversed(self.at_end):
                rest.callback(call)

    def _warn_of_no_layer(self, when: str) -> None:
        """Warn, the first time, that no layer has been synchronised, if there are other members."""
        if self.member.world_size > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s has synchronised no layer, and %s: was the model given to client.convert_model(), and are its "
                "batch norms in training mode?",
                self._name,
                when,
            )

    def _transports(self) -> list[TransportInUse]:
        """Those of the groups that all members of the job are in."""
        size = self.member.world_size
        return [session.transport for session in self._sessions.all() if session.member.world_size == size]

    @api_boundary
    def _gather_machines(self, machine: bytes) -> dict[int, bytes]:
        self.end_absence(None)
        return self._gather(self._world, groups.HOSTS, machine, counts=False)

    def _check_usable(self) -> None:
        if self._closed:
            raise ConnectionClosed(f"{self._name}: expected an open connection, and it was closed")
        if not self.is_own:
            raise ConnectionClosed(
                f"connection of process {self._process} cannot be used by its forked child {os.getpid()}; "
                f"evaluate there, or call client.connect(rank=0, world_size=1) to train alone there; {self._name}"
            )
