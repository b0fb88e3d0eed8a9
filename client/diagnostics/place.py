"""Place: what this process tells of where it is; values only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """How far this process is on one of its process groups of torch.

    Attributes:
        name: torch's, the same on all ranks.
        launched: how many operations this process has begun on it.
        counts_all: whether that number is of all its operations: one of several backends counts those of one.
    """

    name: str
    ranks: tuple[int, ...]
    launched: int
    counts_all: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Where the main thread is.

    Attributes:
        stack: for people; empty if it is not to be told, or not known.
        held: whether it waits in a collective of torch.
        group: the process group that is told of; None: of none.
        collective: what kind of collective it waits in, as in `statsd_bn.messages`; empty if that is not known.
    """

    stack: str
    held: bool
    group: TorchGroup | None
    collective: str = ""
