"""Hooks of other frameworks, which connect when the framework starts a training.

Each framework has a module, which is imported only by its users. Helpers that need no framework belong in
`client.training`.
"""

from typing import Any

from torch import distributed

from client.launch.connect import connect
from client.session.connection import Connection, current_connection


def connect_unless_connected(**options: Any) -> Connection | None:
    """Connect as a rank of torch's process group, with `options` of `client.connect`.

    Returns None if this process has a connection already, or is alone in its process group.
    """
    connection = current_connection()
    is_alone = not distributed.is_initialized() or distributed.get_world_size() == 1
    if is_alone or (connection and connection.is_own):
        return None
    return connect(rank=distributed.get_rank(), world_size=distributed.get_world_size(), **options)
