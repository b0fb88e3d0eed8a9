"""Connection: the sessions, rounds and gathers of this process in its job; and the current connection.

Any thread may use it. A forked child must not, since it would share the sockets; it gets an error.
"""

import logging
import os
import threading
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Self

import numpy as np

from client.session import groups
from client.session.channel_pool import IN_PROCESS, ChannelPool, run_state_machine
from client.session.groups import Group
from client.session.protocol import all_gather
from client.session.protocol.member import OVER_PROCESS_GROUP, OVER_SERVER, SHARED_MEMORY, Member, TransportState
from client.session.protocol.registration import cause_of
from client.session.protocol.round_trip import RoundTrip
from client.session.protocol.session import Session
from client.session.round import Round
from client.session.sessions import Sessions
from client.tracebacks import api_boundary, hide_internal_frames
from statsd_bn.errors import ConfigurationError, ConnectionClosed, StatsdBNError
from statsd_bn.messages import WORLD, Aggregate, Participation
from statsd_bn.reduction import FloatArray, Rows
from statsd_bn.round_key import FORWARD, GATHER, RoundKey

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("statsd_bn.client")

NON_FINITE = "finding"  # key of `non_finite_reports` for forward rounds
MAX_ROUND_TRIPS = 4096  # durations kept for `median_round_trip` and `metrics`


