"""Place: what this process tells of where it is; values only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """How far this process is on one of its process groups of torch.

    Attributes:
        name: torch's, the same on all ranks.
        ranks: the global ranks in it.
        launched: how many operations this process has begun on it.
    """

    name: str
    ranks: tuple[int, ...]
    launched: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where the main thread is.

    Attributes:
        stack: for people; empty if it is not to be told, or not known.
        held: whether it waits in a collective of torch.
        group: the process group that is told of; None: of none.
    """

    stack: str
    held: bool
    group: TorchGroup | None
