"""Member: who this process is among the replicas of its job."""

from dataclasses import dataclass, replace

DEFAULT_DEADLINE = 600.0

# What happens when a member is lost: the others fail with its name, or go on without it.
STRICT = "strict"
ELASTIC = "elastic"


@dataclass(frozen=True, slots=True)
class Member:
    """Who this process is among the replicas.

    Attributes:
        job: the training run.
        group: the members of the job that synchronise together.
        epoch: one life of the group's membership.
        member: this process's number in the job, the same in all its groups.
        world_size: how many members the group begins with.
        deadline: how long one of its rounds may take, in seconds.
        place: host and process, for people.
        min_members: how few members may go on when others are lost; 0: none may, the group is strict.
        fill_deadline: how long the group may take to fill; None: as long as a round.
    """

    job: str
    group: str
    epoch: int
    member: int
    world_size: int
    deadline: float
    place: str
    min_members: int = 0
    fill_deadline: float | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether the members that are left go on when one is lost."""
        return self.min_members > 0

    @property
    def patience(self) -> float:
        """How long it waits for the group to fill, in seconds."""
        return self.deadline if self.fill_deadline is None else self.fill_deadline

    def in_group(self, name: str, size: int) -> "Member":
        """Returns who this process is in a group of the job."""
        return replace(self, group=name, world_size=size, min_members=min(self.min_members, size))
