"""Ports for programs that cannot pick a free one by themselves."""

import socket


def free_port() -> int:
    """Returns one that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
