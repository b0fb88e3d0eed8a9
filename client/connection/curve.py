"""CURVE: a socket with keys, for encryption and so that both sides know whom they speak to."""

import zmq

from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import ClientKeys


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