class Connection:
    """This process as a member of its job, returned by `connect`; as a context manager it leaves the job at the end.

    It joins the group of all members when it is created, and any other group at the group's first use.

    Attributes:
        rounds: number of rounds so far, in all groups.
    """

    def __init__(self, channel_pool: ChannelPool, member: Member) -> None:
        self.member = member
        self.rounds = 0
        self.channel_pool = channel_pool
        self._sessions = Sessions(channel_pool, member)
        self.broken_job = self._sessions.broken_job
        self._world = groups.group_named(WORLD, member.world_size)
        # Resolved here if possible: torch.compile traces `group`, and cannot trace `socket.gethostname`.
        self._host_group: Group | None = None
        with suppress(ConfigurationError):
            self._host_group = groups.host_group(member)
        self._host_group_lock = threading.Lock()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self.close_callbacks: list[Callable[[], None]] = []  # called in order, before the groups are left
        self.is_explicitly_alone = False  # by `connect(world_size=1)`
        # Step and text of each logged report, see `client.ops.non_finite`.
        self.non_finite_reports: dict[str, tuple[int, str]] = {}
        self._round_trips: deque[float] = deque(maxlen=MAX_ROUND_TRIPS)
        try:
            session = self._sessions.get(self._world)
        except BaseException as error:
            self.close(cause=cause_of(error))
            raise
        self.is_latecomer = session.first_step > 0  # whether the job had begun before this member joined
        self.world_transport = session.transport

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._closed:
            self.explain(error)
        self.close(cause=cause_of(error))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        at = self.endpoint if self.is_in_process else f"to {self.endpoint}"
        return f"<Connection {at}: {self.member.name}, {state}>"

    @property
    def endpoint(self) -> str:
        """The server's endpoint, such as `ipc:///run/user/1000/statsd_bn/server`; "in process" without a server."""
        return self.channel_pool.endpoint

    @property
    def is_in_process(self) -> bool:
        """Whether this process is the only member of its job and needs no server."""
        return self.endpoint == IN_PROCESS

    @property
    def transport(self) -> str:
        """The current transport of rows to the other members of the job.

        "server" at first; from the second round on "shared_memory" if all share a host, or "process_group" for torch's
        default process group; "in process" without a server.
        """
        if self.is_in_process:
            return IN_PROCESS
        in_use = {transport.name for transport in self._world_transports()}
        return next((name for name in (OVER_PROCESS_GROUP, SHARED_MEMORY) if name in in_use), OVER_SERVER)

    @property
    def why_not_faster(self) -> str:
        """Why `transport` is "server", for people; empty for other transports, and before the first round."""
        if self.transport != OVER_SERVER:
            return ""
        return next((why for transport in self._world_transports() if (why := transport.why_not_faster)), "")

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self._closed

    @property
    def is_own(self) -> bool:
        """Whether this process opened the connection; a forked child inherits it, but must not use it."""
        return os.getpid() == self._process

    @property
    def members(self) -> list[int]:
        """The members of the job that the latest round covers; before any, the members present when this one joined."""
        return list(self._sessions.get(self._world).members)

    @property
    def rank(self) -> int:
        """This process's number in the job; it never changes."""
        return self.member.rank

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """This process's index among the members, from 0, and their number; for splitting data.

        In a strict job these are `rank` and `world_size`, even while members are paused. In an elastic job they count
        the present members, so the index may be less than `rank`.
        """
        if not self.member.is_elastic:
            return self.member.rank, self.member.world_size
        members = self.members
        return members.index(self.member.rank), len(members)

    @property
    def first_step(self) -> int:
        """The first step of this member; more than 0 if it joined an elastic job later."""
        return self._sessions.get(self._world).first_step

    @property
    def median_round_trip(self) -> float:
        """Median duration in seconds, with waits for members, of recent rounds over the host; 0 before any round."""
        trips = sorted(self._round_trips)
        return trips[len(trips) // 2] if trips else 0.0

    def metrics(self) -> dict[str, float]:
        """Return metrics of the rounds, by name, for a logger: TensorBoard's, W&B's, MLflow's, `self.log_dict`.

        Returns:
            `statsd_bn/members`: number of ranks that the latest round covers.
            `statsd_bn/rounds`: as `rounds`.
            `statsd_bn/round_trip_ms`, `statsd_bn/round_trip_p99_ms`: median and 99th percentile of the latest 4,096
            rounds over the host, in milliseconds; 0 before any. They include the wait for the slowest rank.
            `statsd_bn/non_finite`: 1 if NaN or infinity came into the statistics of a forward pass; always 0 with
            `connect(on_nonfinite="ignore")`.
        """
        trips = sorted(self._round_trips) or [0.0]
        return {
            "statsd_bn/members": float(len(self.members)),
            "statsd_bn/rounds": float(self.rounds),
            "statsd_bn/round_trip_ms": 1e3 * trips[len(trips) // 2],
            "statsd_bn/round_trip_p99_ms": 1e3 * trips[len(trips) * 99 // 100],
            "statsd_bn/non_finite": float(NON_FINITE in self.non_finite_reports),
        }

    def group(self, group: Group | str | None) -> Group:
        """Resolve a group: the whole job for None, the members of this host for "local"."""
        # If no launcher says how many members a host has, the first call with "local" is a round of the whole job.
        if group is None:
            return self._world
        found = group if isinstance(group, Group) else self._resolve_host_group(group)
        if found.size > self.member.world_size:
            raise ConfigurationError(
                f"group {found.name!r}: expected at most the {self.member.world_size} members of the job, "
                f"got size {found.size}"
            )
        return found

    def is_alone(self, group: Group | str | None) -> bool:
        """Whether this process is and stays the only member of a group; False while that is unknown."""
        if self._host_group is None and isinstance(group, str):
            groups.check_group(group)  # torch.compile cannot trace a gather: the first round resolves the group
            group = None
        return self.group(group).size == 1 and not self.member.is_elastic

    @api_boundary
    def pause(self, group: Group | str | None) -> None:
        """Skip the rounds of a group from now on, until `rejoin`; `client.join` calls it."""
        self._check_usable()
        self._sessions.change_participation(self.group(group), Participation.PAUSED)

    @api_boundary
    def rejoin(self, group: Group | str | None) -> None:
        """Resume the rounds of a group, as soon as all its members do."""
        self._check_usable()
        self._sessions.change_participation(self.group(group), Participation.REJOINING)

    @api_boundary
    def rejoin_if_paused(self, group: Group | str | None) -> None:
        """Rejoin a group if this member is paused; called before a round of all members between two passes."""
        self._check_usable()
        if self._sessions.get(self.group(group)).participation is Participation.PAUSED:
            self.rejoin(group)

    def round(
        self, layer: str, key: RoundKey | None = None, group: Group | str | None = None, phase: str = FORWARD
    ) -> Round:
        """Begin a round; a transport exchanges its rows inside of the returned context."""
        try:
            return self._begin_round(layer, key, self.group(group), phase)
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise

    def over_server(self, session: Session, key: RoundKey, rows: Rows) -> Aggregate:
        """Exchange the rows of a round over the server."""
        return self.run(self.round_trip(session, key, rows))

    def run(self, trip: RoundTrip) -> Aggregate:
        """Run a round trip to the server to its end."""
        with self.channel_pool.channel() as channel:
            return run_state_machine(trip, channel)

    def round_trip(self, session: Session, key: RoundKey, rows: Rows) -> RoundTrip:
        """Return a round trip to the server, not yet begun."""
        trip = RoundTrip(session, self.channel_pool.endpoint, key, rows)
        trip.is_gone = lambda: self.channel_pool.is_gone
        return trip

    def gather_in_group(self, group: Group, name: str, data: bytes, *, is_counted: bool = False) -> dict[int, bytes]:
        """Gather the bytes of all members of a group, by rank, in order."""

        def concatenate(part: FloatArray) -> Aggregate:
            with self._begin_round(name, None, group, GATHER, is_counted=is_counted) as round_:
                return self.over_server(round_.session, round_.key, Rows((0,), part[np.newaxis, np.newaxis]))

        return all_gather.gather(concatenate, data, self.member.rank, len(self.session(group).members))

    @api_boundary
    def all_gather(self, name: str, data: bytes) -> dict[int, bytes]:
        """Gather the bytes of all members of the job.

        All members call it in the same order among their rounds. A paused member (see `client.join`) first rejoins, as
        before every new round, and waits until all members have rejoined. One round trip suffices if each member has at
        most 8 KiB (less with more than 31 members). Each further 512 KiB of all members take one more round trip.

        Args:
            name: of the gathered data, the same on every member and distinct from the layers' names.
            data: of any length, which may differ between the members.

        Returns:
            Each member's bytes, by rank, in order; in an elastic job only of members present to the end.

        Raises:
            StatsdBNError: a round failed, with the reason; most such errors are subclasses of RoundFailed.
        """
        self.rejoin_if_paused(None)
        return self.gather_in_group(self._world, name, data, is_counted=True)

    def raise_if_broken(self, cause: BaseException | None = None, seconds: float = 0.0) -> None:
        """Raise the reason if the strict job is known to be broken, or becomes so within `seconds`."""
        if error := self.broken_job.wait_for_cause(seconds):
            raise error from cause

    def session(self, group: Group | str | None) -> Session:
        """This member's session in a group; the first call for a group waits until all its members use it."""
        self._check_usable()
        return self._sessions.get(self.group(group))

    def _begin_round(
        self, layer: str, key: RoundKey | None, group: Group, phase: str, *, is_counted: bool = True
    ) -> Round:
        """Begin a round; `is_counted` is False for the gathers that prepare transports, groups and `client.join`."""
        if self._closed or os.getpid() != self._process:
            self._check_usable()
        session = self._sessions.get(group)
        if key is None and session.participation is Participation.PAUSED:  # a step after `client.join`
            self.rejoin(group)
        with self._lock:
            key = key or session.forward_key(layer, phase)
            session.steps.record_phase(key.phase)
        return Round(session, key, self._end_round, is_counted=is_counted)

    def _end_round(self, round_: Round, seconds: float, error: BaseException | None) -> None:
        if error is None:
            if round_.is_counted:
                self._round_trips.append(seconds)
                self.rounds += 1
                round_.session.times.add(seconds)
        elif isinstance(error, StatsdBNError):
            self.broken_job.record_raised(error)
            hide_internal_frames(error)

    def explain(self, error: BaseException) -> None:
        """Add a note to another library's exception: which rank left the strict job, and why, if known."""
        # For an exception of a torch collective it waits a moment for the server's report.
        if self.is_own and not self.member.is_elastic and self.member.world_size > 1:
            self.broken_job.annotate(error)

    def close(self, cause: str = "") -> None:
        """Leave all groups and close the sockets; harmless when repeated.

        Args:
            cause: error that ends this member, reported to the others; empty for an orderly end.
        """
        if self._closed or not self.is_own:
            return
        self._closed = True
        with ExitStack() as rest:
            # The stack runs its callbacks in reverse order, and continues if one raises.
            rest.callback(self.channel_pool.close)
            rest.callback(self._sessions.leave, cause)
            if not (self.rounds or cause):
                rest.callback(self._sessions.warn_of_no_layer, "before the connection closed")
            for call in reversed(self.close_callbacks):
                rest.callback(call)

    def _world_transports(self) -> list[TransportState]:
        """Transports of the groups that contain all members of the job."""
        size = self.member.world_size
        return [session.transport for session in self._sessions.all() if session.member.world_size == size]

    def _resolve_host_group(self, name: str) -> Group:
        """Return the group "local"; if no launcher counts its members, the job's members gather machine IDs now."""
        groups.check_group(name)
        if self._host_group is None:  # no cached_property: torch.compile traces this, and cannot trace its lock
            with self._host_group_lock:
                # Another thread may have set it while this one waited for the lock.
                self._host_group = self._host_group or groups.host_group(self.member)
                if self._host_group is None:
                    machines = self._gather_machine_ids(groups.machine_id().encode())
                    self._host_group = groups.from_hosts(machines, self.member.rank)
        return self._host_group

    @api_boundary
    def _gather_machine_ids(self, machine: bytes) -> dict[int, bytes]:
        self.rejoin_if_paused(None)
        return self.gather_in_group(self._world, groups.HOSTS, machine)

    def _check_usable(self) -> None:
        if self._closed:
            raise ConnectionClosed(f"{self.member.name}: the connection is closed; call client.connect() again")
        if not self.is_own:
            raise ConnectionClosed(
                f"process {os.getpid()} was forked from process {self._process} and cannot use its connection "
                f"({self.member.name}); use the model in eval mode there, or call client.connect(rank=0, "
                "world_size=1) to train alone there"
            )


# The current connection. Without one, layers use torch's default process group, or only this process's replicas.
_current: Connection | None = None


def set_current_connection(connection: Connection) -> None:
    """Make a connection the current one."""
    global _current  # noqa: PLW0603 - a process has one current connection, as it has one rank
    _current = connection


def disconnect() -> None:
    """Close the current connection; harmless without one."""
    if _current is not None:
        _current.close()


def current_connection() -> Connection | None:
    """Return the connection that this process's layers use; None without one."""
    return None if _current is None or _current.closed else _current


def latest_connection() -> Connection | None:
    """Return this process's latest connection, open or closed by now."""
    return _current


@api_boundary
def local_group() -> Group:
    """Return the group of this host's ranks, to be passed as `group=`; its `size` is their number.

    torchrun says how many ranks a host has. Without it, as under `mp.spawn`, the first call is a round of the whole
    job, in which the ranks compare their machines. All ranks must then make this call at the same place.

    Raises:
        ConfigurationError: this process is not connected; or the job is elastic, and no launcher counts the ranks.
        StatsdBNError: the round failed.
    """
    connection = current_connection()
    if connection is None:
        raise ConfigurationError("local_group: expected a connected process, call client.connect() first")
    return connection.group(groups.LOCAL)
