"""Ports for programs that cannot pick a free one by themselves."""

import errno
import secrets
import socket

# Below those that the system gives to connections and to listeners that ask for any port (from 32768 on Linux): a test
# beside this one cannot be given the same port before the program listens there.
PORTS = range(20_000, 32_000)


def free_port(address: str = "127.0.0.1") -> int:
    """Returns one that is free now."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as one:
            try:
                one.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
