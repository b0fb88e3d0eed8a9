"""The current connection: what this process's synchronised layers use.

A process has at most one. Without one its layers synchronise over the replicas of their own process.
"""

from client.connection.connection import Connection

_current: Connection | None = None


def hold(connection: Connection) -> None:
    """Makes a connection the current one."""
    global _current  # noqa: PLW0603 - a process has one current connection, as it has one rank
    _current = connection


def disconnect() -> None:
    """Closes the current connection; harmless without one."""
    if _current is not None:
        _current.close()


def current_connection() -> Connection | None:
    """Returns the connection this process's layers use, if there is one."""
    return None if _current is None or _current.closed else _current


def has_been_connected() -> bool:
    """Whether this process has had a connection, open or closed by now."""
    return _current is not None


def has_been_alone() -> bool:
    """Whether this process's latest connection needed no server, because nothing said that there were others."""
    return _current is not None and _current.is_in_process
