"""torch's process group: who this process is where no launcher says it, and whether all processes are on one host.

A script that starts its processes itself, by `torch.multiprocessing.spawn` say, tells each its rank when it initialises
the process group. The group's store then takes the place of the launcher's.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from torch import distributed

from client.connection.groups import this_machine
from client.launch.sources import ARGUMENT, Setting
from statsd_bn.errors import ConfigurationError

SOURCE = "process group"


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """This process in torch's default process group.

    Attributes:
        rank: its rank.
        size: how many processes the group has.
    """

    rank: int
    size: int


def find() -> ProcessGroup | None:
    """Returns torch's default process group; None while it is not initialised."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size())


def merged(
    size: Setting[int] | None, rank: Setting[int] | None, group: ProcessGroup
) -> tuple[Setting[int], Setting[int]]:
    """Returns size and rank: those of the process group where neither an argument nor a launcher gives them.

    Args:
        size: from an argument or a launcher.
        rank: likewise.
        group: torch's process group.

    Raises:
        ConfigurationError: a launcher of several processes says something else than the process group.
    """
    in_group = Setting("world_size", group.size, SOURCE), Setting("rank", group.rank, SOURCE)
    if size and size.source != ARGUMENT and size.value == 1 < group.size:
        # The launcher has started one process, and that has started the others.
        return in_group[0], rank if rank and rank.source == ARGUMENT else in_group[1]
    for launched, grouped in zip((size, rank), in_group, strict=True):
        if launched and launched.source != ARGUMENT and launched.value != grouped.value:
            raise ConfigurationError(
                f"{launched.name}: expected the same from the launcher and from torch's process group, got "
                f"{launched.value} ({launched.source}) and {grouped.value}; pass rank and world_size"
            )
    return size or in_group[0], rank or in_group[1]


def is_of(group: ProcessGroup | None, rank: Setting[int], size: Setting[int]) -> bool:
    """Returns whether the job's processes are those of the process group."""
    return group is not None and group.size > 1 and (rank.value, size.value) == (group.rank, group.size)


def this_host() -> str:
    """Returns a name for this host that no other host has."""
    return f"{socket.gethostname()} {this_machine()}"


def address(environ: Mapping[str, str]) -> str:
    """Returns the name by which other hosts reach rank 0's, which this is: MASTER_ADDR, else its own name."""
    return environ.get("MASTER_ADDR") or socket.gethostname()
