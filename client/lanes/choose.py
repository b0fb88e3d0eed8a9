"""Chooses the lane of a layer, from how this process is connected now."""

from client.connection.connection import Connection
from client.connection.current import current_connection
from client.connection.groups import Group
from client.connection.member import SHARED_MEMORY
from client.lanes.in_process import LocalPipe
from client.lanes.lane import Lane
from client.lanes.shared_memory import SharedMemoryPipe
from client.lanes.zeromq import SlavePipe


def connection_to(group: Group | str | None) -> Connection | None:
    """Returns the connection to the other members of a group, or None where there are no others.

    Args:
        group: with whom a layer synchronises.
    """
    connection = current_connection()
    return None if connection is None or connection.is_alone(group) else connection


def lane_for(layer: str, group: Group | str | None) -> Lane:
    """Returns the lane of a layer.

    Args:
        layer: the layer's name.
        group: with whom it synchronises.
    """
    return lane_over(connection_to(group), layer, group)


def lane_over(connection: Connection | None, layer: str, group: Group | str | None) -> Lane:
    """Returns the lane of a layer for which `connection_to(group)` has returned this connection."""
    if connection is None:
        return LocalPipe(layer)
    member = connection.member
    in_memory = member.lane == SHARED_MEMORY and not member.is_elastic
    return (SharedMemoryPipe if in_memory else SlavePipe)(connection, layer, group)
