"""Member: this process as a member of its job; TransportState: how its rows reach the others."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

    from statsd_bn.skew_samples import SkewSampler

DEFAULT_ROUND_TIMEOUT = 600.0
DEFAULT_ABORT_AFTER = 10.0  # seconds that a torch collective may block the main thread after the job has broken

# Policies for a lost member: the others fail with an error that names it, or continue without it.
STRICT, ELASTIC = "strict", "elastic"

# Transports between processes: over the server, in shared memory of one host, or over torch's default process group.
OVER_SERVER, SHARED_MEMORY, OVER_PROCESS_GROUP = "server", "shared_memory", "process_group"
TRANSPORTS = (OVER_SERVER, SHARED_MEMORY)

# Reactions to the first aggregate that is not finite.
WARN, RAISE, IGNORE = ON_NONFINITE = ("warn", "raise", "ignore")

# Values of `connect(transport=)`: a transport, or the fastest that all members of a group can use.
AUTO = "auto"
TRANSPORT_CHOICES = (AUTO, *TRANSPORTS, OVER_PROCESS_GROUP)

# Reasons why a group does not use shared memory, or no longer does.
BY_ELASTIC = "the job is elastic"
BY_JOIN = "client.join() allows ranks to skip rounds"
BY_A_RANK = "a rank failed in a round, or its threads reached the layers in a different order"


@dataclass(frozen=True, slots=True)
class Member:
    """This process as a member of its job; durations are in seconds."""

    job: str
    group: str
    epoch: int  # one life of the group's membership
    rank: int  # the same in all groups of the job
    world_size: int
    round_timeout: float
    host_and_pid: str
    min_members: int = 0  # least number with which an elastic group continues; 0 for a strict group
    join_timeout: float | None = None  # for the members to register; None: `round_timeout`
    abort_after: float | None = DEFAULT_ABORT_AFTER  # None: never abort
    reports_stacks: bool = True
    transport: str = AUTO  # one of TRANSPORT_CHOICES
    on_nonfinite: str = WARN  # one of ON_NONFINITE

    @property
    def name(self) -> str:
        """The member's name in messages."""
        return f"job {self.job!r}, rank {self.rank} of {self.world_size}"

    @property
    def is_elastic(self) -> bool:
        """Whether the others continue without a lost member."""
        return self.min_members > 0

    @property
    def seconds_to_join(self) -> float:
        """Timeout for the other members of the group to register, in seconds."""
        return self.round_timeout if self.join_timeout is None else self.join_timeout

    def in_group(self, name: str, size: int) -> "Member":
        """Return this member as a member of another group of the job."""
        return replace(self, group=name, world_size=size, min_members=min(self.min_members, size))


class TransportState:
    """How the rows of one group travel now, from the view of one member, and why not by a faster transport."""

    def __init__(self) -> None:
        self.bypassed_rounds = 0  # rounds over memory or a process group, unseen by the server
        self.bypassed_seconds = 0.0
        # None on members that send no samples of their rows to the server, because another member does.
        self.samples: SkewSampler | None = None
        self.negotiation: Future[Any] | None = None  # from the group's first round on
        self.memory: Any = None  # the negotiated `GroupMemory`
        self.process_group: Any = None  # the negotiated `NamedProcessGroup`
        self.is_on_devices = False  # whether this member's rows stay on devices, as far as known
        self._fallback_reason = ""

    def fall_back(self, reason: str) -> None:
        """Use the server from now on."""
        self._fallback_reason = reason
        self.process_group = None

    @property
    def bypasses_server(self) -> bool:
        """Whether the next round uses memory or a process group."""
        return self.name in {SHARED_MEMORY, OVER_PROCESS_GROUP}

    @property
    def name(self) -> str:
        """One of `TRANSPORTS`, or `OVER_PROCESS_GROUP`; empty before the negotiation."""
        if self.process_group is not None:
            return OVER_PROCESS_GROUP
        if self.why_not_faster:
            return OVER_SERVER
        return "" if self.memory is None else SHARED_MEMORY

    @property
    def why_not_faster(self) -> str:
        """Why the group uses the server; empty for another transport, and before the negotiation."""
        if self._fallback_reason or self.memory is None:
            return self._fallback_reason
        return BY_A_RANK if self.memory.is_abandoned else ""
