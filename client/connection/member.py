"""Member: who this process is among the processes of its job."""

from dataclasses import dataclass, replace

DEFAULT_ROUND_TIMEOUT = 600.0

# How long a collective of torch may hold the main thread after the job has broken.
DEFAULT_ABORT_AFTER = 10.0

# What happens when a member is lost: the others fail and name it, or go on without it.
STRICT = "strict"
ELASTIC = "elastic"

# How rows reach the other members: over the server, or in memory that the processes of a host share.
ZEROMQ = "zeromq"
SHARED_MEMORY = "shared_memory"
LANES = (ZEROMQ, SHARED_MEMORY)


@dataclass(frozen=True, slots=True)
class Member:
    """Who this process is among the processes of its job.

    Attributes:
        job: the training run.
        group: the members of the job that synchronise together.
        epoch: one life of the group's membership.
        rank: this process's number in the job, the same in all its groups.
        world_size: how many members the group begins with.
        round_timeout: how long a round may take, in seconds.
        host_and_pid: where this process runs, for people.
        min_members: how few members an elastic group may go on with; 0 if the group is strict.
        join_timeout: how long the members may take to arrive, in seconds; None: as long as a round.
        abort_after: how long a collective of torch may hold the main thread after the job has broken, before the
            process is ended, in seconds; None: for ever.
        tells_stacks: whether it tells where it is when others wait for it.
        lane: how its rows reach the others, one of `LANES`.
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
    tells_stacks: bool = True
    lane: str = ZEROMQ

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
