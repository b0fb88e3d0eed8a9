"""Chooses the transport of a layer, from how this process is connected now."""

from typing import Any

from client.session import groups
from client.session.connection import Connection
from client.session.current import current_connection
from client.session.groups import Group
from client.transports import named_process_group
from client.transports.in_process import LocalPipe
from client.transports.named_process_group import NamedProcessGroup
from client.transports.process_group import ProcessGroupPipe
from client.transports.server import SlavePipe
from client.transports.shared_memory import SharedMemoryPipe
from client.transports.transport import Transport

GroupSpec = Group | NamedProcessGroup | str | None
"""With whom a layer synchronises: the ranks of a process group, or of a group of the connection; None for all."""

Communicator = Connection | NamedProcessGroup
"""What a process reaches others by."""


def resolve_group(group: GroupSpec, process_group: Any) -> GroupSpec:
    """Returns with whom a layer synchronises that was given these two.

    Args:
        group: as a layer takes it.
        process_group: one of torch's, or None.

    Raises:
        ValueError: both are given, or one of them is nothing that a layer can synchronise with.
    """
    if process_group is not None:
        if group is not None:
            raise ValueError(f"expected group or process_group, got both: {group!r:.80} and {process_group!r:.80}")
        return named_process_group.named(process_group)
    if not isinstance(group, NamedProcessGroup):
        groups.check(group)
    return group


def communicator_for(group: GroupSpec) -> Communicator | None:
    """Returns what reaches the other members of a group; None where nobody else is in it.

    A connection goes before torch's default process group, unless the members of its job have agreed on that. One that
    heard of no others comes behind it: `connect` may have been called before there was a process group.

    Args:
        group: with whom a layer synchronises.
    """
    if isinstance(group, NamedProcessGroup):
        return group if group.size != 1 else None
    connection = current_connection()
    if group is None and (connection is None or (connection.is_in_process and not connection.is_told_alone)):
        return named_process_group.default()
    if connection is None:
        return None
    if group is None and connection.of_all.process_group is not None:
        agreed: NamedProcessGroup = connection.of_all.process_group
        return agreed
    return None if connection.is_alone(group) else connection


def transport_for(layer: str, group: GroupSpec) -> Transport:
    """Returns the transport of a layer.

    Args:
        layer: the layer's name.
        group: with whom it synchronises.
    """
    return transport_over(communicator_for(group), layer, group)


def transport_over(communicator: Communicator | None, layer: str, group: GroupSpec) -> Transport:
    """Returns the transport of a layer for which `communicator_for(group)` has returned this communicator."""
    if communicator is None:
        return LocalPipe(layer)
    if isinstance(communicator, NamedProcessGroup):
        return ProcessGroupPipe(communicator, layer)
    assert not isinstance(group, NamedProcessGroup)  # noqa: S101 - it would be the communicator
    return (SlavePipe if communicator.member.is_elastic else SharedMemoryPipe)(communicator, layer, group)
