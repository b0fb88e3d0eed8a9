"""When a group may have been begun twice: what the protocol says of it among its limits, as the rules need it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.simulated_member import Process
    from simulation.simulator import World


def opened(process: "Process", before: float) -> bool:
    """Whether it had heard by then that the group was open."""
    connects = [one for one in process.outcomes if one.what == "connect" and one.ended and not one.error]
    return any(one.ended < before for one in connects)


def newcomers_may_come_first(world: "World") -> bool:
    """Whether as many as the group has, of whom none had been in an open one, may have come to a new server first."""
    return any(
        sum(not opened(one, gone) for one in world.processes) >= world.plan.size for gone, _ in world.server.outages
    )


def may_meet_another_beginning(world: "World") -> bool:
    """Whether members of a group that newcomers began anew may meet one of before, at a still later server."""
    return len(world.server.outages) > 1 and newcomers_may_come_first(world)
