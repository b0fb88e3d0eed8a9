"""Other frameworks' hooks, each in a module of its own that is imported only where that framework is used.

They connect where the framework says that a training begins. What works without a framework belongs in
`client.training`.
"""

from typing import Any

from torch import distributed

from client.launch.connect import connect
from client.session.connection import Connection
from client.session.current import current_connection


def connect_unless_connected(**options: Any) -> Connection | None:
    """Connects as a rank of torch's process group.

    Args:
        **options: further arguments of `client.connect`.

    Returns:
        The connection, which is the caller's to close. None where none is needed: this process has one already, or is
        alone in its process group.

    Raises:
        StatsdBNError: as `client.connect`.
    """
    if not _is_needed():
        return None
    return connect(rank=distributed.get_rank(), world_size=distributed.get_world_size(), **options)


def _is_needed() -> bool:
    connection = current_connection()
    if connection and connection.is_own:
        return False
    return distributed.is_initialized() and distributed.get_world_size() > 1
