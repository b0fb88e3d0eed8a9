"""Beacon: a member's way to say that it is alive.

It is a socket of its own, kept for as long as the connection, so that the server has one place at which a living
process can always be reached; the other channels come and go. What cannot leave at once is dropped: a sign of life that
comes late is worth nothing, and nothing may pile up while the server is away.
"""

import math
import socket
from contextlib import suppress

import zmq

from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import ClientKeys

# How soon ZeroMQ connects anew after the connection has broken: the server waits 300 ms before it takes the member
# for dead.
RECONNECT_MILLISECONDS = 50

# When an attempt to connect is given up for a new one. TCP itself repeats a lost first packet after 1, 3 and 7 s.
CONNECT_MILLISECONDS = 1000


class Beacon:
    """Sends frames and waits for no answer; all but `wake` belongs to one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: ClientKeys | None = None) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without a connection there is no queue either.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        secure(self._socket, keys)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._reader):
            self._poller.register(readable, zmq.POLLIN)

    def send(self, frame: bytes) -> bool:
        """Sends a frame if it can leave now; returns whether it could."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def is_connected(self) -> bool:
        """Whether what is sent now can leave."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    def wait(self, seconds: float) -> bool:
        """Waits until the connection comes up, a frame comes, `wake` is called, or the time is over.

        Returns:
            Whether the connection has come up.
        """
        ready = dict(self._poller.poll(max(0, math.ceil(seconds * 1000))))
        with suppress(BlockingIOError):
            self._reader.recv(64)
        return self._monitor in ready and bool(self._drain(self._monitor))

    def received(self) -> list[bytes]:
        """Returns the frames that have come."""
        return self._drain(self._socket)

    def wake(self) -> None:
        """Ends a `wait`; from any thread."""
        # A full buffer wakes as well as one byte more; a closed one has nobody to wake.
        with suppress(OSError):
            self._writer.send(b"\0")

    def close(self) -> None:
        """Closes its sockets."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._reader.close()
        self._writer.close()

    @staticmethod
    def _drain(readable: "zmq.Socket[bytes]") -> list[bytes]:
        frames = []
        with suppress(zmq.Again):
            while True:
                frames.append(readable.recv_multipart(zmq.NOBLOCK)[-1])
        return frames


def secure(socket: "zmq.Socket[bytes]", keys: ClientKeys | None) -> None:
    """Gives a socket its keys, before it is connected; without keys it stays open.

    Raises:
        ConfigurationError: this machine's ZeroMQ has no CURVE.
    """
    if keys is None:
        return
    if not zmq.has("curve"):
        raise ConfigurationError(f"curve: libzmq {zmq.zmq_version()} was built without it; install pyzmq from a wheel")
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey = keys.pair.public.encode()
    socket.curve_secretkey = keys.pair.secret.encode()
