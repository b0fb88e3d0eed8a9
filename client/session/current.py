"""The current connection, which this process's synchronised layers use.

A process has at most one. Without one its layers synchronise over the replicas of the process.
"""

from client.session.connection import Connection
from client.session.groups import LOCAL, Group
from client.tracebacks import api_boundary
from statsd_bn.errors import ConfigurationError

_current: Connection | None = None


def set_current_connection(connection: Connection) -> None:
    """Make a connection the current one."""
    global _current  # noqa: PLW0603 - a process has one current connection, as it has one rank
    _current = connection


def disconnect() -> None:
    """Close the current connection; harmless without one."""
    if _current is not None:
        _current.close()


def current_connection() -> Connection | None:
    """Return the connection that this process's layers use; None without one."""
    return None if _current is None or _current.closed else _current


def latest_connection() -> Connection | None:
    """Return this process's latest connection, open or closed by now."""
    return _current


@api_boundary
def local_group() -> Group:
    """Return the group of the ranks of this host, as `group=` takes it; its `size` is their number.

    torchrun says how many ranks a host has. Without it, as under `mp.spawn`, the first call is a round of the whole
    job, in which the ranks compare their machines: all ranks call it at the same place then.

    Raises:
        ConfigurationError: this process is not connected; or the job is elastic, and no launcher says it.
        StatsdBNError: the round failed.
    """
    connection = current_connection()
    if connection is None:
        raise ConfigurationError("local_group: expected a connected process, call client.connect() first")
    return connection.group(LOCAL)
