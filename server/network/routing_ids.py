"""Routing ids: the names of the peers of the server's socket; no peer may set its own.

A ZeroMQ peer may set its own routing id; to one that sets none, ZeroMQ gives the next number of a count. If another
peer has already set that number, libzmq ends the whole process. So the gatekeeper gives each connection an id that
nobody can guess. ZeroMQ keeps the id that it hears last, the peer's or the gatekeeper's. With keys that is the
gatekeeper's, except in rare moments. Without keys a peer can speak last: then it has its own id, and is refused, or one
of ZeroMQ's count, whose start nobody knows.
"""

import os
import struct

# Nobody guesses one in the life of a universe; written in hexadecimal, since pyzmq reads properties as text.
_RANDOM_BYTES = 12

# ZeroMQ's own ids are a zero byte and a number, which starts again after the last.
_COUNTED_BYTES, _NUMBERS = 5, 2**32


def new() -> bytes:
    """A routing id for a new connection."""
    return os.urandom(_RANDOM_BYTES).hex().encode()


def metadata(routing_id: bytes) -> bytes:
    """Metadata that the gatekeeper sets for a connection; it overrides what the peer says.

    ZeroMQ sets the real descriptor before, unless it does not know the peer's address.
    """
    return _property(b"Identity", routing_id) + _property(b"__fd", b"-1")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


class Counted:
    """Ids that ZeroMQ itself may have given by now.

    Args:
        first: the id that it gave before any connection.
    """

    def __init__(self, first: bytes) -> None:
        self._first = _number(first)

    def holds(self, routing_id: bytes, admitted: int) -> bool:
        """Whether an id is one of them, after at most so many connections."""
        if len(routing_id) != _COUNTED_BYTES or routing_id[0] != 0:
            return False
        return (_number(routing_id) - self._first) % _NUMBERS <= admitted


def _number(routing_id: bytes) -> int:
    return int.from_bytes(routing_id[1:])
