"""Routing ids: the names of the peers of the server's socket.

A ZeroMQ peer may set its own routing id; to one that sets none, ZeroMQ gives the next number of a count. If another
peer has already set that number, libzmq ends the whole process. So the gatekeeper gives each connection an id that
nobody can guess. ZeroMQ keeps the id that it hears last, which is the gatekeeper's, except in rare moments. For these
the count starts at a number that no peer knows.
"""

import ctypes
import os
import struct

# Nobody guesses one in the life of a universe; written in hexadecimal, since pyzmq reads properties as text.
_RANDOM_BYTES = 12


def seed_count() -> None:
    """Seed libc's `rand()`, where ZeroMQ's count starts and which it never seeds; call it before any socket is made."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))


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
