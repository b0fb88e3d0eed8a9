"""Choice of a layer's transport, by the current connection and process group."""

from typing import Any

from client.session import groups
from client.session.connection import Connection, current_connection
from client.session.groups import Group
from client.transports.process_group import NamedProcessGroup, ProcessGroupPipe, default_group, named
from client.transports.server import SlavePipe
from client.transports.shared_memory import SharedMemoryPipe
from client.transports.transport import LocalPipe, Transport

GroupSpec = Group | NamedProcessGroup | str | None
"""Group that a layer synchronises over: a torch process group, or a group of the connection; None: the whole job."""

Communicator = Connection | NamedProcessGroup
"""What connects this process to the other members of a group."""


def resolve_group(group: GroupSpec, process_group: Any) -> GroupSpec:
    """Group specification from a layer's two arguments, of which at most one is set."""
    if process_group is not None:
        if group is not None:
            raise ValueError(f"expected group or process_group, got both: {group!r:.80} and {process_group!r:.80}")
        return named(process_group)
    if not isinstance(group, NamedProcessGroup):
        groups.check_group(group)
    return group


def communicator_for(group: GroupSpec) -> Communicator | None:
    """Communicator of a group; None if this process is its only member."""
    # A connection takes precedence over torch's default process group, unless the job has negotiated that group. But a
    # connection of one process yields to that group: `connect` may have been called before `init_process_group`.
    if isinstance(group, NamedProcessGroup):
        return group if group.size != 1 else None
    connection = current_connection()
    if group is None and (connection is None or (connection.is_in_process and not connection.is_explicitly_alone)):
        return default_group()
    if connection is None:
        return None
    if group is None and connection.world_transport.process_group is not None:
        negotiated: NamedProcessGroup = connection.world_transport.process_group
        return negotiated
    return None if connection.is_alone(group) else connection


def transport_for(layer: str, group: GroupSpec) -> Transport:
    """Transport of the layer of this name."""
    return transport_over(communicator_for(group), layer, group)


def transport_over(communicator: Communicator | None, layer: str, group: GroupSpec) -> Transport:
    """Transport of a layer over the communicator of its group, see `communicator_for`."""
    if communicator is None:
        return LocalPipe(layer)
    if isinstance(communicator, NamedProcessGroup):
        return ProcessGroupPipe(communicator, layer)
    assert not isinstance(group, NamedProcessGroup)  # noqa: S101 - it would be the communicator
    return (SlavePipe if communicator.member.is_elastic else SharedMemoryPipe)(communicator, layer, group)
