"""Floods a server from a process of its own, until it is ended: python flood_program.py ENDPOINT KIND CONNECTIONS.

It does not read what it is told. A process that is stopped and continued floods in turns with calm.
"""

import itertools
import sys

import zmq

from statsd_bn.messages import Message, StatusRequest
from statsd_bn.wire import encode
from support.strategies import contribution, key, register

# Members of the group that the flood of rounds is for: each new round costs the server some milliseconds.
CROWD = 2000


def begin(dealer: "zmq.Socket[bytes]", members: int) -> None:
    """Registers members of the job "flood" over one connection."""
    for member in range(members):
        dealer.send(encode(register(member, members, job="flood", session=b"%08d" % member)))
    while dealer.poll(500):
        dealer.recv()


def frames(kind: str) -> "itertools.cycle[bytes]":
    """What is sent again and again."""
    many: list[Message] = [StatusRequest()]
    if kind == "members":
        # The same contribution of one member of a round that waits for the other.
        many = [contribution(0, key=key(job="flood"), session=b"%08d" % 0)]
    elif kind == "rounds":
        # Rounds that wait for all others, and then a life of the group that begins anew.
        many = [contribution(0, key=key(job="flood", step=step), session=b"%08d" % 0) for step in range(5000)]
    elif kind == "registrations":
        many = [register(0, job=f"flood {number}", session=b"%08d" % number) for number in range(5000)]
    return itertools.cycle(map(encode, many))


def main() -> None:
    """Floods."""
    endpoint, kind, connections = sys.argv[1:]
    with zmq.Context() as context:
        dealers = [context.socket(zmq.DEALER) for _ in range(int(connections))]
        for dealer in dealers:
            dealer.linger = 0
            dealer.connect(endpoint)
        begin(dealers[0], 2 if kind == "members" else CROWD)
        print("begins", flush=True)  # noqa: T201 - the test waits for it
        for dealer, frame in zip(itertools.cycle(dealers), frames(kind), strict=False):
            try:
                dealer.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                continue


if __name__ == "__main__":
    main()
