"""Member: who this process is among the processes of its job, and how its rows travel to the others."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from statsd_bn.skew_samples import Samples

DEFAULT_ROUND_TIMEOUT = 600.0

# How long a collective of torch may hold the main thread after the job has broken.
DEFAULT_ABORT_AFTER = 10.0

# What happens when a member is lost: the others fail and name it, or go on without it.
STRICT = "strict"
ELASTIC = "elastic"

# How rows reach the other members: over the server, in memory that the processes of a host share, or over torch's
# default process group.
OVER_SERVER = "server"
SHARED_MEMORY = "shared_memory"
OVER_PROCESS_GROUP = "process_group"

TRANSPORTS = (OVER_SERVER, SHARED_MEMORY)

# What to do about the first aggregate that is not finite.
WARN, RAISE, IGNORE = ON_NONFINITE = ("warn", "raise", "ignore")

# What a process may ask for: one of them, or the fastest that all members of a group can use.
AUTO = "auto"
TRANSPORT_CHOICES = (AUTO, *TRANSPORTS, OVER_PROCESS_GROUP)

# Why a group is not in memory, or no longer.
BY_ELASTIC = "the job is elastic"
BY_JOIN = "client.join() lets ranks be away from rounds"
BY_A_RANK = "a rank has failed in a round, or has threads that came in another order than the others'"


@dataclass(frozen=True, slots=True)
class Member:
    """Who this process is among the processes of its job.

    Attributes:
        group: the members of the job that synchronise together.
        epoch: one life of the group's membership.
        rank: this process's number in the job, the same in all its groups.
        round_timeout: how long a round may take, in seconds.
        min_members: how few members an elastic group may go on with; 0 if the group is strict.
        join_timeout: how long the members may take to arrive, in seconds; None: as long as a round.
        abort_after: how long a collective of torch may hold the main thread after the job has broken, before the
            process is ended, in seconds; None: for ever.
        transport: how its rows are to reach the others, one of `TRANSPORT_CHOICES`.
        on_nonfinite: what it does about NaN and infinity in an aggregate, one of `ON_NONFINITE`.
    """

    job: str
    group: str
    epoch: int
    rank: int
    world_size: int
    round_timeout: float
    host_and_pid: str
    min_members: int = 0
    join_timeout: float | None = None
    abort_after: float | None = DEFAULT_ABORT_AFTER
    reports_stacks: bool = True
    transport: str = AUTO
    on_nonfinite: str = WARN

    @property
    def is_elastic(self) -> bool:
        """Whether the others go on when a member is lost."""
        return self.min_members > 0

    @property
    def seconds_to_join(self) -> float:
        """How long to wait for the other members of the group, in seconds."""
        return self.round_timeout if self.join_timeout is None else self.join_timeout

    def in_group(self, name: str, size: int) -> "Member":
        """Returns who this process is in a group of the job."""
        return replace(self, group=name, world_size=size, min_members=min(self.min_members, size))


class Memory(Protocol):
    """Memory in which the members of a group exchange their rows."""

    @property
    def is_given_up(self) -> bool:
        """Whether some member uses it no more although it goes on, so that nobody can."""


class TransportInUse:
    """How the rows of one group travel now, as one member knows it, and why not a faster way.

    Attributes:
        rounds_in_memory: how many rounds the group has had of which this member has told the server nothing, in memory
            or over a process group.
        seconds_in_memory: how long this member has waited in rounds whose rows it got in memory.
        samples: of the rounds in memory; None for a member that tells the server of none, since another one does.
        memory: in which the group's members meet; None while they have not agreed on any.
        process_group: the `NamedProcessGroup` over which they meet; None while they have not agreed on it.
        is_on_devices: whether this member's rows are on devices, as far as a layer has brought any.
    """

    def __init__(self) -> None:
        self.rounds_in_memory = 0
        self.seconds_in_memory = 0.0
        self.samples: Samples | None = None
        self.memory: Memory | None = None
        self.process_group: Any = None
        self.is_on_devices = False
        self._refusal = ""

    def refuse(self, why: str) -> None:
        """The group stays at the server from now on."""
        self._refusal = why
        self.process_group = None

    @property
    def passes_server_by(self) -> bool:
        """Whether the next round takes place in memory, or over a process group."""
        return self.process_group is not None or self._is_in_memory

    @property
    def _is_in_memory(self) -> bool:
        return self.memory is not None and not self._refusal and not self.memory.is_given_up

    @property
    def name(self) -> str:
        """One of `TRANSPORTS`, or `OVER_PROCESS_GROUP`; empty while the members have not agreed on one."""
        if self.process_group is not None:
            return OVER_PROCESS_GROUP
        if self._is_in_memory:
            return SHARED_MEMORY
        return OVER_SERVER if self.memory or self._refusal else ""

    @property
    def why_not_faster(self) -> str:
        """Why it is not the fastest transport; empty if it is, or the members have not agreed."""
        if self._refusal or self.memory is None:
            return self._refusal
        return BY_A_RANK if self.memory.is_given_up else ""
