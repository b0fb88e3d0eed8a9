"""Routing ids: who is who among the peers of the server's socket; none of them sets its own.

ZeroMQ takes a peer's word for its routing id, and counts on where it says none. If somebody has said the number that is
next, libzmq ends the whole process. So the gatekeeper gives each connection an id that nobody can guess. The later
word counts: with keys that is the gatekeeper's, but for rare moments; without keys a peer may speak after it. Its id
is then its own, which is refused, or one of ZeroMQ's count, of which nobody knows where it begins.
"""

import os
import struct

# Nobody guesses one in the life of a universe; written in hexadecimal, since pyzmq reads properties as text.
_RANDOM_BYTES = 12

# ZeroMQ's own are a zero byte and a number, which begins anew after the last.
_COUNTED_BYTES, _NUMBERS = 5, 2**32


def new() -> bytes:
    """Returns a routing id for a new connection."""
    return os.urandom(_RANDOM_BYTES).hex().encode()


def metadata(routing_id: bytes) -> bytes:
    """Returns what the gatekeeper says of a connection: these properties count, whatever the peer says they are.

    ZeroMQ adds the descriptor before, unless it does not know the peer's address.
    """
    return _property(b"Identity", routing_id) + _property(b"__fd", b"-1")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


class Counted:
    """The ids that ZeroMQ itself may have given by now.

    Args:
        first: one that it gave before there was any connection.
    """

    def __init__(self, first: bytes) -> None:
        self._first = _number(first)

    def holds(self, routing_id: bytes, admitted: int) -> bool:
        """Returns whether an id is one of them, after so many connections at most."""
        if len(routing_id) != _COUNTED_BYTES or routing_id[0] != 0:
            return False
        return (_number(routing_id) - self._first) % _NUMBERS <= admitted


def _number(routing_id: bytes) -> int:
    return int.from_bytes(routing_id[1:])
